"""A training that was killed between two epochs and started again is one that was never stopped."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tasks.cache.loader import Batch
from tasks.train.checkpoint import load_checkpoint, restore, save_checkpoint
from tasks.train.early_stopping import EarlyStopping
from tasks.train.loop import EpochMetrics, Progress, fit
from tasks.train.reduce import SingleProcess

MAX_EPOCHS = 6
TIMINGS = {"images_per_second", "data_wait_share"}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the loop may catch it."""


class ShufflingLoader:
    """40 rows of noise in batches of 7, in an order drawn from the epoch's number."""

    num_steps = 6

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._inputs = torch.randn(40, 5, generator=generator)
        self._labels = torch.randint(0, 3, (40,), generator=generator)

    def num_global_rows(self, step: int) -> int:
        """Return how many rows the step has."""
        return min(7, 40 - 7 * step)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the epoch's batches."""
        order = torch.from_numpy(np.random.default_rng(number).permutation(40))
        for chosen in order.split(7):
            yield Batch(self._inputs[chosen], self._labels[chosen], chosen.numpy())


class Training:
    """Everything that a process holds while it trains, made as new as in a process that was just started."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        parameters = self.model.parameters()
        self.optimizer = (
            torch.optim.Adam(parameters) if optimizer == "adam" else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        )
        self.progress = Progress(EarlyStopping(patience=4, min_delta=0.0, higher_is_better=False))

    def run(self, checkpoint: Path, kill_after: int | None = None) -> None:
        """Train to the end, or until killed after the checkpoint of an epoch; go on where the checkpoint is."""
        content = load_checkpoint(checkpoint)
        if content is not None:
            restore(content, self.model, self.optimizer, self.progress)

        def on_epoch(metrics: EpochMetrics, progress: Progress) -> None:
            save_checkpoint(checkpoint, self.model, self.optimizer, progress, "run")
            if metrics.epoch == kill_after:
                raise Killed

        fit(
            self.model,
            ShufflingLoader(),
            ShufflingLoader(),
            self.optimizer,
            lambda step: 0.001 * (1 + step),
            self.progress,
            max_epochs=MAX_EPOCHS,
            monitor="val_loss",
            num_classes=3,
            seed=1,
            device=torch.device("cpu"),
            reducer=SingleProcess(),
            on_epoch=on_epoch,
        )

    def losses(self) -> list[dict[str, float]]:
        """Return the history without what a clock measured."""
        return [
            {name: value for name, value in asdict(metrics).items() if name not in TIMINGS}
            for metrics in self.progress.history
        ]


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Say whether two state dicts are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def adam_state(training: Training) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors by parameter and name."""
    return {
        f"{parameter}.{name}": value
        for parameter, state in training.optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("kill_after", [0, 2, MAX_EPOCHS - 1])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_killed_and_resumed_is_never_stopped(tmp_path: Path, optimizer: str, kill_after: int) -> None:
    """Weights, batch norm statistics, optimizer and metrics are equal bit for bit, dropout and shuffling included."""
    unbroken = Training(optimizer)
    unbroken.run(tmp_path / "unbroken.pt")
    with pytest.raises(Killed):
        Training(optimizer).run(tmp_path / "last.pt", kill_after)

    resumed = Training(optimizer)
    resumed.run(tmp_path / "last.pt")

    assert same_tensors(resumed.model.state_dict(), unbroken.model.state_dict())
    assert same_tensors(resumed.progress.best_state, unbroken.progress.best_state)
    assert same_tensors(adam_state(resumed), adam_state(unbroken))
    assert resumed.losses() == unbroken.losses()
    assert resumed.progress.stopping == unbroken.progress.stopping


def test_killed_again_and_again_still_ends_the_same(tmp_path: Path) -> None:
    """One epoch a process gives what one process gives."""
    unbroken = Training("adam")
    unbroken.run(tmp_path / "unbroken.pt")
    for epoch in range(len(unbroken.progress.history)):
        with pytest.raises(Killed):
            Training("adam").run(tmp_path / "last.pt", epoch)

    last = Training("adam")
    last.run(tmp_path / "last.pt")

    assert same_tensors(last.model.state_dict(), unbroken.model.state_dict())
    assert last.losses() == unbroken.losses()


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    """A training that begins has nothing to go on from."""
    assert load_checkpoint(tmp_path / "last.pt") is None


def test_checkpoint_says_where_the_training_stood(tmp_path: Path) -> None:
    """Run, next epoch and early stopping come back as they were."""
    with pytest.raises(Killed):
        Training("adam").run(tmp_path / "folder" / "last.pt", kill_after=1)

    content = load_checkpoint(tmp_path / "folder" / "last.pt")

    assert content is not None
    assert content["run_id"] == "run"
    assert content["next_epoch"] == 2
    assert len(content["history"]) == 2
    assert EarlyStopping(**content["stopping"]).patience == 4


def test_half_written_checkpoint_leaves_the_previous_one_whole(tmp_path: Path) -> None:
    """What a process killed within the write leaves behind is never read, and is overwritten by the next."""
    with pytest.raises(Killed):
        Training("adam").run(tmp_path / "last.pt", kill_after=1)
    (tmp_path / "last.partial").write_bytes(b"half")

    content = load_checkpoint(tmp_path / "last.pt")
    resumed = Training("adam")
    resumed.run(tmp_path / "last.pt")

    assert content is not None
    assert content["next_epoch"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_checkpoint_with_code_in_it_is_not_loaded(tmp_path: Path) -> None:
    """A file from outside runs nothing: only tensors and plain values are read."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"run_id": Payload()}, tmp_path / "last.pt")

    with pytest.raises(Exception, match=r"[Ww]eights"):
        load_checkpoint(tmp_path / "last.pt")
    assert not (tmp_path / "executed").exists()
