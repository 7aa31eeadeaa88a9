"""Labels that heal: suspected ones are found, people decide about them, and ETL obeys."""
