"""The service beside MLflow's server, LitServe and the bare forward pass: rates and times for 1, 8 and 64 clients.

All of them have the same model package, mobilenet_v2 at 224 pixels, and get the same JPEGs, in turns. A server is
stopped while another one is asked: some poll. MLflow's server is as it comes, and gets an image as base64 in JSON, its
only way. Then the service alone: its start, twenty reloads while clients ask, an overload, and the cost of its log.

Run: `make bench-serve`; BENCH_ARGS=--quick for one round of each.
"""

import argparse
import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.config.serving import ServeRun
from tasks.serve.service import OPENER, running_service
from tasks.system.listening import free_port
from tasks.tracking.server import prepare_tracking
from tests.benchmarks.figures import Figure, rate_figure, write_figures
from tests.benchmarks.peers import install_beside, log_file
from tests.benchmarks.predict_data import MODEL, Inputs, register_model, write_source

CLIENTS = (1, 8, 64)
NUM_IMAGES = 32
SECONDS = 8.0
"""Seconds of a round of one server and number of clients."""

NUM_RELOADS = 20
START_GOAL = 10.0
LITSERVE = ("litserve==0.2.19", "pyzmq", "websockets", "watchfiles", "uvloop")


def http_request(port: int, path: str, kind: str, body: bytes) -> bytes:
    """Return the bytes of a request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def form_of(image: bytes) -> tuple[str, bytes]:
    """Return content type and body of a form with an image."""
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    return "multipart/form-data; boundary=b", head + image + b"\r\n--b--\r\n"


def forms(inputs: Inputs, port: int) -> list[bytes]:
    """Return the requests of the images as forms."""
    return [http_request(port, "/predict", *form_of(file.read_bytes())) for file in inputs.files()]


def json_requests(inputs: Inputs, port: int) -> list[bytes]:
    """Return the requests of the images to MLflow's server."""
    encoded = [base64.b64encode(file.read_bytes()).decode() for file in inputs.files()]
    tables = [json.dumps({"dataframe_split": {"columns": ["content"], "data": [[text]]}}) for text in encoded]
    return [http_request(port, "/invocations", "application/json", table.encode()) for table in tables]


def clients_command(folder: Path, port: int, clients: int, requests: list[bytes], seconds: float) -> list[str]:
    """Return the command of the clients' process, whose requests are written to files."""
    files = folder / f"requests-{port}"
    files.mkdir(exist_ok=True)
    for number, request in enumerate(requests):
        (files / f"{number:03d}").write_bytes(request)
    script = str(ROOT / "tests/benchmarks/serve_client.py")
    return [sys.executable, script, f"127.0.0.1:{port}", str(clients), str(seconds), str(files)]


def ask(folder: Path, port: int, clients: int, requests: list[bytes]) -> dict[str, Any]:
    """Return the answer of the clients' process."""
    command = clients_command(folder, port, clients, requests, SECONDS)
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def stop(group: int, running: ExitStack) -> None:
    """Stop the processes of a server until the stack ends."""
    os.killpg(group, signal.SIGSTOP)
    running.callback(os.killpg, group, signal.SIGCONT)


def ask_alone(group: int, folder: Path, port: int, clients: int, requests: list[bytes]) -> dict[str, Any]:
    """Return the answer of the clients' process; the server is stopped before and after."""
    os.killpg(group, signal.SIGCONT)
    found = ask(folder, port, clients, requests)
    os.killpg(group, signal.SIGSTOP)
    return found


@contextmanager
def server(command: Sequence[str], port: int, path: str, log: Any, environment: dict[str, str]) -> Iterator[int]:
    """Run a peer until the block ends, which begins when it answers; the value is its process id."""
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True)
    try:
        latest = time.monotonic() + 180
        while not _answers(f"http://127.0.0.1:{port}{path}"):
            if process.poll() is not None or time.monotonic() > latest:
                raise RuntimeError(f"{command[:4]} did not start: see {log.name}")
            time.sleep(0.2)
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with OPENER.open(url, timeout=5):
            return True
    except OSError:
        return False


