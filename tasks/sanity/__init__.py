"""Sanity checks of a model and its data before a long training run: overfit one batch, check gradients."""
