"""The training cache: decoded pixels of one Delta version, read with petastorm."""
