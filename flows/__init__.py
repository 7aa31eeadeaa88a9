"""What runs: one module a flow, each body a table of contents."""
