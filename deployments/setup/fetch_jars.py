"""One-time download of the jars of Delta or of an object store, by Spark's own resolver.

With the jars in place, no start of Spark needs the network. The resolver honours a user's mirrors
(spark.jars.ivySettings in spark-defaults.conf); each download is verified by its sha256.
"""

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from tasks.errors import WrongInput
from tasks.spark.file_systems import FETCHED, HADOOP, store_jars
from tasks.spark.jvm import DELTA_PACKAGE, check_java, jars_folder


@dataclass(frozen=True)
class Jars:
    """A set of jars that are fetched together.

    Attributes:
        packages: Packages to resolve, as group:artifact:version.
        excluded: Transitive dependencies to leave out, as group:artifact.
        folder: Folder in which the jars are kept.
        digests: sha256 of every jar, by file name.
    """

    packages: tuple[str, ...]
    excluded: tuple[str, ...]
    folder: Path
    digests: Mapping[str, str]


# Delta's second connector, which reads tables of a Unity Catalog. Nothing here uses it.
OTHER_CONNECTOR = ("io.delta:delta-kernel-*", "io.unitycatalog:*", "org.scala-lang:*")

# The modules of the SDK that S3A uses are 9 MB, the bundle of all services, which its metadata asks for, 560 MB.
AWS_SDK = "2.35.4"  # Hadoop was built with it.
STORES = {
    "s3a": (
        f"org.apache.hadoop:hadoop-aws:{HADOOP}",
        f"software.amazon.awssdk:s3-transfer-manager:{AWS_SDK}",
        f"software.amazon.awssdk:sts:{AWS_SDK}",
    ),
    "abfss": (f"org.apache.hadoop:hadoop-azure:{HADOOP}",),
}
COMES_WITH_SPARK = ("io.netty:*", "org.slf4j:slf4j-api", "com.fasterxml.jackson.core:*")
EXCLUDED = ("software.amazon.awssdk:bundle", *COMES_WITH_SPARK)


def jars_of(name: str) -> Jars:
    """Return the jars of `delta`, or of the scheme of a store: those that Spark does not ship."""
    lines = Path(__file__).with_name("jars").joinpath(f"{name}.sha256").read_text().splitlines()
    digests = {jar: digest for digest, jar in map(str.split, lines)}
    if name == "delta":
        return Jars((DELTA_PACKAGE,), OTHER_CONNECTOR, jars_folder(), digests)
    return Jars(STORES[name], EXCLUDED, store_jars(name), digests)


def have_all(jars: Jars) -> bool:
    """Return whether every jar is in its folder with the expected sha256."""
    return all(
        (jars.folder / name).is_file() and hashlib.sha256((jars.folder / name).read_bytes()).hexdigest() == digest
        for name, digest in jars.digests.items()
    )


def fetch(jars: Jars) -> None:
    """Resolve the packages into a scratch folder, and move the jars into their own folder.

    Raises:
        WrongInput: A jar does not have the expected sha256.
    """
    with tempfile.TemporaryDirectory() as scratch:
        spark = (
            SparkSession.builder.master("local[1]")
            .config("spark.jars.packages", ",".join(jars.packages))
            .config("spark.jars.excludes", ",".join(jars.excluded))
            .config("spark.jars.ivy", scratch)
            .config("spark.ui.enabled", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .getOrCreate()
        )
        spark.stop()
        jars.folder.mkdir(parents=True, exist_ok=True)
        for found in Path(scratch, "jars").glob("*.jar"):
            # The resolver prefixes file names with the group: org.apache.hadoop_hadoop-aws-3.5.0.jar.
            name = found.name.partition("_")[2]
            if name not in jars.digests:
                continue
            actual = hashlib.sha256(found.read_bytes()).hexdigest()
            if actual != jars.digests[name]:
                raise WrongInput(
                    f"{name} has sha256 {actual}, expected {jars.digests[name]}",
                    way_out="the mirror serves another file",
                )
            # Copied beside, then renamed: a killed set-up leaves no partial jar under the final name.
            shutil.copy(found, jars.folder / f".{name}.partial")
            os.replace(jars.folder / f".{name}.partial", jars.folder / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch missing jars; return 0 if all are in place."""
    parser = argparse.ArgumentParser(prog="fetch_jars", description=__doc__)
    parser.add_argument("name", nargs="?", default="delta", choices=("delta", *FETCHED))
    parser.add_argument("--check", action="store_true", help="fetch nothing: return 1 if a jar is missing")
    parsed = parser.parse_args(arguments)
    jars = jars_of(parsed.name)
    packages = ", ".join(jars.packages)
    if have_all(jars):
        return 0
    if parsed.check:
        return 1
    print(f"Fetching {packages} into {jars.folder} (once)", flush=True)
    try:
        check_java()
        fetch(jars)
    except WrongInput as error:
        print(f"fetch_jars: {error}", file=sys.stderr)
        return 1
    except PySparkRuntimeError:
        pass  # Spark ended without a session; the missing packages are reported below.
    if not have_all(jars):
        print(f"fetch_jars: {packages} could not be fetched: see the resolver's lines above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
