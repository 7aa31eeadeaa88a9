"""The modules that a rank loads: none of the driver's."""

import subprocess
import sys

RANK = ("start_rank", "rank", "torch_reducer", "horovod_reducer")
"""Modules of `tasks.launch` that a rank runs, with both backends."""

MOST_MODULES = 93

DRIVER_ONLY = {"prefect", "pyspark", "mlflow", "delta", "deltalake", "duckdb", "matplotlib", "optuna"}
"""Packages of the driver, some of which rank 0 loads to log the results."""


def test_rank_loads_no_code_of_the_driver() -> None:
    """Ranks start fast and have room for data: they load training, cache, model and their settings."""
    imports = ", ".join(f"tasks.launch.{name}" for name in RANK)
    command = [sys.executable, "-c", f"import {imports}, sys; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    ours = [name for name in loaded if name.startswith(("tasks.", "flows."))]
    assert len(ours) <= MOST_MODULES, ours
    assert not DRIVER_ONLY & set(loaded)
    packages = {name.split(".")[1] for name in ours}
    assert not packages & {"spark", "tables", "tracking", "report", "etl", "orchestration", "submission"}
