"""The manifest: what commits a cache, and what gives a damaged one away."""

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


def manifest_of(file_digest: str = "f" * 64, **changes: object) -> CacheManifest:
    """Return a manifest of one file that does not exist, with some of its fields changed."""
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
    """Nothing is lost on the way to JSON and back, and the ref names what was read."""
    manifest = manifest_of()

    ref = write_manifest(str(tmp_path), manifest)

    assert read_manifest(str(tmp_path)) == manifest
    assert ref == CacheRef(url=str(tmp_path), digest=manifest.digest)


def test_nothing_is_left_beside_a_written_manifest(tmp_path: Path) -> None:
    """The file that is renamed into place is gone, also after a second commit."""
    write_manifest(str(tmp_path), manifest_of())
    write_manifest(str(tmp_path), manifest_of("0" * 64))

    assert [file.name for file in tmp_path.iterdir()] == [MANIFEST]


def test_folder_without_a_manifest_is_no_cache(tmp_path: Path) -> None:
    """Files that no manifest names, or no folder at all, are not there."""
    (tmp_path / "train-00000-ab.parquet").write_bytes(b"left by a killed build")

    assert read_manifest(str(tmp_path)) is None
    assert read_manifest(str(tmp_path / "gone")) is None


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', '{"format": 0}', "{}"])
def test_manifest_that_is_not_whole_is_no_cache(tmp_path: Path, text: str) -> None:
    """Half a file, a missing field and another format all mean: build it again."""
    (tmp_path / MANIFEST).write_text(text)

    assert read_manifest(str(tmp_path)) is None


def test_manifest_of_another_format_is_no_cache(tmp_path: Path) -> None:
    """What another version of the code wrote is not guessed at, even when it parses."""
    write_manifest(str(tmp_path), manifest_of())
    content = json.loads((tmp_path / MANIFEST).read_text()) | {"format": FORMAT + 1}
    (tmp_path / MANIFEST).write_text(json.dumps(content))

    assert read_manifest(str(tmp_path)) is None


def test_digest_names_the_content_and_not_where_it_came_from() -> None:
    """OPTIMIZE changes the version of the table and a rebuild the names of the files: the cache is the same."""
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
    """Pixels, classes and settings each decide the name of a cache."""
    assert changed.digest != manifest_of().digest


def test_padding_is_what_fills_the_last_row_group() -> None:
    """7 rows in 3 groups of 3 leave 2 rows that are no image."""
    split = manifest_of().splits["train"]

    assert split.row_groups == 3
    assert split.padding == 2


def test_whole_cache_opens(make_cache: Callable[..., CacheRef]) -> None:
    """What was just written passes its own check."""
    manifest = open_cache(make_cache({"train": 20, "val": 4}))

    assert {split: part.rows for split, part in manifest.splits.items()} == {"train": 20, "val": 4}
    assert manifest.splits["train"].row_groups == 7
    assert manifest.splits["train"].padding == 1
    assert manifest.image_size == 16


def test_missing_file_is_damage(make_cache: Callable[..., CacheRef]) -> None:
    """The message names the file that is gone."""
    ref = make_cache({"train": 20})
    lost = files_of(ref)[1]
    lost.unlink()

    with pytest.raises(CacheDamaged, match=f"{lost.name} is missing"):
        open_cache(ref)


def test_cut_file_is_damage(make_cache: Callable[..., CacheRef]) -> None:
    """The message says how many bytes there are and how many there should be."""
    ref = make_cache({"train": 20})
    cut = files_of(ref)[0]
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-1])

    with pytest.raises(CacheDamaged, match=f"{cut.name} has {size - 1} bytes, its manifest says {size}"):
        open_cache(ref)


def test_file_with_other_row_groups_is_damage(make_cache: Callable[..., CacheRef]) -> None:
    """A file of the right size whose row groups are not those promised would break the shards."""
    ref = make_cache({"train": 6})
    manifest = read_manifest(ref.url)
    assert manifest is not None
    split = manifest.splits["train"]
    lying = manifest.model_copy(update={"splits": {"train": split.model_copy(update={"rows_per_group": 2})}})

    with pytest.raises(CacheDamaged, match=r"row groups of \[3, 3\] rows, its manifest says 2 of 2"):
        check_files(ref.url, lying)


def test_whole_cache_passes_in_full(make_cache: Callable[..., CacheRef]) -> None:
    """The digests are those of the files, over all splits."""
    ref = make_cache({"train": 20, "val": 4})

    verify_files(ref.url, open_cache(ref))


