"""The approval of a promotion: the form in the Prefect UI, an answer through the API, and the time limit."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from tasks.config.promotion import PromoteConfig
from tasks.config.storage import StorageConfig
from tasks.refs import RunRef
from tasks.registry.aliases import CHAMPION
from tasks.registry.promote import promote_best
from tasks.storage import Storage, resolve_storage
from tasks.tables.snapshots import latest
from tasks.tracking.models import model_with_alias
from tests.builders.chromium import WAIT_SECONDS, chromium, find_field, log_in, text_of
from tests.builders.prefect_databases import home_with_databases
from tests.builders.stack import Up, running_up
from tests.builders.untrained_model import log_run
from tests.conftest import write_images

NAME = "photos"
ANY_FIGURES = {"model_name": NAME, "min_accuracy_gain": -1.0, "max_recall_drop": 1.0}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Iterator[Up]:
    """Run `make up` until the last test."""
    with running_up(home_with_databases(tmp_path_factory, empty_tracking)) as started:
        yield started


@pytest.fixture(scope="module")
def runs(up: Up, tmp_path_factory: pytest.TempPathFactory) -> list[RunRef]:
    """Log three runs on a table of 12 test images, and promote the first."""
    storage, folder = storage_of(up), tmp_path_factory.mktemp("runs")
    write_images(folder / "source", per_class=4)
    files = sorted((folder / "source").glob("*/*.png"))
    rows = {
        "sha256": [str(number) for number in range(len(files))],
        "label": [file.parent.name for file in files],
        "content": [file.read_bytes() for file in files],
        "split": ["test"] * len(files),
    }
    deltalake.write_deltalake(storage.table("images"), pa.table(rows))
    table = latest(None, storage.table("images"))
    logged = [log_run(storage, folder, seed, 0.5, table=table) for seed in (1, 2, 3)]
    promote_best(logged[:1], PromoteConfig(**ANY_FIGURES), storage)
    return logged


def storage_of(up: Up) -> Storage:
    """Return the storage of the stack."""
    return resolve_storage(StorageConfig(home=str(up.home)))


def champion(up: Up) -> int:
    """Return the number of the champion's version."""
    found = model_with_alias(storage_of(up), NAME, CHAMPION)
    assert found is not None
    return found.version


def submit(up: Up, run: RunRef, **settings: Any) -> str:
    """Submit a run of the deployment `promote` that asks; return its id."""
    config = {"run_ids": [run.run_id], "promote": {**ANY_FIGURES, "approval": "human", **settings}}
    path = f"/deployments/{up.deployment('promote')['id']}/create_flow_run"
    body = {"state": {"type": "SCHEDULED"}, "parameters": {"config": config}}
    return str(up.client().post(path, json=body).raise_for_status().json()["id"])


def wait_for(up: Up, flow_run: str, state: str) -> dict[str, Any]:
    """Wait until a flow run is in the state with this name, and return that."""
    deadline, client = time.monotonic() + 300, up.client()
    while True:
        found = client.get(f"/flow_runs/{flow_run}").raise_for_status().json()["state"]
        if found["name"] == state:
            return dict(found)
        assert time.monotonic() < deadline, found
        assert found["type"] not in {"FAILED", "CRASHED", "COMPLETED"}, found
        time.sleep(0.5)


def decisions(up: Up) -> list[tuple[Any, ...]]:
    """Return the decisions after the first, the oldest first."""
    rows = deltalake.DeltaTable(storage_of(up).table("promotions")).to_pyarrow_table().sort_by("decided_at").to_pylist()
    return [tuple(row[name] for name in ("decision", "from_version", "to_version", "approved_by")) for row in rows[1:]]


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_answer_and_time_limit_decide(up: Up, runs: list[RunRef]) -> None:
    """A refusal keeps the champion, and so does a question that nobody answers in time: the run fails."""
    refused = submit(up, runs[1])
    wait_for(up, refused, "Suspended")
    # Afterwards, so that it is the later version.
    forgotten = submit(up, runs[2], approval_seconds=1)
    answer = {"run_input": {"decision": "keep", "name": "reviewer", "comment": "too early"}}
    up.client().post(f"/flow_runs/{refused}/resume", json=answer).raise_for_status()
    wait_for(up, refused, "Completed")
    assert wait_for(up, forgotten, "Failed")["message"] == "The flow was paused and never resumed."
    retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    up.client().post(f"/flow_runs/{forgotten}/set_state", json=retry).raise_for_status()
    assert "nobody answered within promote.approval_seconds 1" in wait_for(up, forgotten, "Failed")["message"]
    assert champion(up) == 1
    assert decisions(up) == [("kept", 1, 1, "reviewer")]


@pytest.mark.timeout(900)
def test_user_approves_in_the_form(up: Up, runs: list[RunRef], tmp_path: Path) -> None:
    """It shows the figures of both models; the champion changes after the answer and not before."""
    with chromium(height=1600) as page:  # before the run is submitted, which nothing would end without a browser
        flow_run = submit(up, runs[1])
        wait = WebDriverWait(page, WAIT_SECONDS)
        wait_for(up, flow_run, "Suspended")
        assert champion(up) == 1
        page.get(f"{up.url}/login?redirect=/runs/flow-run/{flow_run}")
        log_in(page, up.auth)
        wait.until(lambda shown: shown.find_element(By.XPATH, "//button[normalize-space()='Resume']")).click()
        wait.until(lambda shown: "McNemar" in text_of(shown))
        page.save_screenshot(str(tmp_path / "question.png"))
        shown = text_of(page)
        Select(find_field(page, "Decision")).select_by_value("promote")
        find_field(page, "Name").send_keys("reviewer")
        page.save_screenshot(str(tmp_path / "filled.png"))
        wait.until(lambda shown: shown.find_element(By.XPATH, "//button[normalize-space()='Submit']")).click()
        wait_for(up, flow_run, "Completed")
    assert "Shall photos version 2 become the champion?" in shown
    assert champion(up) == 2
    assert decisions(up)[-1] == ("promoted", 1, 2, "reviewer")


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_answer_is_about_the_champion_that_was_shown(up: Up, runs: list[RunRef], tmp_path: Path) -> None:
    """Another version became the champion before the answer, and the results of stages are on another machine."""
    storage = storage_of(up)
    table = latest(None, storage.table("images"))
    flow_run = submit(up, log_run(storage, tmp_path, 4, 0.5, table=table))
    wait_for(up, flow_run, "Suspended")
    shown = champion(up)
    other = promote_best(runs[2:], PromoteConfig(**ANY_FIGURES), storage)
    assert (other.outcome, other.previous.version if other.previous else None) == ("promoted", shown)
    shutil.rmtree(up.home / "prefect" / "storage")
    answer = {"run_input": {"decision": "promote", "name": "reviewer", "comment": ""}}
    up.client().post(f"/flow_runs/{flow_run}/resume", json=answer).raise_for_status()
    wait_for(up, flow_run, "Completed")
    assert champion(up) == other.champion.version
    assert decisions(up)[-1] == ("kept", other.champion.version, other.champion.version, "reviewer")
