"""Display of external names and values in log lines, errors and Markdown."""
