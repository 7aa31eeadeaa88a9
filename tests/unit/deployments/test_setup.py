"""Tests of set-up: the output of its steps, and the pinning of all installed packages."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import yaml

from deployments.setup.fetch_jars import jars_of
from tasks.spark.jvm import DELTA_JARS
from tasks.storage import Storage
from tests.builders.processes import ROOT, plain_environment, run_python

SOURCED = "set -euo pipefail; . deployments/setup/step.sh; "
"""Start of a script with the functions of set-up."""


def run_step(cache: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run one step of set-up, followed by a command that prints a line."""
    script = SOURCED + f'step "a step (of some size)" {" ".join(command)}; echo after'
    environment = os.environ | {"LAKEVISION_CACHE": str(cache)}
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_step_prints_one_line_and_writes_its_output_to_a_log(tmp_path: Path) -> None:
    """The line has the step's duration, and the log file is kept."""
    done = run_step(tmp_path, "bash", "-c", "'echo noise; echo errors >&2'")
    assert done.returncode == 0
    line, after = done.stdout.splitlines()
    assert re.fullmatch(r"\x1b\[1m==>\x1b\[0m a step \(of some size\) \.\.\. \d+ s", line)
    assert (after, done.stderr) == ("after", "")
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text() == "noise\nerrors\n"


def test_failed_step_prints_its_log_and_ends_set_up(tmp_path: Path) -> None:
    """The last lines of the log are printed; a function fails with its first failing command."""
    done = run_step(tmp_path, "bash", "-c", "'seq 100; exit 3'")
    (log,) = (tmp_path / "logs").iterdir()
    assert done.returncode == 3
    assert "after" not in done.stdout.splitlines()
    assert f"setup: a step (of some size) failed; the full log is {log}, its last lines:" in done.stderr
    assert done.stderr.splitlines()[-1].strip() == "100"
    assert "\n    50\n" not in done.stderr

    script = SOURCED + "f() { false; echo on; }; step f f"
    environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path / "other")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (log,) = (tmp_path / "other" / "logs").iterdir()
    assert log.read_text() == ""


def test_a_step_runs_beside_others(tmp_path: Path) -> None:
    """Its line follows theirs and has its own seconds; in an image build its output is printed before it."""
    script = (
        SOURCED + "start_step 'a build' bash -c 'sleep 1; echo built'; step packages sleep 2; await_step; echo after"
    )
    for log, built in (("", ""), ("-", r"{0}a build\nbuilt\n")):
        environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path), "LAKEVISION_STEP_LOG": log}
        done = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        line = "\x1b\\[1m==>\x1b\\[0m "
        packages = r"{0}packages\n" if log else ""
        expected = packages + r"{0}packages \.\.\. [234] s\n" + built + r"{0}a build \.\.\. [123] s\nafter\n"
        assert re.fullmatch(expected.format(line), done.stdout), done.stdout


def test_failure_of_a_step_beside_others_ends_set_up(tmp_path: Path) -> None:
    """It is reported with its log, and fails with its first failing command."""
    script = (
        SOURCED
        + "f() { seq 100; (exit 3); echo on; }; start_step 'a build' f; step packages true; await_step; echo after"
    )
    environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "after" not in done.stdout.splitlines()
    (log,) = (tmp_path / "logs").glob("*a-build.log")
    assert f"setup: a build failed; the full log is {log}, its last lines:" in done.stderr
    assert done.stderr.splitlines()[-1].strip() == "100"


