"""User errors on the command line: one sentence, no traceback, and nothing is started."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import filelock
import pytest

from tasks.system.listening import free_port
from tests.builders.prefect_databases import home_with_databases
from tests.builders.processes import plain_environment, run_python


def run_module(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a module without a Prefect server, with these environment variables."""
    return run_python("-m", module, *arguments, environment=plain_environment(**environment), timeout=240)


@pytest.mark.parametrize("port", ["abc", "0", "70000"])
def test_invalid_port_is_a_one_sentence_error(port):
    """The port is checked before anything starts."""
    completed = run_module("deployments.up", LAKEVISION_PORT=port)
    assert completed.returncode == 2
    assert (
        f"make up: LAKEVISION_PORT is '{port}', which is not a port: give a number from 1 to 65535" in completed.stderr
    )
    assert "Traceback" not in completed.stderr


def test_port_in_use_is_a_one_sentence_error():
    """The port is checked before anything starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        completed = run_module("deployments.demo", LAKEVISION_PORT=str(port))
    assert completed.returncode == 2
    assert f"make demo: port {port} for the Prefect server is in use" in completed.stderr
    assert "Traceback" not in completed.stderr


SENTENCE = "python -m flows.pipeline: "


@pytest.fixture(scope="module")
def home(tmp_path_factory, empty_tracking):
    """Return a home whose databases are empty and need no migrations."""
    return home_with_databases(tmp_path_factory, empty_tracking, "temporary.db")


def num_flow_runs(home: Path) -> int:
    """Return the number of flow runs in the database of the home's temporary server."""
    with closing(sqlite3.connect(home / "prefect" / "temporary.db")) as database:
        return int(database.execute("SELECT count(*) FROM flow_run").fetchone()[0])


def test_user_error_on_the_command_line_is_one_sentence_without_a_traceback(tmp_path, home):
    """The exit status is 2, the traceback is in the log file only, and a proxy is not asked for this machine."""
    folders = {"LAKEVISION_HOME": str(home), "PREFECT_HOME": str(tmp_path / "prefect")}
    proxy = {"HTTP_PROXY": f"http://127.0.0.1:{free_port()}", "NO_PROXY": "example.org"}
    before = num_flow_runs(home)
    source = tmp_path / "photos"
    (source / "only").mkdir(parents=True)
    (source / "only" / "1.jpg").touch()
    completed = run_module("flows.pipeline", "--etl.source", str(source), **folders, **proxy)
    assert completed.returncode == 2
    sentences = [line for line in completed.stderr.splitlines() if line.startswith(SENTENCE)]
    assert len(sentences) == 1
    assert "which has only the class folder 'only'" in sentences[0]
    assert "Traceback" not in completed.stdout + completed.stderr
    assert "Beginning flow run" in completed.stdout + completed.stderr
    # The database of the temporary server is in the home.
    assert not (tmp_path / "prefect" / "prefect.db").exists()
    assert num_flow_runs(home) == before + 1


