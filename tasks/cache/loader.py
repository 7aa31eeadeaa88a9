"""The loader of a cache: petastorm reads row groups directly into the batches of a predetermined order.

A small split may be held in memory. Single images and the images per class are read without reading an epoch.
"""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tasks.cache.assemble import Assembly, BatchMemory
from tasks.cache.manifest import CacheManifest
from tasks.cache.order import Share, VirtualRanks, count_images, count_turns, epoch_order, share_of
from tasks.cache.reader import open_reader
from tasks.cache.sweep import CacheReadLock
from tasks.cache.worker import Work
from tasks.cache.write import PADDING
from tasks.errors import WrongInput
from tasks.object_store import file_system
from tasks.paths import local_path
from tasks.progress.activity import progressed

MAX_SAMPLED_ROWS, SAMPLED_BATCH = 4096, 64
"""Rows that are read for a few images of each class, and the rows of one batch of them."""


class Batch(NamedTuple):
    """Images of one batch of one rank, without padding: B may be less than the batch size, or 0."""

    inputs: torch.Tensor
    """Images: uint8, shape (B, H, W, 3). Features of a frozen backbone: float32, shape (B, F)."""
    labels_B: torch.Tensor
    """Class indices, int64, shape (B,)."""
    rows_B: npt.NDArray[np.int64]
    """Row numbers in the split, int64, shape (B,)."""


def _file_url(url: str, name: str) -> str:
    path = local_path(url)
    # A local folder stays a path: a URL would escape spaces and umlauts, and petastorm does not unescape them.
    return f"{url.rstrip('/')}/{name}" if path is None else str(path.absolute() / name)


