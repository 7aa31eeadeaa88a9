"""The processes of a stack: their environment, the login, and what is waited for."""

import os
import socket
import stat
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from deployments import stack_processes
from deployments.local_stack import local_stack
from deployments.login import OWN_STRING, auth_file, auth_string
from deployments.stack_processes import LocalStack
from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.storage import resolve_storage
from tests.builders.processes import free_port

RUNS = [sys.executable, "-c", "import time; time.sleep(60)"]
FAILS = [sys.executable, "-c", "import sys, time; time.sleep(0.2); sys.exit('no such table')"]
ANSWERS = "from http.server import *; HTTPServer(('127.0.0.1', {port}), SimpleHTTPRequestHandler).serve_forever()"


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    """Return a stack without processes, which ends those that a test starts."""
    monkeypatch.delenv(OWN_STRING, raising=False)
    made = LocalStack(tmp_path / "home", free_port(), free_port())
    yield made
    made.end()


def test_the_login_is_made_once_for_a_home_and_read_by_its_owner_alone(stack: LocalStack) -> None:
    """Server and clients of the next stack on this home get the same."""
    first = auth_string(stack.home)
    assert first.startswith("lakevision:")
    assert len(first) > 40
    assert auth_string(stack.home) == first == stack.environment["PREFECT_API_AUTH_STRING"]
    assert stack.environment[OWN_STRING] == first
    file = auth_file(stack.home)
    assert file.read_text() == f"{first}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert auth_string(stack.home.parent / "another") != first


@pytest.mark.parametrize("spoilt", [0o644, 0o640])
def test_a_login_that_others_could_read_is_replaced(stack: LocalStack, spoilt: int) -> None:
    """They may have read it."""
    first = auth_string(stack.home)
    auth_file(stack.home).chmod(spoilt)
    second = auth_string(stack.home)
    assert second != first
    assert stat.S_IMODE(auth_file(stack.home).stat().st_mode) == 0o600


