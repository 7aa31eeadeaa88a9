"""Promotion of the best run to champion in the model registry."""
