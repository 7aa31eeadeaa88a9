"""Wrong input on the command line: one sentence, with nothing started."""

import socket
import subprocess

import filelock
import pytest

from tests.builders.processes import free_port, plain_environment, run_python


def run_module(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a module as a person does who has no server, with these variables in the environment."""
    return run_python("-m", module, *arguments, environment=plain_environment(**environment), timeout=240)


@pytest.mark.parametrize("port", ["abc", "0", "70000"])
def test_what_is_no_port_is_one_sentence(port):
    """Before anything starts."""
    done = run_module("deployments.up", LAKEVISION_PORT=port)
    assert done.returncode == 2
    assert f"make up: LAKEVISION_PORT is '{port}', which is not a port: give a number from 1 to 65535" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_one_sentence():
    """Said before anything starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_module("deployments.demo", LAKEVISION_PORT=str(port))
    assert done.returncode == 2
    assert f"make demo: port {port} for the Prefect server is in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--etl.source", "/nowhere"], "source is '/nowhere', which does not exist"),
        (["--cache.image_size", "2000"], "cache.image_size is '2000': input should be less than or equal to 1024"),
        (["--distributed.num_ranks", "0"], "distributed.num_ranks is '0': input should be greater than or equal to 1"),
        (
            ["--train.model", "resnet19", "--train.weights", "none", "--train.freeze_backbone", "false"],
            "no torchvision classifier",
        ),
    ],
)
def test_wrong_input_on_the_command_line_is_one_sentence_without_a_traceback(tmp_path, arguments, said):
    """The traceback stays in the log file."""
    folders = {"LAKEVISION_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    done = run_module("flows.pipeline", *arguments, **folders)
    assert done.returncode == 2
    sentences = [line for line in done.stderr.splitlines() if line.startswith("python -m flows.pipeline: ")]
    assert len(sentences) == 1
    assert said in sentences[0]
    assert "Traceback" not in done.stdout + done.stderr
    # What the temporary server wrote lies with the rest.
    assert not (tmp_path / "prefect" / "prefect.db").exists()
    assert (tmp_path / "home" / "prefect" / "temporary.db").exists() == (
        "Beginning flow run" in done.stdout + done.stderr
    )


def test_fewer_images_than_a_step_takes_are_one_sentence_before_any_are_read(tmp_path):
    """Of the files alone: none of these is an image."""
    for number in range(60):
        file = tmp_path / "photos" / f"class {number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    folders = {"LAKEVISION_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    options = ["--weights", "none", "--freeze_backbone", "false"]
    done = run_module("flows.pipeline", "--source", str(tmp_path / "photos"), *options, **folders)
    assert done.returncode == 2
    assert (
        "python -m flows.pipeline: train.batch_size is 32 on each of 2 ranks, but the source has 60 images, fewer than "
        "one step takes: give at most 30, or 3 for 10 steps per epoch"
    ) in done.stderr
    assert not (tmp_path / "home" / "tables" / "images").exists()


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("deployments.prefect_server", "prefect_server: port {} for the Prefect server is in use: stop what listens"),
        ("deployments.mlflow_ui", "mlflow_ui: port {} for the MLflow UI is in use: stop what listens"),
    ],
)
def test_a_server_whose_port_is_in_use_ends_with_one_sentence(tmp_path, module, sentence):
    """Started by hand, without a stack that holds its port; it makes no database."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_module(module, "--port", str(port), LAKEVISION_HOME=str(tmp_path), PREFECT_HOME=str(tmp_path))
    assert done.returncode == 2
    assert sentence.format(port) in done.stderr
    assert "give --port (and --host)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.rglob("*.db")]


def test_a_server_that_is_away_is_one_sentence(tmp_path):
    """As in a terminal that still has the variables of a stack that was ended."""
    url = f"http://127.0.0.1:{free_port()}/api"
    folders = {"LAKEVISION_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    done = run_module("flows.etl", PREFECT_API_URL=url, **folders)
    assert done.returncode == 2
    assert f"python -m flows.etl: the Prefect server '{url}' (PREFECT_API_URL) does not answer" in done.stderr
    assert "unset PREFECT_API_URL to run without it" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "home" / "tables").exists()


def test_a_second_stack_on_one_home_is_one_sentence(tmp_path):
    """It would take the first one's runs for abandoned."""
    (tmp_path / "prefect").mkdir()
    with filelock.FileLock(tmp_path / "prefect" / "stack.lock"):
        folders = {"LAKEVISION_HOME": str(tmp_path), "LAKEVISION_PORT": str(free_port())}
        done = run_module("deployments.demo", **folders)
    assert done.returncode == 2
    assert f"make demo: another stack runs on '{tmp_path}': stop it" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_java_is_one_sentence(tmp_path):
    """With the command that installs it."""
    done = run_module("deployments.demo", JAVA_HOME=str(tmp_path), LAKEVISION_HOME=str(tmp_path / "home"))
    assert done.returncode == 2
    assert "Spark needs Java 17 or 21" in done.stderr
    assert "Traceback" not in done.stderr
