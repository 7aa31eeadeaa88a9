"""A service as users run it: its processes, its models as the registry changes, its log, and its page."""

import asyncio
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import deltalake
import httpx
import psutil
import pytest
from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from flows.serve import serve
from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.model_package.classifier import ImageClassifier
from tasks.schema import REQUESTS_ARROW, columns_of
from tasks.serve.journal import Journal
from tasks.serve.registry import fetch_package
from tasks.serve.request_log import has_request, journal_file, rows_of
from tasks.serve.service import Service, ServiceFailed
from tasks.storage import Storage, resolve_storage
from tasks.system.listening import allow_connections, free_port
from tasks.tracking import models
from tasks.tracking.server import prepare_tracking
from tests.builders.chromium import chromium, text_of
from tests.builders.image_bytes import encoded
from tests.builders.processes import ROOT
from tests.builders.services import BUSY_SECONDS, NAME, asking, parameters, picture, register, service, until, workers
from tests.builders.tracking_server import TrackingServer
from tests.builders.untrained_model import CLASSES

HEADERS = {"Content-Type": "image/png"}


def ask(url: str, content: bytes) -> dict[str, object]:
    """Return the answer for an image."""
    answer = httpx.post(f"{url}/predict", content=content, headers=HEADERS, timeout=60, trust_env=False)
    answer.raise_for_status()
    found: dict[str, object] = answer.json()
    return found


def ready(url: str) -> dict[str, object]:
    """Return the versions of a worker, and its problem; an empty one if no worker answers with them."""
    try:
        answer = httpx.get(f"{url}/ready", timeout=60, trust_env=False)
    except httpx.HTTPError:
        return {}
    return dict(answer.json()) if answer.status_code == 200 else {}


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Iterator[TrackingServer]:
    """Run a tracking server, whose registry the services read."""
    folder = tmp_path_factory.mktemp("tracking-server")
    shutil.copy(empty_tracking, folder)
    with TrackingServer(f"sqlite:///{folder}/mlflow.db", folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tracking: TrackingServer) -> Storage:
    """Return a home with two versions of the model; the first is the champion, the second the challenger."""
    folder = tmp_path_factory.mktemp("serve")
    storage = resolve_storage(StorageConfig(home=str(folder / "home"), tracking=tracking.url))
    prepare_tracking(storage)
    for seed, alias in ((1, "champion"), (2, "challenger")):
        register(storage, folder, seed, alias)
    return storage


@pytest.fixture(scope="module")
def running(home: Storage) -> Iterator[Service]:
    """Run a service with two workers."""
    with service(home, num_workers=2, challenger="shadow", keep_images=True) as found:
        yield found


def test_the_answers_are_those_of_the_model_package(running: Service, home: Storage) -> None:
    """In each worker, with the version."""
    champion = models.model_with_alias(home, NAME, "champion")
    assert champion is not None
    classifier = ImageClassifier.load(Path(fetch_package(champion, home).folder))
    for seed in range(6):
        answer, (expected,) = ask(running.url, picture(seed)), classifier.predict([picture(seed)])
        (found,) = answer["predictions"]
        assert (answer["model"], found["model_version"], found["label"]) == (NAME, 1, expected.label)
        assert found["probability"] == pytest.approx(expected.probability, abs=1e-4)
    assert ready(running.url) == {"model": NAME, "model_version": 1, "challenger_version": 2, "problem": ""}


def test_a_promotion_and_a_rollback_reach_every_worker_without_a_failed_request(
    running: Service, home: Storage
) -> None:
    """Within seconds of the alias, while clients ask."""
    first, second = (models.numbered_version(home, NAME, str(number)) for number in (1, 2))
    assert first is not None
    assert second is not None
    with asking(running.url, picture()) as clients:
        clients.wait_for(1)
        for version in (second, first):
            models.set_alias(home, version, "champion")
            clients.wait_for(version.version)

    assert clients.failures == []
    # Its import takes the supervisor 10 s on a busy machine, in which no alias is looked at.
    assert not any("libtorch" in file.path for file in psutil.Process(running.process.pid).memory_maps())
    assert any("libtorch" in file.path for worker in workers(running) for file in worker.memory_maps())