class CacheLoader:
    """Batches of one split for one rank: the same number of steps on every rank, no image dropped or repeated.

    The order of an epoch is the same on any number of ranks. A position counts images over all ranks: a resumed run
    may have another number of ranks or another batch size, and still sees every image exactly once (see `epoch`). With
    the same number of virtual ranks and the same batch size, it also sees the same batches.

    A step is one batch of this rank. With fewer ranks than virtual ranks, several steps make one turn.
    """

    def __init__(
        self,
        url: str,
        manifest: CacheManifest,
        split: str,
        batch_size: int,
        *,
        seed: int | None = None,
        ranks: VirtualRanks = VirtualRanks(),
        pool_megabytes: int = 256,
        workers_count: int = 2,
        pin_memory: bool = False,
        balanced_N: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Take the read lock of the cache, so that no sweep removes it; no file is opened yet.

        Args:
            url: Folder or URL of the cache.
            manifest: Its manifest, as returned by `open_cache`.
            split: train, val or test.
            batch_size: Images per batch.
            seed: Seed of the shuffling, which differs per epoch; None keeps the order of the rows.
            ranks: The virtual ranks of this rank.
            pool_megabytes: Memory of the batches that are being filled, independent of the size of the split. Half of
                it is the window within which images are shuffled: another value gives another order.
            workers_count: Number of petastorm's reader threads, which also decode.
            pin_memory: Allocate batches in page-locked memory, for asynchronous copies to a GPU.
            balanced_N: Labels of all rows of the split, for shuffled epochs with as many images of each class; None:
                each image once.
        """
        self._read_lock = CacheReadLock(url)
        self._source = (url, manifest, split)
        self._split = manifest.splits[split]
        self._urls = [_file_url(url, file.name) for file in self._split.files]
        jpeg = manifest.settings.format == "jpeg" and manifest.features is None
        row_bytes, local = manifest.row_bytes, local_path(url) is not None
        self._work_on = partial(Work, image_size=manifest.image_size, row_bytes=row_bytes, jpeg=jpeg, local=local)
        self._shape: tuple[int, ...] = (manifest.image_size, manifest.image_size, 3)
        self._dtype = torch.uint8
        if manifest.features is not None:
            self._shape, self._dtype = (manifest.features.num_features,), torch.float32
        self.batch_size = batch_size
        self._seed, self._balanced_N = seed, balanced_N
        self.ranks = ranks
        self._workers_count = workers_count
        # One window is consumed while the next one is read.
        self.window = max(1, (pool_megabytes << 20) // (self._split.rows_per_group * row_bytes) // 2)
        # Unshuffled, a batch needs adjacent row groups only: read ahead just enough to keep the workers busy.
        self._ahead = max(2 * workers_count, 0 if seed is None else self.window)
        max_batches = 2 * self._ahead * self._split.rows_per_group // batch_size + 3
        self._memory = BatchMemory((batch_size, row_bytes), max_batches, pin=pin_memory)

    @property
    def num_rows(self) -> int:
        """Number of images of the split, over all ranks."""
        return self._split.rows

    @property
    def num_steps(self) -> int:
        """Number of steps per epoch, the same on every rank."""
        return self.steps_from(0)

    def steps_from(self, start: int) -> int:
        """Return the number of steps that remain of an epoch from position `start`."""
        num_turns = count_turns(self._split.rows - start, self.batch_size, self.ranks.num_virtual)
        return num_turns * self.ranks.num_turns

    def position(self, step: int, start: int = 0) -> int:
        """Return the position before the turn of step `step`, in images over all ranks.

        Args:
            step: Number of the step.
            start: Position at which the epoch begins.
        """
        images_per_turn = self.batch_size * self.ranks.num_virtual
        return min(self._split.rows, start + step // self.ranks.num_turns * images_per_turn)

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return the number of images of all ranks in step `step` of an epoch that begins at `start`."""
        ranks, position = self.ranks, self.position(step, start)
        if ranks.num_turns == 1:  # Without a look at each rank, in each step.
            return self.position(step + 1, start) - position
        in_turn = (ranks.at(step % ranks.num_turns, rank) for rank in range(ranks.num_ranks))
        count = partial(count_images, self._split.rows - position, self.batch_size, ranks.num_virtual)
        return sum(count(virtual) for virtual in in_turn if virtual is not None)

    def share(self, number: int, start: int = 0) -> Share:
        """Return the rows that this rank reads of an epoch from position `start`.

        Raises:
            WrongInput: `start` is outside the epoch.
        """
        split = self._split
        if not 0 <= start <= split.rows:
            raise WrongInput(
                f"start is {start}, which is outside an epoch of {split.rows} images", way_out=f"give 0 to {split.rows}"
            )
        order = epoch_order(split.rows, split.rows_per_group, self.window, self._seed, number, self._balanced_N)
        return share_of(order, self.batch_size, self.ranks, start)

    def epoch(self, number: int, start: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of one epoch, exactly `steps_from(start)` of them.

        Args:
            number: Number of the epoch, which determines its order together with the seed.
            start: Position in the epoch to begin at. The images before and after it are together the whole epoch, each
                once, with any number of ranks and any batch size on either side.

        Raises:
            WrongInput: `start` is outside the epoch.
            CacheDamaged: The rows that were read are not those that were written.
        """
        share = self.share(number, start)
        assembly = Assembly(share, self._split.rows_per_group, self._memory)
        with ExitStack() as stack:
            reader: Iterator[int] = iter(())
            if len(share.groups):
                work, groups = self._work_on(assembly), share.groups.tolist()
                # A new reader per epoch: the order of a petastorm reader is fixed.
                opened = open_reader(self._urls, work, groups, workers_count=self._workers_count, ahead=self._ahead)
                reader = stack.enter_context(opened)
            num_read = 0
            for step in range(share.num_batches):
                for _group in islice(reader, max(0, int(share.whole_after[step]) - num_read)):
                    num_read += 1
                    progressed()
                assert num_read >= share.whole_after[step], f"step {step} lacks row groups after {num_read}"
                content, labels, rows = assembly.take(step)
                yield Batch(content.view(self._dtype).view(-1, *self._shape), labels, rows)
                del content  # Its memory is reused once the caller has dropped the batch as well.


IN_MEMORY_BYTES = 1 << 30
"""Size up to which a split is held in memory."""


class InMemoryLoader(CacheLoader):
    """A loader that reads its split once, in its first epoch; order, shards and positions are those of CacheLoader."""

    _held: tuple[torch.Tensor, torch.Tensor] | None = None

    def epoch(self, number: int, start: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of one epoch, as `CacheLoader.epoch` does."""
        share = self.share(number, start)
        if self._held is None:
            self._held = self._read()
        inputs, labels = self._held
        for batch in range(share.num_batches):
            rows = share.rows[share.images_of(batch)]
            chosen = torch.from_numpy(rows)
            yield Batch(inputs[chosen], labels[chosen], rows)

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contents and labels of all rows, of every rank."""
        inputs = torch.empty((self.num_rows, *self._shape), dtype=self._dtype)
        labels = torch.empty(self.num_rows, dtype=torch.int64)
        for batch in CacheLoader(*self._source, 256).epoch(0):  # in the order of the rows
            rows = torch.from_numpy(batch.rows_B)
            inputs[rows], labels[rows] = batch.inputs, batch.labels_B
        return inputs, labels


def read_images(url: str, manifest: CacheManifest, split: str, rows: Sequence[int]) -> torch.Tensor:
    """Return the images of a few rows of a split, uint8 (len(rows), H, W, 3), in the order of `rows`.

    Raises:
        CacheDamaged: The rows that were read are not those that were written.
    """
    size = manifest.image_size
    images = torch.empty((len(rows), size, size, 3), dtype=torch.uint8)
    for place, row in enumerate(rows):
        # With as many ranks as images remain from a position, the first rank reads exactly the image at it.
        left = manifest.splits[split].rows - row
        loader = CacheLoader(url, manifest, split, 1, ranks=VirtualRanks.of(0, left), workers_count=1)
        for batch in loader.epoch(0, row):
            images[place] = batch.inputs[0]
    return images


def sample_classes(url: str, manifest: CacheManifest, split: str, per_class: int) -> list[list[torch.Tensor]]:
    """Return up to `per_class` images of each class, uint8 (H, W, 3), among the first rows of a split.

    At most MAX_SAMPLED_ROWS are read: a class that none of them has is without an image.

    Raises:
        CacheDamaged: The rows that were read are not those that were written.
    """
    found: list[list[torch.Tensor]] = [[] for _ in manifest.classes]
    loader = CacheLoader(url, manifest, split, SAMPLED_BATCH, workers_count=1)
    for batch in islice(loader.epoch(0), MAX_SAMPLED_ROWS // SAMPLED_BATCH):
        for image, label in zip(batch.inputs, batch.labels_B.tolist(), strict=True):
            if len(found[label]) < per_class:
                found[label].append(image.clone())  # the loader fills the memory of a batch again
        if all(len(images) == per_class for images in found):
            break
    return found


def read_labels(url: str, manifest: CacheManifest, split: str) -> npt.NDArray[np.int64]:
    """Return the class of each row of a split, int64 (rows,)."""
    filesystem, root = file_system(url)

    def read(name: str) -> pa.Table:
        with filesystem.open(f"{root}/{name}", "rb") as handle:
            return pq.read_table(handle, columns=["label", "row"])

    found = np.empty(manifest.splits[split].rows, dtype=np.int64)
    with ThreadPoolExecutor(8) as pool:
        for table in pool.map(read, [file.name for file in manifest.splits[split].files]):
            labels, rows = table["label"].to_numpy(), table["row"].to_numpy()
            found[rows[labels != PADDING]] = labels[labels != PADDING]
    return found
