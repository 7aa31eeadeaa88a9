"""Names and values from outside, as log lines, errors and Markdown may show them."""
