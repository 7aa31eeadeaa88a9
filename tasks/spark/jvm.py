"""The JVM of Spark: the Java version, Delta's jars, and the class data archive."""

import hashlib
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import pyspark

from tasks.environment import download_cache, java_command, runs_under_spark_submit, spark_variable
from tasks.errors import WrongInput

DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
DELTA_JARS = ("delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar")
"""Jars that Spark does not include (antlr4-runtime comes with Spark)."""

JAVA_VERSIONS = ("17", "21")

CODE_CACHE = "240m"
"""Memory that a local JVM reserves for compiled code, as much as Java does with both of its compilers."""


def jars_folder() -> Path:
    """Return the folder of Delta's jars, which `make setup` downloads."""
    return download_cache() / "jars" / DELTA_PACKAGE.replace(":", "-")


def delta_jars(*, required: bool = True) -> list[str]:
    """Return the paths of Delta's jars, or an empty list if one is missing.

    Spark is never configured to download them itself: their digests would not be checked.

    Raises:
        WrongInput: A jar is missing and `required` is true.
    """
    found = [jars_folder() / name for name in DELTA_JARS]
    missing = [jar.name for jar in found if not jar.is_file()]
    if missing and required:
        raise WrongInput(
            f"Delta's jars are not in '{jars_folder()}' ({', '.join(missing)})", way_out="run 'make setup' once"
        )
    return [] if missing else [str(jar) for jar in found]


def class_archive(java: str) -> Path:
    """Return the path of the class data archive (CDS), which `make setup` writes and the JVM maps into memory.

    Loading and verifying classes is half of the JVM's CPU time in a short run. An archive is valid for one JVM and one
    class path; others ignore it. It is in the virtual environment of the jars, and is removed with it.

    Args:
        java: Output of `java -version`.
    """
    made_for = f"{java}\n{pyspark.__version__}\n{jars_folder()}"
    return Path(sys.prefix, "share", "lakevision", f"classes-{hashlib.sha256(made_for.encode()).hexdigest()[:16]}.jsa")


def _check_variables() -> None:
    version = pyspark.__version__
    home, arguments = spark_variable("SPARK_HOME"), spark_variable("PYSPARK_SUBMIT_ARGS")
    is_stale = home and not [*Path(home, "jars").glob(f"spark-core_*-{version}*.jar")]
    refused = {
        "SPARK_HOME": f"which has no Spark {version}" if is_stale else None,
        "PYSPARK_SUBMIT_ARGS": "which lacks pyspark-shell" if arguments and "pyspark-shell" not in arguments else None,
        "SPARK_REMOTE": "and Spark Connect has no driver here" if spark_variable("SPARK_REMOTE") else None,
    }
    for name, problem in refused.items():
        if problem is not None:
            raise WrongInput(f"{name} is '{spark_variable(name)}', {problem}", way_out=f"unset {name}")


def check_java() -> str:
    """Check that Spark can start: Java 17 or 21, the Spark of pyspark, a user with a name; return what Java prints.

    Returns:
        The output of `java -version`.

    Raises:
        WrongInput: Java or the user's name is missing, or Java or the Spark of $SPARK_HOME is another version.
    """
    if not runs_under_spark_submit():
        _check_variables()
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        raise WrongInput(
            f"the user id {os.geteuid()} has no name in /etc/passwd, and Hadoop's login in Java needs one",
            way_out="add a line for it there, run as another user, or preload libnss_wrapper",
        ) from None
    command = java_command()
    way_out = "install one (Debian, Ubuntu: apt-get install default-jre-headless) or point JAVA_HOME at it"
    try:
        printed = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    except OSError:
        raise WrongInput(f"Spark needs Java 17 or 21 and '{command}' does not start", way_out=way_out) from None
    found = re.search(r'version "(\d+)', printed)
    if found is None or found.group(1) not in JAVA_VERSIONS:
        version = printed.splitlines()[0] if printed else "nothing"
        raise WrongInput(f"Spark needs Java 17 or 21 and '{command} -version' says '{version}'", way_out=way_out)
    return printed


def java_options(java: str, scratch: Path, *, serial: bool) -> str:
    """Return the options of a local session's JVM.

    The JVM of a flow is short-lived, and the heavy work is in Python workers. Measured, the second compiler (C2) takes
    a third of the time of the start and of the first Delta commands, and does not pay off in so short a time. With the
    first compiler alone, a JVM reserves 48 MB for compiled code. Spark fills them within minutes, and a JVM that stays
    open, as that of a stream, then removes compiled code and compiles it again (LOG.md, 2026-11-28).

    Args:
        java: Output of `java -version`.
        scratch: Folder for temporary files.
        serial: Whether one thread collects garbage; otherwise the JVM chooses a collector.
    """
    options = f'-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize={CODE_CACHE} "-Djava.io.tmpdir={scratch}"'
    if serial:
        options = f"-XX:+UseSerialGC {options}"
    archive = class_archive(java)
    # Without the messages about an archive that it cannot use: it starts without the archive.
    return f'{options} "-XX:SharedArchiveFile={archive}" -Xlog:cds*=off' if archive.exists() else options
