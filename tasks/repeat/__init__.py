"""Repetition of a training run on the same version of the data, compared with the original."""
