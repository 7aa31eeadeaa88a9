"""The stack and the demo on a machine whose cores are all busy."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from tasks.system.listening import free_port
from tests.builders.chromium import WAIT_SECONDS, chromium, find_field, log_in, log_in_to_mlflow, text_of
from tests.builders.processes import ROOT, plain_environment, server_errors
from tests.builders.stack import Up, running_up

CLASSES = ("airplanes", "bonsai", "pizza")
PHOTOS_PER_CLASS = 50
RUN_SECONDS = 1500


@pytest.fixture
def busy() -> Iterator[None]:
    """Run an endless loop per core beside the test."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.fixture
def photos(test_data: Path, tmp_path: Path) -> Path:
    """Return a source folder of real photos in three classes."""
    for name in CLASSES:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for photo in sorted((test_data / "photos" / name).glob("*.jpg"))[:PHOTOS_PER_CLASS]:
            shutil.copy(photo, tmp_path / "photos" / name)
    return tmp_path / "photos"


def submit_photos(page: webdriver.Chrome, up: Up, source: Path, weights: Path) -> str:
    """Submit the deployment `photos` from the first screen of its form, and return the flow run."""
    (deployment,) = (
        found["id"] for found in up.client().post("/deployments/filter", json={}).json() if found["name"] == "photos"
    )
    page.get(f"{up.url}/login?redirect=/deployments/deployment/{deployment}/run")
    log_in(page, up.auth)
    for label, value in (("Source", source), ("Weights", weights)):
        field = find_field(page, label)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(str(value))
    page.save_screenshot(str(up.home / "form.png"))
    page.find_element(By.XPATH, "//button[normalize-space()='Submit']").click()
    runs: list[dict[str, str]] = []

    def submitted(_: webdriver.Chrome) -> bool:
        runs[:] = up.client().post("/flow_runs/filter", json={}).json()
        return bool(runs)

    WebDriverWait(page, WAIT_SECONDS).until(submitted)
    return runs[-1]["id"]


def wait_for_end(up: Up, run: str) -> dict[str, str]:
    """Wait until a flow run has ended, and return its final state."""
    client, deadline = up.client(), time.monotonic() + RUN_SECONDS
    while True:
        state: dict[str, str] = client.get(f"/flow_runs/{run}").raise_for_status().json()["state"]
        if state["type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}:
            return state
        assert time.monotonic() < deadline, f"the run is still {state['name']} after {RUN_SECONDS} s"
        time.sleep(3)


@pytest.mark.timeout(2400)
def test_user_trains_on_photos_from_the_form_and_finds_the_champion(
    busy: None, photos: Path, test_data: Path, tmp_path: Path
) -> None:
    """A user gets from the login to the champion's model card in the browser alone."""
    with chromium() as page, running_up(tmp_path / "home") as up:
        run = submit_photos(page, up, photos, test_data / "weights" / "mobilenet_v2.pth")
        state = wait_for_end(up, run)
        assert state["type"] == "COMPLETED", state
        artifacts = up.client().post("/artifacts/latest/filter", json={"sort": "KEY_ASC"}).json()
        shown = {artifact["key"]: artifact["latest_id"] for artifact in artifacts}
        wait = WebDriverWait(page, WAIT_SECONDS)
        page.get(f"{up.url}/runs/flow-run/{run}")
        tab = "//*[contains(concat(' ', @class, ' '), ' p-tab ')][contains(., 'Artifacts')]"
        wait.until(lambda _: page.find_element(By.XPATH, tab)).click()
        wait.until(lambda _: "champion-model-card" in text_of(page))
        page.save_screenshot(str(up.home / "artifacts.png"))
        page.get(f"{up.url}/artifacts/artifact/{shown['champion-model-card']}")
        wait.until(lambda _: "mobilenet_v2" in text_of(page))
        page.save_screenshot(str(up.home / "card.png"))
        assert all(name in text_of(page) for name in CLASSES)
        page.get(f"{up.url}/artifacts/artifact/{shown['champion']}")
        link = wait.until(lambda _: page.find_element(By.XPATH, "//a[contains(., 'in MLflow')]"))
        address = str(link.get_attribute("href"))
        log_in_to_mlflow(page, up.mlflow, up.auth)
        page.get(address)
        wait.until(lambda _: "lakevision-photos-" in text_of(page) and "mobilenet_v2" in text_of(page))
        page.save_screenshot(str(up.home / "champion.png"))
    assert server_errors(up.home) == []


@pytest.mark.timeout(1800)
def test_demo_ends_with_a_champion(busy: None, tmp_path: Path) -> None:
    """`make demo` registers the champion, and the server logs no error."""
    environment = plain_environment(LAKEVISION_HOME=str(tmp_path / "home"), LAKEVISION_PORT=str(free_port()))
    done = subprocess.run(
        ["make", "demo"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1700
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "champion      demo-digits version 1" in done.stdout
    assert server_errors(tmp_path / "home") == []
