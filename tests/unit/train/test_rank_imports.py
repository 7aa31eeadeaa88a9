"""The modules that a rank loads: none of the driver's."""

from pathlib import Path

from tests.builders.loaded_modules import loaded_modules

RANK = ("launch.start_rank", "launch.rank", "collectives.torch_reducer", "collectives.horovod_reducer")
"""Modules of `tasks` that a rank runs, with both backends."""

MOST_MODULES = 76

DRIVER_ONLY = {"prefect", "pyspark", "mlflow", "delta", "deltalake", "duckdb", "matplotlib", "optuna"}
"""Packages of the driver, some of which rank 0 loads to log the results."""


def test_rank_loads_no_code_of_the_driver(tmp_path: Path) -> None:
    """Ranks start fast and have room for data: they load training, cache, model and their settings."""
    loaded = loaded_modules("import " + ", ".join(f"tasks.{name}" for name in RANK), tmp_path)

    assert len(loaded.own) <= MOST_MODULES, loaded.own
    assert not DRIVER_ONLY & loaded.others
    packages = {name.split(".")[1] for name in loaded.own}
    assert not packages & {"spark", "tables", "tracking", "report", "etl", "orchestration"}
