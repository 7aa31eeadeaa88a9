"""Sources of images: a local folder, a URL of any Hadoop file system, or the built-in digits.

Spark's JVM lists a URL, and Spark tasks read its files with Hadoop's API. Hadoop's connectors handle credentials,
retries and requests of each store, and are configured once for all of Spark.
"""

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from tasks.config.etl import BUILTIN_DIGITS, EtlConfig
from tasks.config.storage import SparkConfig
from tasks.errors import SourceUnavailable, WrongInput
from tasks.etl.choice import Decided, LeftOut, ListedFiles, has_image_name, is_hidden, is_system_file, unfinished
from tasks.etl.extract import MAX_FILE_BYTES
from tasks.etl.groups import check_groups
from tasks.etl.labels import PathLabels
from tasks.etl.listing import check_labels, local_files, make_listing
from tasks.etl.own_folders import NO_FOLDERS, OwnFolders
from tasks.model_package.structure import HEAD_BYTES, other_content
from tasks.paths import expand_user, local_path
from tasks.schema import FILES_ARROW, GROUPS_ARROW, IGNORED, columns_of
from tasks.spark.file_systems import check_folder, hadoop_files, scheme_of
from tasks.spark.gateway import connected_jvm
from tasks.spark.scratch import scratch_root
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables import snapshots
from tasks.tables.delta import newest_commit
from tasks.tables.parquet_rows import SpooledRows
from tasks.tables.properties import SOURCE_PROPERTY
from tasks.tables.relations import Relations


@dataclass(frozen=True)
class Source:
    """A source and its listing.

    Attributes:
        location: A folder, or the URL of one as text.
        listing: Its image files (LISTING_ARROW).
        before: The newest commits of the tables before the listing; after newer ones the listing may be outdated.
        left: Files that the listing leaves out.
        groups: Names of groups in the label file (GROUPS_ARROW).
    """

    location: Path | str
    listing: SpooledRows
    before: tuple[str | None, ...]
    left: LeftOut = field(default_factory=LeftOut)
    groups: pa.Table = field(default_factory=GROUPS_ARROW.empty_table)


def newest_commits(storage: Storage) -> tuple[str | None, ...]:
    """Return the names of the newest commits of `images` and `files`, each None without a table."""
    return tuple(newest_commit(storage.table(name)) for name in ("images", "files"))


def find_source(source: str, storage: Storage, setting: str = "source") -> Path | str:
    """Return the folder of a source, or its URL without a trailing slash; the built-in digits are below the home.

    `setting` is the name of the source's setting, for the error message.

    Raises:
        WrongInput: The source is neither a path nor a URL.
    """
    if source == BUILTIN_DIGITS:
        return storage.digits
    path = local_path(source)
    if path is not None:
        return expand_user(path).absolute()
    if scheme_of(source) is None:
        raise WrongInput(
            f"{setting} is '{source}', which is neither a path nor a URL",
            setting=setting,
            way_out=f"give a folder (./{source} if it is one), file:///folder or scheme://host/folder",
        )
    return source.rstrip("/")


def prepare_source(etl: EtlConfig, storage: Storage, config: SparkConfig) -> Source:
    """List the source; write the built-in digits first if they are the source.

    A URL is listed by Spark's JVM, in the active session or a new one; a local folder is listed without Spark.

    Raises:
        WrongInput: As `find_source`, `OwnFolders.of`, `local_files`, `remote_files`, `make_listing` and `check_labels`.
        SourceUnavailable: As `local_files` and `remote_files`.
        DiskFull: The disk has no space for the listing.
    """
    location = find_source(etl.source, storage)
    if etl.source == BUILTIN_DIGITS:
        write_digits(Path(location))
    before = newest_commits(storage)
    with translate_disk_full(storage.home):
        return try_without_spark(lambda spark: _list(spark, location, etl, storage, before), config, storage)


def relist_if_outdated(spark: SparkSession | None, etl: EtlConfig, source: Source, storage: Storage) -> Source:
    """Return the source, listed again if another run committed since it was listed.

    With an outdated listing, files that the other run ingested would count as deleted, and its images as surplus.

    Raises:
        WrongInput: As `local_files`, `remote_files`, `make_listing` and `check_labels`.
        SourceUnavailable: As `local_files` and `remote_files`.
        NeedsSpark: `spark` is None, and the source is a URL.
    """
    now = newest_commits(storage)
    if now == source.before:
        return source
    return _list(spark, source.location, etl, storage, now)


def _list(
    spark: SparkSession | None, location: Path | str, etl: EtlConfig, storage: Storage, before: tuple[str | None, ...]
) -> Source:
    own, left = OwnFolders.of(location, storage), LeftOut(scratch_root(storage))
    if isinstance(location, Path):
        files = local_files(location, own=own, left=left)
    elif spark is None:
        raise NeedsSpark
    else:
        left.decided |= _ignored_before(spark, location, storage)
        files = remote_files(spark, location, own=own, left=left)
    labels = PathLabels(etl)
    listing = make_listing(files, str(location), etl, left, labels)
    check_labels(listing, str(location), etl)
    source = Source(location, listing, before, left, labels.groups())
    check_groups(source.listing, source.groups, str(location), etl, storage)
    return source


