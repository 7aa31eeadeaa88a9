"""Batch inference with the model package, and the accuracy of registered models."""
