"""The end of ranks: the last line of a killed rank, and a rank that outlives its kill."""

import queue
import signal
import subprocess
from pathlib import Path

import pytest

from tasks.environment import rank_environment
from tasks.launch import rank_process
from tasks.launch.rank_process import OUT_OF_MEMORY, Message, memory_kills, start


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
    rank = start(0, tmp_path / "spec.json", rank_environment(), messages, lambda *_heard: None)
    write_counters(counters, 3 + kills)
    rank.process.send_signal(sent)
    found = [messages.get(timeout=60)[1] for _ in range(2 + len(lines))]
    assert [message for message in found if message is not None] == lines
    assert messages.empty()
    assert rank.process.wait(timeout=60) == -sent
    rank.process.stdin.close()


class _Endless:
    """A process that outlives SIGKILL, as one does that waits for a driver."""

    stdin = None
    returncode = None

    def __init__(self) -> None:
        self.signals: list[str] = []

    def poll(self) -> None:
        return None

    def wait(self, timeout: float) -> int:
        assert timeout is not None
        raise subprocess.TimeoutExpired("rank", timeout)

    def terminate(self) -> None:
        self.signals.append("SIGTERM")

    def kill(self) -> None:
        self.signals.append("SIGKILL")


def test_rank_that_outlives_its_kill_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The launcher does not wait for ever, and names the rank."""
    monkeypatch.setattr(rank_process, "KILL_SECONDS", 0.0)
    process = _Endless()
    rank_process.terminate([rank_process.RankProcess(3, process)], 0.0)  # type: ignore[arg-type]  # a fake process
    assert process.signals == ["SIGTERM", "SIGKILL"]
    assert "rank 3 has been killed and does not end" in caplog.text
