"""The ranks of a training: started, watched, and ended together."""
