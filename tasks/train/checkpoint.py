"""Checkpoints of a training run, written atomically and loaded without executing code."""

import errno
import logging
import pickle
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from tasks.collectives import Reducer
from tasks.metrics.epoch import EpochMetrics
from tasks.train.buffers import VirtualBuffers
from tasks.train.checkpoint_files import PARTIAL, UNREADABLE, checkpoint_name, written_at_once
from tasks.train.early_stopping import EarlyStopping
from tasks.train.progress import Progress, RunningEpoch

logger = logging.getLogger("lakevision.train")

CONTENT = (
    *("config", "classes", "model", "optimizer", "rank_buffers", "phase", "first_epoch", "next_epoch", "running"),
    *("batch_size", "average", "stopping", "history", "seconds", "provenance", "tags"),
)
"""Keys of a checkpoint."""

FORM = [*CONTENT, *(field.name for kind in (EarlyStopping, EpochMetrics, RunningEpoch) for field in fields(kind))]
"""Names of all values in a checkpoint; a run cannot resume from a checkpoint with other names."""


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
        content = {
            "config": self._config,
            "classes": list(progress.classes),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rank_buffers": rank_buffers,
            "phase": progress.phase,
            "first_epoch": progress.first_epoch,
            "next_epoch": progress.next_epoch,
            "running": running,
            "batch_size": progress.batch_size,
            "average": progress.average,
            "stopping": asdict(progress.stopping),
            "history": [asdict(metrics) for metrics in progress.history],
            "seconds": progress.seconds,
            "provenance": progress.provenance,
            "tags": progress.tags,
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
                _save(content | {"run_id": run_id, "best": best, "form": FORM}, file)
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

    def newest(self) -> tuple[str | None, str | None]:
        """Return the name of the newest valid checkpoint and the id of its MLflow run, or None for both.

        Its content is kept in memory for the `load` that follows. A checkpoint with invalid content is renamed: its
        number may be higher than those of later checkpoints, and it would be taken for the newest one.

        Raises:
            OSError: A checkpoint could not be read. It stays in place, since the fault may be temporary.
        """
        for path in reversed(self._steps()):
            try:
                content = self.load(path.name)
                _check_form(content)
                self._read = path.name, content
                return path.name, str(content["run_id"])
            except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
                # UnpicklingError also for a file with objects other than tensors and plain values; no code is executed.
                logger.warning("cannot resume from %s (%r): the checkpoint before it is used, if any", path, error)
                path.rename(path.with_suffix(UNREADABLE))
                self._best_written = ""
        return None, None

    def load(self, name: str) -> dict[str, Any]:
        """Return a checkpoint with its `best_state`; the caller owns the tensors."""
        read, self._read = self._read, None
        if read is not None and read[0] == name:
            return read[1]
        content: dict[str, Any] = torch.load(self.folder / name, map_location="cpu", weights_only=True)
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
        for path in steps[: -self._keep]:
            path.unlink()
        for path in self.folder.glob(f"*{PARTIAL}"):
            path.unlink()
        # Compared by name: an older checkpoint that is kept resumes with the weights that were the best ones then.
        needed = {path.name.partition("+")[2] for path in steps[-self._keep :]}
        for path in self.folder.glob("best-*.pt"):
            if path.name not in needed:
                path.unlink()


def _check_form(content: dict[str, Any]) -> None:
    if content["form"] != FORM:
        raise ValueError("written by another version of this code")


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
    progress.phase = content["phase"]
    progress.first_epoch = content["first_epoch"]
    progress.next_epoch = content["next_epoch"]
    progress.batch_size = content["batch_size"]
    progress.running = RunningEpoch(**content["running"])
    if rank != 0:
        progress.running.totals = torch.zeros_like(progress.running.totals)
    progress.stopping = EarlyStopping(**content["stopping"])
    progress.history = [EpochMetrics(**metrics) for metrics in content["history"]]
    progress.best_state = content["best_state"]
    progress.average = content["average"]
    progress.seconds = content["seconds"]
    progress.provenance = dict(content["provenance"])
    progress.tags = content["tags"]


def restore(
    content: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    buffers: VirtualBuffers | None = None,
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
