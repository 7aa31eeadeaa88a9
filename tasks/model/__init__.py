"""Networks, their number format, and the model package that inference reads."""
