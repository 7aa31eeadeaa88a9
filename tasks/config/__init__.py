"""Settings: one frozen model per stage, from which the flows' parameters and Prefect's form are built."""
