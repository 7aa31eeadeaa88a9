"""`make up` as others see it: a page of another origin, another user of the machine, and the user who logs in."""

import sqlite3
import subprocess
import sys
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

from deployments.login import auth_file, authorization
from tests.builders.chromium import WAIT_SECONDS, chromium, log_in, log_in_to_mlflow, text_of
from tests.builders.processes import plain_environment, run_python, server_errors
from tests.builders.stack import Up, running_up

FOREIGN = "http://page.example"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Run `make up` until the last test, and look through its server's log."""
    with running_up(tmp_path_factory.mktemp("up") / "home") as started:
        yield started
        check_for_leaks(started)
    assert server_errors(started.home) == []


def check_for_leaks(up: Up) -> None:
    """Fail where the login, as it is or as a header has it, is in a command line or in a file beside its own."""
    # `info` and not `cmdline()`, which raises where a process has ended since: a zombie has no command line to leak.
    command_lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert any("deployments.prefect_server" in line for line in command_lines)
    password = up.auth.partition(":")[2]
    header = authorization(up.auth)["Authorization"].removeprefix("Basic ")
    assert not [line for line in command_lines if password in line or header in line]
    files = [path for path in up.home.rglob("*") if path.is_file()]
    assert [file for file in files if password.encode() in file.read_bytes()] == [auth_file(up.home)]
    assert [file for file in files if header.encode() in file.read_bytes()] == []


def run_a_command(up: Up, client: httpx.Client, proof: Path, **headers: str) -> int:
    """Ask for a run whose worker would run a command of ours; return the answer's status."""
    deployment = up.deployment("maintain")["id"]
    body = f'{{"state": {{"type": "SCHEDULED"}}, "job_variables": {{"command": "touch {proof}"}}}}'
    # As a page may send it to another origin without being asked whether it may: with no content type.
    answer = client.post(f"{up.api}/deployments/{deployment}/create_flow_run", content=body, headers=headers)
    return answer.status_code


def num_runs(up: Up) -> int:
    """Return how many flow runs there are."""
    return int(up.client().post("/flow_runs/count", json={}).raise_for_status().json())


def test_a_page_of_another_origin_starts_no_command(up: Up, tmp_path: Path) -> None:
    """Neither as it is, nor where the browser has the login; and it may read nothing."""
    before = num_runs(up)
    with httpx.Client() as plain:
        assert run_a_command(up, plain, tmp_path / "proof", Origin=FOREIGN) == 403
        assert run_a_command(up, plain, tmp_path / "proof", Origin=FOREIGN, **authorization(up.auth)) == 403
        for origin, allowed in ((FOREIGN, None), (up.url, up.url)):
            answer = plain.get(f"{up.api}/health", headers={"Origin": origin})
            assert answer.headers.get("Access-Control-Allow-Origin") == allowed
    assert num_runs(up) == before


@pytest.mark.parametrize("host", ["page.example", "127.0.0.1.page.example", "localhost.page.example:4200", ""])
def test_a_foreign_host_is_refused(up: Up, tmp_path: Path, host: str) -> None:
    """A name that was made to lead here (DNS rebinding): for a browser its page is of our own origin."""
    assert httpx.get(f"{up.url}/", headers={"Host": host}).status_code == 400
    assert httpx.get(f"{up.api}/csrf-token?client=x", headers={"Host": host}).status_code == 400
    client = up.client()
    assert run_a_command(up, client, tmp_path / "proof", Host=host) == 400


def test_another_user_of_the_machine_is_refused(up: Up, tmp_path: Path) -> None:
    """Who cannot read the file has no token, can start and read nothing, and hears no events."""
    before = num_runs(up)
    assert httpx.get(f"{up.api}/csrf-token", params={"client": "other"}).status_code == 401
    client = up.client("other")
    del client.headers["Authorization"]
    assert run_a_command(up, client, tmp_path / "proof") == 401
    assert run_a_command(up, client, tmp_path / "proof", **authorization("lakevision:guessed")) == 401
    assert client.post("/flow_runs/filter", json={}).status_code == 401
    assert client.post("/logs/filter", json={}).status_code == 401
    assert num_runs(up) == before
    for path in ("events/in", "events/out", "logs/out"):
        with pytest.raises(InvalidStatus):
            connect(f"{up.api.replace('http', 'ws')}/{path}")
        with pytest.raises(WebSocketException):  # the protocol of Prefect's clients, with another string
            talk_with_a_guess(f"{up.api.replace('http', 'ws')}/{path}")


