"""Fetch Delta's jars once, through Spark's own resolver, so that no later start of Spark asks the network.

The resolver honours a person's mirrors (spark.jars.ivySettings in spark-defaults.conf); what it brings is checked here.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from tasks.errors import WrongInput
from tasks.spark import DELTA_PACKAGE, check_java, jars_folder

JARS = {
    "delta-spark_2.13-4.0.1.jar": "a1e76860b19fe1e6b205a4ea7a9099a2f9575d39bb71d49b3e679b299d0efb91",
    "delta-storage-4.0.1.jar": "ecc42c5aaa51c423312d9e4e48aa4a12b34740bf2c37de0e8f279277ec3d12e4",
}
"""File names and sha256 of what Spark's own jars lack (antlr4-runtime comes with Spark)."""


def have_all(folder: Path) -> bool:
    """Say whether every jar is in `folder` with the digest it must have."""
    return all(
        (folder / name).is_file() and hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        for name, digest in JARS.items()
    )


def fetch(folder: Path) -> None:
    """Resolve DELTA_PACKAGE into a scratch folder and move the jars into `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        spark = (
            SparkSession.builder.master("local[1]")
            .config("spark.jars.packages", DELTA_PACKAGE)
            .config("spark.jars.ivy", scratch)
            .config("spark.ui.enabled", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .getOrCreate()
        )
        spark.stop()
        folder.mkdir(parents=True, exist_ok=True)
        for found in Path(scratch, "jars").glob("*.jar"):
            for name, digest in JARS.items():
                if found.name.endswith(name):
                    actual = hashlib.sha256(found.read_bytes()).hexdigest()
                    if actual != digest:
                        raise WrongInput(
                            f"{name} has sha256 {actual}, expected {digest}: the mirror serves another file"
                        )
                    # Copy beside, then rename: a killed set-up leaves no half jar under the final name.
                    shutil.copy(found, folder / f".{name}.partial")
                    os.replace(folder / f".{name}.partial", folder / name)


def main() -> int:
    """Fetch what is missing; return 0 when all jars are there."""
    folder = jars_folder()
    if have_all(folder):
        return 0
    print(f"Fetching {DELTA_PACKAGE} into {folder} (once)", flush=True)
    try:
        check_java()
        fetch(folder)
    except WrongInput as error:
        print(f"fetch_jars: {error}", file=sys.stderr)
        return 1
    except PySparkRuntimeError:
        pass  # Spark ended without a session; what it could not fetch is said below.
    if not have_all(folder):
        print(f"fetch_jars: {DELTA_PACKAGE} could not be fetched: see Spark's lines above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
