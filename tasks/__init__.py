"""How each step is done, in the order of the data: plain functions, with a thin Prefect task beside each."""
