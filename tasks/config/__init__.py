"""Settings: one frozen model for each stage, which are also the parameters of the flows and the Prefect form."""
