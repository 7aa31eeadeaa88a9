"""Hadoop file systems other than local folders (s3a, abfss, gs, hdfs) in a running Spark session.

The jars of a store are in the user's cache folder and are loaded into a session when a URL first needs them. Sessions
that read local folders start as fast as without, and no start of Spark needs the network.
"""

import logging
import re
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tasks.environment import download_cache, s3_endpoint
from tasks.errors import SourceUnavailable, WrongInput
from tasks.spark.gateway import add_to_class_path, class_loader, connected_jvm

logger = logging.getLogger("lakevision.spark")

FETCHED = ("s3a", "abfss")
"""Schemes whose jars `make jars-SCHEME` downloads."""

HADOOP = "3.5.0"
"""Version of Spark's own Hadoop client, which a store's jars must have as well."""

FEW_RETRIES = {
    "fs.s3a.attempts.maximum": "2",
    "fs.s3a.retry.limit": "1",
    "fs.s3a.retry.throttle.limit": "1",
    "fs.s3a.connection.establish.timeout": "5s",
    "fs.s3a.connection.timeout": "20s",
    "fs.azure.io.retry.max.retries": "1",
    "fs.azure.oauth.token.fetch.retry.max.retries": "1",
    "ipc.client.connect.max.retries": "1",
    "ipc.client.connect.max.retries.on.timeouts": "1",
    "dfs.client.failover.max.attempts": "1",
}
"""Hadoop's settings for the first access to a folder; its defaults retry for minutes."""

WAYS_OUT = {"s3a": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where the machine has a role"}
CREDENTIALS = "give them in core-site.xml or a credential store of Hadoop (HADOOP_CONF_DIR)"

OWN_DEFAULTS = {
    "gs": {
        "fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
        "fs.AbstractFileSystem.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFS",
        "fs.gs.block.size": str(64 << 20),
    }
}
"""Hadoop's settings that have another default here, by scheme.

For gs, Hadoop names classes that no jar of Spark has, and a block size of "64m", which Google's connector 3.1.18 takes
for a number.
"""

NO_JARS = ("UnsupportedFileSystemException", "ClassNotFoundException", "NoClassDefFoundError")
NO_CREDENTIALS = ("NoAuthWithAWSException", "NoAwsCredentialsException", "KeyProviderException")
REFUSED = ("AccessDeniedException", "AccessControlException")
UNREACHED = (
    *("UnknownHostException", "ConnectException", "ConnectTimeoutException", "HttpHostConnectException"),
    *("NoRouteToHostException", "SocketTimeoutException"),
)
"""Java's exceptions for a store without a connector, without credentials, with insufficient ones, without an answer."""

LOG_STORE, PATH_STYLE = "spark.delta.logStore.s3a.impl", "fs.s3a.path.style.access"
OWN_LOG_STORE = "lakevision.ConditionalPutLogStore"

_prepared: WeakKeyDictionary[SparkContext, set[str]] = WeakKeyDictionary()
"""Schemes whose stores each running session is prepared for."""


def scheme_of(url: str) -> str | None:
    """Return the scheme of a URL (s3a of s3a://bucket/folder), or None for a path."""
    found = re.match(r"([a-z][a-z0-9+.-]*)://", url, flags=re.IGNORECASE)
    return found.group(1).lower() if found else None


def store_jars(scheme: str) -> Path:
    """Return the folder of the jars of a store; those that are downloaded have one for each version of Hadoop."""
    return download_cache() / "jars" / (f"{scheme}-{HADOOP}" if scheme in FETCHED else scheme)


def load_jars(spark: SparkSession, jars: Iterable[Path]) -> None:
    """Add jars to a running session, to the driver and its executors; jars that are already loaded are skipped."""
    context: Any = spark.sparkContext._jsc
    loaded = {Path(str(url)).name for url in context.sc().listJars().mkString("\n").split("\n")}
    for jar in jars:
        if jar.name not in loaded:
            context.addJar(str(jar))
            add_to_class_path([str(jar)])


def _load_compiled(spark: SparkSession, source: Path) -> None:
    """Compile a Java file with Janino, which Spark includes, and load its classes, once per session."""
    jar = Path(spark.sparkContext._temp_dir) / f"lakevision-{source.stem}.jar"  # Spark removes this folder.
    if not jar.exists():
        compiler = connected_jvm().org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(class_loader())
        compiler.cook(source.read_text())
        classes = compiler.getBytecodes()
        with zipfile.ZipFile(jar, "w") as archive:
            for name in classes:
                archive.writestr(f"{name.replace('.', '/')}.class", bytes(classes[name]))
        load_jars(spark, [jar])


def hadoop_files(spark: SparkSession) -> Any:
    """Return the Java class of HadoopFiles.java, compiled and loaded on first use.

    Spark's own source `binaryFile` is not sufficient. It skips empty files and names that begin with an underscore,
    takes a folder a=b for a partition, and fails the job at one unreadable file.
    """
    _load_compiled(spark, Path(__file__).with_name("HadoopFiles.java"))
    return connected_jvm().lakevision.HadoopFiles


def prepare_store(spark: SparkSession, url: str) -> None:
    """Prepare a running session for the store of a URL, a source or a table; once per session, nothing for a folder.

    The jars of the store are loaded, and Delta commits to S3 by conditional puts. Another log store in `spark.conf`
    (`spark.delta.logStore.s3a.impl`) is kept. Endpoint and credentials come from the environment or from Hadoop.

    Raises:
        WrongInput: The jars of the store are not there.
    """
    scheme = scheme_of(url)
    if scheme in {None, "file"}:
        return
    prepared = _prepared.setdefault(spark.sparkContext, set())
    if scheme in prepared:
        return
    load_jars(spark, sorted(store_jars(scheme).glob("*.jar")))
    context: Any = spark.sparkContext._jsc
    settings = context.hadoopConfiguration()
    for name, value in OWN_DEFAULTS.get(scheme or "", {}).items():
        if _is_hadoops_default(settings, name):
            settings.set(name, value)
    try:
        connected_jvm().org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, settings)
    except Py4JJavaError as error:
        logger.debug("no file system for %s", url, exc_info=error)
        problem, way_out = _missing_jars(scheme)
        raise WrongInput(f"'{url}' is a URL of {scheme}, {problem}", way_out=way_out) from None
    if scheme == "s3a":
        if s3_endpoint() is not None and _is_hadoops_default(settings, PATH_STYLE):
            settings.set(PATH_STYLE, "true")  # As boto3 does: a server of one's own has no host name for each bucket.
        _load_compiled(spark, Path(__file__).with_name("ConditionalPutLogStore.java"))
        context.sc().conf().setIfMissing(LOG_STORE, OWN_LOG_STORE)
    prepared.add(scheme)


