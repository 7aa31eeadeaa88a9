"""What is decided before a cache is built: its key, the size of its row groups, and what is refused."""

from pathlib import Path

import pytest

from tasks.cache.materialize import Content, cache_key, check_content
from tasks.cache.sizes import MIN_ROW_GROUPS, cache_bytes, check_disk, rows_per_group
from tasks.config.cache import CacheConfig
from tasks.errors import WrongInput
from tasks.refs import TableRef

TABLE = TableRef(path="/tables/images", version=3)


def content_of(
    digest: str = "d", classes: tuple[str, ...] = ("ant", "bee"), rows: dict[str, int] | None = None
) -> Content:
    """Return the content of a small table."""
    return Content(digest, classes, rows or {"train": 80, "val": 10, "test": 10})


def test_small_split_is_cut_into_many_row_groups() -> None:
    """Where the rows allow it there are MIN_ROW_GROUPS, so that as many ranks have something to read."""
    rows = rows_per_group(1437, CacheConfig(image_size=32))

    assert rows in {22, 23}
    assert -(-1437 // rows) >= MIN_ROW_GROUPS - 1


def test_row_group_is_bounded_by_its_megabytes() -> None:
    """Images of 224x224 are 147 KiB each: 111 of them fit into 16 MB."""
    rows = rows_per_group(1_000_000, CacheConfig(image_size=224, row_group_megabytes=16))

    assert rows == 111
    assert rows * 224 * 224 * 3 <= 16 << 20


@pytest.mark.parametrize("rows", [0, 1, 10])
def test_row_group_has_a_row_at_least(rows: int) -> None:
    """A split smaller than MIN_ROW_GROUPS has groups of one row, and so have images larger than a group."""
    assert rows_per_group(rows, CacheConfig(image_size=32)) == 1
    assert rows_per_group(1_000_000, CacheConfig(image_size=1024, row_group_megabytes=1)) == 1


def test_key_is_decided_by_content_and_settings() -> None:
    """Another digest, image size or row group is another cache; the same ones are the same, from whatever version."""
    settings = CacheConfig(image_size=32)
    keys = {
        cache_key(content_of("d"), settings),
        cache_key(content_of("e"), settings),
        cache_key(content_of("d"), CacheConfig(image_size=64)),
        cache_key(content_of("d"), CacheConfig(image_size=32, row_group_megabytes=1)),
        cache_key(content_of("d"), CacheConfig(image_size=32, format="jpeg")),
        cache_key(content_of("d"), CacheConfig(image_size=32, format="jpeg", jpeg_quality=75)),
    }

    assert len(keys) == 6
    kept = CacheConfig(image_size=32, jpeg_quality=75, verify=True, keep_days=0, keep_gigabytes=7)
    assert cache_key(content_of("d"), kept) in keys
    assert cache_key(content_of("d"), CacheConfig(image_size=32)) in keys


def test_bytes_cover_pixels_and_padding() -> None:
    """The estimate is above the pixels, and not by much."""
    pixels = 1_000_000 * 32 * 32 * 3

    assert pixels < cache_bytes(1_000_000, CacheConfig(image_size=32)) < 1.05 * pixels
    assert cache_bytes(1_000_000, CacheConfig(image_size=32, format="jpeg")) < 0.3 * pixels


def test_table_with_one_class_is_refused() -> None:
    """The sentence names table, version and the class there is."""
    with pytest.raises(WrongInput, match=r"'/tables/images' version 3 has the classes \['ant'\]: .* at least two"):
        check_content(content_of(classes=("ant",)), TABLE)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_empty_split_is_refused(split: str) -> None:
    """A metric of no images is no number: the split that is empty is named."""
    rows = {"train": 80, "val": 10, "test": 10} | {split: 0}

    with pytest.raises(WrongInput, match=f"the split '{split}' of '/tables/images' version 3 has no images"):
        check_content(content_of(rows=rows), TABLE)


def test_usable_table_passes() -> None:
    """Two classes and three splits with images are enough."""
    check_content(content_of(), TABLE)


def test_cache_that_the_disk_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Also where the folder is yet to be made; an object store has no end."""
    with pytest.raises(WrongInput, match=r"needs 1000000000\.0 GB and .* GB are free: make room"):
        check_disk(str(tmp_path / "not" / "made" / "yet"), 10**18)
    assert list(tmp_path.iterdir()) == []

    check_disk(str(tmp_path), 1)
    check_disk("s3a://bucket/cache", 10**18)


@pytest.mark.parametrize("rows", [64, 65, 100, 127, 1437])
def test_split_with_the_rows_has_min_row_groups(rows: int) -> None:
    """What has 64 rows has 64 row groups."""
    assert -(-rows // rows_per_group(rows, CacheConfig(image_size=16))) >= MIN_ROW_GROUPS
