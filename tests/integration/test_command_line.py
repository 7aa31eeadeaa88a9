"""User errors on the command line: one sentence, no traceback, and nothing is started."""

import socket
import subprocess

import filelock
import pytest

from tests.builders.processes import free_port, plain_environment, run_python


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--etl.source", "/nowhere"], "source is '/nowhere', which does not exist"),
        (["--cache.image_size", "2000"], "cache.image_size is '2000': input should be less than or equal to 1024"),
        (["--distributed.num_ranks", "0"], "distributed.num_ranks is '0': input should be greater than or equal to 1"),
        (
            ["--train.model", "resnet19", "--train.weights", "none", "--train.freeze_backbone", "false"],
            "is not a torchvision classifier",
        ),
    ],
)
def test_user_error_on_the_command_line_is_one_sentence_without_a_traceback(tmp_path, arguments, message):
    """The exit status is 2, and the traceback is in the log file only."""
    folders = {"LAKEVISION_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    completed = run_module("flows.pipeline", *arguments, **folders)
    assert completed.returncode == 2
    sentences = [line for line in completed.stderr.splitlines() if line.startswith("python -m flows.pipeline: ")]
    assert len(sentences) == 1
    assert message in sentences[0]
    assert "Traceback" not in completed.stdout + completed.stderr
    # The database of the temporary server is in the home.
    assert not (tmp_path / "prefect" / "prefect.db").exists()
    assert (tmp_path / "home" / "prefect" / "temporary.db").exists() == (
        "Beginning flow run" in completed.stdout + completed.stderr
    )


def test_fewer_images_than_a_step_needs_is_an_error_before_any_image_is_read(tmp_path):
    """Files are counted without reading: none of these is a valid image."""
    for number in range(60):
        file = tmp_path / "photos" / f"class {number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    folders = {"LAKEVISION_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    options = ["--weights", "none", "--freeze_backbone", "false", "--train_on", "both"]
    completed = run_module("flows.pipeline", "--source", str(tmp_path / "photos"), *options, **folders)
    assert completed.returncode == 2
    assert (
        "python -m flows.pipeline: train.batch_size is 32 on each of 2 ranks, but the source has 60 images, fewer than "
        "one step takes: give at most 30, or 3 for 10 steps per epoch"
    ) in completed.stderr
    assert not (tmp_path / "home" / "tables" / "images").exists()


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("deployments.prefect_server", "prefect_server: port {} for the Prefect server is in use: stop its process"),
        ("deployments.mlflow_ui", "mlflow_ui: port {} for the MLflow UI is in use: stop its process"),
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
