"""Memory of the loader, its two formats, and damaged images."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.cache.manifest import CacheDamaged
from tasks.refs import CacheRef
from tests.builders.split_batches import load


def test_batches_do_not_share_memory(cache: CacheRef) -> None:
    """Changing a batch does not change later batches, and later batches do not overwrite it."""
    expected = [batch.inputs.clone() for batch in load(cache, seed=7).epoch(0)]

    kept = []
    for batch in load(cache, seed=7).epoch(0):
        kept.append(batch.inputs.clone())
        batch.inputs.zero_()

    assert all((found == wanted).all() for found, wanted in zip(kept, expected, strict=True))


def photo(row: int, side: int) -> np.ndarray:
    """Return a gradient with a little noise, which compresses well as JPEG, in a colour that depends on the row."""
    draw = np.random.default_rng(row)
    ramp = np.linspace(0, 80, side)
    image = draw.integers(40, 140, 3) + ramp[:, None, None] * 0.5 + ramp[None, :, None] * 0.5
    return np.clip(image + draw.normal(0, 2, (side, side, 1)), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_formats_differ_in_lossy_pixels_and_size_only(make_cache: Callable[..., CacheRef], num_ranks: int) -> None:
    """The format jpeg gives the rows and labels of uint8, similar pixels, and smaller files."""
    caches = [
        make_cache({"train": 56}, image_size=64, folder=kind, draw=photo, format=kind) for kind in ("uint8", "jpeg")
    ]
    for rank in range(num_ranks):
        raw, jpeg = (list(load(cache, seed=7, rank=rank, num_ranks=num_ranks).epoch(2)) for cache in caches)
        for exact, lossy in zip(raw, jpeg, strict=True):
            assert exact.rows_B.tolist() == lossy.rows_B.tolist()
            assert exact.labels_B.tolist() == lossy.labels_B.tolist()
            difference = (exact.inputs.int() - lossy.inputs.int()).abs().double()
            assert difference.mean() < 2.5
            assert difference.max() < 30
    assert len({cache.digest for cache in caches}) == 2
    sizes = [sum(file.stat().st_size for file in Path(cache.url).glob("*.parquet")) for cache in caches]
    assert sizes[1] < 0.4 * sizes[0]


def test_damaged_jpeg_image_is_reported_with_its_file(make_cache: Callable[..., CacheRef]) -> None:
    """A JPEG image with a damaged header raises CacheDamaged with the name of the cache file."""
    cache = make_cache({"train": 6}, image_size=32, draw=photo, format="jpeg")
    file = next(Path(cache.url).glob("*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\xff\xd8\xff\xe0", b"\0\0\0\0", 1))

    with pytest.raises(CacheDamaged, match=f"{file.name} has a damaged image in row group 0"):
        list(load(cache).epoch(0))


@pytest.mark.parametrize("rows", [2_000, 8_000])
def test_memory_of_a_loader_does_not_grow_with_the_split(make_cache: Callable[..., CacheRef], rows: int) -> None:
    """With a pool of 1 MB, images of 3 kB and batches of 16, at most the pool and a few batches are held."""
    cache = make_cache({"train": rows}, image_size=32, rows_per_group=16, groups_per_file=50)
    loader = load(cache, batch_size=16, seed=7, pool_megabytes=1)
    window = (1 << 20) // (16 * 32 * 32 * 3) // 2
    assert loader.window == window

    assert sum(len(batch.labels_B) for batch in loader.epoch(0)) == rows
    assert len(loader._memory._kept) <= 2 * window + 3
    assert len(loader._memory._kept) * 16 * 32 * 32 * 3 <= 1.3 * (1 << 20)


def test_memory_of_a_batch_is_reused_once_unreferenced(make_cache: Callable[..., CacheRef]) -> None:
    """Memory of dropped batches is reused, and never that of a batch with a reference to it or to a view of it."""
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: its driver allocates page-locked memory")
def test_batches_for_a_gpu_are_pinned(cache: CacheRef) -> None:
    """With a GPU, batches are in pinned memory, and asynchronous copies to the GPU are complete."""
    for batch in load(cache, seed=7).epoch(0):
        for tensor in (batch.inputs, batch.labels_B):
            assert tensor.is_pinned()
            assert (tensor.to("cuda", non_blocking=True).cpu() == tensor).all()