def test_a_killed_worker_is_replaced(running: Service) -> None:
    """The other one answers meanwhile; only requests that the killed one had are lost."""
    before = workers(running)
    with asking(running.url, picture()) as clients:
        until(lambda: len(clients.answers) > 20)
        before[0].kill()
        until(lambda: len(workers(running)) == 2 and before[0].pid not in {worker.pid for worker in workers(running)})
        num = len(clients.answers)
        until(lambda: len(clients.answers) > num + 20)
    before[1].suspend()  # The new one alone accepts connections now.
    try:
        until(lambda: ready(running.url) != {})
    finally:
        before[1].resume()

    assert len(clients.failures) <= 4, clients.failures
    assert before[1].is_running()


def test_a_registry_that_is_away_stops_no_answer(running: Service, tracking: TrackingServer) -> None:
    """The problem is said, until the registry is back."""
    tracking.kill()
    try:
        until(lambda: tracking.url in str(ready(running.url).get("problem")))
        answer = ask(running.url, picture())
    finally:
        tracking.start()
    until(lambda: ready(running.url).get("problem") == "")

    assert answer["predictions"][0]["model_version"] == 1


def test_the_page_shows_answer_and_heat_map_and_takes_the_right_class(
    running: Service, home: Storage, tmp_path: Path
) -> None:
    """In a browser: a file with a hostile name, the five most probable classes, another class, and feedback."""
    file = tmp_path / "<img src=x onerror=alert(1)>.png"
    file.write_bytes(picture(5))
    with chromium(1000, 800) as browser:
        browser.get(f"{running.url}/")
        wait = WebDriverWait(browser, 60)
        wait.until(lambda page: f"{NAME}, version 1" in text_of(page))
        browser.find_element(By.ID, "file").send_keys(str(file))
        wait.until(lambda page: page.execute_script("return document.getElementById('heat').naturalWidth") == 448)
        rows = browser.find_elements(By.CSS_SELECTOR, "#top li")
        first = browser.find_element(By.ID, "heat").get_attribute("src")
        rows[1].find_element(By.TAG_NAME, "button").click()
        wait.until(lambda page: page.find_element(By.ID, "heat").get_attribute("src") != first)
        pressed = [row.find_element(By.TAG_NAME, "button").get_attribute("aria-pressed") for row in rows]
        browser.find_element(By.ID, "right").send_keys("a new class")
        browser.find_element(By.CSS_SELECTOR, "#wrong button").click()
        wait.until(lambda page: "Thank you: noted as a new class." in text_of(page))
        shown = text_of(browser)
        browser.find_element(By.CSS_SELECTOR, "#wrong #right").send_keys("again")
        browser.find_element(By.CSS_SELECTOR, "#wrong button").click()
        wait.until(lambda page: "has feedback already" in text_of(page))
        file.write_bytes(b"broken")
        browser.find_element(By.ID, "file").send_keys(str(file))
        wait.until(lambda page: "not_an_image" in text_of(page))
        errors = [entry for entry in browser.get_log("browser") if "Content Security Policy" in entry["message"]]

    assert len(rows) == len(CLASSES)
    assert pressed == ["false", "true", "false"]
    assert all(name in shown for name in CLASSES)
    assert errors == []


def test_every_answer_is_in_the_log_after_sigterm(home: Storage) -> None:
    """Once, with the label of the challenger in the shadow."""
    with service(home, challenger="shadow") as running:
        ids = [str(ask(running.url, picture(seed))["request_id"]) for seed in range(12)]
        before = workers(running)
    rows = rows_of(home, "requests", columns_of(REQUESTS_ARROW, "request_id", "model_version", "other_version"))

    assert running.process.returncode == 0
    assert "Traceback" not in running.log.read_text()
    assert "terminate" not in running.log.read_text()
    found = [row for row in rows.to_pylist() if row["request_id"] in ids]
    assert sorted(row["request_id"] for row in found) == sorted(ids)
    assert {(row["model_version"], row["other_version"]) for row in found} == {(1, 2)}
    assert not any(worker.is_running() for worker in before)


