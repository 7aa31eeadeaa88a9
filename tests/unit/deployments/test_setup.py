"""Set-up: one line a step, everything that is installed pinned."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from deployments.fetch_jars import DELTA_DIGESTS
from tasks.jvm import DELTA_JARS
from tasks.storage import Storage
from tests.processes import ROOT, plain_environment, run_python


def run_step(cache: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run one step of set-up, and a line after it."""
    script = f'set -euo pipefail; . deployments/step.sh; step "a step (of some size)" {" ".join(command)}; echo after'
    environment = os.environ | {"LAKEVISION_CACHE": str(cache)}
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_a_step_prints_one_line_and_keeps_the_rest_in_its_log(tmp_path: Path) -> None:
    """With its time; the log is kept, to be read later."""
    done = run_step(tmp_path, "bash", "-c", "'echo noise; echo errors >&2'")
    assert done.returncode == 0
    line, after = done.stdout.splitlines()
    assert re.fullmatch(r"\x1b\[1m==>\x1b\[0m a step \(of some size\) \.\.\. \d+ s", line)
    assert (after, done.stderr) == ("after", "")
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text() == "noise\nerrors\n"


def test_a_step_that_fails_names_its_log_and_ends_set_up(tmp_path: Path) -> None:
    """The end of the log is shown; a function fails with its first command that fails."""
    done = run_step(tmp_path, "bash", "-c", "'seq 100; exit 3'")
    (log,) = (tmp_path / "logs").iterdir()
    assert done.returncode == 3
    assert "after" not in done.stdout.splitlines()
    assert f"setup: a step (of some size) failed; the whole log is {log}, its end:" in done.stderr
    assert done.stderr.splitlines()[-1].strip() == "100"
    assert "\n    50\n" not in done.stderr

    script = "set -euo pipefail; . deployments/step.sh; f() { false; echo on; }; step f f"
    environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path / "other")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (log,) = (tmp_path / "other" / "logs").iterdir()
    assert log.read_text() == ""


def test_uv_is_pinned_by_the_hash_of_every_platform() -> None:
    """`pip install --require-hashes` refuses any other file; the scripts name no other way to get it."""
    text = (ROOT / "deployments/uv.txt").read_text()
    requirements = [line for line in text.splitlines() if line and line[0] not in "# "]
    assert len(requirements) == 1
    assert re.fullmatch(r"uv==[\d.]+ \\", requirements[0])
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}", text)) > 10
    scripts = [*ROOT.glob("deployments/*.sh"), *ROOT.glob("docker/Dockerfile.*"), ROOT / "Makefile"]
    installs = [
        line
        for script in scripts
        for line in script.read_text().splitlines()
        if re.search(r"pip\S* (install|download)\b", line) and not line.lstrip().startswith("#")
    ]
    from_an_index = [line for line in installs if "uv pip install" not in line]  # that one takes a wheel of ours
    assert len(from_an_index) == 2
    assert all("--require-hashes" in line for line in from_an_index)


def test_what_builds_packages_is_pinned() -> None:
    """The build backend of this project and what it needs; the lock has the same constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    pinned = project["tool"]["uv"]["build-constraint-dependencies"]
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", line) for line in pinned)
    names = {line.partition("==")[0] for line in pinned}
    assert {re.split(r"[<>=]", line)[0] for line in project["build-system"]["requires"]} <= names
    assert {entry["name"] for entry in lock["manifest"]["build-constraints"]} == names
    built = [package["name"] for package in lock["package"] if not package.get("wheels")]
    assert sorted(built) == ["lakevision", "pyspark"]  # A third one may need another build backend.


def test_without_deltas_jars_spark_fetches_nothing(tmp_path: Path, storage: Storage) -> None:
    """Nobody would have checked them: one sentence says what does. In a process of its own, which has no session."""
    assert DELTA_DIGESTS.keys() == set(DELTA_JARS)
    code = """
import sys
from tasks.config import SparkConfig, StorageConfig
from tasks.spark import spark_session
from tasks.storage import resolve_storage
with spark_session(SparkConfig(), resolve_storage(StorageConfig(home=sys.argv[1]))):
    pass
"""
    environment = plain_environment(LAKEVISION_CACHE=str(tmp_path))
    done = run_python("-c", code, storage.home, environment=environment, timeout=300)
    assert done.returncode == 1
    refused = r"WrongInput: Delta's jars are not in '.*' \(delta-spark.*\): run 'make setup' once"
    assert re.search(refused, done.stderr), done.stderr
