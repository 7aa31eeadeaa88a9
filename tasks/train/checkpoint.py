"""Checkpoints of a training run, written atomically and loaded without executing code.

Hosts without a shared folder each have their own copies.
"""

import errno
import logging
import pickle
import struct
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import TypeAdapter
from torch import nn

from tasks.collectives.reducer import Reducer, broadcast_value, wait_for_all
from tasks.environment import local_rank_and_size
from tasks.errors import WrongInput, loggable
from tasks.metrics.evaluate import EpochMetrics
from tasks.system.disk import translate_disk_full
from tasks.train.buffers import VirtualBuffers
from tasks.train.checkpoint_files import PARTIAL, UNREADABLE, checkpoint_name, files_of, written_at_once
from tasks.train.progress import EarlyStopping, Progress, RunningEpoch
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.train")

PLAIN = tuple(
    field.name
    for field in fields(Progress)
    if field.name not in {"stopping", "running", "history", "best_state", "scaler", "classes"}
)
"""Values of `Progress` that a checkpoint has as they are; it has the others in a form of its own."""

CONTENT = (
    *PLAIN,
    "loss_scale",
    "config",
    "classes",
    "model",
    "optimizer",
    "rank_buffers",
    "running",
    "stopping",
    "history",
)
"""Keys of a checkpoint."""

VERSION = 1
"""Version of checkpoints, raised where a value changes its meaning. Checkpoints without a version have version 1.

A value that is added needs no other version: it has a default that means "as before", in its dataclass or in ADDED.
"""

ADDED: dict[str, Any] = {"plan": {}, "phases": [], "folds": [], "loss_scale": {}}
"""Values of CONTENT that are newer than version 1, for checkpoints that lack them."""

DAMAGE = (
    *(RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError),
    *(struct.error, pickle.UnpicklingError),
)
"""Errors of torch's unpickler on damaged files, and on those with objects other than tensors and plain values.

It executes no code. An OSError is none of them: the fault may be temporary.
"""

PARTS: dict[str, type[Any]] = {"running": RunningEpoch, "stopping": EarlyStopping, "history": EpochMetrics}
"""Dataclasses in a checkpoint, by key; `history` is a list of them."""


class Checkpoints:
    """The checkpoints of a training run, in their own folder.

    Files `step-...+best-...pt` have all state that is needed to resume except the weights of the best epoch. Those are
    in the file `best-...pt` given by the name, and so are not written again with each checkpoint.
    """

    def __init__(self, folder: Path, keep: int, config: dict[str, Any]) -> None:
        """Use a folder, which is created by the first save.

        Args:
            folder: Folder of the checkpoints.
            keep: Number of checkpoints to keep.
            config: Settings and data that a run must share with a checkpoint to resume from it.
        """
        self.folder = folder
        self._keep = keep
        self._config = config
        self._best_written = ""
        self.refused: WrongInput | None = None
        self._damaged: dict[Path, str] = {}
        self._read: tuple[str, dict[str, Any]] | None = None

    def collect(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        reducer: Reducer,
        buffers: VirtualBuffers | None = None,
    ) -> dict[str, Any]:
        """Return the content of a checkpoint; every rank calls this after the same step.

        Batch norm's running statistics and the sums of the running epoch differ between ranks until the end of the
        epoch.

        Args:
            model: The trained model.
            optimizer: Its optimizer.
            progress: Progress of the training run.
            reducer: The other ranks.
            buffers: Buffers of the virtual ranks; None: of a single process, or after an epoch.
        """
        running = asdict(progress.running) | {
            "totals": reducer.sum(progress.running.totals.cpu()),
            "gradient_norms": progress.running.gradient_norms.cpu(),
        }
        # Collected only if they differ: after an epoch all ranks have the averaged statistics.
        differ = progress.running.position > 0 and not progress.running.is_trained
        rank_buffers = (
            buffers.collect(reducer) if differ and buffers is not None and buffers.ranks.num_virtual > 1 else []
        )
        content = {name: getattr(progress, name) for name in PLAIN} | {
            "loss_scale": progress.loss_scale,
            "config": self._config,
            "classes": list(progress.classes),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rank_buffers": rank_buffers,
            "running": running,
            "stopping": asdict(progress.stopping),
            "history": [asdict(metrics) for metrics in progress.history],
        }
        assert tuple(content) == CONTENT, "CONTENT lists the keys of a checkpoint"
        return content

    def save(self, content: dict[str, Any], progress: Progress, run_id: str) -> bool:
        """Write a checkpoint to a temporary file and rename it.

        If the process is killed at any time, the previous checkpoint stays intact. A full disk does not end training:
        a warning is logged, and the previous checkpoint is kept.

        Returns:
            Whether the checkpoint was written.
        """
        best = f"best-{progress.phase:02d}-{max(0, progress.stopping.best_epoch):06d}.pt" if progress.best_state else ""
        name = f"{checkpoint_name(progress.phase, progress.next_epoch, progress.running.position)}+{best or '.pt'}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if best and best != self._best_written:
                with written_at_once(self.folder / best) as file:
                    _save(progress.best_state, file)
                self._best_written = best
            with written_at_once(self.folder / name) as file:
                _save(content | {"run_id": run_id, "best": best, "version": VERSION}, file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logger.warning(
                "no checkpoint was written, the disk of '%s' is full: training continues, "
                "the previous checkpoint is kept",
                self.folder,
            )
            return False
        self._remove_old()
        return True

    def newest(self, *, refuse: bool = True) -> tuple[str | None, dict[str, Any]]:
        """Return the name and the content of the newest valid checkpoint; without one, None and an empty content.

        The content is kept in memory for the `load` that follows. Damaged checkpoints after it are renamed: their
        numbers may be higher than those of later checkpoints, and they would be taken for the newest ones.

        Args:
            refuse: Raise an error if all checkpoints are damaged, rather than keep it as `refused`.

        Raises:
            OSError: A checkpoint could not be read. It stays in place, since the fault may be temporary.
            WrongInput: All checkpoints are damaged, or the newest one is of a newer release. They stay in place.
        """
        self._damaged = damaged = dict[Path, str]()
        for path in reversed(self._steps()):
            try:
                content = self.load(path.name)
            except WrongInput:  # Not damaged.
                raise
            except DAMAGE as error:
                damaged[path] = loggable(error) or type(error).__name__
                self._best_written = ""
                continue
            self.rename_damaged()
            self._read = path.name, content
            return self._read
        if damaged:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
            self.refused = WrongInput(
                f"no checkpoint in '{self.folder}' can be read ({reasons})",
                way_out="restore one of them, or remove the files in that folder to train from the start",
            )
            if refuse:
                raise self.refused
        return None, {}

    def rename_damaged(self) -> None:
        """Rename the damaged checkpoints that `newest` found, since the run resumes from another one."""
        for path, reason in self._damaged.items():
            logger.warning("cannot resume from %s (%s): another checkpoint is used", path, reason)
            path.rename(path.with_suffix(UNREADABLE))
        self._damaged = {}

    def load(self, name: str) -> dict[str, Any]:
        """Return a checkpoint with its `best_state`; the caller owns the tensors.

        Raises:
            WrongInput: It is of a newer release.
        """
        read, self._read = self._read, None
        if read is not None and read[0] == name:
            return read[1]
        content: dict[str, Any] = torch.load(self.folder / name, map_location="cpu", weights_only=True)
        _complete(content, self.folder / name)
        best = content["best"]
        try:
            content["best_state"] = (
                torch.load(self.folder / best, map_location="cpu", weights_only=True) if best else {}
            )
        except FileNotFoundError:
            raise ValueError(f"the weights of its best epoch, {best}, are missing") from None
        self._best_written = best
        return content

    def _steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))

    def _remove_old(self) -> None:
        steps = self._steps()
        # Compared by name: an older checkpoint that is kept resumes with the weights that were the best ones then.
        needed = {path.name.partition("+")[2] for path in steps[-self._keep :]}
        best = [path for path in self.folder.glob("best-*.pt") if path.name not in needed]
        for path in (*steps[: -self._keep], *self.folder.glob(f"*{PARTIAL}"), *best):
            path.unlink()


