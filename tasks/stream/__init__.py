"""Streaming inference: new images are predicted in micro-batches, by the functions of batch inference."""
