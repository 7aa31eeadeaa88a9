"""Flow runs that a run submits to a work pool: submitted, awaited, and ended with their parent."""
