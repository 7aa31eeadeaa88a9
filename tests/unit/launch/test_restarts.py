"""Restarts after a loss: which errors are followed by one, with how many ranks, and how it is told."""

import threading
from pathlib import Path

import pytest

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import (
    DiskFull,
    Diverged,
    HostLost,
    OutOfMemory,
    RankStalled,
    TimeLimitExceeded,
    WrongInput,
    is_retried,
)
from tasks.launch import restarts
from tasks.launch.restarts import Deadline, RankFailed, RanksLost, Stopped, train_with_restarts
from tasks.refs import CacheRef, RunRef
from tasks.storage import Storage
from tasks.tracking.runs import RESTARTS_TAG
from tasks.train.checkpoint_files import checkpoint_name
from tasks.train.spec import TrainingSpec

KILLED = "rank 1 was ended by signal 9; its last lines:\nepoch 2: ..."


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let restarts wait for milliseconds."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.001)


def spec_of(storage: Storage, num_ranks: int, **distributed: object) -> TrainingSpec:
    """Return a specification."""
    settings = DistributedConfig.model_validate({"num_ranks": num_ranks} | distributed)
    train = TrainConfig(weights="none", freeze_backbone=False)
    return TrainingSpec(
        train=train, distributed=settings, cache=CacheRef(url="cache", digest="digest"), storage=storage
    )


class Attempts:
    """Attempts that end with the given errors, one after the other, and then with a result."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)
        self.specs: list[TrainingSpec] = []

    def __call__(self, spec: TrainingSpec) -> RunRef:
        """Take the next end."""
        self.specs.append(spec)
        if self._errors:
            raise self._errors.pop(0)
        return RunRef(run_id="run")

    @property
    def ranks(self) -> list[int]:
        """Number of ranks of each attempt."""
        return [spec.num_ranks for spec in self.specs]


def test_restart_is_told_in_one_line(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """It has the cause, the ranks, the position of the newest checkpoint, and the number of the restart."""
    spec = spec_of(storage, 2, max_restarts=3)
    attempts = Attempts(RanksLost(KILLED), RankStalled("rank 0 has reported nothing for 60 s, since step 4; all ended"))
    folder = storage.checkpoints / spec.key

    def attempt(given: TrainingSpec) -> RunRef:
        if attempts.specs:
            folder.mkdir(parents=True, exist_ok=True)
            for image in (640, 0):
                Path(folder, f"{checkpoint_name(0, 3, image)}+best-00-000002.pt").touch()
        return attempts(given)

    assert train_with_restarts(spec, attempt, Deadline(60)).run_id == "run"

    assert caplog.messages == [
        "rank 1 was ended by signal 9: restarting 2 ranks from the start (restart 1 of 3)",
        "rank 0 has reported nothing for 60 s, since step 4: restarting 2 ranks from the checkpoint at epoch 3, image "
        "640 (restart 2 of 3)",
    ]
    assert [given.tags.get(RESTARTS_TAG) for given in attempts.specs] == [None, "1", "2"]
    assert {given.key for given in attempts.specs} == {spec.key}


def test_ranks_of_a_lost_host_start_on_the_others(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """As many as fit there, down to `min_ranks`; if they are fewer, all wait for the host."""
    spec = spec_of(storage, 6, max_restarts=9, min_ranks=2, launcher="hosts", hosts="a:2,b:2,c:1,d:3")
    attempts = Attempts(
        HostLost("host 'a' with the ranks 0 and 1 does not answer", "a", [0, 1]),
        RanksLost(KILLED),
        HostLost("host 'd' is not reached", "d"),
        HostLost("host 'b' with the ranks 0 and 1 does not answer", "b", [0, 1]),
    )

    assert train_with_restarts(spec, attempts, Deadline(60)).run_id == "run"

    # The hosts b, c and d have six places, b and c have three, and c alone one.
    assert attempts.ranks == [6, 6, 6, 3, 3]
    assert [given.lost_hosts for given in attempts.specs] == [(), ("a",), ("a",), ("a", "d"), ("a", "d")]
    assert {given.num_virtual_ranks for given in attempts.specs} == {6}
    assert {given.key for given in attempts.specs} == {spec.key}
    assert "restarting 3 ranks" in "\n".join(caplog.messages)


def test_all_ranks_are_needed_by_default(storage: Storage) -> None:
    """Without `min_ranks`, as many ranks start again, and the lost host may come back."""
    loss = HostLost("host 'b' with the rank 1 does not answer", "b", [1])
    attempts = Attempts(loss, loss)
    with pytest.raises(HostLost) as lost:
        train_with_restarts(spec_of(storage, 2, max_restarts=1), attempts, Deadline(60))
    assert attempts.ranks == [2, 2]
    assert not is_retried(lost.value)


@pytest.mark.parametrize("max_restarts", [0, 1, 2])
def test_number_of_restarts_is_limited(storage: Storage, max_restarts: int) -> None:
    """The last loss is raised; the flow that runs the ranks repeats them only without restarts."""
    attempts = Attempts(*(RanksLost(KILLED) for _ in range(5)))
    with pytest.raises(RanksLost) as lost:
        train_with_restarts(spec_of(storage, 2, max_restarts=max_restarts), attempts, Deadline(60))
    assert attempts.ranks == [2] * (1 + max_restarts)
    assert is_retried(lost.value) == (max_restarts == 0)


@pytest.mark.parametrize(
    "error",
    [
        WrongInput("a"),
        Diverged("a"),
        DiskFull("a"),
        OutOfMemory("a"),
        TimeLimitExceeded("a"),
        RankFailed("rank 0 ended with status 1"),
        Stopped("a"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_raised_at_once(storage: Storage, error: BaseException) -> None:
    """They would occur again, or belong to the caller."""
    attempts = Attempts(error)
    with pytest.raises(type(error)):
        train_with_restarts(spec_of(storage, 2, max_restarts=3), attempts, Deadline(60))
    assert len(attempts.specs) == 1


def test_single_process_is_not_restarted(storage: Storage) -> None:
    """The settings of restarts are those of distributed training."""
    attempts = Attempts(RanksLost(KILLED))
    with pytest.raises(RanksLost):
        train_with_restarts(spec_of(storage, 2).model_copy(update={"distributed": None}), attempts, Deadline(60))
    assert len(attempts.specs) == 1


def test_time_limit_holds_for_all_attempts_together(storage: Storage) -> None:
    """No attempt starts after it, and the wait for a restart ends with it."""
    now = [0.0]
    deadline = Deadline(100, clock=lambda: now[0])
    attempts = Attempts(*(RanksLost(KILLED) for _ in range(5)))

    def attempt(given: TrainingSpec) -> RunRef:
        deadline.check()
        now[0] += 40
        return attempts(given)

    with pytest.raises(TimeLimitExceeded, match="train.timeout_seconds 100 ") as exceeded:
        train_with_restarts(spec_of(storage, 2, max_restarts=9), attempt, deadline)
    assert exceeded.value.setting == "train.timeout_seconds"
    assert len(attempts.specs) == 3


def test_wait_for_a_restart_can_be_stopped(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends does not wait for the backoff."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 1e6)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        train_with_restarts(spec_of(storage, 2, max_restarts=1), Attempts(RanksLost(KILLED)), Deadline(1e7), stop)
