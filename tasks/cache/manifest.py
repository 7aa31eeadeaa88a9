"""The manifest of a cache: what it holds and what it was made from. Written last, it is the commit."""

import glob
import hashlib
import json
import logging
import os
import uuid
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.config.cache import CacheConfig
from tasks.paths import local_path
from tasks.refs import CacheRef, TableRef
from tasks.system.cores import num_cores

logger = logging.getLogger("lakevision.cache")

MANIFEST = "manifest.json"
FORMAT = 2


class CacheFile(BaseModel):
    """One Parquet file; rows count no padding."""

    model_config = ConfigDict(frozen=True)

    name: str
    rows: int
    row_groups: int
    bytes: int
    sha256: str


class CacheSplit(BaseModel):
    """One split: every row group has exactly `rows_per_group` rows, the last of them padded."""

    model_config = ConfigDict(frozen=True)

    rows: int
    rows_per_group: int
    files: tuple[CacheFile, ...]

    @property
    def row_groups(self) -> int:
        """Number of row groups over all files."""
        return sum(file.row_groups for file in self.files)

    @property
    def padding(self) -> int:
        """Number of rows that are no image."""
        return self.row_groups * self.rows_per_group - self.rows


class FeatureSettings(BaseModel):
    """What features were made from: rows of the cache `source`, by a backbone."""

    model_config = ConfigDict(frozen=True)

    source: str
    """Digest of the cache with the images."""
    backbone: str
    """Digest of architecture and weights."""
    precision: str
    device: str
    """Type of the device that computed them: another one rounds otherwise."""
    transform: tuple[tuple[float, ...], ...]
    """Mean and standard deviation of the channels that the backbone's inputs were normalized with."""
    num_features: int
    form: int = 1
    """Number of the form in which the backbone computed: another one rounds otherwise."""


class CacheManifest(BaseModel):
    """What a cache holds; `classes` are the sorted labels, a row's label is an index into them.

    Where `features` is set, its rows are float32 features of a backbone in place of pixels.
    """

    model_config = ConfigDict(frozen=True)

    format: int
    table: TableRef
    content_digest: str
    settings: CacheConfig
    classes: tuple[str, ...]
    splits: dict[str, CacheSplit]
    features: FeatureSettings | None = None

    @property
    def row_bytes(self) -> int:
        """Size of one row's pixels or features."""
        return self.pixel_bytes if self.features is None else 4 * self.features.num_features

    @property
    def image_size(self) -> int:
        """Side of the images, in pixels."""
        return self.settings.image_size

    @property
    def pixel_bytes(self) -> int:
        """Size of one image's pixels, uint8 HWC."""
        return self.settings.pixel_bytes

    @property
    def digest(self) -> str:
        """sha256 of what the cache holds: classes, settings and the content of its files, whatever they are called."""
        held = {
            "format": self.format,
            "settings": self.settings.decisive(),
            "classes": self.classes,
            "splits": {split: [file.sha256 for file in part.files] for split, part in self.splits.items()},
        }
        if self.features is not None:
            held["features"] = self.features.model_dump()
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


class CacheDamaged(RuntimeError):
    """A cache whose files are not what its manifest says; building it again mends it."""


def write_manifest(url: str, manifest: CacheManifest) -> CacheRef:
    """Commit the cache at `url`."""
    filesystem, root = fsspec.core.url_to_fs(url)
    text = manifest.model_dump_json(indent=2)
    if local_path(url) is not None:
        # A rename, for readers on this machine; an object store shows a whole object or none.
        partial = f"{root}/.{MANIFEST}.{uuid.uuid4().hex}"
        filesystem.pipe_file(partial, text.encode())
        os.replace(partial, f"{root}/{MANIFEST}")
    else:
        filesystem.pipe_file(f"{root}/{MANIFEST}", text.encode())
    return CacheRef(url=url, digest=manifest.digest)


