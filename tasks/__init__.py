"""The steps of the DAG as plain functions, with a thin Prefect task beside each."""

import os

# PyArrow 25 would choose mimalloc, with which the processes of ETL hold a seventh more memory (LOG.md, 2026-11-28).
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")
