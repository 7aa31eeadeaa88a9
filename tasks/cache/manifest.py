"""The manifest of a cache: its contents and provenance; writing it commits the cache."""

import glob
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from tasks.config.cache import CacheConfig
from tasks.config.frozen import RECORDED, hashed_settings
from tasks.model_package.description import AS_BEFORE, Decoding
from tasks.object_store import file_system
from tasks.paths import local_path
from tasks.refs import CacheRef, TableRef
from tasks.system.cores import num_cores

logger = logging.getLogger("lakevision.cache")

MANIFEST = "manifest.json"
FORMAT = 2


class CacheFile(BaseModel, frozen=True):
    """One Parquet file of a cache; `rows` does not count padding."""

    name: str
    rows: int
    row_groups: int
    bytes: int
    sha256: str


class CacheSplit(BaseModel, frozen=True):
    """One split: every row group has exactly `rows_per_group` rows, the last of them padded."""

    rows: int
    rows_per_group: int
    files: tuple[CacheFile, ...]


class QuarantinedImage(BaseModel, frozen=True):
    """An image of the table that cannot be decoded, and is not in the cache."""

    sha256: str
    split: str
    reason: str
    """Reason and detail."""
    path: str = ""
    """Path in the source, by the table `files`; empty if it has none."""


class FeatureSettings(BaseModel, frozen=True):
    """Provenance of cached features: the rows of the cache `source`, computed by a backbone."""

    source: str
    """Digest of the cache with the images."""
    backbone: str
    """Digest of architecture and weights."""
    precision: str
    device: str
    """Type of the device that computed them: rounding differs between devices."""
    transform: tuple[tuple[float, ...], ...]
    """Mean and standard deviation of the channels that the backbone's inputs were normalized with."""
    num_features: int
    form: int = 1
    """Version of the backbone's computation: rounding differs between versions."""


class CacheManifest(BaseModel, frozen=True):
    """Contents of a cache; `classes` are the sorted labels, and a row's label is an index into them.

    Where `features` is set, the rows are float32 features of a backbone instead of pixels. The build has read `table`.
    For a reader, `open_cache` replaces it by the table that asked for the cache.
    """

    format: int
    table: TableRef
    content_digest: str
    """Digest of the originals, labels and splits (`tasks.cache.materialize`)."""
    stored_digest: str = ""
    """Digest of the stored bytes, labels and splits; empty in a cache of a release that did not record it."""
    settings: CacheConfig
    decoding: Decoding = AS_BEFORE
    """Decoding of the images: that of their table. Caches of earlier releases do not record it."""
    classes: tuple[str, ...]
    splits: dict[str, CacheSplit]
    quarantined: tuple[QuarantinedImage, ...] = ()
    features: FeatureSettings | None = None

    @property
    def row_bytes(self) -> int:
        """Size of one row's pixels or features."""
        return self.settings.pixel_bytes if self.features is None else 4 * self.features.num_features

    @property
    def image_size(self) -> int:
        """Side of the images, in pixels."""
        return self.settings.image_size

    @property
    def digest(self) -> str:
        """SHA-256 of the contents: classes, settings and the content of the files, independent of the files' names."""
        content = {
            "format": self.format,
            "settings": self.settings.decisive(),
            "classes": self.classes,
            "splits": {split: [file.sha256 for file in part.files] for split, part in self.splits.items()},
        }
        if self.decoding != AS_BEFORE:
            content["decoding"] = self.decoding.model_dump()
        if self.features is not None:
            content["features"] = hashed_settings(self.features, type(self.features).model_fields)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


Wanted = Callable[[CacheManifest], bool]
"""Returns whether a cache is wanted, by its manifest."""


class CacheDamaged(RuntimeError):
    """A cache whose files do not match its manifest; a rebuild repairs it."""


def write_manifest(url: str, manifest: CacheManifest) -> CacheRef:
    """Commit the cache at `url`."""
    filesystem, root = file_system(url)
    # An atomic rename, for concurrent readers; an object store shows a complete object or none.
    name = MANIFEST if local_path(url) is None else f".{MANIFEST}.{uuid.uuid4().hex}"
    filesystem.pipe_file(f"{root}/{name}", manifest.model_dump_json(indent=2).encode())
    if name != MANIFEST:
        os.replace(f"{root}/{name}", f"{root}/{MANIFEST}")
    return CacheRef(url=url, digest=manifest.digest)


