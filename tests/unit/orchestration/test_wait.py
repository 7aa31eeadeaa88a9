"""Tests of the bounds of the wait for a submitted run, on a clock that the test sets."""

from collections.abc import Callable

import pytest

from tasks.config.distributed import DistributedConfig
from tasks.errors import SubmittedRunLost, TimeLimitExceeded, WrongInput
from tasks.orchestration.wait import Outage, RunWait


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> Clock:
    """Return a clock at 0 s; all messages are recorded."""
    caplog.set_level("INFO", "lakevision")
    return Clock()


def wait_for(clock: Clock, **settings: int) -> RunWait:
    """Return the wait for a run with these timeouts."""
    return RunWait(DistributedConfig.model_validate(settings), "distributed", "training", "brave-fox", clock)


def test_run_that_a_dead_worker_left_pending_is_lost_although_another_worker_polls(clock: Clock) -> None:
    """The time counts from the moment at which a worker took the run, however long it waited before."""
    wait = wait_for(clock, start_timeout_seconds=100)
    wait.scheduled(1, list)
    clock.now = 5000.0
    wait.pending()
    clock.now = 5100.0
    wait.pending()
    clock.now = 5101.0
    with pytest.raises(SubmittedRunLost, match="'brave-fox', which has not begun") as raised:
        wait.pending()
    assert raised.value.setting == "distributed.start_timeout_seconds"


def test_run_without_a_new_heartbeat_is_lost(clock: Clock) -> None:
    """Each new heartbeat restarts the time."""
    wait = wait_for(clock, heartbeat_timeout_seconds=60)
    for beat in range(5):
        clock.now = 50.0 * beat
        wait.running(beat)
    clock.now = 261.0
    with pytest.raises(SubmittedRunLost, match="has sent no heartbeat for 61 s") as raised:
        wait.running(4)
    assert raised.value.setting == "distributed.heartbeat_timeout_seconds"


def test_run_that_never_sent_a_heartbeat_is_bounded_by_its_time_limit(clock: Clock) -> None:
    """Heartbeats may be turned off; the time limit is not retried, as a retry would take as long again."""
    wait = wait_for(clock, heartbeat_timeout_seconds=60, run_timeout_seconds=1000)
    wait.running(None)
    clock.now = 1000.0
    wait.running(None)
    clock.now = 1001.0
    with pytest.raises(TimeLimitExceeded, match="seconds 1000: it was cancelled") as raised:
        wait.running(None)
    assert raised.value.setting == "distributed.run_timeout_seconds"


@pytest.mark.parametrize(
    "report",
    [lambda wait: wait.pending(), lambda wait: wait.running(1), lambda wait: wait.scheduled(0, list)],
    ids=["pending", "running", "scheduled"],
)
def test_time_without_a_server_does_not_count_against_a_run(clock: Clock, report: Callable[[RunWait], None]) -> None:
    """Nothing is reported during an outage, so that a healthy run would look lost after it."""
    wait = wait_for(clock, submit_timeout_seconds=60, start_timeout_seconds=60, heartbeat_timeout_seconds=60)
    report(wait)
    clock.now = 10_000.0
    wait.restart()
    report(wait)
    clock.now = 10_061.0
    with pytest.raises((SubmittedRunLost, WrongInput)):
        report(wait)


def test_time_limit_of_a_run_holds_during_an_outage(clock: Clock) -> None:
    """The wait for the server ends with the time of the run; before it has begun, that of the outage is limited."""
    wait = wait_for(clock, run_timeout_seconds=1000)
    clock.now = 5000.0
    wait.check_time_limit()
    wait.running(None)
    wait.restart()
    clock.now = 6001.0
    with pytest.raises(TimeLimitExceeded):
        wait.check_time_limit()


def test_pool_without_workers_is_waited_for_and_a_busy_one_is_not_limited(
    clock: Clock, messages_of: Callable[[str], list[str]]
) -> None:
    """The timeout counts from the moment at which the last worker stopped."""
    wait = wait_for(clock, submit_timeout_seconds=100)
    clock.now = 5000.0
    wait.scheduled(1, list)
    clock.now = 5050.0
    wait.scheduled(0, list)
    clock.now = 5101.0
    with pytest.raises(WrongInput, match="start one with 'prefect worker start --pool gpu'"):
        wait.scheduled(0, list)
    assert messages_of("lakevision.pool") == [
        "the work pool 'gpu' is busy: waiting for a slot",
        "no worker polls the work pool 'gpu': start one with 'prefect worker start --pool gpu'; waiting 50 s more",
    ]


def test_run_whose_slots_are_held_by_waiting_parents_is_warned_about_by_age(
    clock: Clock, messages_of: Callable[[str], list[str]]
) -> None:
    """The warning names the runs, and comes less and less often."""
    wait = wait_for(clock)
    for now in range(0, 1000, 10):
        clock.now = float(now)
        wait.scheduled(1, lambda: ["tall-owl", "shy-cat"])
    warnings = messages_of("lakevision.pool")[1:]
    assert [int(line.split(" has waited ")[1].split(" ")[0]) for line in warnings] == [70, 150, 310, 630]
    assert "held by runs that wait for runs on it: tall-owl, shy-cat. Raise the limit of the pool" in warnings[0]


def test_outage_is_reported_once_and_so_is_its_end(clock: Clock, messages_of: Callable[[str], list[str]]) -> None:
    """The next outage is reported again."""
    outage = Outage("the run continues", ("distributed.run_timeout_seconds", 1000), clock)
    assert not outage.end()
    for seconds in (75.0, 100.0):
        for _ in range(3):
            outage.note(ConnectionError("refused"))
        clock.now += seconds
        assert outage.end()
        assert not outage.end()
    assert messages_of("lakevision.pool") == [
        "the Prefect server does not answer (refused): waiting until it does; the run continues",
        "the Prefect server answers again, after 75 s",
        "the Prefect server does not answer (refused): waiting until it does; the run continues",
        "the Prefect server answers again, after 100 s",
    ]


def test_outage_is_not_waited_out_longer_than_the_run_itself_may_take(clock: Clock) -> None:
    """Also before the run has begun; the next outage has the whole time again."""
    outage = Outage("the run continues", ("distributed.run_timeout_seconds", 1000), clock)
    outage.note(ConnectionError("refused"))
    clock.now += 1000
    outage.note(ConnectionError("refused"))
    assert outage.end()
    outage.note(ConnectionError("refused"))
    clock.now += 1001
    with pytest.raises(TimeLimitExceeded, match=r"not answered for 1001 s \(refused\)") as raised:
        outage.note(ConnectionError("refused"))
    assert raised.value.setting == "distributed.run_timeout_seconds"