def read_manifest(url: str) -> CacheManifest | None:
    """Return the manifest at `url`, or None where no whole cache is."""
    filesystem, root = fsspec.core.url_to_fs(url)
    try:
        content = json.loads(filesystem.cat_file(f"{root}/{MANIFEST}"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return None
        return CacheManifest.model_validate(content)
    except (FileNotFoundError, ValueError, ValidationError):
        return None


def check_files(url: str, manifest: CacheManifest) -> None:
    """Check sizes and footers of every file.

    Raises:
        CacheDamaged: Names the file and what is wrong with it.
    """
    filesystem, root = fsspec.core.url_to_fs(url)
    for split in manifest.splits.values():
        for file in split.files:
            path = f"{root}/{file.name}"
            try:
                size = filesystem.size(path)
                if size != file.bytes:
                    raise CacheDamaged(f"{path} has {size} bytes, its manifest says {file.bytes}")
                with filesystem.open(path, "rb") as handle:
                    footer = pq.ParquetFile(handle).metadata
            except FileNotFoundError:  # Lost, or another run's sweep was quicker.
                raise CacheDamaged(f"{path} is missing") from None
            groups = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
            if groups != [split.rows_per_group] * file.row_groups:
                wanted = f"{file.row_groups} of {split.rows_per_group}"
                raise CacheDamaged(f"{path} has row groups of {groups} rows, its manifest says {wanted}")


def verify_files(url: str, manifest: CacheManifest) -> None:
    """Check every file in full: sizes, footers and sha256.

    Raises:
        CacheDamaged: Names every file whose content is not what was written.
    """
    check_files(url, manifest)
    filesystem, root = fsspec.core.url_to_fs(url)

    def damage(file: CacheFile) -> str | None:
        with filesystem.open(f"{root}/{file.name}", "rb") as handle:
            sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
        return (
            None
            if sha256 == file.sha256
            else f"{root}/{file.name} has the sha256 {sha256}, its manifest says {file.sha256}"
        )

    # Hashing lets go of Python's lock.
    with ThreadPoolExecutor(max_workers=num_cores()) as pool:
        found = [
            said for said in pool.map(damage, (f for part in manifest.splits.values() for f in part.files)) if said
        ]
    if found:
        raise CacheDamaged("; ".join(found))


def whole_cache(url: str, settings: CacheConfig, table: TableRef | None = None) -> CacheRef | None:
    """Return the cache at `url` if it is whole, undamaged and of these settings (and of `table`, if given), or None.

    Files are checked by sizes and footers, and in full where `settings.verify` asks for it.
    """
    manifest = read_manifest(url)
    if manifest is None or manifest.settings.decisive() != settings.decisive() or manifest.features is not None:
        return None
    if table is not None and not manifest.table.is_version(table):
        return None
    try:
        (verify_files if settings.verify else check_files)(url, manifest)
    except CacheDamaged as damage:
        logger.warning("%s: it will be built again", damage)
        return None
    return CacheRef(url=url, digest=manifest.digest)


def find_cache(folder: str, table: TableRef, settings: CacheConfig) -> CacheRef | None:
    """Return the whole and undamaged cache of exactly this table version and these settings below `folder`, or None."""
    filesystem, root = fsspec.core.url_to_fs(folder)
    for path in filesystem.glob(f"{glob.escape(root)}/*/{MANIFEST}"):
        name = path.split("/")[-2]
        if name.startswith("."):
            continue  # On its way out: `tasks.cache.sweep` removes it, whoever reads it.
        if found := whole_cache(f"{folder.rstrip('/')}/{name}", settings, table):
            return found
    return None


def open_cache(ref: CacheRef) -> CacheManifest:
    """Return the manifest of the cache, its files checked by sizes and footers.

    Raises:
        CacheDamaged: No whole cache is there, another one is, or a file is damaged.
    """
    manifest = read_manifest(ref.url)
    if manifest is None:
        raise CacheDamaged(f"{ref.url} holds no whole cache")
    if manifest.digest != ref.digest:
        raise CacheDamaged(f"{ref.url} holds the cache {manifest.digest}, not {ref.digest}")
    check_files(ref.url, manifest)
    return manifest
