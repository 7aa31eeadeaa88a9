"""Sources on any Hadoop file system, listed by the driver and read by Spark tasks with Hadoop's API.

Hadoop's connectors handle credentials, retries and requests of each store, and are configured once for all of Spark.
"""

from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from tasks.config.etl import EtlConfig
from tasks.errors import SourceUnavailable
from tasks.etl.extract import MAX_FILE_BYTES
from tasks.etl.listing import ListedFiles, is_image_path, make_listing
from tasks.etl.own_folders import OwnFolders
from tasks.spark.file_systems import check_folder, hadoop_files
from tasks.tables.parquet_rows import SpooledRows

FILES_PER_PAGE = 10_000
"""Number of files that one call returns from the JVM: about a megabyte of text."""


def list_remote(
    spark: SparkSession,
    url: str,
    etl: EtlConfig = EtlConfig(),
    scratch: Path | None = None,
    own: OwnFolders | None = None,
) -> SpooledRows:
    """List the image files below a URL as `list_images` does for a folder; hidden files are ignored.

    Raises:
        WrongInput: As `check_folder`; or the URL has no image files, or the label file is not usable.
        SourceUnavailable: As `remote_files`.
    """
    return make_listing(remote_files(spark, url, own=own), url, etl, scratch)


def remote_files(
    spark: SparkSession, url: str, setting: str = "source", own: OwnFolders | None = None
) -> Iterator[ListedFiles]:
    """Yield the image files below a URL in batches, in any order; hidden files are ignored.

    Args:
        spark: The session.
        url: The URL, without a trailing slash.
        setting: Name of its setting, for error messages.
        own: Folders to leave out, since runs write to them.

    Raises:
        WrongInput: As `check_folder`.
        SourceUnavailable: As `check_folder`, or the listing ended before its end.
    """
    left_out = () if own is None else own.prefixes()
    check_folder(spark, url, f"{setting} is '{url}'")
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    listing = hadoop_files(spark).Listing(settings, f"{url}/")
    while page := listing.page(FILES_PER_PAGE):
        files = ListedFiles()
        for line in page.removesuffix("\0").split("\0"):
            size, milliseconds, path = line.split("\t", 2)
            if is_image_path(path) and not (own is not None and own.has_path(path, left_out)):
                files.paths.append(path)
                files.sizes.append(int(size))
                files.times.append(int(milliseconds) * 1000)
                files.status_times.append(None)
                files.inodes.append(None)
        yield files
    if problem := listing.problem():
        raise SourceUnavailable(
            f"{setting} is '{url}', whose files could not be listed to the end ({problem.splitlines()[0]}): check the "
            "store and its permissions; its files do not count as deleted"
        )


def read_remote(spark: SparkSession, listing: DataFrame, url: str) -> DataFrame:
    """Return the listed files with their content (bytes), or with the reason for its absence in `unreadable`."""
    jvm, session = spark.sparkContext._jvm, spark._jsparkSession
    reader = hadoop_files(spark)(spark.sparkContext._jsc.hadoopConfiguration(), f"{url}/", MAX_FILE_BYTES)
    schema = StructType(
        [*listing.schema, StructField("content", BinaryType()), StructField("unreadable", StringType())]
    )
    java_schema = jvm.org.apache.spark.sql.types.DataType.fromJson(schema.json())  # type: ignore[union-attr]  # the JVM is there while a session is
    rows = listing._jdf.javaRDD().mapPartitions(reader)
    return DataFrame(session.createDataFrame(rows, java_schema), spark)
