"""The end of ranks: the last line of a killed rank, and a rank that outlives its kill."""

import json
import os
import queue
import signal
import subprocess
from pathlib import Path

import pytest

from tasks.environment import rank_environment
from tasks.errors import HostLost, RankStalled, is_retried
from tasks.launch import rank_process
from tasks.launch.launcher import check_left
from tasks.launch.protocol import Channel
from tasks.launch.rank_process import OUT_OF_MEMORY, Message, RankOutput, RemoteProcess, memory_kills, start
from tasks.launch.restarts import RankFailed, RanksLost


def write_counters(path: Path, kills: int) -> None:
    """Write the kernel's counters."""
    path.write_text(f"nr_free_pages 12\noom_kill {kills}\noom_kill_other 5\n")


def test_kills_of_the_kernel_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 0 where the kernel does not tell."""
    counters = tmp_path / "vmstat"
    monkeypatch.setattr(rank_process, "KERNEL_COUNTERS", counters)
    assert memory_kills() == 0
    counters.write_text("nr_free_pages 12\n")
    assert memory_kills() == 0
    write_counters(counters, 7)
    assert memory_kills() == 7


@pytest.mark.parametrize(
    ("sent", "kills", "lines"),
    [(signal.SIGKILL, 1, [OUT_OF_MEMORY]), (signal.SIGKILL, 0, []), (signal.SIGTERM, 1, [])],
)
def test_killed_rank_has_a_last_line_if_the_kernel_has_killed_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, kills: int, lines: list[str]
) -> None:
    """It is not there without a kill by the kernel, nor after another signal."""
    counters = tmp_path / "vmstat"
    write_counters(counters, 3)
    monkeypatch.setattr(rank_process, "KERNEL_COUNTERS", counters)
    messages: queue.Queue[Message] = queue.Queue()
    rank = start(0, tmp_path / "spec.json", rank_environment(), RankOutput(messages, lambda *_heard: None))
    write_counters(counters, 3 + kills)
    rank.process.send_signal(sent)
    found = [messages.get(timeout=60)[1] for _ in range(2 + len(lines))]
    assert [message for message in found if message is not None] == lines
    assert messages.empty()
    assert rank.process.wait(timeout=60) == -sent
    rank.process.stdin.close()


class _Endless(subprocess.Popen):  # type: ignore[type-arg]  # of no output
    """A process that outlives SIGKILL, as one does that waits for a driver."""

    stdin = None
    returncode = None

    def __init__(self) -> None:
        self.pid = 4711
        self.signals: list[str] = []

    def __del__(self) -> None:
        """Do not look for a process, as the class does."""

    def poll(self) -> None:
        return None

    def wait(self, timeout: float) -> int:
        assert timeout is not None
        raise subprocess.TimeoutExpired("rank", timeout)

    def send_signal(self, sig: int) -> None:
        self.signals.append(signal.Signals(sig).name)


def test_rank_that_outlives_its_kill_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The launcher does not wait for ever, and names the rank."""
    monkeypatch.setattr(rank_process, "KILL_SECONDS", 0.0)
    process = _Endless()
    left = rank_process.terminate([rank_process.RankProcess(3, process)], 0.0)
    assert left == {3: 4711}
    assert process.signals == ["SIGTERM", "SIGKILL"]
    assert "rank 3 (process 4711) has been killed and does not end" in "\n".join(caplog.messages)


def fail_with(error: BaseException, left: dict[int, int]) -> None:
    """Raise an error, and check the ranks that are left while it is handled."""
    try:
        raise error
    finally:
        check_left(left)


@pytest.mark.parametrize("loss", [RanksLost("rank 1 was ended"), RankStalled("rank 1 waits"), HostLost("gone", "two")])
def test_no_rank_is_started_again_while_one_outlives_its_kill(loss: Exception) -> None:
    """It holds the training run's lock, for which the next rank 0 would wait without an end."""
    sentence = r"^rank 3 \(process 4711\) was killed and does not end, so no rank is started again"
    with pytest.raises(RankFailed, match=sentence) as raised:
        fail_with(loss, {3: 4711})
    assert not isinstance(raised.value, RanksLost)
    assert not is_retried(raised.value)
    assert raised.value.__cause__ is loss
    with pytest.raises(type(loss)) as same:
        fail_with(loss, {})
    assert same.value is loss


def test_rank_that_outlives_its_kill_does_not_hide_a_cancellation() -> None:
    """A cancelled run stays cancelled."""
    with pytest.raises(KeyboardInterrupt):
        fail_with(KeyboardInterrupt(), {3: 4711})


def test_rank_of_a_host_that_does_not_answer_is_left_to_its_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its signals do not arrive."""
    monkeypatch.setattr(rank_process, "REMOTE_KILL_SECONDS", 0.0)
    read, write = os.pipe()
    rank = rank_process.RankProcess(2, RemoteProcess(2, Channel(read, write)))
    assert rank_process.terminate([rank], 0.0) == {}
    assert "rank 2 has been killed and may still run: its host, or a driver" in "\n".join(caplog.messages)
    assert [json.loads(line)["number"] for line in os.read(read, 4096).splitlines()] == [15, 9]
    for descriptor in (read, write):
        os.close(descriptor)
