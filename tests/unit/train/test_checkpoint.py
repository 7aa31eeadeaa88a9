"""A training that was killed after any step and started again is one that was never stopped."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tasks.cache.loader import Batch
from tasks.errors import WrongInput
from tasks.signals import interrupt_on
from tasks.train.checkpoint import Checkpoints, check_fits, restore, restore_progress
from tasks.train.early_stopping import EarlyStopping
from tasks.train.loop import fit
from tasks.train.pause import Pauses
from tasks.train.progress import EpochMetrics, Progress
from tasks.train.reduce import SingleProcess
from tasks.train.step import StepSettings

MAX_EPOCHS = 5
NUM_STEPS = 6
TIMINGS = {"images_per_second", "data_wait_share", "train_seconds", "validation_seconds"}
LAST = (MAX_EPOCHS - 1, NUM_STEPS - 1)
CONFIG = {"train": {"seed": 1, "model": "resnet18"}, "cache": "digest"}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the loop may catch it."""


class ShufflingLoader:
    """40 rows of noise in batches of 7, in an order drawn from the epoch's number."""

    num_steps = NUM_STEPS

    def __init__(self, after_batch: Callable[[int, int], None] = lambda epoch, step: None) -> None:
        generator = torch.Generator().manual_seed(3)
        self._inputs = torch.randn(40, 5, generator=generator)
        self._labels = torch.randint(0, 3, (40,), generator=generator)
        self._after_batch = after_batch

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return how many rows the step has."""
        return min(7, 40 - start - 7 * step)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the epoch's batches from a position on."""
        order = torch.from_numpy(np.random.default_rng(number).permutation(40))[start:]
        for step, chosen in enumerate(order.split(7) if len(order) else []):
            yield Batch(self._inputs[chosen], self._labels[chosen], chosen.numpy())
            self._after_batch(number, start // 7 + step)


class Training:
    """Everything that a process holds while it trains, made as new as in a process that was just started."""

    def __init__(self, folder: Path, optimizer: str = "adam", **options: float) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        parameters = self.model.parameters()
        self.optimizer = (
            torch.optim.Adam(parameters) if optimizer == "adam" else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        )
        self.progress = Progress(EarlyStopping(patience=4, min_delta=0.0, higher_is_better=False))
        self.checkpoints = Checkpoints(folder, keep=2, config=CONFIG)
        self._checkpoint_seconds = options.get("checkpoint_seconds", 0.0)
        self._budget = options.get("budget", float("inf"))

    def run(
        self,
        after_batch: Callable[[int, int], None] = lambda epoch, step: None,
        after_validated_batch: Callable[[int, int], None] = lambda epoch, step: None,
    ) -> None:
        """Train to the end, with a checkpoint after every step; go on where the newest one is."""
        progress = self.progress
        name, _run = self.checkpoints.newest()
        if name is not None:
            content = self.checkpoints.load(name)
            restore_progress(content, progress)
            restore(content, self.model, self.optimizer, SingleProcess())

        def save() -> None:
            collected = self.checkpoints.collect(self.model, self.optimizer, progress, SingleProcess())
            assert self.checkpoints.save(collected, progress, "run")

        def on_epoch(_metrics: EpochMetrics, _progress: Progress) -> None:
            save()

        fit(
            self.model,
            ShufflingLoader(after_batch),
            ShufflingLoader(after_validated_batch),
            self.optimizer,
            lambda step: 0.001 * (1 + step),
            progress,
            max_epochs=MAX_EPOCHS,
            monitor="val_loss",
            num_classes=3,
            device=torch.device("cpu"),
            reducer=SingleProcess(),
            on_epoch=on_epoch,
            settings=StepSettings(seed=1),
            pauses=Pauses(
                SingleProcess(),
                save,
                checkpoint_seconds=self._checkpoint_seconds,
                # A clock that counts steps.
                seconds_left=lambda: self._budget - len(progress.history) * NUM_STEPS - progress.running.steps,
            ),
        )

    def losses(self) -> list[dict[str, float]]:
        """Return the history without what a clock measured."""
        return [
            {name: value for name, value in asdict(metrics).items() if name not in TIMINGS}
            for metrics in self.progress.history
        ]


def kill_at(epoch: int, step: int) -> Callable[[int, int], None]:
    """Return what ends a training when the batch after this step is asked for."""

    def kill(now: int, its_step: int) -> None:
        if (now, its_step) == (epoch, step):
            raise Killed

    return kill


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Say whether two state dicts are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def optimizer_state(training: Training) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors by parameter and name."""
    return {
        f"{parameter}.{name}": value
        for parameter, state in training.optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def assert_same(resumed: Training, unbroken: Training) -> None:
    """Assert that two trainings ended alike, bit for bit."""
    assert same_tensors(resumed.model.state_dict(), unbroken.model.state_dict())
    assert same_tensors(resumed.progress.best_state, unbroken.progress.best_state)
    assert same_tensors(optimizer_state(resumed), optimizer_state(unbroken))
    assert resumed.losses() == unbroken.losses()
    assert resumed.progress.stopping == unbroken.progress.stopping


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (0, 3), (1, 5), (2, 1), LAST])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_killed_after_a_step_and_resumed_is_never_stopped(
    tmp_path: Path, optimizer: str, epoch: int, step: int
) -> None:
    """Weights, batch norm statistics, optimizer and metrics are equal bit for bit, dropout and shuffling included."""
    unbroken = Training(tmp_path / "unbroken", optimizer)
    unbroken.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed", optimizer).run(kill_at(epoch, step))

    resumed = Training(tmp_path / "killed", optimizer)
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))

    assert_same(resumed, unbroken)
    # It went on with the batch after the last step that a checkpoint covers.
    assert seen[:1] == ([divmod(epoch * NUM_STEPS + step + 1, NUM_STEPS)] if (epoch, step) != LAST else [])


def test_a_checkpoint_between_epochs_alone_repeats_the_epoch_and_ends_the_same(tmp_path: Path) -> None:
    """What was trained after the last checkpoint is trained again, and counts once."""
    unbroken = Training(tmp_path / "unbroken")
    unbroken.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed", checkpoint_seconds=1e9).run(kill_at(2, 4))

    resumed = Training(tmp_path / "killed", checkpoint_seconds=1e9)
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))

    assert seen[0] == (2, 0)
    assert_same(resumed, unbroken)


def test_killed_again_and_again_still_ends_the_same(tmp_path: Path) -> None:
    """Two steps a process give what one process gives."""
    unbroken = Training(tmp_path / "unbroken")
    unbroken.run()
    for number in range(1, len(unbroken.progress.history) * NUM_STEPS, 2):
        with pytest.raises(Killed):
            Training(tmp_path / "killed").run(kill_at(*divmod(number, NUM_STEPS)))

    last = Training(tmp_path / "killed")
    last.run()

    assert_same(last, unbroken)


def test_sigterm_ends_the_step_writes_a_checkpoint_and_leaves(tmp_path: Path) -> None:
    """Whatever the time since the last one; resumed, it is a training that was never stopped."""
    unbroken = Training(tmp_path / "unbroken")
    unbroken.run()

    def ask_to_leave(epoch: int, step: int) -> None:
        if (epoch, step) == (1, 2):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            Training(tmp_path / "left", checkpoint_seconds=1e9).run(ask_to_leave)
    finally:
        signal.signal(signal.SIGTERM, before)

    resumed = Training(tmp_path / "left")
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))
    # Asked while the batch of step 3 was fetched: that step is whole.
    assert seen[0] == (1, 4)
    assert_same(resumed, unbroken)


def test_a_used_up_budget_ends_the_epoch_and_validates_it(tmp_path: Path) -> None:
    """What it learned so far is measured and kept, and run again it trains no more."""
    training = Training(tmp_path, budget=NUM_STEPS + 2)
    steps: list[tuple[int, int]] = []
    training.run(lambda *now: steps.append(now))

    assert [metrics.epoch for metrics in training.progress.history] == [0, 1]
    assert steps[-1] == (1, 0)  # The batch of step 1 was the last that was asked for.

    again = Training(tmp_path, budget=NUM_STEPS + 2)
    again.run(kill_at(1, 0))
    assert len(again.progress.history) == 2
    assert same_tensors(again.model.state_dict(), training.model.state_dict())


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9])
def test_killed_in_the_validation_after_the_budget_it_is_validated_when_resumed(
    tmp_path: Path, checkpoint_seconds: float
) -> None:
    """The epoch counts that was cut short, be it the first one; asked to leave in its validation it is saved."""
    for budget, validation in ((2, 1), (NUM_STEPS + 2, 2)):
        options = {"budget": budget, "checkpoint_seconds": checkpoint_seconds}
        unbroken = Training(tmp_path / f"unbroken-{budget}", **options)
        unbroken.run()
        began = iter(range(1, 10))

        def kill(_epoch: int, step: int, began: Iterator[int] = began, validation: int = validation) -> None:
            if step == 0 and next(began) == validation:
                raise Killed

        with pytest.raises(Killed):
            Training(tmp_path / f"killed-{budget}", **options).run(after_validated_batch=kill)

        resumed = Training(tmp_path / f"killed-{budget}", **options)
        resumed.run()
        assert_same(resumed, unbroken)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    """A training that begins has nothing to go on from."""
    assert Checkpoints(tmp_path / "none", 2, CONFIG).newest() == (None, None)


def test_the_last_few_checkpoints_and_the_best_weights_stay(tmp_path: Path) -> None:
    """Older ones are removed, and no partial file is left."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))

    names = sorted(path.name for path in tmp_path.iterdir())

    (best,) = (name for name in names if name.startswith("best"))
    assert [name for name in names if name.startswith("step")] == [
        f"step-00-000003-000000000014+{best}",
        f"step-00-000003-000000000021+{best}",
    ]
    assert len(names) == 3
    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (names[-1], "run")
    assert Checkpoints(tmp_path, 2, CONFIG).load(names[-1])["best"] == best


def test_best_weights_stay_while_a_checkpoint_needs_them(tmp_path: Path) -> None:
    """Also beside newer ones: of an epoch that a killed process had as best, and this one has not."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 2))
    later = tmp_path / "best-00-000099.pt"
    later.write_bytes(b"of an epoch whose checkpoint was never written")

    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(3, 4))

    name, _run = Checkpoints(tmp_path, 2, CONFIG).newest()
    assert name is not None
    assert Checkpoints(tmp_path, 2, CONFIG).load(name)["best_state"]
    assert not later.exists()


def cut(content: bytes) -> bytes:
    """Return the first bytes."""
    return content[:1000]


def spoil(content: bytes) -> bytes:
    """Return the file with other bytes in the middle of its values' names."""
    place = content.index(b"optimizer")
    return content[:place] + b"\xff" * 9 + content[place + 9 :]


@pytest.mark.parametrize("damage", [cut, spoil])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """It is told, and the training goes on from the older one to the same end."""
    unbroken = Training(tmp_path / "unbroken")
    unbroken.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed").run(kill_at(2, 3))
    newest = max((tmp_path / "killed").glob("step-*.pt"))
    newest.write_bytes(damage(newest.read_bytes()))

    resumed = Training(tmp_path / "killed")
    resumed.run()

    assert_same(resumed, unbroken)


def test_a_checkpoint_of_another_version_of_the_code_is_not_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds other things by other names: told, and the one before it is taken."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(2, 3))
    older, newest = sorted(tmp_path.glob("step-*.pt"))
    content = torch.load(newest, weights_only=True)
    torch.save(content | {"form": [*content["form"], "more"]}, newest)

    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (older.name, "run")
    assert "written by another version of this code" in caplog.text
    # It is out of the way of those that come: a training begun anew keeps its own, whose numbers are lower.
    older.unlink()
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(1, 1))
    name, _run = Checkpoints(tmp_path, 2, CONFIG).newest()
    assert name is not None
    assert name < newest.name


