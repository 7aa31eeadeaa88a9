"""Sources of images and their listings: a local folder, or a URL of any Hadoop file system."""

from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from tasks.config.etl import BUILTIN_DIGITS, EtlConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.digits import write_digits
from tasks.etl.listing import check_labels, check_source
from tasks.etl.own_folders import OwnFolders
from tasks.etl.remote import list_remote
from tasks.paths import expand_user, local_path
from tasks.spark.file_systems import scheme_of
from tasks.spark.scratch import scratch_root
from tasks.spark.session import NeedsSpark, spark_session
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables.delta import newest_commit
from tasks.tables.parquet_rows import SpooledRows


@dataclass(frozen=True)
class Source:
    """A source and its listing.

    Attributes:
        location: A folder, or the URL of one as text.
        listing: Its image files (LISTING_ARROW).
        before: The newest commits of the tables before the listing; after newer ones the listing may be outdated.
    """

    location: Path | str
    listing: SpooledRows
    before: tuple[str | None, ...]


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
            f"{setting} is '{source}', which is neither a path nor a URL: give a folder (./{source} if it is one), "
            "file:///folder or scheme://host/folder"
        )
    return source.rstrip("/")


def prepare_source(etl: EtlConfig, storage: Storage, config: SparkConfig) -> Source:
    """List the source; write the built-in digits first if they are the source.

    A URL is listed by Spark's JVM, in the active session or a new one; a local folder is listed without Spark.

    Raises:
        WrongInput: As `find_source`, `OwnFolders.of`, `check_source`, `list_remote` and `check_labels`.
        SourceUnavailable: As `check_source` and `list_remote`.
        DiskFull: The disk has no space for the listing.
    """
    location = find_source(etl.source, storage)
    if etl.source == BUILTIN_DIGITS:
        write_digits(Path(location))
    before = newest_commits(storage)
    with translate_disk_full(storage.home):
        if isinstance(location, Path):
            return Source(location, _list_folder(location, etl, storage), before)
        with spark_session(config, storage) as spark:
            return Source(location, _list_url(spark, location, etl, storage), before)


def relist_if_outdated(spark: SparkSession | None, etl: EtlConfig, source: Source, storage: Storage) -> Source:
    """Return the source, listed again if another run committed since it was listed.

    With an outdated listing, files that the other run ingested would count as deleted, and its images as surplus.

    Raises:
        WrongInput: As `check_source`, `list_remote` and `check_labels`.
        SourceUnavailable: As `check_source` and `list_remote`.
        NeedsSpark: `spark` is None, and the source is a URL.
    """
    now = newest_commits(storage)
    if now == source.before:
        return source
    if isinstance(source.location, Path):
        return Source(source.location, _list_folder(source.location, etl, storage), now)
    if spark is None:
        raise NeedsSpark
    return Source(source.location, _list_url(spark, source.location, etl, storage), now)


def _list_folder(folder: Path, etl: EtlConfig, storage: Storage) -> SpooledRows:
    return check_source(folder, etl, scratch_root(storage), OwnFolders.of(folder, storage))


def _list_url(spark: SparkSession, url: str, etl: EtlConfig, storage: Storage) -> SpooledRows:
    listing = list_remote(spark, url, etl, scratch_root(storage), OwnFolders.of(url, storage))
    check_labels(listing, url, etl)
    return listing
