"""The manifest: commit of a cache, and detection of damaged caches."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.cache.manifest import (
    FORMAT,
    MANIFEST,
    CacheDamaged,
    CacheFile,
    CacheManifest,
    CacheSplit,
    check_files,
    find_cache,
    open_cache,
    read_manifest,
    verify_files,
    write_manifest,
)
from tasks.config.cache import CacheConfig
from tasks.refs import CacheRef, TableRef


def num_groups(split: CacheSplit) -> int:
    """Return the number of row groups over all files of a split."""
    return sum(file.row_groups for file in split.files)


def manifest_of(file_digest: str = "f" * 64, **changes: object) -> CacheManifest:
    """Return a manifest of one file that does not exist, with the given changes of its fields."""
    file = CacheFile(name="train-00000-ab.parquet", rows=7, row_groups=3, bytes=100, sha256=file_digest)
    content = {
        "format": FORMAT,
        "table": TableRef(path="/tables/images", version=3),
        "content_digest": "content",
        "settings": CacheConfig(image_size=16),
        "classes": ("ant", "bee"),
        "splits": {"train": CacheSplit(rows=7, rows_per_group=3, files=(file,))},
    }
    return CacheManifest.model_validate(content | changes)


def files_of(ref: CacheRef) -> list[Path]:
    """Return the Parquet files of a cache."""
    return sorted(Path(ref.url).glob("*.parquet"))


def test_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A manifest read from JSON equals the written one, and the ref has its digest."""
    manifest = manifest_of()

    ref = write_manifest(str(tmp_path), manifest)

    assert read_manifest(str(tmp_path)) == manifest
    assert ref == CacheRef(url=str(tmp_path), digest=manifest.digest)


def test_writing_a_manifest_leaves_no_temporary_file(tmp_path: Path) -> None:
    """After a first and a second commit the folder contains the manifest only."""
    write_manifest(str(tmp_path), manifest_of())
    write_manifest(str(tmp_path), manifest_of("0" * 64))

    assert [file.name for file in tmp_path.iterdir()] == [MANIFEST]


def test_folder_without_a_manifest_is_no_cache(tmp_path: Path) -> None:
    """A folder of files without a manifest, and a missing folder, contain no cache."""
    (tmp_path / "train-00000-ab.parquet").write_bytes(b"left by a killed build")

    assert read_manifest(str(tmp_path)) is None
    assert read_manifest(str(tmp_path / "gone")) is None


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', '{"format": 0}', "{}"])
def test_incomplete_manifest_is_no_cache(tmp_path: Path, text: str) -> None:
    """A truncated manifest, or one with missing fields or another format, is not read."""
    (tmp_path / MANIFEST).write_text(text)

    assert read_manifest(str(tmp_path)) is None


def test_manifest_of_another_format_is_no_cache(tmp_path: Path) -> None:
    """A manifest of another format version is not read, even if it can be parsed."""
    write_manifest(str(tmp_path), manifest_of())
    content = json.loads((tmp_path / MANIFEST).read_text()) | {"format": FORMAT + 1}
    (tmp_path / MANIFEST).write_text(json.dumps(content))

    assert read_manifest(str(tmp_path)) is None


def test_digest_depends_on_the_content_and_not_on_its_provenance() -> None:
    """Another version of the table (after OPTIMIZE) and other file names (after a rebuild) give the same digest."""
    file = CacheFile(name="train-00000-cd.parquet", rows=7, row_groups=3, bytes=100, sha256="f" * 64)
    renamed = {"train": CacheSplit(rows=7, rows_per_group=3, files=(file,))}

    assert manifest_of(table=TableRef(path="/elsewhere", version=9)).digest == manifest_of().digest
    assert manifest_of(splits=renamed).digest == manifest_of().digest


@pytest.mark.parametrize(
    "changed",
    [
        manifest_of("0" * 64),
        manifest_of(classes=("ant", "bug")),
        manifest_of(settings=CacheConfig(image_size=32)),
        manifest_of(splits={}),
    ],
)
def test_another_content_has_another_digest(changed: CacheManifest) -> None:
    """The digest changes with pixels, classes, settings and splits."""
    assert changed.digest != manifest_of().digest


