"""Prefect flows: one module per flow, each body a table of contents."""
