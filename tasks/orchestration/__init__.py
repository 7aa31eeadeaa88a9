"""Common behaviour of Prefect tasks: retries, logs, states and explained failures."""