def test_a_login_that_another_user_has_planted_is_replaced(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of theirs, and a link to one that we can read."""
    first = auth_string(stack.home)
    planted = stack.home / "planted"
    auth_file(stack.home).rename(planted)
    auth_file(stack.home).symlink_to(planted)
    second = auth_string(stack.home)
    assert second != first
    assert planted.read_text() == f"{first}\n"
    opened = os.fstat

    def of_another(descriptor: int) -> os.stat_result:
        status = list(opened(descriptor))
        status[stat.ST_UID] += 1
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", of_another)
    assert auth_string(stack.home) != second


def test_a_folder_of_another_user_holds_no_login(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared home, the first to come may be another; our own that was left open is closed."""
    folder = auth_file(stack.home).parent
    folder.mkdir(parents=True, mode=0o755)
    first = auth_string(stack.home)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    stack.home.chmod(0o777)
    assert auth_string(stack.home) == first
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    for asked in (lambda: auth_string(stack.home), stack.start_server):
        with pytest.raises(WrongInput, match=r"prefect' belongs to another user.*set LAKEVISION_HOME"):
            asked()
    with pytest.raises(WrongInput, match="belongs to another user"), local_stack(stack.home, stack.port):
        pass


def test_nobody_else_listens_on_a_port_that_was_found_free(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the check on, and not only when the server has been imported: workers send the login there."""
    addresses = [("127.0.0.1", stack.port), ("127.0.0.1", stack.mlflow_port), ("0.0.0.0", stack.port)]  # noqa: S104

    def another_user_listens(_: LocalStack) -> None:
        for address in addresses:
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    other.bind(address)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStack, "start_server", another_user_listens)
    with pytest.raises(KeyboardInterrupt), local_stack(stack.home, stack.port, stack.mlflow_port):
        pass
    with socket.socket() as later:  # the ports are free again
        later.bind(addresses[0])
        with pytest.raises(WrongInput, match=f"port {stack.port} for the Prefect server is in use"):
            stack.hold_ports("prefect-server")


def test_a_port_whose_server_has_ended_refuses_connections_and_is_nobody_else_s(stack: LocalStack) -> None:
    """A browser hears at once that MLflow's UI is not there; it would wait for ever on a port that only listens."""
    stack.hold_ports("mlflow-ui")
    stack.start("mlflow-ui", [sys.executable, "-c", "raise SystemExit(3)"])
    dict(stack._processes)["mlflow-ui"].wait(timeout=60)
    stack.check_alive()
    with socket.socket() as browser, pytest.raises(ConnectionRefusedError):
        browser.connect(("127.0.0.1", stack.mlflow_port))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", stack.mlflow_port))


def test_the_login_goes_to_no_proxy(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's proxy is for other machines; who else is asked past it stays so."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(30)
        asked: list[bytes] = []

        def refuse() -> None:
            with suppress(OSError):  # closed when the test ends
                while True:
                    connection, _ = proxy.accept()
                    with connection:
                        asked.append(connection.recv(4096))
                        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=refuse, daemon=True).start()
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "intranet.example")
        stack.start("prefect-server", [sys.executable, "-c", ANSWERS.format(port=stack.port)])
        stack.wait_for("/", "prefect-server")
        assert asked == []
        environment = stack.environment
        assert environment["no_proxy"] == environment["NO_PROXY"] == "intranet.example,127.0.0.1,localhost"
        monkeypatch.setenv("no_proxy", environment["no_proxy"])
        monkeypatch.setenv("NO_PROXY", environment["NO_PROXY"])
        # As clients in the stack ask.
        with urllib.request.build_opener().open(f"{stack.url}/", timeout=30) as answer:
            assert answer.status == 200
        assert asked == []
        assert stack.environment["no_proxy"] == environment["no_proxy"]
        monkeypatch.setenv("no_proxy", "*")
        assert stack.environment["no_proxy"] == "*"


def test_the_user_s_own_login_wins_and_is_kept_nowhere(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the server and for what talks to it; that of another server has no say."""
    monkeypatch.setenv(OWN_STRING, "me:mine")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "of:another")
    assert stack.environment[OWN_STRING] == "me:mine"
    assert stack.environment["PREFECT_API_AUTH_STRING"] == "me:mine"
    assert not auth_file(stack.home).exists()


def test_runs_of_a_stack_with_another_home_track_where_its_ui_shows_them(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the form names another tracking."""
    for name, value in stack.environment.items():
        monkeypatch.setenv(name, value)
    shown = resolve_storage(StorageConfig()).tracking
    assert shown == f"sqlite:///{stack.home}/mlflow.db"
    assert resolve_storage(StorageConfig(home="/another/home")).tracking == shown
    chosen = StorageConfig(home="/another/home", tracking="http://mlflow:5000")
    assert resolve_storage(chosen).tracking == "http://mlflow:5000"


def test_a_part_is_waited_for_as_long_as_it_lives_and_that_is_said(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers late; a user hears what is waited for, and where its log is."""
    monkeypatch.setattr(stack_processes, "SAY_SECONDS", 0.5)
    late = f"import time; time.sleep(2); {ANSWERS.format(port=stack.port)}"
    stack.start("prefect-server", [sys.executable, "-c", late])
    stack.wait_for("/", "prefect-server")
    said = capsys.readouterr().out
    assert "==> waiting for prefect-server for " in said
    assert str(stack.log_file("prefect-server")) in said


def test_a_part_that_ends_is_waited_for_no_longer(stack: LocalStack) -> None:
    """Nor is one whose server has ended; the last lines of the log come with it."""
    stack.start("prefect-server", FAILS)
    with pytest.raises(RuntimeError, match=r"(?s)prefect-server ended with status 1; the end of .*no such table"):
        stack.wait_for("/api/health", "prefect-server")
    stack.start("register", RUNS)
    with pytest.raises(RuntimeError, match="prefect-server ended with status 1"):
        stack.finish("register")


def test_a_registration_that_is_done_ends_nothing(stack: LocalStack) -> None:
    """And one that failed says why."""
    stack.start("prefect-server", RUNS)
    stack.run("register", [sys.executable, "-c", "pass"])
    stack.check_alive()
    stack.start("worker-gpu", FAILS)  # which a registration has no need of
    dict(stack._processes)["worker-gpu"].wait()
    stack.run("register", [sys.executable, "-c", "pass"])
    with pytest.raises(RuntimeError, match="worker-gpu ended with status 1"):
        stack.check_alive()
    with pytest.raises(RuntimeError, match=r"(?s)register ended with status 1; .*no such table"):
        stack.run("register", FAILS)


def test_the_stack_goes_on_without_mlflow_s_ui(stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    """One warning, with the reason."""
    stack.start("prefect-server", RUNS)
    stack.start("mlflow-ui", FAILS)
    dict(stack._processes)["mlflow-ui"].wait()
    for _ in range(2):
        stack.check_alive()
    said = capsys.readouterr().out
    assert said.count("warning: mlflow-ui ended with status 1") == 1
    assert "no such table" in said
    assert not stack.runs("mlflow-ui")
    assert stack.runs("prefect-server")
