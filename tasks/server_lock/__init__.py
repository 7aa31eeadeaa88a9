"""Exclusive locks on the Prefect server, for locations that several machines share."""
