"""The log of a run, as the demo prints it."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from deployments.demo import _show_log


class Server:
    """A server with the log lines of one flow run."""

    def __init__(self, lines: list[SimpleNamespace]) -> None:
        self._lines = lines

    def read_flow_runs(self, **_filters: Any) -> list[SimpleNamespace]:
        """Return no runs that the run has submitted."""
        return []

    def read_logs(self, *_filters: Any, **_options: Any) -> list[SimpleNamespace]:
        """Return the lines, the newest first."""
        return self._lines[::-1]


def line(run: UUID, message: str, task: UUID | None = None) -> SimpleNamespace:
    """Return one line of a run, or of a stage of it."""
    return SimpleNamespace(
        id=uuid4(), flow_run_id=run, task_run_id=task, message=message, timestamp=datetime(2026, 1, 1, tzinfo=UTC)
    )


def test_log_has_ended_with_the_last_line_of_the_flow_and_not_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of the last stage may arrive after the line with its state."""
    run, task = uuid4(), uuid4()
    lines = [line(run, "1 image predicted", task), line(run, "Finished in state Completed()", task)]
    shown: set[UUID] = set()

    assert not _show_log(Server(lines), run, shown)
    assert _show_log(Server([*lines, line(run, "Finished in state Completed()")]), run, shown)
    assert capsys.readouterr().out.splitlines() == ["00:00:00  1 image predicted"]