def _is_hadoops_default(settings: Any, name: str) -> bool:
    return "core-default.xml" in (settings.getPropertySources(name) or ())


def conditional_log_store(spark: SparkSession, url: str) -> Any:
    """Return the Java class of ConditionalPutLogStore.java in a session that is prepared for S3."""
    prepare_store(spark, url)
    return connected_jvm().lakevision.ConditionalPutLogStore


def has_other_log_store(spark: SparkSession, url: str) -> bool:
    """Return whether commits to a table on S3 go through a log store that the user has set, and that others use."""
    if scheme_of(url) != "s3a":
        return False
    prepare_store(spark, url)
    context: Any = spark.sparkContext._jsc
    return str(context.sc().conf().get(LOG_STORE)) != OWN_LOG_STORE


def check_folder(spark: SparkSession, url: str, setting: str) -> None:
    """Check that a URL can be listed.

    Args:
        spark: The session that will read it.
        url: Folder on any Hadoop file system.
        setting: Name of its setting, for the error message.

    Raises:
        WrongInput: No connector, no such folder, missing or rejected credentials, or a store that does not answer.
        SourceUnavailable: Any other reason.
    """
    with suppress(WrongInput):  # The listing reports missing jars, too.
        prepare_store(spark, url)
    hadoop = connected_jvm().org.apache.hadoop
    settings = hadoop.conf.Configuration(spark.sparkContext._jsc.hadoopConfiguration())
    for name, value in FEW_RETRIES.items():
        settings.set(name, value)
    chain = hadoop_files(spark).problem(settings, f"{url}/")
    if not chain:
        return
    logger.debug("%s cannot be listed: %s", url, chain)
    explained = explain_problem(chain, url)
    if explained is None:
        problem = f"{setting} is '{url}', which cannot be listed: {chain.splitlines()[0]}"
        raise SourceUnavailable(problem, setting=setting)
    problem, way_out = explained
    raise WrongInput(f"{setting} is '{url}', {problem}", setting=setting, way_out=way_out)


def _missing_jars(scheme: str) -> tuple[str, str]:
    is_fetched = scheme in FETCHED
    way_out = (
        f"run 'make jars-{scheme}' once" if is_fetched else f"put those of its connector into {store_jars(scheme)}"
    )
    return f"and the jars for {scheme}:// are not there", way_out


def explain_problem(chain: str, url: str) -> tuple[str, str] | None:
    """Return problem and way out of a chain of Java exceptions ("class: message" lines), None if they are unknown."""
    scheme, place = scheme_of(url) or "", urlsplit(url).netloc
    names = [line.split(": ", 1)[0] for line in chain.splitlines()]
    if scheme == "s3":
        return "and Hadoop's name for this store is s3a", f"write s3a://{url.split('://', 1)[1]}"
    credentials = WAYS_OUT.get(scheme, CREDENTIALS)
    permissions = f"check them and their permissions, or {credentials}"
    explanations = {
        **dict.fromkeys(NO_JARS, _missing_jars(scheme)),
        "UnknownStoreException": (f"but the bucket '{place}' does not exist", "check its name and the endpoint"),
        "NotDirectoryException": ("which is a file", "give a folder of class folders with images"),
        "FileNotFoundException": ("which does not exist", "give a folder of class folders with images"),
        **dict.fromkeys(NO_CREDENTIALS, ("and no credentials were found", credentials)),
        **dict.fromkeys(REFUSED, ("which the credentials that were found may not read", permissions)),
        **dict.fromkeys(UNREACHED, ("whose server does not answer", "check the URL, the endpoint and the network")),
    }
    # The innermost cause is the reason, the outer ones are the calls. Only an outer one tells that a bucket is missing.
    for name in ["UnknownStoreException"] * ("UnknownStoreException" in names) + names[::-1]:
        if name in explanations:
            return explanations[name]
    return None
