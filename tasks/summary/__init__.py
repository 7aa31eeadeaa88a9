"""Summary of a run of the DAG, as JSON and as an artifact."""

SUMMARY_FILE = "summary.json"
"""Name of the file with the newest summary, in the home."""