def test_padding_is_the_number_of_rows_that_fill_the_last_row_group() -> None:
    """7 rows in 3 groups of 3 leave 2 rows of padding."""
    split = manifest_of().splits["train"]

    assert num_groups(split) == 3
    assert num_groups(split) * split.rows_per_group - split.rows == 2


def test_complete_cache_can_be_opened(make_cache: Callable[..., CacheRef]) -> None:
    """A cache that was just written passes the check, and its manifest has its rows and row groups."""
    manifest = open_cache(make_cache({"train": 20, "val": 4}))

    assert {split: part.rows for split, part in manifest.splits.items()} == {"train": 20, "val": 4}
    train = manifest.splits["train"]
    assert num_groups(train) == 7
    assert num_groups(train) * train.rows_per_group - train.rows == 1
    assert manifest.image_size == 16


def test_missing_file_is_damage(make_cache: Callable[..., CacheRef]) -> None:
    """A missing file raises CacheDamaged with its name."""
    ref = make_cache({"train": 20})
    lost = files_of(ref)[1]
    lost.unlink()

    with pytest.raises(CacheDamaged, match=f"{lost.name} is missing"):
        open_cache(ref)


def test_truncated_file_is_damage(make_cache: Callable[..., CacheRef]) -> None:
    """A truncated file raises CacheDamaged with its size and the expected size."""
    ref = make_cache({"train": 20})
    truncated = files_of(ref)[0]
    size = truncated.stat().st_size
    truncated.write_bytes(truncated.read_bytes()[:-1])

    with pytest.raises(CacheDamaged, match=f"{truncated.name} has {size - 1} bytes, its manifest says {size}"):
        open_cache(ref)


def test_file_with_other_row_groups_is_damage(make_cache: Callable[..., CacheRef]) -> None:
    """A file of the right size with other row groups than in the manifest, which would break sharding, is damaged."""
    ref = make_cache({"train": 6})
    manifest = read_manifest(ref.url)
    assert manifest is not None
    split = manifest.splits["train"]
    wrong = manifest.model_copy(update={"splits": {"train": split.model_copy(update={"rows_per_group": 2})}})

    with pytest.raises(CacheDamaged, match=r"row groups of \[3, 3\] rows, its manifest says 2 of 2"):
        check_files(ref.url, wrong)


def test_file_with_a_destroyed_footer_is_damage(make_cache: Callable[..., CacheRef]) -> None:
    """A file of the right size that is not a Parquet file, as after a disk error, is named and built again."""
    ref = make_cache({"train": 6})
    (file,) = Path(ref.url).glob("*.parquet")
    file.write_bytes(bytes(file.stat().st_size))

    with pytest.raises(CacheDamaged, match=f"{file.name} is not a Parquet file"):
        open_cache(ref)


def test_complete_cache_passes_full_verification(make_cache: Callable[..., CacheRef]) -> None:
    """The digests in the manifest equal those of the files, over all splits."""
    ref = make_cache({"train": 20, "val": 4})

    verify_files(ref.url, open_cache(ref))


def flip_byte(file: Path, place: int) -> None:
    """Change one byte."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_flipped_bit_is_found_by_full_verification_only(make_cache: Callable[..., CacheRef]) -> None:
    """A flipped bit leaves size and footer unchanged; the full verification names both affected files, and no other."""
    ref = make_cache({"train": 20})
    manifest = open_cache(ref)
    flip_byte(files_of(ref)[1], 500)
    flip_byte(files_of(ref)[2], 700)

    open_cache(ref)
    with pytest.raises(CacheDamaged, match=r"has the sha256 \w+, its manifest says") as raised:
        verify_files(ref.url, manifest)
    assert [file.name in str(raised.value) for file in files_of(ref)] == [False, True, True, False]


def test_full_verification_finds_truncated_and_missing_files(make_cache: Callable[..., CacheRef]) -> None:
    """The full verification finds the damage that opening a cache finds."""
    ref = make_cache({"train": 20})
    manifest = open_cache(ref)
    first, second = files_of(ref)[:2]
    second.write_bytes(second.read_bytes()[:-7])
    with pytest.raises(CacheDamaged, match=second.name):
        verify_files(ref.url, manifest)

    first.unlink()
    with pytest.raises(CacheDamaged, match=f"{first.name} is missing"):
        verify_files(ref.url, manifest)


def test_cache_with_flipped_bit_is_found_only_without_verify(
    make_cache: Callable[..., CacheRef], tmp_path: Path
) -> None:
    """With `verify`, a cache with a flipped bit is not found, so that it is rebuilt."""
    ref = make_cache({"train": 6})
    flip_byte(files_of(ref)[0], 500)
    table = TableRef(path="/tables/images", version=3)

    assert find_cache(str(tmp_path), table, CacheConfig(image_size=16)) == ref.model_copy(update={"table": table})
    assert find_cache(str(tmp_path), table, CacheConfig(image_size=16, verify=True)) is None


def test_digest_ignores_settings_that_do_not_affect_the_content(
    make_cache: Callable[..., CacheRef], tmp_path: Path
) -> None:
    """Settings of sweeping and verification, and JPEG's quality for raw pixels, do not affect digest and lookup."""
    ref = make_cache({"train": 6})
    other = CacheConfig(image_size=16, keep_days=1, keep_gigabytes=5, verify=True, jpeg_quality=70)

    table = TableRef(path="/tables/images", version=3)
    assert find_cache(str(tmp_path), table, other) == ref.model_copy(update={"table": table})
    assert manifest_of(settings=other).digest == manifest_of().digest
    assert manifest_of(settings=CacheConfig(image_size=16, format="jpeg")).digest != manifest_of().digest


