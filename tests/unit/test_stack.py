"""The processes of a stack: their environment, login, ports and startup."""

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

from deployments.stack import processes as stack_processes
from deployments.stack.local_stack import local_stack
from deployments.stack.login import OWN_STRING, auth_file, auth_string
from deployments.stack.processes import LocalStack
from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.storage import resolve_storage
from tasks.system.listening import free_port

RUNS = [sys.executable, "-c", "import time; time.sleep(60)"]
FAILS = [sys.executable, "-c", "import sys, time\ntime.sleep(0.2)\nsys.exit('no such table')"]
ANSWERS = "from http.server import *; HTTPServer(('127.0.0.1', {port}), SimpleHTTPRequestHandler).serve_forever()"


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    """Yield a stack without processes, and terminate the processes that the test started."""
    monkeypatch.delenv(OWN_STRING, raising=False)
    made = LocalStack(tmp_path / "home", free_port(), free_port())
    yield made
    made.end()


def test_login_is_created_once_per_home_and_readable_only_by_its_owner(stack: LocalStack) -> None:
    """Server and clients of the next stack with this home get the same login."""
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


@pytest.mark.parametrize("open_mode", [0o644, 0o640])
def test_login_that_other_users_could_read_is_replaced(stack: LocalStack, open_mode: int) -> None:
    """A login file with permissions for other users gets a new login, since they may have read the old one."""
    first = auth_string(stack.home)
    auth_file(stack.home).chmod(open_mode)
    second = auth_string(stack.home)
    assert second != first
    assert stat.S_IMODE(auth_file(stack.home).stat().st_mode) == 0o600


def test_login_planted_by_another_user_is_replaced(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login file of another user and a symbolic link to one are replaced."""
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


def test_login_is_never_stored_in_another_users_folder(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The login's folder is refused if another user owns it, and restricted if it is our own and open."""
    folder = auth_file(stack.home).parent
    folder.mkdir(parents=True, mode=0o755)
    first = auth_string(stack.home)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    stack.home.chmod(0o777)
    assert auth_string(stack.home) == first
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    for call in (lambda: auth_string(stack.home), stack.start_server):
        with pytest.raises(WrongInput, match=r"prefect' belongs to another user.*set LAKEVISION_HOME"):
            call()
    with pytest.raises(WrongInput, match="belongs to another user"), local_stack(stack.home, stack.port):
        pass


def test_free_port_is_held_from_the_check_on(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process can listen on the port before the server does, since workers send the login there."""
    addresses = [("127.0.0.1", stack.port), ("127.0.0.1", stack.mlflow_port), ("0.0.0.0", stack.port)]  # noqa: S104  # the address that is expected to be refused

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


def test_port_of_an_ended_server_refuses_connections_and_stays_held(stack: LocalStack) -> None:
    """Connections are refused at once and do not hang, and no other process can listen on the port."""
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


def test_login_is_not_sent_to_a_proxy(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to the stack bypass the user's proxy, and the user's own exceptions to the proxy are kept."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(30)
        requests: list[bytes] = []

        def refuse() -> None:
            with suppress(OSError):  # closed when the test ends
                while True:
                    connection, _ = proxy.accept()
                    with connection:
                        requests.append(connection.recv(4096))
                        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=refuse, daemon=True).start()
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "intranet.example")
        stack.start("prefect-server", [sys.executable, "-c", ANSWERS.format(port=stack.port)])
        stack.wait_for("/", "prefect-server")
        assert requests == []
        environment = stack.environment
        assert environment["no_proxy"] == environment["NO_PROXY"] == "intranet.example,127.0.0.1,localhost"
        monkeypatch.setenv("no_proxy", environment["no_proxy"])
        monkeypatch.setenv("NO_PROXY", environment["NO_PROXY"])
        # As clients in the stack do.
        with urllib.request.build_opener().open(f"{stack.url}/", timeout=30) as answer:
            assert answer.status == 200
        assert requests == []
        assert stack.environment["no_proxy"] == environment["no_proxy"]
        monkeypatch.setenv("no_proxy", "*")
        assert stack.environment["no_proxy"] == "*"


def test_users_own_login_takes_precedence_and_is_not_stored(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server and its clients use the user's login for this server, and not that for another server."""
    monkeypatch.setenv(OWN_STRING, "me:mine")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "of:another")
    assert stack.environment[OWN_STRING] == "me:mine"
    assert stack.environment["PREFECT_API_AUTH_STRING"] == "me:mine"
    assert not auth_file(stack.home).exists()


def test_runs_of_a_stack_with_another_home_track_where_its_ui_shows_them(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run tracks into the stack's database, unless its settings name another tracking server."""
    for name, value in stack.environment.items():
        monkeypatch.setenv(name, value)
    shown = resolve_storage(StorageConfig()).tracking
    assert shown == f"sqlite:///{stack.home}/mlflow.db"
    assert resolve_storage(StorageConfig(home="/another/home")).tracking == shown
    chosen = StorageConfig(home="/another/home", tracking="http://mlflow:5000")
    assert resolve_storage(chosen).tracking == "http://mlflow:5000"


def test_slow_part_is_awaited_as_long_as_it_is_alive(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the user waits for a part that answers late, a line names the part and its log file."""
    monkeypatch.setattr(stack_processes, "REPORT_SECONDS", 0.5)
    late = f"import time\ntime.sleep(2)\n{ANSWERS.format(port=stack.port)}"
    stack.start("prefect-server", [sys.executable, "-c", late])
    stack.wait_for("/", "prefect-server")
    printed = capsys.readouterr().out
    assert "==> waiting for prefect-server for " in printed
    assert str(stack.log_file("prefect-server")) in printed


def test_waiting_stops_when_a_process_ends(stack: LocalStack) -> None:
    """The error of an ended part or server has the last lines of its log."""
    stack.start("prefect-server", FAILS)
    with pytest.raises(RuntimeError, match=r"(?s)prefect-server ended with status 1; the end of .*no such table"):
        stack.wait_for("/api/health", "prefect-server")
    stack.start("register", RUNS)
    with pytest.raises(RuntimeError, match="prefect-server ended with status 1"):
        stack.finish("register")


def test_only_a_failed_registration_raises(stack: LocalStack) -> None:
    """A successful registration does not stop the stack, and the error of a failed one has its log."""
    stack.start("prefect-server", RUNS)
    stack.start("register", [sys.executable, "-c", "pass"])
    stack.finish("register")
    stack.check_alive()
    stack.start("worker-gpu", FAILS)  # not needed by a registration
    dict(stack._processes)["worker-gpu"].wait()
    stack.start("register", [sys.executable, "-c", "pass"])
    stack.finish("register")
    with pytest.raises(RuntimeError, match="worker-gpu ended with status 1"):
        stack.check_alive()
    stack.start("register", FAILS)
    with pytest.raises(RuntimeError, match=r"(?s)register ended with status 1; .*no such table"):
        stack.finish("register")


def test_stack_continues_without_mlflows_ui(stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    """If MLflow's UI ends, the stack continues and prints one warning with the reason."""
    stack.start("prefect-server", RUNS)
    stack.start("mlflow-ui", FAILS)
    dict(stack._processes)["mlflow-ui"].wait()
    for _ in range(2):
        stack.check_alive()
    printed = capsys.readouterr().out
    assert printed.count("warning: mlflow-ui ended with status 1") == 1
    assert "no such table" in printed
    assert not stack.is_running("mlflow-ui")
    assert stack.is_running("prefect-server")