def _complete(content: dict[str, Any], path: Path) -> None:
    """Add the values that a checkpoint of an older release lacks.

    Raises:
        ValueError: A value is missing that every release has written.
        WrongInput: The checkpoint is of a newer release: its version or one of its names is unknown.
    """
    version = content.get("version", 1)
    names = {"": (set(content), {*CONTENT, "run_id", "best", "version", "form"})}
    for key, kind in PARTS.items():
        found = content[key] if key == "history" else [content[key]]
        names[f"{key}."] = ({name for part in found for name in part}, {field.name for field in fields(kind)})
    unknown = sorted(prefix + name for prefix, (has, knows) in names.items() for name in has - knows)
    if version > VERSION or unknown:
        reason = f"has version {version}" if version > VERSION else f"has the value {unknown[0]}, which is unknown"
        raise WrongInput(
            f"the checkpoint '{path}' {reason}",
            way_out=f"it was written by a newer release than this one, which reads version {VERSION}; train with that "
            "release, or remove the files in its folder to train from the start",
        )
    content |= {name: value for name, value in ADDED.items() if name not in content}
    if missing := sorted({*CONTENT, "run_id", "best"} - content.keys()):
        raise ValueError(f"it lacks {', '.join(missing)}")
    try:
        for key, kind in PARTS.items():
            for part in content[key] if key == "history" else [content[key]]:
                kind(**part)
    except TypeError as error:
        raise ValueError(f"it lacks a value: {error}") from None


def _save(content: dict[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch finalizes its zip file even after a failed write, and raises that error in place of the first one.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def restore_progress(content: dict[str, Any], progress: Progress, rank: int = 0) -> None:
    """Restore the progress of a checkpoint; rank 0 continues with the sums of all ranks, the others with zeros."""
    for name in PLAIN:
        setattr(progress, name, content[name])
    progress.running = RunningEpoch(**content["running"])
    if rank != 0:
        progress.running.totals = torch.zeros_like(progress.running.totals)
    progress.stopping = EarlyStopping(**content["stopping"])
    progress.history = [EpochMetrics(**metrics) for metrics in content["history"]]
    progress.best_state = content["best_state"]


def restore(
    content: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, buffers: VirtualBuffers | None = None
) -> None:
    """Restore model and optimizer of the checkpoint's phase; each rank restores the buffers of its virtual ranks."""
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    if buffers is None:
        return
    if content["rank_buffers"]:
        buffers.restore(content["rank_buffers"])
    else:
        buffers.reset()


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
