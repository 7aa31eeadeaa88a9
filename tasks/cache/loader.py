"""From a cache to batches: petastorm reads row groups straight into the batches of an order that is known before."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tasks.cache.assemble import Assembly, BatchMemory
from tasks.cache.manifest import CacheManifest
from tasks.cache.order import Share, count_steps, epoch_order, share_of
from tasks.cache.read_lock import CacheReadLock
from tasks.cache.reader import open_reader
from tasks.cache.worker import Work
from tasks.errors import WrongInput
from tasks.paths import local_path


class Batch(NamedTuple):
    """Images of one step on one rank; padding is already left out, so that B may be less than asked for, or 0."""

    inputs: torch.Tensor
    """Images: uint8, shape (B, H, W, 3). Features of a frozen backbone: float32, shape (B, F)."""
    labels_B: torch.Tensor
    """int64 class indices, shape (B,)."""
    rows_B: npt.NDArray[np.int64]
    """Numbers of the rows in the split, shape (B,)."""


def _file_url(url: str, name: str) -> str:
    path = local_path(url)
    # A folder stays a path: in a URL its spaces and umlauts would be escaped, and petastorm does not unescape.
    return f"{url.rstrip('/')}/{name}" if path is None else str(path.absolute() / name)


class CacheLoader:
    """Batches of one split for one rank: the same number of steps on every rank, nothing dropped or doubled.

    The order of an epoch is the same on any number of ranks. A position counts its images over all ranks, so that
    a training may go on from one with another number of ranks or another batch size, and still sees every image
    exactly once: see `epoch`.
    """

    def __init__(
        self,
        url: str,
        manifest: CacheManifest,
        split: str,
        batch_size: int,
        *,
        seed: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        pool_megabytes: int = 256,
        workers_count: int = 2,
        pin_memory: bool | None = None,
    ) -> None:
        """Prepare to read: no file is opened yet, but the cache is held, so that no sweep removes it.

        Args:
            url: Folder or URL of the cache.
            manifest: What `open_cache` returned for it.
            split: train, val or test.
            batch_size: Images a step on this rank.
            seed: Shuffle, differently in each epoch, identically for the same seed; None keeps the order.
            rank: This rank.
            num_ranks: Number of ranks.
            pool_megabytes: Memory of the batches that are being filled, whatever the size of the split; half of it is
                the window within which images are mixed. Another value is another order.
            workers_count: petastorm's reading threads, which decode as well.
            pin_memory: Batches in page-locked memory, from which a copy to a GPU need not be waited for; None where
                there is a GPU.
        """
        self._use = CacheReadLock(url)
        self._given = (url, manifest, split)
        self._split = manifest.splits[split]
        self._urls = [_file_url(url, file.name) for file in self._split.files]
        self._local = local_path(url) is not None
        self._jpeg = manifest.settings.format == "jpeg" and manifest.features is None
        self._row_bytes = manifest.row_bytes
        self._shape: tuple[int, ...] = (manifest.image_size, manifest.image_size, 3)
        self._kind = torch.uint8
        if manifest.features is not None:
            self._shape, self._kind = (manifest.features.num_features,), torch.float32
        self.image_size = manifest.image_size
        self.batch_size = batch_size
        self._seed = seed
        self.rank = rank
        self._num_ranks = num_ranks
        self._workers_count = workers_count
        # One window is handed out while the next one is read.
        self.window = max(1, (pool_megabytes << 20) // (self._split.rows_per_group * self._row_bytes) // 2)
        # In the cache's own order a batch needs its neighbours only: enough is read ahead to keep the workers busy.
        self._ahead = max(2 * workers_count, 0 if seed is None else self.window)
        most = 2 * self._ahead * self._split.rows_per_group // batch_size + 3
        self._memory = BatchMemory(
            (batch_size, self._row_bytes), most, pin=torch.cuda.is_available() if pin_memory is None else pin_memory
        )

    def in_order(self) -> "CacheLoader":
        """Return a loader of the whole split in the order of its rows."""
        return CacheLoader(*self._given, 256, pin_memory=False)

    @property
    def num_rows(self) -> int:
        """Images of the split, over all ranks."""
        return self._split.rows

    @property
    def num_steps(self) -> int:
        """Steps an epoch, the same on every rank."""
        return self.steps_from(0)

    def steps_from(self, start: int) -> int:
        """Return how many steps are left of an epoch from position `start` on."""
        return count_steps(self._split.rows - start, self.batch_size, self._num_ranks)

    def position(self, step: int, start: int = 0) -> int:
        """Return the position in the epoch before step `step` of those from `start` on: images of all ranks."""
        return min(self._split.rows, start + step * self.batch_size * self._num_ranks)

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return how many images all ranks together have in step `step` of an epoch, or of what is left of it."""
        return self.position(step + 1, start) - self.position(step, start)

    def share(self, number: int, start: int = 0) -> Share:
        """Return what this rank reads of an epoch from position `start` on.

        Raises:
            WrongInput: `start` is outside the epoch.
        """
        split = self._split
        if not 0 <= start <= split.rows:
            raise WrongInput(
                f"start is {start}, an epoch of {split.rows} images has no such position: give 0 to its size"
            )
        order = epoch_order(split.rows, split.rows_per_group, self.window, self._seed, number)
        return share_of(order, self.batch_size, self.rank, self._num_ranks, start)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, exactly `steps_from(start)` of them.

        Args:
            number: Number of the epoch, which with the seed draws its order.
            start: Position in the epoch to begin at. The images before it and those that come are the whole epoch,
                each once, with any number of ranks and any batch size, before and after.

        Raises:
            WrongInput: `start` is outside the epoch.
            CacheDamaged: What is read is not what was written.
        """
        share = self.share(number, start)
        assembly = Assembly(share, self._split.rows_per_group, self._memory)
        with ExitStack() as stack:
            reader: Iterator[int] = iter(())
            if len(share.groups):
                work = Work(assembly, self.image_size, self._row_bytes, jpeg=self._jpeg, local=self._local)
                # A new reader each epoch: petastorm's order cannot be changed later.
                reader = stack.enter_context(
                    open_reader(
                        self._urls, work, share.groups.tolist(), workers_count=self._workers_count, ahead=self._ahead
                    )
                )
            num_read = 0
            for step in range(share.num_steps):
                for _group in islice(reader, max(0, int(share.whole_after[step]) - num_read)):
                    num_read += 1
                assert num_read >= share.whole_after[step], f"step {step} lacks row groups after {num_read}"
                content, labels, rows = assembly.take(step)
                yield Batch(content.view(self._kind).view(-1, *self._shape), labels, rows)
                del content  # The memory goes to a later batch once the caller has let go of it too.
