"""Hyper-parameter search: trials are sampled, trained, pruned and compared."""