def flip_byte(file: Path, place: int) -> None:
    """Change one byte."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_flipped_byte_is_seen_in_full_only(make_cache: Callable[..., CacheRef]) -> None:
    """A bit that rotted leaves size and footer as they were; both files with one are named, and no other."""
    ref = make_cache({"train": 20})
    manifest = open_cache(ref)
    flip_byte(files_of(ref)[1], 500)
    flip_byte(files_of(ref)[2], 700)

    open_cache(ref)
    with pytest.raises(CacheDamaged, match=r"has the sha256 \w+, its manifest says") as raised:
        verify_files(ref.url, manifest)
    assert [file.name in str(raised.value) for file in files_of(ref)] == [False, True, True, False]


def test_cut_or_missing_file_is_named_in_full_too(make_cache: Callable[..., CacheRef]) -> None:
    """What opening a cache sees, the full check sees."""
    ref = make_cache({"train": 20})
    manifest = open_cache(ref)
    first, second = files_of(ref)[:2]
    second.write_bytes(second.read_bytes()[:-7])
    with pytest.raises(CacheDamaged, match=second.name):
        verify_files(ref.url, manifest)

    first.unlink()
    with pytest.raises(CacheDamaged, match=f"{first.name} is missing"):
        verify_files(ref.url, manifest)


def test_changed_cache_is_found_only_where_digests_are_not_asked_for(
    make_cache: Callable[..., CacheRef], tmp_path: Path
) -> None:
    """With `verify`, a cache with a flipped byte is passed over, so that it is built again."""
    ref = make_cache({"train": 6})
    flip_byte(files_of(ref)[0], 500)
    table = TableRef(path="/tables/images", version=3)

    assert find_cache(str(tmp_path), table, CacheConfig(image_size=16)) == ref
    assert find_cache(str(tmp_path), table, CacheConfig(image_size=16, verify=True)) is None


def test_how_long_a_cache_is_kept_is_no_part_of_it(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """Settings of sweeping and checking, or of JPEG for raw pixels, neither name a cache nor hide one."""
    ref = make_cache({"train": 6})
    other = CacheConfig(image_size=16, keep_days=1, keep_gigabytes=5, verify=True, jpeg_quality=70)

    assert find_cache(str(tmp_path), TableRef(path="/tables/images", version=3), other) == ref
    assert manifest_of(settings=other).digest == manifest_of().digest
    assert manifest_of(settings=CacheConfig(image_size=16, format="jpeg")).digest != manifest_of().digest


def test_folder_without_a_whole_cache_does_not_open(tmp_path: Path) -> None:
    """A ref to nothing is damage, which building again mends."""
    with pytest.raises(CacheDamaged, match="holds no whole cache"):
        open_cache(CacheRef(url=str(tmp_path), digest="x"))


def test_another_cache_in_the_same_place_does_not_open(make_cache: Callable[..., CacheRef]) -> None:
    """A training that was given one cache never trains on another."""
    ref = make_cache({"train": 6})

    with pytest.raises(CacheDamaged, match=f"holds the cache {ref.digest}, not other"):
        open_cache(CacheRef(url=ref.url, digest="other"))


def test_cache_is_found_by_table_version_and_settings(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """Of all caches in a folder the one of exactly this version and these settings is found, or none."""
    small = make_cache({"train": 6}, folder="caches-small")
    large = make_cache({"train": 6}, image_size=32, folder="caches-large")
    for ref in (small, large):
        shutil.move(ref.url, tmp_path / "caches" / Path(ref.url).name)
    table = TableRef(path="/tables/images", version=3)
    folder = str(tmp_path / "caches")

    found = find_cache(folder, table, CacheConfig(image_size=32))

    assert found == CacheRef(url=f"{folder}/caches-large", digest=large.digest)
    assert find_cache(folder, table, CacheConfig(image_size=64)) is None
    assert find_cache(folder, table.model_copy(update={"version": 4}), CacheConfig(image_size=32)) is None


def test_damaged_cache_is_not_found(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """A cache with a file missing is passed over, so that it is built again."""
    ref = make_cache({"train": 6})
    table, settings = TableRef(path="/tables/images", version=3), CacheConfig(image_size=16)
    assert find_cache(str(tmp_path), table, settings) == ref

    files_of(ref)[0].unlink()

    assert find_cache(str(tmp_path), table, settings) is None


def test_cache_on_its_way_out_is_not_found(make_cache: Callable[..., CacheRef], tmp_path: Path) -> None:
    """A sweep that was killed left it whole, and the next one removes it, whoever reads it."""
    ref = make_cache({"train": 6})
    shutil.move(ref.url, tmp_path / f".{'0' * 16}.swept-{'0' * 32}")

    assert find_cache(str(tmp_path), TableRef(path="/tables/images", version=3), CacheConfig(image_size=16)) is None


def test_no_cache_is_found_where_no_folder_is(tmp_path: Path) -> None:
    """Before the first build there is nothing to find."""
    assert find_cache(str(tmp_path / "gone"), TableRef(path="x", version=0), CacheConfig()) is None
