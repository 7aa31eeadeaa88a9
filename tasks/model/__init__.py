"""Networks, their precision, and the model package that inference loads."""
