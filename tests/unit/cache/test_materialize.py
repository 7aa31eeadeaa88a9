"""Preparation of a build: the key of the cache, the size of its row groups, and refused tables."""

from pathlib import Path

import pytest

from tasks.cache.manifest import FORMAT, CacheManifest
from tasks.cache.materialize import Content, cache_key, check_content, has_content
from tasks.cache.write import MIN_ROW_GROUPS, cache_bytes, check_disk, rows_per_group
from tasks.config.cache import CacheConfig
from tasks.errors import WrongInput
from tasks.model_package.description import AS_BEFORE, NEWEST, Decoding
from tasks.refs import TableRef

TABLE = TableRef(path="/tables/images", version=3)


def content_of(
    digest: str = "d", classes: tuple[str, ...] = ("ant", "bee"), rows: dict[str, int] | None = None
) -> Content:
    """Return the content of a small table."""
    return Content("originals", digest, classes, rows or {"train": 80, "val": 10, "test": 10})


def test_small_split_has_many_row_groups() -> None:
    """A split with enough rows has about MIN_ROW_GROUPS row groups, enough for as many ranks."""
    rows = rows_per_group(1437, CacheConfig(image_size=32))

    assert rows in {22, 23}
    assert -(-1437 // rows) >= MIN_ROW_GROUPS - 1


def test_row_group_is_bounded_by_row_group_megabytes() -> None:
    """A row group of 16 MB has 111 images of 224x224, of 147 KiB each."""
    rows = rows_per_group(1_000_000, CacheConfig(image_size=224, row_group_megabytes=16))

    assert rows == 111
    assert rows * 224 * 224 * 3 <= 16 << 20


@pytest.mark.parametrize("rows", [0, 1, 10])
def test_row_group_has_at_least_one_row(rows: int) -> None:
    """A split smaller than MIN_ROW_GROUPS, and images larger than a row group, have row groups of one row."""
    assert rows_per_group(rows, CacheConfig(image_size=32)) == 1
    assert rows_per_group(1_000_000, CacheConfig(image_size=1024, row_group_megabytes=1)) == 1


def test_key_depends_on_content_and_decisive_settings() -> None:
    """It changes with content, decoding, image size, row groups and format, and not with settings like keep_days."""
    settings = CacheConfig(image_size=32)
    keys = {
        cache_key(content_of("d"), settings, AS_BEFORE),
        cache_key(content_of("d"), settings, NEWEST),
        cache_key(content_of("d"), settings, Decoding(sample_bits=12)),
        cache_key(content_of("e"), settings, AS_BEFORE),
        cache_key(content_of("d"), CacheConfig(image_size=64), AS_BEFORE),
        cache_key(content_of("d"), CacheConfig(image_size=32, row_group_megabytes=1), AS_BEFORE),
        cache_key(content_of("d"), CacheConfig(image_size=32, format="jpeg"), AS_BEFORE),
        cache_key(content_of("d"), CacheConfig(image_size=32, format="jpeg", jpeg_quality=75), AS_BEFORE),
    }

    assert len(keys) == 8
    kept = CacheConfig(image_size=32, jpeg_quality=75, verify=True, keep_days=0, keep_gigabytes=7)
    assert cache_key(content_of("d"), kept, AS_BEFORE) in keys
    assert cache_key(content_of("d"), CacheConfig(image_size=32), AS_BEFORE) in keys


def test_cache_has_the_content_of_a_version_if_its_stored_bytes_are_the_same() -> None:
    """The digest of the stored bytes decides; without it, a cache of an older release serves only its own table."""
    table = TABLE.model_copy(update={"table_id": "one"})

    def has(of: TableRef, stored_digest: str = "", content_digest: str = "originals") -> bool:
        cache = CacheManifest(
            format=FORMAT,
            table=of,
            content_digest=content_digest,
            stored_digest=stored_digest,
            settings=CacheConfig(),
            classes=("ant", "bee"),
            splits={},
        )
        found = has_content(cache, content_of("stored"), table, AS_BEFORE)
        assert not has_content(cache, content_of("stored"), table, NEWEST)
        return found

    other = table.model_copy(update={"table_id": "two"})
    assert [has(other, "stored"), has(table, "stored"), has(table, "others")] == [True, True, False]
    earlier = table.model_copy(update={"path": "/moved/images", "version": 1})
    assert [has(earlier), has(other), has(TABLE), has(table, content_digest="others")] == [True, False, False, False]


def test_estimated_bytes_include_padding() -> None:
    """The estimate is slightly above the size of the pixels, and for JPEG well below."""
    pixels = 1_000_000 * 32 * 32 * 3

    assert pixels < cache_bytes(1_000_000, CacheConfig(image_size=32)) < 1.05 * pixels
    assert cache_bytes(1_000_000, CacheConfig(image_size=32, format="jpeg")) < 0.3 * pixels


def test_table_with_one_class_is_refused() -> None:
    """A table with one class is refused with its path, version and classes."""
    with pytest.raises(WrongInput, match=r"images' version 3 has the classes \['ant'\]"):
        check_content(content_of(classes=("ant",)), TABLE)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_empty_split_is_refused(split: str) -> None:
    """A table with an empty split, whose metrics would be NaN, is refused with the name of the split."""
    rows = {"train": 80, "val": 10, "test": 10} | {split: 0}

    with pytest.raises(WrongInput, match=f"no image of '/tables/images' version 3 is in the split '{split}'"):
        check_content(content_of(rows=rows), TABLE)


def test_usable_table_passes() -> None:
    """A table with two classes and images in three splits is accepted."""
    check_content(content_of(), TABLE)


def test_cache_larger_than_the_free_disk_space_is_refused(tmp_path: Path) -> None:
    """A cache larger than the free space is refused, even if its folder does not exist, but not on an object store."""
    with pytest.raises(WrongInput, match=r"needs 1000000000\.0 GB and .* GB are free: make room"):
        check_disk(str(tmp_path / "missing" / "cache" / "folder"), 10**18)
    assert list(tmp_path.iterdir()) == []

    check_disk(str(tmp_path), 1)
    check_disk("s3a://bucket/cache", 10**18)


@pytest.mark.parametrize("rows", [64, 65, 100, 127, 1437])
def test_split_of_64_rows_or_more_has_min_row_groups(rows: int) -> None:
    """A split of at least MIN_ROW_GROUPS rows has at least MIN_ROW_GROUPS row groups."""
    assert -(-rows // rows_per_group(rows, CacheConfig(image_size=16))) >= MIN_ROW_GROUPS
