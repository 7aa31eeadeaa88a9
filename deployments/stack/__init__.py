"""The local stack: Prefect server, workers, MLflow UI, their registration, and what ends with them."""
