"""Prefect: stages and their failures, cancellation, work pools, submitted runs, approval and locks."""