def test_half_written_checkpoint_is_never_read(tmp_path: Path) -> None:
    """What a process killed within the write leaves behind is removed by the next checkpoint."""
    with pytest.raises(Killed):
        Training(tmp_path).run(kill_at(1, 1))
    (tmp_path / "step-00-000009-000000000000.partial").write_bytes(b"half")

    resumed = Training(tmp_path)
    resumed.run()

    assert not list(tmp_path.glob("*.partial"))


def test_a_checkpoint_of_another_training_is_refused_by_name_of_the_difference() -> None:
    """Settings, data and ranks are named with both values."""
    other = {"train": {"seed": 2, "model": "resnet18"}, "cache": "other"}
    with pytest.raises(WrongInput, match=r"cache is 'other' there and 'digest' here, train.seed is 2 there and 1 here"):
        check_fits({"config": other}, CONFIG)
    check_fits({"config": CONFIG}, CONFIG)


def test_checkpoint_with_code_in_it_is_not_loaded(tmp_path: Path) -> None:
    """A file from outside runs nothing: only tensors and plain values are read."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"run_id": Payload()}, tmp_path / "step-00-000001-000000000000+.pt")

    assert Checkpoints(tmp_path, 2, CONFIG).newest() == (None, None)
    assert not (tmp_path / "executed").exists()
