"""The JVM behind Spark: which Java it is, Delta's jars, and the archive of its classes."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pyspark

from tasks.environment import download_cache, java_command
from tasks.errors import WrongInput

DELTA_PACKAGE = "io.delta:delta-spark_2.13:4.0.1"
DELTA_JARS = ("delta-spark_2.13-4.0.1.jar", "delta-storage-4.0.1.jar")
"""What Spark's own jars lack (antlr4-runtime comes with Spark)."""

JAVA_VERSIONS = ("17", "21")


def jars_folder() -> Path:
    """Return the folder of Delta's jars, filled once by set-up."""
    return download_cache() / "jars" / DELTA_PACKAGE.replace(":", "-")


def delta_jars(*, required: bool = True) -> list[str]:
    """Return the paths of Delta's jars, none where one is missing.

    Spark is never told to fetch them by itself: nobody would have checked what it loads.

    Raises:
        WrongInput: One is missing that is required.
    """
    found = [jars_folder() / name for name in DELTA_JARS]
    missing = [jar.name for jar in found if not jar.is_file()]
    if missing and required:
        raise WrongInput(f"Delta's jars are not in '{jars_folder()}' ({', '.join(missing)}): run 'make setup' once")
    return [] if missing else [str(jar) for jar in found]


def class_archive(java: str) -> Path:
    """Return where set-up keeps the classes that our work loads, in the form the JVM maps into memory.

    Half of a short run's CPU time in the JVM is loading and verifying classes. An archive is for one JVM and one class
    path: any other ignores it. It lies in the virtual environment whose jars it is of, and goes with it.

    Args:
        java: What `java -version` says.
    """
    made_for = f"{java}\n{pyspark.__version__}\n{jars_folder()}"
    return Path(sys.prefix, "share", "lakevision", f"classes-{hashlib.sha256(made_for.encode()).hexdigest()[:16]}.jsa")


def check_java() -> str:
    """Refuse to start without Java 17 or 21; return what `java -version` says.

    Raises:
        WrongInput: No java, or another version.
    """
    command = java_command()
    way_out = "install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or point JAVA_HOME at it"
    try:
        printed = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    except OSError:
        raise WrongInput(f"Spark needs Java 17 or 21 and '{command}' does not start: {way_out}") from None
    found = re.search(r'version "(\d+)', printed)
    if found is None or found.group(1) not in JAVA_VERSIONS:
        said = printed.splitlines()[0] if printed else "nothing"
        raise WrongInput(f"Spark needs Java 17 or 21 and '{command} -version' says '{said}': {way_out}")
    return printed


def java_options(java: str, scratch: Path) -> str:
    """Return the options of a local session's JVM.

    A flow is one short JVM whose heavy work is in Python workers: measured, the second compiler costs a third of the
    start and of the first Delta commands, and gives nothing back in so short a life.
    """
    options = f'-XX:TieredStopAtLevel=1 "-Djava.io.tmpdir={scratch}"'
    archive = class_archive(java)
    # What it says of an archive that it cannot use is nothing to a person: it starts without.
    return f'{options} "-XX:SharedArchiveFile={archive}" -Xlog:cds*=off' if archive.exists() else options
