"""A submitted run and an outage of the server that is longer than all retries of its clients."""

import time
from pathlib import Path

from tests.builders.submissions import (
    WAIT_SECONDS,
    end_worker,
    kill_server,
    process_of,
    restart_server,
    running_server,
    start_submitter,
    start_worker,
    states,
    submitted_name,
)

OUTAGE_SECONDS = 100.0
"""Prefect's clients repeat a request for about a minute."""


def test_outage_longer_than_all_retries_is_waited_out(tmp_path: Path) -> None:
    """The submitted run completes after the outage and was submitted once; its worker, without retries, waits too."""
    with running_server(tmp_path / "home") as stack:
        worker = start_worker(stack, client_retries=0)
        submitter = start_submitter(stack, tmp_path / "run", OUTAGE_SECONDS + 60)
        process_of(tmp_path / "run")
        kill_server(stack)
        time.sleep(OUTAGE_SECONDS)
        restart_server(stack)
        log = (stack.home / "logs" / "worker-gpu.log").read_text()
        assert "the Prefect server does not answer: the worker waits for it, and its runs continue" in log
        printed, _ = submitter.communicate(timeout=WAIT_SECONDS)
        end_worker(stack, worker)
        assert submitter.returncode == 0, printed
        assert printed.count("the Prefect server does not answer") == 1
        assert printed.count("the Prefect server answers again") == 1
        assert states(stack) == {submitted_name(printed): "COMPLETED"}