ONE_AFTER_THE_OTHER = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        runpy.run_module("flows.pipeline", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        sys.stdout.flush()
        print("ended with", ended.code, file=sys.stderr, flush=True)
"""
"""The command, once for each list of options in one process, whose imports and temporary server take seconds."""


def test_every_user_error_is_one_sentence_without_a_traceback(tmp_path, home):
    """Settings are checked before a flow run begins, and files are counted without reading: none is a valid image."""
    photos = tmp_path / "photos"
    for number in range(60):
        file = photos / f"class {number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    untrained = ["--train.weights", "none", "--train.freeze_backbone", "false"]
    both = ["--source", str(photos), "--weights", "none", "--freeze_backbone", "false", "--train_on", "both"]
    both += ["--distributed.num_ranks", "49"]
    errors = [
        (["--cache.image_size", "2000"], "cache.image_size is '2000': input should be less than or equal to 1024"),
        (["--distributed.num_ranks", "0"], "distributed.num_ranks is '0': input should be greater than or equal to 1"),
        (["--train.model", "resnet19", *untrained], "is not a torchvision classifier: did you mean resnet18"),
        (["--source", "/nowhere"], "source is '/nowhere', which does not exist"),
        (["--source", "/nowhere", "--trian_on", "both"], "unknown option '--trian_on': did you mean --train_on"),
        (
            both,
            "distributed.num_ranks is 49, but the source has at most 48 images for the split 'train': give at most 48",
        ),
    ]
    before = num_flow_runs(home)
    environment = plain_environment(LAKEVISION_HOME=str(home), PREFECT_HOME=str(tmp_path / "prefect"))
    calls = json.dumps([arguments for arguments, _message in errors])
    done = run_python("-c", ONE_AFTER_THE_OTHER, calls, environment=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    printed, endings = done.stderr, []
    for _arguments, message in errors:
        own, _, rest = printed.partition("ended with ")
        ending, _, printed = rest.partition("\n")
        (sentence,) = [line for line in own.splitlines() if line.startswith(SENTENCE)]
        assert message in sentence
        begun = "Beginning flow run" in own
        # A run logs the sentence as well; without one, it is printed once, and no temporary server starts.
        assert begun or (done.stdout + own).count(message) == 1
        assert begun or "temporary server" not in own
        endings.append((ending, begun))
    assert endings == [("2", False)] * 5 + [("2", True)]
    assert num_flow_runs(home) == before + 1
    assert not (tmp_path / "prefect" / "prefect.db").exists()
    assert not (home / "tables" / "images").exists()


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (
            "deployments.stack.prefect_server",
            "prefect_server: port {} for the Prefect server is in use: stop its process",
        ),
        ("deployments.stack.mlflow_ui", "mlflow_ui: port {} for the MLflow UI is in use: stop its process"),
    ],
)
def test_server_whose_port_is_in_use_ends_with_one_sentence(tmp_path, module, sentence):
    """A server started by hand checks its port before it creates a database."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        completed = run_module(module, "--port", str(port), LAKEVISION_HOME=str(tmp_path), PREFECT_HOME=str(tmp_path))
    assert completed.returncode == 2
    assert sentence.format(port) in completed.stderr
    assert "give --port (and --host)" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert not [*tmp_path.rglob("*.db")]


def test_unreachable_prefect_server_is_a_one_sentence_error(tmp_path):
    """This happens in a terminal that still has the variables of a stopped stack."""
    url = f"http://127.0.0.1:{free_port()}/api"
    folders = {"LAKEVISION_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    completed = run_module("flows.etl", PREFECT_API_URL=url, **folders)
    assert completed.returncode == 2
    assert f"python -m flows.etl: the Prefect server '{url}' (PREFECT_API_URL) does not answer" in completed.stderr
    assert "unset PREFECT_API_URL to run without it" in completed.stderr
    assert "Traceback" not in completed.stdout + completed.stderr
    assert not (tmp_path / "home" / "tables").exists()


def test_unreachable_server_of_a_profile_is_named_by_it(tmp_path):
    """No variable is set that could be unset: the profile is named, and the command that changes it."""
    url = f"http://127.0.0.1:{free_port()}/api"
    (tmp_path / "profiles.toml").write_text(f'active = "prod"\n[profiles.prod]\nPREFECT_API_URL = "{url}"\n')
    given = {"PREFECT_PROFILES_PATH": str(tmp_path / "profiles.toml"), "LAKEVISION_HOME": str(tmp_path)}
    completed = run_module("flows.etl", **given)
    assert completed.returncode == 2
    assert f"the Prefect server '{url}' (of the Prefect profile 'prod') does not answer" in completed.stderr
    unset = "prefect --profile prod config unset PREFECT_API_URL"
    assert f"or run '{unset}' to run without it" in completed.stderr
    binaries = Path(sys.executable).parent
    subprocess.run([binaries / "prefect", *unset.split()[1:], "-y"], env=os.environ | given, check=True)
    assert url not in (tmp_path / "profiles.toml").read_text()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("PREFECT_LOGGING_LEVEL", "verbose", "{} is 'verbose', with which prefect cannot be imported (Input should be"),
        ("PREFECT_PROFILES_PATH", "cut.toml", "a setting of prefect is invalid, with which prefect cannot be imported"),
        ("MLFLOW_LOGGING_LEVEL", "verbose", "{} is 'verbose', with which mlflow cannot be imported (Unknown level"),
    ],
)
def test_invalid_setting_of_a_library_is_a_one_sentence_error(tmp_path, name, value, sentence):
    """Prefect and MLflow read their settings when they are imported, before any check of this project."""
    (tmp_path / "cut.toml").write_text('active = "prod')
    completed = run_module("flows.etl", **{name: str(tmp_path / value) if value.endswith("toml") else value})
    assert completed.returncode == 2
    (line,) = [line for line in completed.stderr.splitlines() if "UserWarning" not in line and "warn(" not in line]
    assert line.startswith(f"flows: {sentence.format(name)}")
    assert "correct or unset it, in the environment or in " in line


def test_second_stack_on_one_home_is_a_one_sentence_error(tmp_path):
    """A second stack would treat the runs of the first as abandoned."""
    (tmp_path / "prefect").mkdir()
    with filelock.FileLock(tmp_path / "prefect" / "stack.lock"):
        folders = {"LAKEVISION_HOME": str(tmp_path), "LAKEVISION_PORT": str(free_port())}
        completed = run_module("deployments.demo", **folders)
    assert completed.returncode == 2
    assert f"make demo: another stack runs on '{tmp_path}': stop it" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_missing_java_is_a_one_sentence_error(tmp_path):
    """The error has the supported versions of Java."""
    completed = run_module("deployments.demo", JAVA_HOME=str(tmp_path), LAKEVISION_HOME=str(tmp_path / "home"))
    assert completed.returncode == 2
    assert "Spark needs Java 17 or 21" in completed.stderr
    assert "Traceback" not in completed.stderr
