"""MLflow tracking and model registry: no other package uses MLflow's API."""
