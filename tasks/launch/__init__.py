"""Processes of a training run: one process or many ranks, started, watched and ended together."""
