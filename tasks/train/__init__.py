"""One training loop, for one process and for many ranks."""
