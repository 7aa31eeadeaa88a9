"""Work pools: their limits, workers and deployments, and the runs that hold their slots."""
