"""Memory of the loader, its two formats, and what of a cache is damaged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.cache.manifest import CacheDamaged
from tasks.refs import CacheRef
from tests.builders.split_batches import load

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def test_batches_do_not_share_memory(cache: CacheRef) -> None:
    """A batch that is kept or changed is not overwritten by, and does not change, the next ones."""
    expected = [batch.inputs.clone() for batch in load(cache, seed=7).epoch(0)]

    kept = []
    for batch in load(cache, seed=7).epoch(0):
        kept.append(batch.inputs.clone())
        batch.inputs.zero_()

    assert all((mine == theirs).all() for mine, theirs in zip(kept, expected, strict=True))


def photo(row: int, side: int) -> np.ndarray:
    """Return a gradient in the colour of the row's number, with a little noise: what JPEG is made for."""
    draw = np.random.default_rng(row)
    ramp = np.linspace(0, 80, side)
    image = draw.integers(40, 140, 3) + ramp[:, None, None] * 0.5 + ramp[None, :, None] * 0.5
    return np.clip(image + draw.normal(0, 2, (side, side, 1)), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_both_formats_give_the_same_rows_and_labels_and_close_pixels(
    make_cache: Callable[..., CacheRef], num_ranks: int
) -> None:
    """Format jpeg loses what its quality says and nothing else, and takes less of the disk."""
    caches = [
        make_cache({"train": 56}, image_size=64, folder=kind, draw=photo, format=kind) for kind in ("uint8", "jpeg")
    ]
    for rank in range(num_ranks):
        raw, jpeg = (list(load(cache, seed=7, rank=rank, num_ranks=num_ranks).epoch(2)) for cache in caches)
        for ours, theirs in zip(raw, jpeg, strict=True):
            assert ours.rows_B.tolist() == theirs.rows_B.tolist()
            assert ours.labels_B.tolist() == theirs.labels_B.tolist()
            apart = (ours.inputs.int() - theirs.inputs.int()).abs().double()
            assert apart.mean() < 2.5
            assert apart.max() < 30
    assert len({cache.digest for cache in caches}) == 2
    sizes = [sum(file.stat().st_size for file in Path(cache.url).glob("*.parquet")) for cache in caches]
    assert sizes[1] < 0.4 * sizes[0]


def test_damaged_image_of_format_jpeg_is_named(make_cache: Callable[..., CacheRef]) -> None:
    """A JPEG file whose header is gone is no image of zeros."""
    cache = make_cache({"train": 6}, image_size=32, draw=photo, format="jpeg")
    file = next(Path(cache.url).glob("*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\xff\xd8\xff\xe0", b"\0\0\0\0", 1))

    with pytest.raises(CacheDamaged, match=f"{file.name} has a damaged image in row group 0"):
        list(load(cache).epoch(0))


@pytest.mark.parametrize("rows", [2_000, 8_000])
def test_memory_of_a_loader_does_not_grow_with_the_split(make_cache: Callable[..., CacheRef], rows: int) -> None:
    """With a pool of 1 MB, images of 3 kB and steps of 16, at most a pool and a few batches are ever held."""
    cache = make_cache({"train": rows}, image_size=32, rows_per_group=16, groups_per_file=50)
    loader = load(cache, batch_size=16, seed=7, pool_megabytes=1)
    window = (1 << 20) // (16 * 32 * 32 * 3) // 2
    assert loader.window == window

    assert sum(len(batch.labels_B) for batch in loader.epoch(0)) == rows
    assert loader._memory.num_kept <= 2 * window + 3
    assert loader._memory.num_kept * 16 * 32 * 32 * 3 <= 1.3 * (1 << 20)


def test_memory_of_batches_is_used_again_and_never_while_held(make_cache: Callable[..., CacheRef]) -> None:
    """Batches that are let go of lend their memory to later ones; one that is kept, or a view of it, does not."""
    cache = make_cache({"train": 400}, rows_per_group=4)
    loader = load(cache, batch_size=4, seed=7, pool_megabytes=0)
    kept = {}
    for step, batch in enumerate(loader.epoch(0)):
        if step % 10 == 0:
            kept[step] = (batch.inputs[1:3], batch.inputs[1:3].clone(), batch.inputs.data_ptr())
    places = [batch.inputs.data_ptr() for batch in loader.epoch(1)]

    assert all((view == copied).all() for view, copied, _place in kept.values())
    assert len(set(places)) < len(places) / 2
    assert not {place for _view, _copied, place in kept.values()} & set(places)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: page-locked memory is the driver's")
def test_batches_for_a_gpu_are_pinned(cache: CacheRef) -> None:
    """Their copies need not be waited for, and arrive whole."""
    for batch in load(cache, seed=7).epoch(0):
        for tensor in (batch.inputs, batch.labels_B):
            assert tensor.is_pinned()
            assert (tensor.to("cuda", non_blocking=True).cpu() == tensor).all()
