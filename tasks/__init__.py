"""The steps of the DAG as plain functions, with a thin Prefect task beside each."""
