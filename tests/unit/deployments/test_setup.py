"""Tests of set-up: the output of its steps, and the pinning of all installed packages."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deployments.setup.fetch_jars import DELTA_DIGESTS
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
    assert all(re.fullmatch(r"\w+_(PASSWORD=|AUTH=lakevision:)[0-9a-f]{48}", line) for line in generated)
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
    from_an_index = [line for line in installs if "uv pip install" not in line]  # installs a local wheel
    assert len(from_an_index) == 2
    assert all("--require-hashes" in line for line in from_an_index)


def test_build_dependencies_are_pinned() -> None:
    """The project's build backend and its dependencies have exact versions, and the lock has the same constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    pinned = project["tool"]["uv"]["build-constraint-dependencies"]
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", line) for line in pinned)
    names = {line.partition("==")[0] for line in pinned}
    assert {re.split(r"[<>=]", line)[0] for line in project["build-system"]["requires"]} <= names
    assert {entry["name"] for entry in lock["manifest"]["build-constraints"]} == names
    built = [package["name"] for package in lock["package"] if not package.get("wheels")]
    assert sorted(built) == ["lakevision", "pyspark"]  # Another one may need a different build backend.


def test_session_without_deltas_jars_is_refused(tmp_path: Path, storage: Storage) -> None:
    """Spark does not fetch unverified jars; the test uses a separate process, since this one may have a session."""
    assert DELTA_DIGESTS.keys() == set(DELTA_JARS)
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
