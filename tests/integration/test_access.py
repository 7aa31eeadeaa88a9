"""Access control of `make up`: other origins, other users of the machine, and the authenticated user."""

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from mlflow import MlflowClient
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

from deployments.stack.login import auth_file, authorization
from tasks.refs import ModelRef
from tests.builders.chromium import WAIT_SECONDS, chromium, log_in, log_in_to_mlflow, text_of
from tests.builders.homes import home_with_tracking
from tests.builders.prefect_databases import copy_prefect_database
from tests.builders.processes import plain_environment, run_printed, run_python, server_errors
from tests.builders.stack import Up, running_up
from tests.builders.tracked_homes import CARD, log_champion

FOREIGN = "http://page.example"


@pytest.fixture(scope="module")
def champion(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> tuple[Path, ModelRef]:
    """Return a home that was moved, and its champion."""
    folder = tmp_path_factory.mktemp("up")
    model = log_champion(home_with_tracking(folder / "former", empty_tracking), folder / "scratch")
    return (folder / "former").rename(folder / "home"), model


@pytest.fixture(scope="module")
def up(champion: tuple[Path, ModelRef], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Run `make up` until the last test, then check for leaks of the login and for errors in the server's log."""
    copy_prefect_database(champion[0], tmp_path_factory)
    with running_up(champion[0]) as started:
        yield started
        check_for_leaks(started)
    assert server_errors(started.home) == []


def check_for_leaks(up: Up) -> None:
    """Check that the login, plain or as in a header, is in no command line and only in its own file."""
    # `info` and not `cmdline()`, which raises if the process has ended: a zombie has no command line to leak.
    command_lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert any("deployments.stack.prefect_server" in line for line in command_lines)
    password = up.auth.partition(":")[2]
    header = authorization(up.auth)["Authorization"].removeprefix("Basic ")
    assert not [line for line in command_lines if password in line or header in line]
    files = [path for path in up.home.rglob("*") if path.is_file()]
    assert [file for file in files if password.encode() in file.read_bytes()] == [auth_file(up.home)]
    assert [file for file in files if header.encode() in file.read_bytes()] == []


def submit_command(up: Up, client: httpx.Client, proof: Path, **headers: str) -> int:
    """Submit a run whose worker would execute a command; return the status code of the response."""
    deployment = up.deployment("maintain")["id"]
    body = f'{{"state": {{"type": "SCHEDULED"}}, "job_variables": {{"command": "touch {proof}"}}}}'
    # Without a content type, as a page may send it to another origin without a preflight request.
    response = client.post(f"{up.api}/deployments/{deployment}/create_flow_run", content=body, headers=headers)
    return response.status_code


def num_runs(up: Up) -> int:
    """Return the number of flow runs."""
    return int(up.client().post("/flow_runs/count", json={}).raise_for_status().json())


def test_page_of_another_origin_starts_no_command(up: Up, tmp_path: Path) -> None:
    """Requests of another origin are refused with and without the login, and their responses are unreadable."""
    before = num_runs(up)
    with httpx.Client() as plain:
        assert submit_command(up, plain, tmp_path / "proof", Origin=FOREIGN) == 403
        assert submit_command(up, plain, tmp_path / "proof", Origin=FOREIGN, **authorization(up.auth)) == 403
        for origin, allowed in ((FOREIGN, None), (up.url, up.url)):
            response = plain.get(f"{up.api}/health", headers={"Origin": origin})
            assert response.headers.get("Access-Control-Allow-Origin") == allowed
    assert num_runs(up) == before


@pytest.mark.parametrize("host", ["page.example", "127.0.0.1.page.example", "localhost.page.example:4200", ""])
def test_foreign_host_is_refused(up: Up, tmp_path: Path, host: str) -> None:
    """With DNS rebinding another host name resolves to this server, and a browser sees the same origin."""
    assert httpx.get(f"{up.url}/", headers={"Host": host}).status_code == 400
    assert httpx.get(f"{up.api}/csrf-token?client=x", headers={"Host": host}).status_code == 400
    client = up.client()
    assert submit_command(up, client, tmp_path / "proof", Host=host) == 400


def test_another_user_of_the_machine_is_refused(up: Up, tmp_path: Path) -> None:
    """Without the login a user gets no CSRF token, starts no run, and reads no data and no events."""
    before = num_runs(up)
    assert httpx.get(f"{up.api}/csrf-token", params={"client": "other"}).status_code == 401
    client = up.client("other")
    del client.headers["Authorization"]
    assert submit_command(up, client, tmp_path / "proof") == 401
    assert submit_command(up, client, tmp_path / "proof", **authorization("lakevision:guessed")) == 401
    assert client.post("/flow_runs/filter", json={}).status_code == 401
    assert client.post("/logs/filter", json={}).status_code == 401
    assert num_runs(up) == before
    for path in ("events/in", "events/out", "logs/out"):
        with pytest.raises(InvalidStatus):
            connect(f"{up.api.replace('http', 'ws')}/{path}")
        with pytest.raises(WebSocketException):  # the protocol of Prefect's clients, with a wrong login
            connect_with_wrong_login(f"{up.api.replace('http', 'ws')}/{path}")


def connect_with_wrong_login(url: str) -> None:
    """Authenticate to a web socket with a wrong login, and read from it."""
    with connect(url, subprotocols=["prefect"]) as socket:  # type: ignore[list-item]  # websockets wants a NewType of str
        socket.send('{"type": "auth", "token": "lakevision:guessed"}')
        while True:
            assert "auth_success" not in str(socket.recv(timeout=30))


def test_login_is_in_no_command_line_and_in_one_file(up: Up) -> None:
    """Only the owner may read the login, the home and its databases; the fixture checks again after all runs."""
    check_for_leaks(up)
    files = [auth_file(up.home), *up.home.glob("mlflow.db*"), *up.home.glob("prefect/prefect.db*")]
    assert len(files) >= 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in (up.home, up.home / "prefect")} == {0o700}


def test_printed_instructions_log_in_on_the_page_and_on_the_command_line(up: Up) -> None:
    """The printed command has the path of the login's file and not the login."""
    page, command = (next(line for line in up.printed if part in line) for part in ("to log in:", "export "))
    assert up.auth in page
    assert up.auth not in command
    export = command[command.index("export ") :].strip()
    completed = run_printed(f"{export}; .venv/bin/python -m prefect work-pool ls", timeout=240)
    assert completed.returncode == 0, completed.stderr
    assert "gpu" in completed.stdout


ASSISTANT = "/ajax-api/3.0/mlflow/assistant"
EXPERIMENTS = "/api/2.0/mlflow/experiments"


@pytest.mark.parametrize(
    ("headers", "method", "path", "status"),
    [
        ({"Host": "page.example"}, "GET", "/", 403),
        ({"Host": "127.0.0.1.page.example:5000"}, "GET", "/", 403),
        ({"Origin": FOREIGN}, "POST", f"{EXPERIMENTS}/create", 403),
        # The origin of another server on this machine, which MLflow accepts by default.
        ({"Origin": "http://localhost:1"}, "POST", f"{EXPERIMENTS}/create", 403),
        ({"Origin": "http://127.0.0.1:1"}, "POST", "/graphql", 403),
        ({"Origin": "null"}, "POST", "/graphql", 403),
        ({"Origin": "http://localhost:1"}, "GET", f"{EXPERIMENTS}/search?max_results=1", 403),
        ({"Origin": "http://localhost:1"}, "OPTIONS", f"{EXPERIMENTS}/create", 403),
        # Routes that run commands, send requests to other addresses, or start jobs.
        ({}, "PUT", f"{ASSISTANT}/config", 404),
        ({}, "POST", f"{ASSISTANT}/message", 404),
        ({}, "POST", f"/{ASSISTANT}/message", 404),
        ({}, "GET", f"{ASSISTANT}/sessions/x/stream", 404),
        ({}, "POST", "/gateway/proxy/x/y", 404),
        ({}, "POST", "/ajax-api/2.0/mlflow/gateway-proxy", 404),
        ({}, "POST", "/api/3.0/mlflow/gateway/secrets/create", 404),
        ({}, "POST", "/ajax-api/3.0/jobs/", 404),
        ({}, "POST", "/api/2.0/mlflow/webhooks", 404),
    ],
)
def test_mlflow_ui_refuses_foreign_hosts_foreign_origins_and_disabled_routes(
    up: Up, headers: dict[str, str], method: str, path: str, status: int
) -> None:
    """They are refused even with the login, which a browser sends with every request, and have no CORS header."""
    for login in (authorization(up.auth), {}):
        body = '{"name": "x"}' if method in {"POST", "PUT"} else None
        response = httpx.request(method, f"{up.mlflow}{path}", headers=headers | login, content=body)
        assert response.status_code == status
        assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize("guess", [None, "lakevision:guessed", ":"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/version"),
        ("GET", "/get-artifact?run_id=x&path=prefect/auth-string"),
        ("GET", "/graphql"),
        ("POST", "/ajax-api/2.0/mlflow/upload-artifact?run_uuid=x&path=y"),
    ],
)
def test_mlflow_ui_requires_the_login(up: Up, guess: str | None, method: str, path: str) -> None:
    """All paths except the health check require the login."""
    headers = {} if guess is None else authorization(guess)
    response = httpx.request(method, f"{up.mlflow}{path}", headers=headers)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"].startswith("Basic ")
    assert httpx.get(f"{up.mlflow}/health").status_code == 200


def test_mlflow_ui_shows_the_files_of_a_moved_home(up: Up, champion: tuple[Path, ModelRef]) -> None:
    """Artifacts of a run, and the location of a registered model."""
    _home, model = champion
    headers = authorization(up.auth)
    card = httpx.get(f"{up.mlflow}/get-artifact?run_id={model.run_id}&path={CARD}", headers=headers)
    assert card.raise_for_status().text == "# the card"
    version = f"{up.mlflow}/ajax-api/2.0/mlflow/model-versions/get-download-uri?name={model.name}&version=1"
    location = httpx.get(version, headers=headers).raise_for_status().json()["artifact_uri"]
    assert location.startswith(f"{up.home.as_uri()}/artifacts/models/")


def test_another_user_cannot_create_an_experiment(up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artifact location with a symbolic link would give access to all files of the owner."""
    planted = {"name": "planted", "artifact_location": str(tmp_path)}
    assert httpx.post(f"{up.mlflow}{EXPERIMENTS}/create", json=planted).status_code == 401
    # With the login, MLflow's pages and clients work.
    search = {"max_results": 50}
    headers = authorization(up.auth) | {"Origin": up.mlflow}
    found = httpx.post(f"{up.mlflow}{EXPERIMENTS}/search", json=search, headers=headers).raise_for_status().json()
    names = {experiment["name"] for experiment in found["experiments"]}
    assert "lakevision" in names
    assert "planted" not in names
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", up.auth)
    assert {experiment.name for experiment in MlflowClient(up.mlflow).search_experiments()} == names


def test_mlflow_ui_is_one_process_without_the_login_of_prefect(up: Up) -> None:
    """MLflow's eight job runners are not started, and its environment has no login of Prefect's API."""
    stack = psutil.Process(up.process.pid)
    (mlflow,) = [child for child in stack.children() if "deployments.stack.mlflow_ui" in child.cmdline()]
    assert mlflow.children(recursive=True) == []
    assert not [name for name in mlflow.environ() if name.startswith("PREFECT_") and "AUTH" in name]


def test_ten_users_submit_concurrently(up: Up) -> None:
    """No request fails because of another writer: SQLite queues them."""
    deployment = up.deployment("maintain")["id"]
    statuses: Counter[tuple[str, int]] = Counter()

    def submit(number: int) -> None:
        client = up.client(f"user-{number}")
        for _ in range(5):
            # Scheduled in the far future, so that no worker starts it.
            state = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
            created = client.post(f"/deployments/{deployment}/create_flow_run", json={"state": state})
            statuses["create", created.status_code] += 1
            if created.status_code == 201:
                run = created.json()["id"]
                cancelled = client.post(
                    f"/flow_runs/{run}/set_state", json={"state": {"type": "CANCELLED"}, "force": True}
                )
                statuses["cancel", cancelled.status_code] += 1

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {("create", 201): 50, ("cancel", 201): 50}


def test_active_schedule_creates_runs_that_complete(up: Up) -> None:
    """The scheduler is a background service of the server, whose failures no page shows."""
    deployment = up.deployment("maintain")["id"]
    code = f"""
import time
from datetime import timedelta
from uuid import UUID
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.schedules import IntervalSchedule
deployment = UUID("{deployment}")
wanted = {{"deployment_id": {{"any_": [deployment]}}}}
of_deployment = FlowRunFilter.model_validate(wanted)
# The server schedules an hour of runs, and would send all of them with each answer.
begun = FlowRunFilter.model_validate(wanted | {{"state": {{"type": {{"not_any_": ["SCHEDULED", "PENDING"]}}}}}})
with get_client(sync_client=True) as client:
    made, = client.create_deployment_schedules(deployment, [(IntervalSchedule(interval=timedelta(minutes=1)), True)])
    def runs(wanted):
        return [run for run in client.read_flow_runs(flow_run_filter=wanted) if run.auto_scheduled]
    while not (upcoming := runs(of_deployment)):
        time.sleep(0.5)
    print("upcoming", upcoming[0].state.type.value)
    while not any(run.start_time for run in runs(begun)):
        time.sleep(1)
    client.delete_deployment_schedule(deployment, made.id)
    while not (ended := [run for run in runs(begun) if run.start_time and run.state.is_final()]):
        time.sleep(1)
    print("ended", ended[0].state.type.value)
"""
    environment = plain_environment(
        LAKEVISION_HOME=str(up.home), PREFECT_API_URL=up.api, PREFECT_API_AUTH_STRING=up.auth
    )
    completed = run_python("-c", code, environment=environment, timeout=400)
    assert completed.stdout.splitlines() == ["upcoming SCHEDULED", "ended COMPLETED"], completed.stderr


def test_run_without_the_login_is_refused_before_it_starts(up: Up) -> None:
    """A terminal may have PREFECT_API_URL without PREFECT_API_AUTH_STRING."""
    environment = plain_environment(LAKEVISION_HOME=str(up.home), PREFECT_API_URL=up.api)
    completed = run_python("-m", "flows.maintain", environment=environment, timeout=240)
    assert completed.returncode == 2
    assert (
        f"the Prefect server '{up.api}' (PREFECT_API_URL) refuses the login: set PREFECT_API_AUTH_STRING"
        in completed.stderr
    )
    assert "Traceback" not in completed.stdout + completed.stderr


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    """Run a headless Chromium."""
    with chromium() as started:
        yield started


def test_user_logs_in_and_starts_a_run_from_the_form(up: Up, browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Prefect's pages work with the login and the CSRF check."""
    deployment = up.deployment("maintain")["id"]
    before = num_runs(up)
    wait = WebDriverWait(browser, WAIT_SECONDS)

    browser.get(f"{up.url}/login")
    advertised = ".p-toast-container__toast a[href*='app.prefect.cloud']"
    wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, advertised))  # Prefect's page still has it.
    assert "Login" in text_of(browser)
    assert "Oops" not in text_of(browser)
    browser.get(f"{up.url}/deployments/deployment/{deployment}/run")
    log_in(browser, "lakevision:guessed")
    wait.until(lambda page: "Authentication failed" in page.page_source)
    assert "/login" in browser.current_url
    browser.get(f"{up.url}/login?redirect=/deployments/deployment/{deployment}/run")
    log_in(browser, up.auth)
    form = wait.until(lambda page: page.find_element(By.XPATH, "//button[normalize-space()='Submit']"))
    browser.save_screenshot(str(tmp_path / "form.png"))
    form.click()
    wait.until(lambda page: "/run" not in page.current_url.rsplit("/", maxsplit=1)[-1])
    wait.until(lambda _: num_runs(up) == before + 1)
    browser.save_screenshot(str(tmp_path / "submitted.png"))
    database = sqlite3.connect(f"file:{up.home}/prefect/prefect.db?mode=ro", uri=True)
    newest = "SELECT id FROM flow_run ORDER BY created DESC LIMIT 1"
    run = database.execute(newest).fetchone()[0]
    deadline = time.monotonic() + 240
    while not up.client().get(f"/flow_runs/{run}").json()["start_time"]:
        assert time.monotonic() < deadline, "no worker has taken the run that the form submitted"
        time.sleep(1.0)


def test_user_logs_in_to_mlflow_and_sees_the_runs(up: Up, browser: webdriver.Chrome, tmp_path: Path) -> None:
    """MLflow's pages work with the login, with the menu of model training alone, and without the Assistant."""
    wait = WebDriverWait(browser, WAIT_SECONDS)
    log_in_to_mlflow(browser, up.mlflow, up.auth)
    for _visit in range(2):  # The browser has the second page.
        browser.get(f"{up.mlflow}/#/experiments")
        wait.until(lambda page: "lakevision" in text_of(page) and "Model registry" in text_of(page))
        browser.save_screenshot(str(tmp_path / "mlflow.png"))
        assert not {"GenAI", "AI Gateway", "Prompts", "MLflow Assistant"} & {*text_of(browser).splitlines()}
        browser.refresh()
    status = browser.execute_async_script(
        "fetch('ajax-api/2.0/mlflow/experiments/search?max_results=9').then(a => arguments[0](a.status))"
    )
    assert status == 200