def _ignored_before(spark: SparkSession, url: str, storage: Storage) -> Decided:
    """Return at most MOST_DECIDED files of a source that the ledger has as ignored: a look at them takes requests."""
    newest = snapshots.newest_snapshot(spark, storage.table("files"))
    if newest is None or newest.properties.get(SOURCE_PROPERTY) != url:
        return {}
    rows = snapshots.version_rows(spark, newest.table, DECIDED_ARROW, scratch_root(storage), {"outcome": IGNORED})
    with Relations(storage) as relations:
        relations.add("ignored", rows)
        query = f"SELECT path, size, epoch_us(modified_at), detail FROM ignored LIMIT {MOST_DECIDED}"  # noqa: S608  # a number
        return {(path, size, time): detail for path, size, time, detail in relations.rows(query)}


NUM_DIGITS = 1797


def write_digits(folder: Path) -> None:
    """Write 1,797 grayscale PNG files of 8x8 pixels into ten class folders; existing files are not touched.

    The digits are those of Alpaydin and Kaynak (UCI, 1998) in scikit-learn's copy, levels 0-16 scaled to 0-255.
    """
    if sum(1 for _ in folder.glob("*/*.png")) == NUM_DIGITS:
        return
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (levels, target) in enumerate(zip(digits.images, digits.target, strict=True)):
        file = folder / str(target) / f"{number:04d}.png"
        if file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(levels * (255 / 16)).astype(np.uint8)
        # Written under another name and renamed: a killed run leaves no truncated file that would be quarantined.
        partial = file.with_name(f".{file.name}")  # hidden: a listing leaves it out
        Image.fromarray(pixels).save(partial, format="PNG")
        os.replace(partial, file)


FILES_PER_PAGE = 10_000
"""Number of files that one call returns from the JVM: about a megabyte of text."""

MOST_DECIDED = 1_000_000
"""Ignored files of a store in memory, of which a run reads no first bytes again: 400 MB."""

DECIDED_ARROW = columns_of(FILES_ARROW, "path", "size", "modified_at", "detail")

HEADS_PER_CALL = 1000
"""Number of files whose first bytes one call returns: 4 MB."""


def remote_files(
    spark: SparkSession, url: str, setting: str = "source", own: OwnFolders = NO_FOLDERS, left: LeftOut | None = None
) -> Iterator[ListedFiles]:
    """Yield the image files below a URL in batches, in any order; hidden files are left out.

    A file without the name of an image is one if its first bytes are those of an image.

    Args:
        spark: The session.
        url: The URL, without a trailing slash.
        setting: Name of its setting, for error messages.
        own: Folders to leave out, since runs write to them.
        left: Gets the files that are left out.

    Raises:
        WrongInput: As `check_folder`.
        SourceUnavailable: As `check_folder`, or the listing ended before its end.
    """
    left, own_prefixes = left or LeftOut(), own.prefixes()
    check_folder(spark, url, setting)
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    listing = hadoop_files(spark).Listing(settings, f"{url}/")
    while page := listing.page(FILES_PER_PAGE):
        files, unnamed = ListedFiles(), ListedFiles()
        for line in page.removesuffix("\0").split("\0"):
            size, milliseconds, path = line.split("\t", 2)
            has_name = has_image_name(path)
            if is_hidden(path) or (not has_name and is_system_file(path.rpartition("/")[2])):
                left.num_systems += 1
            elif own.has_path(path, own_prefixes):
                left.num_systems += not path.startswith(own_prefixes)
            else:
                (files if has_name else unnamed).add(path, int(size), int(milliseconds) * 1000)
        _choose(spark, url, unnamed, files, left)
        yield files
    if problem := listing.problem():
        raise SourceUnavailable(
            f"{setting} is '{url}', whose files could not be listed to the end ({problem.splitlines()[0]})",
            setting=setting,
            way_out="check the store and its permissions; its files do not count as deleted",
        )


def _choose(spark: SparkSession, url: str, unnamed: ListedFiles, files: ListedFiles, left: LeftOut) -> None:
    """Add files without the name of an image to `files`, or to `left`, by their first bytes."""
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    listed = list(zip(unnamed.paths, unnamed.sizes, unnamed.times, strict=True))
    for values in listed:
        if (detail := unfinished(values[0])) is not None:
            left.decided[values] = detail
    to_read = [values for values in listed if values not in left.decided]
    for first in range(0, len(to_read), HEADS_PER_CALL):
        some = to_read[first : first + HEADS_PER_CALL]
        lines = "\0".join(f"{size}\t{path}" for path, size, _time in some)
        heads = io.BytesIO(hadoop_files(spark).heads(settings, f"{url}/", lines, HEAD_BYTES))
        for values in some:
            length = int.from_bytes(heads.read(4), "big", signed=True)
            # A file that cannot be read is listed: it may be an image of the table.
            if length >= 0 and (detail := other_content(heads.read(length))) is not None:
                left.decided[values] = detail
    for values in listed:
        if (detail := left.decided.get(values)) is None:
            files.add(*values)
        else:
            left.ignore(detail, *values)


def read_remote(spark: SparkSession, listing: DataFrame, url: str) -> DataFrame:
    """Return the listed files with their content (bytes), or with the reason for its absence in `unreadable`."""
    reader = hadoop_files(spark)(spark.sparkContext._jsc.hadoopConfiguration(), f"{url}/", MAX_FILE_BYTES)
    schema = StructType(
        [*listing.schema, StructField("content", BinaryType()), StructField("unreadable", StringType())]
    )
    java_schema = connected_jvm().org.apache.spark.sql.types.DataType.fromJson(schema.json())
    rows = listing._jdf.javaRDD().mapPartitions(reader)
    return DataFrame(spark._jsparkSession.createDataFrame(rows, java_schema), spark)
