"""Reduction over ranks: the reducers of each backend, buckets of gradients, and the store by which ranks meet."""
