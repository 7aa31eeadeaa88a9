"""Checks of a run: input, disk and model before it, sanity of model and data, and its repetition afterwards."""
