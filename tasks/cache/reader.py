"""A petastorm reader that reads exactly the given row groups, in the given order."""

import logging
import queue
from typing import Any

from petastorm.fs_utils import get_filesystem_and_path_or_paths
from petastorm.reader import Reader
from petastorm.workers_pool import EmptyResultError
from petastorm.workers_pool.thread_pool import ThreadPool, VentilatedItemProcessedMessage
from petastorm.workers_pool.ventilator import ConcurrentVentilator

from tasks.cache.worker import PlacingWorker, Work
from tasks.object_store import file_system

POLL_SECONDS = 0.05

VENTILATION_SECONDS = 0.001
"""Interval at which the ventilator checks for free slots; petastorm's default of 0.01 starves two fast workers."""


class OrderedThreadPool(ThreadPool):  # type: ignore[misc]  # petastorm has no types
    """petastorm's thread pool, with results in the order in which the work was ventilated.

    petastorm 0.13.1 checks "is all work done?" before "has all work been ventilated?": when the last items are
    ventilated between the two checks, the reader ends early. Measured on 63 row groups: every third epoch lost 3 to 8
    of them. It also skips a worker that has no result yet, which makes the order depend on timing.
    Item i belongs to worker i mod n and yields one result and one message; a strict round robin is exact and ordered.
    """

    def __init__(self, workers_count: int, results_queue_size: int, work: Work) -> None:
        super().__init__(workers_count, results_queue_size)
        self._work = work
        self._next_worker = 0
        self._num_processed = 0

    def start(self, worker_class: Any, worker_args: tuple[Any, ...] = (), ventilator: Any = None) -> None:
        """Start the workers, each with the work as its last argument."""
        super().start(worker_class, (*worker_args, self._work), ventilator)

    def get_results(self) -> Any:
        """Return the next row group.

        Raises:
            EmptyResultError: All row groups have been returned.
        """
        while True:
            if self._ventilator.completed() and self._num_processed == self._ventilated_items:
                raise EmptyResultError
            try:
                result = self._results_queues[self._next_worker].get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(result, VentilatedItemProcessedMessage):
                self._num_processed += 1
                self._ventilator.processed_item()
                self._next_worker = (self._next_worker + 1) % self.workers_count
            elif isinstance(result, Exception):
                self.stop()
                self.join()
                raise result
            else:
                return result


class OrderedReader(Reader):  # type: ignore[misc]  # petastorm has no types
    """petastorm's reader over the given row groups in the given order, without its line on stdout.

    It yields the number of each row group read; the pixels are already in their batches.
    """

    def __init__(
        self, filesystem: Any, paths: list[str], pool: OrderedThreadPool, groups: list[int], ahead: int
    ) -> None:
        self._groups = groups
        self._ahead = ahead
        super().__init__(
            filesystem,
            paths,
            worker_class=PlacingWorker,
            reader_pool=pool,
            shuffle_row_groups=False,
            num_epochs=1,
            is_batched_reader=True,
        )

    def _filter_row_groups(self, *_args: Any) -> tuple[list[int], None]:
        return self._groups, None

    def _create_ventilator(self, groups: list[int], *_args: Any) -> ConcurrentVentilator:
        items = [
            {"piece_index": group, "worker_predicate": None, "shuffle_row_drop_partition": (0, 1)} for group in groups
        ]
        return ConcurrentVentilator(
            self._workers_pool.ventilate,
            items,
            iterations=1,
            max_ventilation_queue_size=self._ahead,
            ventilation_interval=VENTILATION_SECONDS,
        )

    def __next__(self) -> int:
        try:
            number: int = self._workers_pool.get_results()
        except EmptyResultError:
            raise StopIteration from None
        return number

    def cleanup_cache(self) -> None:
        """Do nothing: this reader caches no row groups."""


class _StoreFiles:
    """The file system of a store as petastorm's `ParquetDataset` takes it, for the files that a manifest names."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def isfile(self, path: str) -> bool:
        """Return whether a path is a file, as all of a manifest are: no request is sent."""
        return True

    def isdir(self, path: str) -> bool:
        """Return whether a path is a folder."""
        return False

    def open(self, path: str, mode: str = "rb") -> Any:
        """Open a file, without reading ahead: a whole column of a row group is requested at once."""
        return self._filesystem.open(path, mode, cache_type="none")


def open_reader(urls: list[str], work: Work, groups: list[int], *, workers_count: int, ahead: int) -> Any:
    """Return a petastorm reader that fills the batches of `work` and yields the number of each row group it has read.

    Args:
        urls: The Parquet files, absolute paths or URLs, in the order in which their row groups are numbered.
        work: The batches to fill.
        groups: The row groups to read, in this order.
        workers_count: Number of reader threads.
        ahead: Number of row groups to read ahead.
    """
    logging.getLogger("petastorm").setLevel(logging.WARNING)
    if work.local:
        (filesystem, _root), paths = get_filesystem_and_path_or_paths("file:///"), urls
    else:
        filesystem, paths = _StoreFiles(file_system(urls[0])[0]), [file_system(url)[1] for url in urls]
    ahead = max(ahead, workers_count)
    # Two messages per row group: no worker ever waits for room in its queue, and `ahead` is the only bound.
    pool = OrderedThreadPool(workers_count, 2 * (ahead + workers_count), work)
    return OrderedReader(filesystem, paths, pool, groups, ahead)
