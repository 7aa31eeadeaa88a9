"""Summary of a run of the DAG, as JSON and as an artifact."""
