"""petastorm's reader, made to read the row groups it is told to, every one of them, in that order."""

import logging
import queue
import warnings
from typing import Any

from petastorm.cache import NullCache
from petastorm.fs_utils import get_filesystem_and_path_or_paths
from petastorm.reader import Reader
from petastorm.workers_pool import EmptyResultError
from petastorm.workers_pool.thread_pool import ThreadPool, VentilatedItemProcessedMessage
from petastorm.workers_pool.ventilator import ConcurrentVentilator

from tasks.cache.worker import PlacingWorker, Work

POLL_SECONDS = 0.05

VENTILATION_SECONDS = 0.001
"""How often it is looked whether more row groups may be handed out; petastorm's 0.01 starves two quick workers."""


class OrderedThreadPool(ThreadPool):  # type: ignore[misc]  # petastorm has no types
    """petastorm's thread pool, with results in the order of the work handed out.

    petastorm 0.13.1 asks "is all work done?" before "has all work been handed out?": when the last items are handed
    out between the two questions, the reader ends early. Measured on 63 row groups: every third epoch lost 3 to 8 of
    them. It also passes over a worker that has nothing to do yet, which makes the order depend on timing.
    Item i is worker i mod n's, and yields one result and one message; taking turns strictly is both exact and in order.
    """

    def __init__(self, workers_count: int, results_queue_size: int, work: Work) -> None:
        super().__init__(workers_count, results_queue_size)
        self._work = work
        self._turn = 0
        self._num_processed = 0

    def start(self, worker_class: Any, worker_args: tuple[Any, ...] = (), ventilator: Any = None) -> None:
        """Start the workers, each with the work as its last argument."""
        super().start(worker_class, (*worker_args, self._work), ventilator)

    def get_results(self) -> Any:
        """Return the next row group.

        Raises:
            EmptyResultError: All row groups were handed over.
        """
        while True:
            if self._ventilator.completed() and self._num_processed == self._ventilated_items:
                raise EmptyResultError
            try:
                result = self._results_queues[self._turn].get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(result, VentilatedItemProcessedMessage):
                self._num_processed += 1
                self._ventilator.processed_item()
                self._turn = (self._turn + 1) % self.workers_count
            elif isinstance(result, Exception):
                self.stop()
                self.join()
                raise result
            else:
                return result


class OrderedReader(Reader):  # type: ignore[misc]  # petastorm has no types
    """petastorm's reader over the row groups it is told to read, in that order, and without its line on stdout."""

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
            cache=NullCache(),
            is_batched_reader=True,
        )

    def _filter_row_groups(self, *_how: Any) -> tuple[list[int], None]:
        return self._groups, None

    def _create_ventilator(self, groups: list[int], *_how: Any) -> ConcurrentVentilator:
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

    def cleanup_cache(self) -> None:
        """Do nothing: row groups are not cached a second time."""


def open_reader(urls: list[str], work: Work, groups: list[int], *, workers_count: int, ahead: int) -> Any:
    """Return a petastorm reader that fills the batches of `work`, and yields the number of each row group it has read.

    Args:
        urls: The Parquet files, absolute paths or URLs, in the order that numbers their row groups.
        work: Where the images go.
        groups: The row groups to read, in this order.
        workers_count: Reading threads.
        ahead: Row groups read before they are asked for.
    """
    # petastorm touches what pyarrow calls legacy on every access; the lock keeps a pyarrow that still has it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"petastorm\.")
    logging.getLogger("petastorm").setLevel(logging.WARNING)
    if work.local:
        (filesystem, _root), paths = get_filesystem_and_path_or_paths("file:///"), urls
    else:
        filesystem, paths = get_filesystem_and_path_or_paths(urls)
    ahead = max(ahead, workers_count)
    # Two messages a row group, so that no worker ever waits for room in its queue: `ahead` is the bound.
    pool = OrderedThreadPool(workers_count, 2 * (ahead + workers_count), work)
    return OrderedReader(filesystem, paths, pool, groups, ahead)