def talk_with_a_guess(url: str) -> None:
    """Log in to a socket with a string that is not the stack's, and listen."""
    with connect(url, subprotocols=["prefect"]) as socket:  # type: ignore[list-item]
        socket.send('{"type": "auth", "token": "lakevision:guessed"}')
        while True:
            assert "auth_success" not in str(socket.recv(timeout=30))


def test_the_login_is_in_no_command_line_and_in_one_file(up: Up) -> None:
    """Which its owner alone may read, as the home and its databases; looked at again after runs, at the end."""
    check_for_leaks(up)
    files = [auth_file(up.home), *up.home.glob("mlflow.db*"), *up.home.glob("prefect/prefect.db*")]
    assert len(files) >= 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in (up.home, up.home / "prefect")} == {0o700}


def test_what_is_printed_logs_in_on_the_page_and_on_the_command_line(up: Up) -> None:
    """The command line's own line holds where the string is kept and not the string."""
    page, command = (next(line for line in up.printed if part in line) for part in ("to log in:", "export "))
    assert up.auth in page
    assert up.auth not in command
    export = command[command.index("export ") :].strip()
    done = subprocess.run(
        ["bash", "-c", f"{export}; {sys.executable} -m prefect work-pool ls"],
        env=plain_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "gpu" in done.stdout


ASSISTANT = "/ajax-api/3.0/mlflow/assistant"
EXPERIMENTS = "/api/2.0/mlflow/experiments"


@pytest.mark.parametrize(
    ("headers", "method", "path", "status"),
    [
        ({"Host": "page.example"}, "GET", "/", 403),
        ({"Host": "127.0.0.1.page.example:5000"}, "GET", "/", 403),
        ({"Origin": FOREIGN}, "POST", f"{EXPERIMENTS}/create", 403),
        # A page of another server on this machine, which MLflow itself trusts.
        ({"Origin": "http://localhost:1"}, "POST", f"{EXPERIMENTS}/create", 403),
        ({"Origin": "http://127.0.0.1:1"}, "POST", "/graphql", 403),
        ({"Origin": "null"}, "POST", "/graphql", 403),
        ({"Origin": "http://localhost:1"}, "GET", f"{EXPERIMENTS}/search?max_results=1", 403),
        ({"Origin": "http://localhost:1"}, "OPTIONS", f"{EXPERIMENTS}/create", 403),
        # What runs commands, sends requests to other addresses, or starts jobs.
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
def test_mlflow_s_ui_refuses_foreign_hosts_and_pages(
    up: Up, headers: dict[str, str], method: str, path: str, status: int
) -> None:
    """Also with the login, which a browser sends with every request; and nobody may read an answer."""
    for login in (authorization(up.auth), {}):
        body = '{"name": "x"}' if method in {"POST", "PUT"} else None
        answer = httpx.request(method, f"{up.mlflow}{path}", headers=headers | login, content=body)
        assert answer.status_code == status
        assert "Access-Control-Allow-Origin" not in answer.headers


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
def test_mlflow_s_ui_asks_for_the_login(up: Up, guess: str | None, method: str, path: str) -> None:
    """Every page and every path but the one that says that the server is there."""
    headers = {} if guess is None else authorization(guess)
    answer = httpx.request(method, f"{up.mlflow}{path}", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")
    assert httpx.get(f"{up.mlflow}/health").status_code == 200


def test_another_user_makes_no_experiment_whose_artifacts_are_our_files(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of theirs, with a link in it, would have been the way to every file of ours."""
    planted = {"name": "planted", "artifact_location": str(tmp_path)}
    assert httpx.post(f"{up.mlflow}{EXPERIMENTS}/create", json=planted).status_code == 401
    # With the login it is MLflow as it is, for its pages and for its clients.
    search = {"max_results": 50}
    headers = authorization(up.auth) | {"Origin": up.mlflow}
    found = httpx.post(f"{up.mlflow}{EXPERIMENTS}/search", json=search, headers=headers).raise_for_status().json()
    names = {experiment["name"] for experiment in found["experiments"]}
    assert "lakevision" in names
    assert "planted" not in names
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", up.auth)
    assert {experiment.name for experiment in MlflowClient(up.mlflow).search_experiments()} == names


def test_mlflow_s_ui_is_one_process_without_the_login_to_prefect(up: Up) -> None:
    """Without the job runner's eight, and with a login that starts no run."""
    stack = psutil.Process(up.process.pid)
    (mlflow,) = [child for child in stack.children() if "deployments.mlflow_ui" in child.cmdline()]
    assert mlflow.children(recursive=True) == []
    assert not [name for name in mlflow.environ() if name.startswith("PREFECT_") and "AUTH" in name]


def test_ten_users_submit_at_once(up: Up) -> None:
    """Nothing is refused because another one writes: SQLite lets the writers queue."""
    deployment = up.deployment("maintain")["id"]
    statuses: Counter[tuple[str, int]] = Counter()

    def submit(number: int) -> None:
        client = up.client(f"user-{number}")
        for _ in range(5):
            # In the far future: no worker takes it.
            state = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
            made = client.post(f"/deployments/{deployment}/create_flow_run", json={"state": state})
            statuses["create", made.status_code] += 1
            if made.status_code == 201:
                run = made.json()["id"]
                changed = client.post(
                    f"/flow_runs/{run}/set_state", json={"state": {"type": "CANCELLED"}, "force": True}
                )
                statuses["cancel", changed.status_code] += 1

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {("create", 201): 50, ("cancel", 201): 50}


def test_an_active_schedule_gives_runs_and_they_run(up: Up) -> None:
    """The scheduler is a service of the server's own, whose failures no page shows."""
    deployment = up.deployment("maintain")["id"]
    code = f"""
import time
from datetime import timedelta
from uuid import UUID
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.schedules import IntervalSchedule
deployment = UUID("{deployment}")
of_deployment = FlowRunFilter.model_validate({{"deployment_id": {{"any_": [deployment]}}}})
with get_client(sync_client=True) as client:
    made, = client.create_deployment_schedules(deployment, [(IntervalSchedule(interval=timedelta(minutes=1)), True)])
    def runs():
        return [run for run in client.read_flow_runs(flow_run_filter=of_deployment) if run.auto_scheduled]
    while not (upcoming := runs()):
        time.sleep(0.5)
    print("upcoming", upcoming[0].state.type.value)
    while not any(run.start_time for run in runs()):
        time.sleep(0.5)
    client.delete_deployment_schedule(deployment, made.id)
    while not (ended := [run for run in runs() if run.start_time and run.state.is_final()]):
        time.sleep(0.5)
    print("ended", ended[0].state.type.value)
"""
    environment = plain_environment(
        LAKEVISION_HOME=str(up.home), PREFECT_API_URL=up.api, PREFECT_API_AUTH_STRING=up.auth
    )
    done = run_python("-c", code, environment=environment, timeout=400)
    assert done.stdout.splitlines() == ["upcoming SCHEDULED", "ended COMPLETED"], done.stderr


def test_a_run_without_the_login_is_refused_before_it_begins(up: Up) -> None:
    """In a terminal that has a part of what `make up` prints."""
    environment = plain_environment(LAKEVISION_HOME=str(up.home), PREFECT_API_URL=up.api)
    done = run_python("-m", "flows.maintain", environment=environment, timeout=240)
    assert done.returncode == 2
    assert (
        f"the Prefect server '{up.api}' (PREFECT_API_URL) refuses the login: set PREFECT_API_AUTH_STRING" in done.stderr
    )
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    """Run a headless Chromium."""
    with chromium() as started:
        yield started


def test_a_user_logs_in_and_starts_a_run_from_the_form(up: Up, browser: webdriver.Chrome, tmp_path: Path) -> None:
    """With the login and the CSRF check on, the pages are Prefect's own and work as without."""
    deployment = up.deployment("maintain")["id"]
    before = num_runs(up)
    wait = WebDriverWait(browser, WAIT_SECONDS)

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


def test_a_user_logs_in_to_mlflow_and_sees_the_runs(up: Up, browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Its pages are MLflow's own and work behind the login, and without the Assistant."""
    wait = WebDriverWait(browser, WAIT_SECONDS)
    log_in_to_mlflow(browser, up.mlflow, up.auth)
    browser.get(f"{up.mlflow}/#/experiments")
    wait.until(lambda page: "lakevision" in text_of(page))
    browser.save_screenshot(str(tmp_path / "mlflow.png"))
    log = browser.execute_async_script(
        "fetch('ajax-api/2.0/mlflow/experiments/search?max_results=9').then(a => arguments[0](a.status))"
    )
    assert log == 200
