"""Preflight: checks of input, disk and model before any work."""
