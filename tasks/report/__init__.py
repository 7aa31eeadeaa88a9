"""Artifacts of a training run: figures, tables, event file and model card."""
