"""What every Prefect task shares."""