def test_a_killed_supervisor_takes_its_workers_with_it_and_loses_no_answer(home: Storage) -> None:
    """The port is free again, and the next service moves what the journal has."""
    with service(home) as running:
        ids = [str(ask(running.url, picture(seed))["request_id"]) for seed in range(5)]
        journal = Journal(journal_file(home))
        until(lambda: all(journal.has("requests", f"{name} 0") or has_request(home, name, 0) for name in ids))
        journal.close()
        before = workers(running)
        os.kill(running.process.pid, signal.SIGKILL)
        until(lambda: not any(worker.is_running() for worker in before))
        with pytest.raises(ServiceFailed, match="the service ended with -9"):
            running.check_alive()
    with service(home):
        pass
    rows = rows_of(home, "requests", columns_of(REQUESTS_ARROW, "request_id"))["request_id"].to_pylist()

    assert sorted(found for found in rows if found in ids) == sorted(ids)


def test_a_service_that_is_started_while_the_registry_is_away_begins_with_its_last_model(
    home: Storage, tracking: TrackingServer
) -> None:
    """Of the same settings; it looks for another one when the registry is back."""
    port = free_port()
    with service(home, port=port):
        pass
    tracking.kill()
    try:
        with service(home, port=port) as running:
            answer = ask(running.url, picture())
            found = ready(running.url)
    finally:
        tracking.start()

    assert answer["predictions"][0]["model_version"] == 1
    assert found["model_version"] == 1


def test_the_command_serves_until_it_is_ended(home: Storage, tmp_path: Path) -> None:
    """As the README has it: SIGTERM ends all of its processes, Prefect's temporary server included."""
    given = parameters(home)
    options = [*home.options, "--model_name", NAME, "--port", str(given.serve.port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "flows.serve", *options], cwd=ROOT, stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{given.serve.port}"
    try:
        until(lambda: ready(url) != {} or command.poll() is not None)
        assert command.poll() is None, log.read_text()
        answer = ask(url, picture())
        children = psutil.Process(command.pid).children(recursive=True)
    finally:
        command.terminate()
        command.wait(BUSY_SECONDS)
    _gone, left = psutil.wait_procs(children, BUSY_SECONDS)

    assert answer["model"] == NAME
    assert len(children) > 3  # Prefect's temporary server is one of them.
    assert left == []
    assert command.returncode == 130
    assert "python -m flows.serve: interrupted (SIGTERM)" in log.read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", given.serve.port)) != 0


def test_the_flow_serves_for_its_time(home: Storage, prefect_harness: None) -> None:
    """And returns what it has served."""
    report = serve(parameters(home, run_seconds=1))

    assert (report.model.name, report.model.version) == (NAME, 1)
    assert report.url.startswith("http://127.0.0.1:")
    assert report.seconds >= 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"promote": {"model_name": "nothing"}}, "the registered model 'nothing' has no version with the alias"),
        ({"predict": {"unknown_rate": 0.05}}, "predict.unknown_rate is 0.05"),
        ({"predict": {"alias": "best"}}, "has no version with the alias 'best'"),
    ],
)
def test_a_service_that_cannot_answer_is_refused(
    home: Storage, prefect_harness: None, change: dict[str, object], sentence: str
) -> None:
    """Before a process starts."""
    given = parameters(home).model_dump(exclude_defaults=True) | change
    with pytest.raises(WrongInput, match=sentence):
        serve(given)


