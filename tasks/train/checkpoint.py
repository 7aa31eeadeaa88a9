"""The checkpoint of a running training: whole or not there, and no code in it."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.train.early_stopping import EarlyStopping
from tasks.train.loop import EpochMetrics, Progress


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, run_id: str
) -> None:
    """Write the checkpoint aside and rename it: killed at any moment, the previous one is still whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    content = {
        "run_id": run_id,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "next_epoch": progress.next_epoch,
        "stopping": asdict(progress.stopping),
        "history": [asdict(metrics) for metrics in progress.history],
        "best_state": progress.best_state,
    }
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the checkpoint's content, or None where there is none."""
    if not path.exists():
        return None
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def restore(content: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Bring model, optimizer and progress to where the checkpoint was taken."""
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    progress.next_epoch = content["next_epoch"]
    progress.stopping = EarlyStopping(**content["stopping"])
    progress.history = [EpochMetrics(**metrics) for metrics in content["history"]]
    progress.best_state = content["best_state"]
