"""Keep the Delta tables small and quick, and every version that a model was trained from."""
