"""One compute thread, and a tiny cache, written with the code that Spark tasks run, but without Spark."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tasks.cache.manifest import FORMAT, CacheFile, CacheManifest, CacheSplit, write_manifest
from tasks.cache.write import CacheFileWriter
from tasks.config import CacheConfig
from tasks.refs import CacheRef, TableRef

CLASSES = ("ant", "bee", "cat")

Pixels = npt.NDArray[np.uint8]


def noise(row: int, side: int) -> Pixels:
    """Return pixels drawn from the row's number."""
    return np.random.default_rng(row).integers(0, 256, (side, side, 3), dtype=np.uint8)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Networks this small are slower on many threads than on one."""
    torch.set_num_threads(1)


@pytest.fixture
def make_cache(tmp_path: Path) -> Callable[..., CacheRef]:
    """Return a function that writes a cache of noise: row i has label i mod 3 and pixels drawn from seed i."""

    def make(
        rows: Mapping[str, int],
        *,
        rows_per_group: int = 3,
        groups_per_file: int = 2,
        image_size: int = 16,
        folder: str = "cache",
        draw: Callable[[int, int], Pixels] = noise,
        **settings: object,
    ) -> CacheRef:
        config = CacheConfig.model_validate({"image_size": image_size} | settings)
        root = tmp_path / folder
        root.mkdir()
        rows_per_file = rows_per_group * groups_per_file
        splits = {}
        for split, num_rows in rows.items():
            files = []
            for number in range(-(-num_rows // rows_per_file)):
                writer = CacheFileWriter(str(root), split, number, config, rows_per_group)
                for row in range(number * rows_per_file, min(num_rows, (number + 1) * rows_per_file)):
                    writer.add(draw(row, image_size), row % len(CLASSES), row)
                part = writer.close()
                files.append(CacheFile(**{name: part[name] for name in CacheFile.model_fields}))
            splits[split] = CacheSplit(rows=num_rows, rows_per_group=rows_per_group, files=tuple(files))
        manifest = CacheManifest(
            format=FORMAT,
            table=TableRef(path="/tables/images", version=3),
            content_digest="content",
            settings=config,
            classes=CLASSES,
            splits=splits,
        )
        return write_manifest(str(root), manifest)

    return make