def against_peers(inputs: Inputs, litserve: str | None, num_rounds: int, log: Any) -> list[Figure]:
    """Compare rates and times in turns."""
    ports = {name: free_port() for name in ("ours", "MLflow", "LitServe")}
    requests = {name: (json_requests if name == "MLflow" else forms)(inputs, port) for name, port in ports.items()}
    groups = {}
    storage = inputs.storage()
    tracking = {"MLFLOW_TRACKING_URI": storage.tracking, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    uri = ["--model-uri", f"models:/{MODEL}@champion", "--env-manager", "local", "--port", str(ports["MLflow"])]
    rounds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    bare_rates: list[float] = []
    with ExitStack() as running:
        groups["ours"] = running.enter_context(running_service(parameters(inputs, ports["ours"]), storage)).process.pid
        command = ["mlflow", "models", "serve", *uri]
        groups["MLflow"] = running.enter_context(server(command, ports["MLflow"], "/health", log, tracking))
        if litserve is not None:
            script = [litserve, str(ROOT / "tests/benchmarks/serve_litserve.py"), str(inputs.package)]
            command = [*script, str(ports["LitServe"])]
            groups["LitServe"] = running.enter_context(server(command, ports["LitServe"], "/health", log, {}))
        names = list(groups)
        for group in groups.values():
            stop(group, running)
        for number in range(num_rounds):
            for clients in CLIENTS:
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    found = ask_alone(groups[name], inputs.folder, ports[name], clients, requests[name])
                    rounds.setdefault((name, clients), []).append(found)
                    print(f"{clients} clients, {name}: {found}", flush=True)
            script = [sys.executable, str(ROOT / "tests/benchmarks/serve_bare.py"), str(inputs.package)]
            done = subprocess.run(
                [*script, str(inputs.files()[0]), str(SECONDS)], capture_output=True, text=True, check=True
            )
            bare_rates.append(float(done.stdout))
            print(f"bare: {bare_rates[-1]:.1f}", flush=True)
    figures = []
    for clients in CLIENTS:
        ours = rounds["ours", clients]
        for name in names[1:]:
            theirs = rounds[name, clients]
            goal = {("MLflow", 64): 3.0, ("LitServe", 64): 1.0}.get((name, clients))
            pairs = [(one["rate"], other["rate"]) for one, other in zip(ours, theirs, strict=True)]
            figures.append(rate_figure(f"requests/s, {clients} clients", "", name, pairs, goal))
            for part in ("p50", "p99"):
                mine, other = median(one[part] for one in ours), median(one[part] for one in theirs)
                figures.append(Figure(f"{part}, {clients} clients", mine, "ms", name, other, mine / other, None, None))
    pairs = list(zip([one["rate"] for one in rounds["ours", 64]], bare_rates, strict=True))
    figures.append(rate_figure("images/s, 64 clients", "", "bare forward pass", pairs, 0.8))
    return figures


def parameters(inputs: Inputs, port: int, **serve: Any) -> ServeRun:
    """Return the parameters of a service of the benchmark's model."""
    given = {"storage": inputs.storage().as_config(), "promote": {"model_name": MODEL}, "serve": {"port": port} | serve}
    return ServeRun.model_validate(given)


def alone(inputs: Inputs, num_rounds: int) -> list[Figure]:
    """Measure what no peer has: start, reloads, overload, and the cost of the log."""
    storage = inputs.storage()
    starts = []
    for _number in range(num_rounds):
        port, began = free_port(), time.monotonic()
        with running_service(parameters(inputs, port), storage):
            starts.append(time.monotonic() - began)
    figures = [_bound("start to ready, warm", median(starts), "s", START_GOAL)]
    port = free_port()
    with running_service(parameters(inputs, port), storage):
        figures += reloads(inputs, port)
    rates: dict[bool, list[float]] = {True: [], False: []}
    ports = {is_logged: free_port() for is_logged in rates}
    with ExitStack() as running:
        groups = {}
        for is_logged, own in ports.items():
            started = running_service(parameters(inputs, own, log_requests=is_logged), storage)
            groups[is_logged] = running.enter_context(started).process.pid
        for group in groups.values():
            stop(group, running)
        for number in range(2 * num_rounds):
            for is_logged in (True, False) if number % 2 else (False, True):
                own = ports[is_logged]
                found = ask_alone(groups[is_logged], inputs.folder, own, 64, forms(inputs, own))
                rates[is_logged].append(found["rate"])
    pairs = list(zip(rates[True], rates[False], strict=True))
    figures.append(rate_figure("requests/s with the log, 64 clients", "", "without", pairs, 0.95))
    port = free_port()
    with running_service(parameters(inputs, port, max_waiting=64), storage):
        statuses = ask(inputs.folder, port, 256, forms(inputs, port))["statuses"]
    print(f"overload: {statuses}", flush=True)
    others = sum(num for status, num in statuses.items() if status not in {"200", "429", "503"})
    figures.append(
        _bound("answers of 256 clients, 64 of whom may wait, that are neither 200, 429 nor 503", others, "", 0)
    )
    return figures


def register_second(inputs: Inputs) -> None:
    """Register the same model once more, as version 2."""
    from tasks.refs import RunRef
    from tasks.tracking import models
    from tasks.tracking.tracked_run import tracked_run

    storage = inputs.storage()
    with tracked_run(storage, "benchmark", "second", {"data": {"table": ""}}, {}, None) as run:
        run.log_model(inputs.package)
    models.register_run(storage, RunRef(run_id=run.run_id), MODEL)


def reloads(inputs: Inputs, port: int) -> list[Figure]:
    """Move the alias again and again while clients ask; return failures and the slowest reload."""
    from tasks.tracking import models

    storage = inputs.storage()
    versions = [models.numbered_version(storage, MODEL, number) for number in ("1", "2")]
    command = clients_command(inputs.folder, port, 8, forms(inputs, port), NUM_RELOADS * 4.0)
    slowest = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        for number in range(NUM_RELOADS):
            wanted = versions[(number + 1) % 2]
            assert wanted is not None
            models.set_alias(storage, wanted, "champion")
            began = time.monotonic()
            while _version(port) != wanted.version:
                time.sleep(0.05)
            slowest = max(slowest, time.monotonic() - began)
        out, _errors = clients.communicate()
    statuses = json.loads(out)["statuses"]
    print(f"{NUM_RELOADS} reloads: {statuses}, the slowest after {slowest:.1f} s", flush=True)
    failed = sum(num for status, num in statuses.items() if status != "200")
    return [
        _bound(f"failed requests in {NUM_RELOADS} reloads, of {sum(statuses.values())}", failed, "", 0),
        _bound("slowest reload after the alias moved", slowest, "s", 5),
    ]


def _version(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=30) as answer:
        found: int = json.loads(answer.read())["model_version"]
    return found


def _bound(figure: str, value: float, unit: str, bound: float) -> Figure:
    """Return a figure without a peer, which holds up to a bound."""
    return Figure(figure, value, unit, "bound", bound, value / bound if bound else value, bound, value <= bound)


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="one round of each")
    num_rounds = 1 if parser.parse_args().quick else 3
    with TemporaryDirectory() as scratch, log_file("serve").open("w") as log:
        inputs = Inputs(Path(scratch), NUM_IMAGES)
        write_source(inputs)
        prepare_tracking(inputs.storage())
        register_model(inputs)
        register_second(inputs)
        litserve = install_beside(Path(scratch) / "litserve", LITSERVE, "litserve", log)
        figures = against_peers(inputs, litserve, num_rounds, log) + alone(inputs, num_rounds)
    write_figures(
        "serve",
        figures,
        f"mobilenet_v2 at 224 pixels, {NUM_IMAGES} JPEGs of 160 to 1,024 pixels, {num_rounds} rounds in turns",
    )


if __name__ == "__main__":
    main()
