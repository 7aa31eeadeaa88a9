"""Checkpoints of ranks on hosts without a shared folder: each host has its own copies."""

from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch
from pydantic import TypeAdapter

from tasks.collectives.reducer import Reducer, broadcast_value, wait_for_all
from tasks.environment import local_rank_and_size
from tasks.system.disk import translate_disk_full
from tasks.train.checkpoint import Checkpoints
from tasks.train.checkpoint_files import files_of, written_at_once
from tasks.train.spec import TrainingSpec

CHUNK_BYTES = 64 << 20
"""Size of a broadcast, which every rank holds in memory."""

NAME, SIZE = TypeAdapter(str), TypeAdapter(int)


def writes_checkpoints(spec: TrainingSpec, rank: int) -> bool:
    """Return whether a rank writes checkpoints: rank 0, and without a shared folder the first rank of each host."""
    if spec.shares_home:
        return rank == 0
    local_rank, _local_size = local_rank_and_size() or (rank, 1)
    return local_rank == 0


def send_newest_checkpoint(checkpoints: Checkpoints, reducer: Reducer, *, writes: bool) -> None:
    """Give each host the newest checkpoint that any of them has; a collective operation.

    Args:
        checkpoints: The checkpoints of this rank's host.
        reducer: The ranks.
        writes: Whether this rank writes the checkpoints of its host.

    Raises:
        DiskFull: The disk of this host is full.
        WrongInput: No host has a valid checkpoint, and those of this host are damaged.
    """
    own = (checkpoints.newest(refuse=False)[0] or "") if writes else ""
    names = [broadcast_value(reducer, NAME, own, rank) for rank in range(reducer.num_ranks)]
    newest = max(names)  # Names sort by position.
    if not newest and checkpoints.refused is not None:
        raise checkpoints.refused
    if newest:
        checkpoints.rename_damaged()  # They may have higher numbers, and would be kept in place of those to come.
        for name in files_of(newest):
            _send_file(checkpoints.folder / name, reducer, names.index(newest), writes=writes and own != newest)
    wait_for_all(reducer)  # A rank loads what the first rank of its host has written.


def _send_file(path: Path, reducer: Reducer, root: int, *, writes: bool) -> None:
    """Send a file of rank `root`; the ranks that write it do so at once or not at all."""
    is_root = reducer.rank == root
    size = broadcast_value(reducer, SIZE, path.stat().st_size if is_root else None, root)
    with ExitStack() as stack:
        source = stack.enter_context(path.open("rb")) if is_root else None
        target: IO[bytes] | None = None
        if writes:
            stack.enter_context(translate_disk_full(str(path.parent)))
            path.parent.mkdir(parents=True, exist_ok=True)
            target = stack.enter_context(written_at_once(path))
        for start in range(0, size, CHUNK_BYTES):
            values = torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
            if source is not None:
                values = torch.frombuffer(bytearray(source.read(len(values))), dtype=torch.uint8)
            received = reducer.broadcast(values, root)
            if target is not None:
                target.write(received.numpy().tobytes())
