"""A training run repeated on the same version of the data, and compared with the original."""
