"""Cancellation of Prefect runs: their final states, and those of their tasks."""