@pytest.mark.parametrize("ending", ["interrupt", "failure of another step"])
def test_a_step_beside_others_ends_with_set_up(tmp_path: Path, ending: str) -> None:
    """Its processes and theirs are gone, and so is its folder."""
    last = "exit 1" if ending == "failure of another step" else "sleep 60"
    script = SOURCED + (
        "export work=$(mktemp -d); trap 'stop_started_step; rm -rf \"$work\"' EXIT; "
        "f() { sleep 61 & echo $! >$work/pid.new; mv $work/pid.new $work/pid; wait; }; start_step 'a build' f; "
        "while [ ! -e $work/pid ]; do sleep 0.1; done; echo $work $(cat $work/pid) $started_pid; "
        f"step packages bash -c 'touch $work/packages; {last}'"
    )
    environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path)}
    with subprocess.Popen(
        ["bash", "-c", script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        work, *pids = process.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        assert len(processes) == 2
        if ending == "interrupt":
            # Bash ignores an interrupt while it waits for a command that ends as usual, as those before the step do.
            while not Path(work, "packages").exists():
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C: the step is in another group
        assert process.wait(timeout=30) != 0
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert not Path(work).exists()


def test_failed_optional_step_prints_one_line_and_set_up_continues(tmp_path: Path) -> None:
    """The line has the consequence and the log; a successful optional step prints the same as any other."""
    script = SOURCED + "optional_step 'an archive' 'sessions start slower' {}; echo after"
    environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path)}
    for command, result in (
        (
            "bash -c 'echo no space left >&2; exit 1'",
            r"failed after \d+ s, not required: sessions start slower \(log: (.+)\)",
        ),
        ("true", r"\d+ s()"),
    ):
        done = subprocess.run(
            ["bash", "-c", script.format(command)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        line, after = done.stdout.splitlines()
        assert after == "after"
        found = re.fullmatch(rf"\x1b\[1m==>\x1b\[0m an archive \.\.\. {result}", line)
        assert found, line
        assert not found[1] or Path(found[1]).read_text() == "no space left\n"


PYTHON = """#!/bin/sh
case "$2" in *executable*) echo "$0" ;; *) {} ;; esac
"""
"""A Python that only says which it is."""


def find_python(folder: Path, pythons: dict[str, str], **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run find_python.sh in a folder with the given Pythons, by path and version; an empty version does not run."""
    script = folder / "deployments" / "setup" / "find_python.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "deployments/setup/find_python.sh", script)
    (folder / "bin").mkdir()
    for program in ("bash", "dirname", "sed"):
        (folder / "bin" / program).symlink_to(str(shutil.which(program)))
    for path, version in pythons.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PYTHON.format(f"echo {version}" if version else "exit 127"))
        file.chmod(0o755)
        if path.startswith(".venv/"):
            (folder / ".venv" / "pyvenv.cfg").touch()
    # As `make` does, with the folder of set-up's own uv at the front.
    environment |= {"PATH": f"{folder}/cache/uv/bin:{folder}/bin", "LAKEVISION_CACHE": f"{folder}/cache"}
    return subprocess.run([script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("pythons", "named", "expected"),
    [
        ({"bin/python3": "3.12", "bin/python3.13": "3.13"}, "", "bin/python3"),
        ({"bin/python3": "3.14", "bin/python3.13": "", "bin/python3.11": "3.11"}, "", "bin/python3.11"),
        ({"bin/python3": "3.13", "cache/uv/bin/python3": "3.11"}, "", "bin/python3"),
        ({"bin/python3": "3.13", "bin/python3.11": "3.11"}, "3.11", "bin/python3.11"),
        ({"bin/python3": "3.13", "other/python": "3.12"}, "other/python", "other/python"),
        ({"bin/python3": "3.13", ".venv/bin/python": "3.11"}, "", ".venv/bin/python"),
        ({"bin/python3.13": "3.13", ".venv/bin/python": "3.13"}, "3.13", ".venv/bin/python"),
    ],
)
def test_python_is_that_of_the_venv_or_the_named_or_the_first(
    tmp_path: Path, pythons: dict[str, str], named: str, expected: str
) -> None:
    """Only a Python that runs and has a version of the lock file counts."""
    done = find_python(tmp_path, pythons, LAKEVISION_PYTHON=named)
    assert (done.returncode, done.stderr) == (0, "")
    assert tmp_path / done.stdout.strip() == tmp_path / expected


@pytest.mark.parametrize(
    ("pythons", "named", "refusal"),
    [
        ({}, "", "no Python of the versions 3.13 3.12 3.11 is on PATH; found: none. Install one "),
        ({"bin/python3": "3.9", "bin/python3.13": ""}, "", "/bin/python3 (3.9), .*/bin/python3.13 (does not run). "),
        ({"bin/python3": "3.13"}, "3.12", "LAKEVISION_PYTHON is '3.12' (does not run): set it to one of 3.13 3.12 "),
        ({"bin/python3": "3.14"}, "python3", "LAKEVISION_PYTHON is 'python3' (3.14): set it to one of 3.13 3.12 "),
        ({".venv/bin/python": "", "bin/python3": "3.13"}, "", "the Python of .venv does not run, .*: remove .venv "),
        ({".venv/bin/python": "3.14"}, "", ".venv has Python 3.14, not one of 3.13 3.12 3.11: remove it "),
        (
            {".venv/bin/python": "3.11", "bin/python3.13": "3.13"},
            "3.13",
            ".venv has Python 3.11 and LAKEVISION_PYTHON is '3.13': unset LAKEVISION_PYTHON, or remove .venv ",
        ),
    ],
)
def test_unsuitable_python_is_refused(tmp_path: Path, pythons: dict[str, str], named: str, refusal: str) -> None:
    """One sentence names what was found and the way out; no .venv is removed."""
    done = find_python(tmp_path, pythons, LAKEVISION_PYTHON=named)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.match(r"setup: .*" + refusal.replace("(", r"\(").replace(")", r"\)"), done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


def test_set_up_and_the_workflow_take_the_versions_of_the_lock_file() -> None:
    """The bounds in pyproject.toml, the list of set-up and the matrix of the workflow are the same."""
    versions = ["3.11", "3.12", "3.13"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.11,<3.14"
    assert f"versions=({' '.join(reversed(versions))})\n" in (ROOT / "deployments/setup/find_python.sh").read_text()
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert [entry["python"] for entry in matrix] == versions


@pytest.mark.parametrize(
    ("python", "refusal"),
    [
        ("3.12", "no Debian release has Python 3.12: .github/workflows/test.yml tests it, on Ubuntu."),
        ("3.14", "PYTHON is '3.14': set it to 3.11 (Debian 12) or 3.13 (Debian 13)"),
        ("", "PYTHON is '': set it to 3.11 (Debian 12) or 3.13 (Debian 13)"),
    ],
)
def test_root_of_a_python_that_no_debian_has_is_refused(python: str, refusal: str) -> None:
    """Before anything is made or mounted."""
    done = subprocess.run(
        ["deployments/setup/test_python.sh", python], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"test_python: {refusal}")


def test_class_archive_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Without Java the command fails with one line; with `--check` it fails without output."""
    environment = plain_environment(JAVA_HOME=str(tmp_path))
    done = run_python("-m", "deployments.setup.class_archive", environment=environment, timeout=120)
    assert done.returncode == 1
    assert re.fullmatch(r"class_archive: .*Java.*\n", done.stderr)
    done = run_python("-m", "deployments.setup.class_archive", "--check", environment=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    (recipe,) = re.findall(
        r"\{ \. deployments/setup/step\.sh; (\w+) \"Spark's classes", (ROOT / "Makefile").read_text()
    )
    assert recipe == "optional_step"


def test_step_prints_its_output_in_an_image_build(tmp_path: Path) -> None:
    """The log file of a failed step would be lost with the layer that is not created."""
    script = SOURCED + "step \"a step\" bash -c 'seq 100; echo why >&2; exit 3'; echo after"
    environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path), "LAKEVISION_STEP_LOG": "-"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "1\n2\n3\n" in done.stdout
    assert "after" not in done.stdout.splitlines()
    assert done.stderr == "why\nsetup: a step failed; the full log is above\n"
    assert list(tmp_path.iterdir()) == []
    for name in ("Dockerfile.cpu", "Dockerfile.gpu"):
        assert "LAKEVISION_STEP_LOG=- " in (ROOT / "docker" / name).read_text()


def test_secrets_of_compose_are_generated_once(tmp_path: Path) -> None:
    """The script can be run again, writes every variable that is required, and only its owner can read the file."""
    (tmp_path / "docker").mkdir()
    script = shutil.copy(ROOT / "docker" / "secrets.sh", tmp_path / "docker")
    file = tmp_path / "docker" / ".env"
    file.write_text("POSTGRES_PASSWORD=x\n")
    file.chmod(0o644)
    kept = set()
    for _ in range(2):
        done = subprocess.run(["sh", script], cwd=tmp_path, check=False)
        assert done.returncode == 0
        kept.add(file.read_text())
    assert len(kept) == 1
    first, *generated = kept.pop().splitlines()
    assert first == "POSTGRES_PASSWORD=x"
    required = set(re.findall(r"\$\{(\w+):\?", (ROOT / "docker" / "compose.yaml").read_text()))
    assert {line.partition("=")[0] for line in generated} == required - {"POSTGRES_PASSWORD"}
    assert all(re.fullmatch(r"\w+_((PASSWORD|KEY)=|AUTH=lakevision:)[0-9a-f]{48}", line) for line in generated)
    assert len({line.partition("=")[2] for line in generated}) == len(generated)
    assert file.stat().st_mode & 0o777 == 0o600


def test_uv_is_pinned_by_the_hashes_of_all_platforms() -> None:
    """Every pip command in the scripts that uses an index has `--require-hashes`."""
    text = (ROOT / "deployments/setup/uv.txt").read_text()
    requirements = [line for line in text.splitlines() if line and line[0] not in "# "]
    assert len(requirements) == 1
    assert re.fullmatch(r"uv==[\d.]+ \\", requirements[0])
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}", text)) > 10
    scripts = [*ROOT.glob("deployments/*/*.sh"), *ROOT.glob("docker/Dockerfile.*"), ROOT / "Makefile"]
    installs = [
        line
        for script in scripts
        for line in script.read_text().splitlines()
        if re.search(r"pip\S* (install|download)\b", line) and not line.lstrip().startswith("#")
    ]
    from_an_index = [line for line in installs if "$(find_wheel)" not in line]
    assert len(from_an_index) == 3
    assert all("--require-hashes" in line for line in from_an_index)


def test_build_dependencies_are_pinned() -> None:
    """The build backends and their dependencies have exact versions, and the lock has the same constraints."""
    project, petastorm = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        for folder in (".", "deployments/setup/patched_petastorm")
    )
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    pinned = project["tool"]["uv"]["build-constraint-dependencies"]
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", line) for line in pinned)
    names = {line.partition("==")[0] for line in pinned}
    for built in (project, petastorm):
        assert {re.split(r"[<>=]", line)[0] for line in built["build-system"]["requires"]} <= names
    assert {entry["name"] for entry in lock["manifest"]["build-constraints"]} == names
    # Another one may need a different build backend.
    without_wheel = [package["name"] for package in lock["package"] if not package.get("wheels")]
    assert sorted(without_wheel) == ["lakevision", "petastorm", "pyspark"]


def test_session_without_deltas_jars_is_refused(tmp_path: Path, storage: Storage) -> None:
    """Spark does not fetch unverified jars; the test uses a separate process, since this one may have a session."""
    assert jars_of("delta").digests.keys() == set(DELTA_JARS)
    code = """
import sys
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.spark.session import spark_session
from tasks.storage import resolve_storage
with spark_session(SparkConfig(), resolve_storage(StorageConfig(home=sys.argv[1]))):
    pass
"""
    environment = plain_environment(LAKEVISION_CACHE=str(tmp_path))
    done = run_python("-c", code, storage.home, environment=environment, timeout=300)
    assert done.returncode == 1
    refused = r"WrongInput: Delta's jars are not in '.*' \(delta-spark.*\): run 'make setup' once"
    assert re.search(refused, done.stderr), done.stderr


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.gpu"])
def test_image_has_what_its_build_reads_when_it_fetches_jars(tmp_path: Path, name: str) -> None:
    """Few files are in the image by then, so that an edited flow does not repeat the step."""
    stage = (ROOT / "docker" / name).read_text().split(" AS build\n")[1].split("\nFROM ")[0]
    for sources, target in re.findall(r"^COPY (.+) (\S+)$", stage, re.MULTILINE):
        for pattern in sources.split():
            for source in ROOT.glob(pattern):
                copied = tmp_path / target / source.name if target.endswith("/") else tmp_path / target
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, copied) if source.is_dir() else shutil.copy(source, copied)
    program = (
        "from deployments.setup import fetch_jars; print(fetch_jars.__file__, len(fetch_jars.jars_of('s3a').digests))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    file, count = done.stdout.split()
    assert (done.stderr, Path(file)) == ("", tmp_path / "deployments" / "setup" / "fetch_jars.py")
    assert int(count) > 1