def test_a_port_in_use_is_refused(home: Storage, prefect_harness: None) -> None:
    """With its number, and the setting."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with pytest.raises(WrongInput, match=f"port {port} for the service is in use: .*serve.port"):
            serve(parameters(home, port=port))


def shell_block(readme: str, part: str) -> str:
    """Return the only block of shell commands of a README that has this part."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / readme).read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if part in block]
    return str(found)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_of_the_readmes_are_run(running: Service, home: Storage, tmp_path: Path) -> None:
    """Those of clients with this service, and those of the live test and of explanations with its model."""
    for name, kind in (("photo.jpg", "JPEG"), ("other.heic", "HEIC"), ("new-photos/a.png", "PNG")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(Image.open(io.BytesIO(picture(6))), kind))
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\n")
    replaced = {
        "http://127.0.0.1:8000": running.url,
        "2026-11-30-6f0c...": str(ask(running.url, picture(6))["request_id"]),
        ".venv/bin/python": f"cd '{ROOT}'; {sys.executable}",
        "--tables demo-digits --model_name demo-digits": f"--tables '{home.tables}' --model_name {NAME}",
        "/data/new-photos": str(tmp_path / "new-photos"),
    }
    blocks = (
        shell_block("tasks/serve/README.md", "curl"),
        shell_block("flows/README.md", "-m flows.compare_live"),
        shell_block("flows/README.md", "-m flows.explain"),
    )
    environment = {"LAKEVISION_HOME": home.home, "LAKEVISION_TRACKING_URI": home.tracking, "CURL_HOME": str(tmp_path)}
    said = []
    for block in blocks:
        commands = block
        for before, after in replaced.items():
            commands = commands.replace(before, after)
        done = subprocess.run(
            ["bash", "-ec", commands],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (commands, done.stdout, done.stderr)
        said.append(done.stdout + done.stderr)

    assert said[0].count('"request_id"') == 2
    assert said[0].endswith('{"status":"added"}')
    with Image.open(tmp_path / "heat.jpg") as heat:
        assert heat.format == "JPEG"
    assert "is not decided to be better" in said[1]
    assert list(Path(home.home, "explanations").glob("*.jpg"))


def test_large_slow_and_many_clients_stop_no_other_one(running: Service) -> None:
    """200 MB with and without their length, clients that send a byte and wait or go, and 1,000 at once.

    Each gets a status that says why, from the processes that were there before, and nothing fails in the log.
    """
    port, image = int(running.url.rpartition(":")[2]), picture(5)
    before, said = {worker.pid for worker in workers(running)}, len(running.log.read_text())
    size = max(worker.memory_info().rss for worker in workers(running))  # One of them may have just been started.

    async def connect(head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n{head}\r\n\r\n".encode())
        return reader, writer

    async def status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        found = int((await reader.readline()).split()[1])
        writer.close()
        return found

    async def send_200_mb(head: str, part: bytes) -> int:
        reader, writer = await connect(head)
        for _megabyte in range(200):  # The answer comes after the first of them, and is read after the last one.
            writer.write(part)
            await writer.drain()
        return await status(reader, writer)

    async def ask_once() -> int:
        reader, writer = await connect(f"Content-Length: {len(image)}")
        writer.write(image)
        return await status(reader, writer)

    async def all_of_them() -> Counter[int]:
        megabyte = bytes(1_000_000)
        assert await send_200_mb("Content-Length: 200000000", megabyte) == 413
        assert await send_200_mb("Transfer-Encoding: chunked", b"f4240\r\n" + megabyte + b"\r\n") == 413
        slow = [await connect(f"Content-Length: {len(image)}") for _number in range(50)]
        for _reader, writer in slow:
            writer.write(image[:1])
        assert await ask_once() == 200
        for number, (_reader, writer) in enumerate(slow):
            (writer.close if number % 2 else writer.transport.abort)()
        return Counter(await asyncio.gather(*(ask_once() for _number in range(1000))))

    allow_connections()
    statuses = asyncio.run(all_of_them())

    assert statuses.keys() <= {200, 429, 503}
    assert statuses[200] >= 100
    ask(running.url, image)
    assert {worker.pid for worker in workers(running)} == before
    assert max(worker.memory_info().rss for worker in workers(running)) < size + (300 << 20)
    assert "Traceback" not in running.log.read_text()[said:]


def test_kept_images_are_those_of_the_requests(running: Service, home: Storage) -> None:
    """Their digests are those of the rows, after the service has ended."""
    ask(running.url, picture(77))
    running.process.terminate()
    running.process.wait(BUSY_SECONDS)
    images = deltalake.DeltaTable(home.table("request_images")).to_pyarrow_table()
    rows = rows_of(home, "requests", columns_of(REQUESTS_ARROW, "sha256"))["sha256"].to_pylist()

    assert picture(77) in images["content"].to_pylist()
    assert set(images["sha256"].to_pylist()) <= set(rows)
    assert json.dumps(sorted(images["day"].unique().to_pylist()))
