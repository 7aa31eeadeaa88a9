"""The class data sharing archive that local Spark sessions start from, written once per checkout and Java.

It holds the classes that an ETL and a cache build load, so both run here, on the built-in digits.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.spark.jvm import check_java, class_archive, java_options
from tasks.spark.session import spark_session
from tasks.spark.settings import collects_serially
from tasks.storage import resolve_storage


def write_archive(java: str) -> None:
    """Run an ETL and a cache build in a JVM that writes the archive when it exits.

    Args:
        java: Output of `java -version`.

    Raises:
        WrongInput: The JVM wrote no archive.
    """
    # Here and not at the top: every `make` runs this module, and rarely this function.
    from tasks.cache.materialize import materialize_cache
    from tasks.etl.ingest import ingest_images
    from tasks.etl.source import write_digits

    archive = class_archive(java)
    partial = archive.with_suffix(".partial")
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)  # left by a set-up that was interrupted
    with TemporaryDirectory() as folder:
        source, storage = Path(folder, "source"), resolve_storage(StorageConfig(home=f"{folder}/home"))
        write_digits(source)
        # The log is off: the JVM prints hundreds of lines about classes that an archive cannot hold.
        serial = collects_serially(SparkConfig())
        options = (
            f'{java_options(java, Path(folder), serial=serial)} "-XX:ArchiveClassesAtExit={partial}" -Xlog:cds*=off'
        )
        config = SparkConfig(conf={"spark.driver.extraJavaOptions": options})
        etl = EtlConfig(source=str(source))
        with spark_session(config, storage):
            ingest_images(etl, storage, config)
            next(source.glob("*/*")).unlink()  # so that the second run deletes, by a MERGE
            report = ingest_images(etl, storage, config)
            materialize_cache(CacheConfig(image_size=32), report.images, storage, config)
    if not partial.exists():
        raise WrongInput(f"the JVM wrote no class archive to '{partial}'", way_out="local sessions start without it")
    for old in archive.parent.glob("classes-*.jsa"):
        old.unlink()
    os.replace(partial, archive)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the archive if it is missing; return 1 if it is still missing afterwards."""
    parser = argparse.ArgumentParser(prog="class_archive", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing: return 1 if the archive is missing")
    check = parser.parse_args(arguments).check
    try:
        java = check_java()
        if class_archive(java).exists():
            return 0
        if check:
            return 1
        write_archive(java)
    except (WrongInput, OSError) as error:
        if not check:  # the step that follows reports the error
            print(f"class_archive: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
