"""Ten flow runs at once on one stack, whose server writes to one SQLite database."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.builders.processes import server_errors
from tests.builders.stack import running_up

NUM_RUNS = 10
RUN_SECONDS = 900


@pytest.mark.timeout(1500)
def test_ten_runs_at_once_complete(tmp_path: Path) -> None:
    """Ten users' flow runs in one worker's processes complete; the server writes their states, logs and artifacts."""
    with running_up(tmp_path / "home") as up:
        deployment = up.deployment("etl")["id"]

        def submit(number: int) -> str:
            # Each run has its own tables; they share only the server.
            config = {"source": "builtin:digits", "storage": {"home": str(tmp_path / f"home-{number}")}}
            client = up.client(f"user-{number}")
            made = client.post(f"/deployments/{deployment}/create_flow_run", json={"parameters": {"config": config}})
            return str(made.raise_for_status().json()["id"])

        with ThreadPoolExecutor(NUM_RUNS) as users:
            runs = list(users.map(submit, range(NUM_RUNS)))
        client, deadline = up.client(), time.monotonic() + RUN_SECONDS
        wanted = {"flow_runs": {"id": {"any_": runs}}}
        while True:
            found = client.post("/flow_runs/filter", json=wanted).raise_for_status().json()
            states = [run["state_type"] for run in found]
            if not {"SCHEDULED", "PENDING", "RUNNING"} & set(states):
                break
            assert time.monotonic() < deadline, states
            time.sleep(2)
        assert states == ["COMPLETED"] * NUM_RUNS, [run["state"] for run in found]
    assert server_errors(up.home) == []