def test_folder_without_a_complete_cache_cannot_be_opened(tmp_path: Path) -> None:
    """A ref to an empty folder raises CacheDamaged."""
    with pytest.raises(CacheDamaged, match="contains no complete cache"):
        open_cache(CacheRef(url=str(tmp_path), digest="x"))


def test_opened_cache_has_the_table_that_asked_for_it(make_cache: Callable[..., CacheRef]) -> None:
    """A training run records this table, and not the table of the build."""
    ref = make_cache({"train": 6})
    asked = TableRef(path="/other/images", version=7, table_id="other")

    assert open_cache(ref).table == TableRef(path="/tables/images", version=3)
    assert open_cache(ref.model_copy(update={"table": asked})).table == asked


def test_another_cache_in_the_same_folder_cannot_be_opened(make_cache: Callable[..., CacheRef]) -> None:
    """A ref with another digest raises CacheDamaged: a training run never reads another cache than its own."""
    ref = make_cache({"train": 6})

    with pytest.raises(CacheDamaged, match=f"contains the cache {ref.digest}, not other"):
        open_cache(CacheRef(url=ref.url, digest="other"))


def test_cache_is_found_by_table_version_and_settings(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """Of the caches in a folder, only the one of exactly the given version and settings is found."""
    small = make_cache({"train": 6}, folder="caches-small")
    large = make_cache({"train": 6}, image_size=32, folder="caches-large")
    for ref in (small, large):
        shutil.move(ref.url, tmp_path / "caches" / Path(ref.url).name)
    table = TableRef(path="/tables/images", version=3)
    folder = str(tmp_path / "caches")

    found = find_cache(folder, table, CacheConfig(image_size=32))

    assert found == CacheRef(url=f"{folder}/caches-large", digest=large.digest, table=table)
    assert find_cache(folder, table, CacheConfig(image_size=64)) is None
    assert find_cache(folder, table.model_copy(update={"version": 4}), CacheConfig(image_size=32)) is None


def test_damaged_cache_is_not_found(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """A cache with a missing file is not found, so that it is rebuilt."""
    ref = make_cache({"train": 6})
    table, settings = TableRef(path="/tables/images", version=3), CacheConfig(image_size=16)
    assert find_cache(str(tmp_path), table, settings) == ref.model_copy(update={"table": table})

    files_of(ref)[0].unlink()

    assert find_cache(str(tmp_path), table, settings) is None


def test_cache_that_is_being_removed_is_not_found(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """A complete cache that a killed sweep had renamed is not found, as the next sweep removes it."""
    ref = make_cache({"train": 6})
    shutil.move(ref.url, tmp_path / f".{'0' * 16}.swept-{'0' * 32}")

    assert find_cache(str(tmp_path), TableRef(path="/tables/images", version=3), CacheConfig(image_size=16)) is None


def test_no_cache_is_found_in_a_missing_folder(tmp_path: Path) -> None:
    """In a missing folder, as before the first build, no cache is found."""
    assert find_cache(str(tmp_path / "gone"), TableRef(path="x", version=0), CacheConfig()) is None
