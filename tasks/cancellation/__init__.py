"""What a run that is being cancelled does, and what its page shows of it."""