def read_manifest(url: str) -> CacheManifest | None:
    """Return the manifest at `url`, or None without a complete cache there."""
    filesystem, root = file_system(url)
    try:
        content = json.loads(filesystem.cat_file(f"{root}/{MANIFEST}"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return None
        return CacheManifest.model_validate(content, context=RECORDED)
    except (FileNotFoundError, ValueError):
        return None


CHECK_THREADS = 16
"""Files checked at the same time: most of the time, a check waits for a disk or a store."""


def check_files(url: str, manifest: CacheManifest) -> None:
    """Check the size and the footer of every file.

    Raises:
        CacheDamaged: A file is missing, unreadable or does not match; the message names it and the difference.
    """
    filesystem, root = file_system(url)

    def check(file: CacheFile, rows_per_group: int) -> None:
        path = f"{root}/{file.name}"
        try:
            size = filesystem.size(path)
            if size != file.bytes:
                raise CacheDamaged(f"{path} has {size} bytes, its manifest says {file.bytes}")
            with filesystem.open(path, "rb") as handle:
                footer = pq.ParquetFile(handle).metadata
        except FileNotFoundError:  # Lost, or removed by another run's sweep.
            raise CacheDamaged(f"{path} is missing") from None
        except pa.ArrowInvalid as error:
            raise CacheDamaged(f"{path} is not a Parquet file: {error}") from None
        groups = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        if groups != [rows_per_group] * file.row_groups:
            wanted = f"{file.row_groups} of {rows_per_group}"
            raise CacheDamaged(f"{path} has row groups of {groups} rows, its manifest says {wanted}")

    with ThreadPoolExecutor(max_workers=CHECK_THREADS) as pool:
        for part in manifest.splits.values():
            list(pool.map(check, part.files, repeat(part.rows_per_group)))  # The first error cancels the other checks.


def verify_files(url: str, manifest: CacheManifest) -> None:
    """Check the size, the footer and the SHA-256 of every file.

    Raises:
        CacheDamaged: Files do not match; the message names each of them.
    """
    check_files(url, manifest)
    filesystem, root = file_system(url)

    def digest(file: CacheFile) -> str:
        with filesystem.open(f"{root}/{file.name}", "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()

    files = [file for part in manifest.splits.values() for file in part.files]
    with ThreadPoolExecutor(max_workers=num_cores()) as pool:  # Hashing releases the GIL.
        problems = [
            f"{root}/{file.name} has the sha256 {sha256}, its manifest says {file.sha256}"
            for file, sha256 in zip(files, pool.map(digest, files), strict=True)
            if sha256 != file.sha256
        ]
    if problems:
        raise CacheDamaged("; ".join(problems))


def whole_cache(url: str, settings: CacheConfig, is_wanted: Wanted = lambda _manifest: True) -> CacheRef | None:
    """Return the cache at `url` if it is complete, undamaged, of these settings and wanted by its manifest, or None.

    Files are checked by size and footer, and with `settings.verify` by SHA-256 as well.
    """
    manifest = read_manifest(url)
    if manifest is None or manifest.settings.decisive() != settings.decisive() or manifest.features is not None:
        return None
    if not is_wanted(manifest):
        return None
    try:
        (verify_files if settings.verify else check_files)(url, manifest)
    except CacheDamaged as damage:
        logger.warning("%s: it will be built again", damage)
        return None
    return CacheRef(url=url, digest=manifest.digest)


def find_cache(folder: str, table: TableRef, settings: CacheConfig, is_wanted: Wanted | None = None) -> CacheRef | None:
    """Return a complete, undamaged cache of these settings in `folder` for a table version, or None.

    Args:
        folder: Folder or URL of the caches.
        table: The table version that asks.
        settings: Settings of the cache.
        is_wanted: Returns whether a cache has the content of the version; None: if it was built from this version.
    """
    wanted = is_wanted or (lambda manifest: manifest.table.is_version(table))
    filesystem, root = file_system(folder)
    for path in filesystem.glob(f"{glob.escape(root)}/*/{MANIFEST}"):
        name = path.split("/")[-2]
        if name.startswith("."):
            continue  # Being removed by `tasks.cache.sweep`, even if it has readers.
        if found := whole_cache(f"{folder.rstrip('/')}/{name}", settings, wanted):
            return found.model_copy(update={"table": table})
    return None


def open_cache(ref: CacheRef) -> CacheManifest:
    """Return the manifest of the cache with the table that asked for it, its files checked by size and footer.

    Raises:
        CacheDamaged: The cache is missing or incomplete, or another one, or a file is damaged.
    """
    manifest = read_manifest(ref.url)
    if manifest is None:
        raise CacheDamaged(f"{ref.url} contains no complete cache")
    if manifest.digest != ref.digest:
        raise CacheDamaged(f"{ref.url} contains the cache {manifest.digest}, not {ref.digest}")
    check_files(ref.url, manifest)
    return manifest if ref.table is None else manifest.model_copy(update={"table": ref.table})
