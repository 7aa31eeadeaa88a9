"""Set-up: one line a step, everything that is installed pinned."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from deployments.fetch_jars import DELTA_DIGESTS
from tasks.spark.jvm import DELTA_JARS
from tasks.storage import Storage
from tests.builders.processes import ROOT, plain_environment, run_python


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


def test_a_step_that_set_up_can_do_without_fails_in_one_line(tmp_path: Path) -> None:
    """It says what that means and where the reason is, and set-up goes on; where it works, it is a step like others."""
    script = (
        "set -euo pipefail; . deployments/step.sh; optional_step 'an archive' 'sessions start slower' {}; echo after"
    )
    environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path)}
    for command, said in (
        (
            "bash -c 'echo no space left >&2; exit 1'",
            r"failed after \d+ s; going on without: sessions start slower \(log: (.+)\)",
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
        found = re.fullmatch(rf"\x1b\[1m==>\x1b\[0m an archive \.\.\. {said}", line)
        assert found, line
        assert not found[1] or Path(found[1]).read_text() == "no space left\n"


def test_an_archive_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    """As where there is no Java; who only asks whether it is there is told nothing but so."""
    environment = plain_environment(JAVA_HOME=str(tmp_path))
    done = run_python("-m", "deployments.class_archive", environment=environment, timeout=120)
    assert done.returncode == 1
    assert re.fullmatch(r"class_archive: .*Java.*\n", done.stderr)
    done = run_python("-m", "deployments.class_archive", "--check", environment=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    (recipe,) = re.findall(r"\{ \. deployments/step\.sh; (\w+) \"Spark's classes", (ROOT / "Makefile").read_text())
    assert recipe == "optional_step"


def test_in_an_image_build_a_step_shows_what_it_prints(tmp_path: Path) -> None:
    """The log of one that fails would be gone with the layer that was not made."""
    script = (
        "set -euo pipefail; . deployments/step.sh; step \"a step\" bash -c 'seq 100; echo why >&2; exit 3'; echo after"
    )
    environment = os.environ | {"LAKEVISION_CACHE": str(tmp_path), "LAKEVISION_STEP_LOG": "-"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "1\n2\n3\n" in done.stdout
    assert "after" not in done.stdout.splitlines()
    assert done.stderr == "why\nsetup: a step failed; the whole log is above\n"
    assert list(tmp_path.iterdir()) == []
    for name in ("Dockerfile.cpu", "Dockerfile.gpu"):
        assert "LAKEVISION_STEP_LOG=- " in (ROOT / "docker" / name).read_text()


def test_the_login_of_compose_is_made_once(tmp_path: Path) -> None:
    """By the two lines at the head of its file, however often they are run, into a file that only its owner reads."""
    lines = (ROOT / "docker" / "compose.yaml").read_text().splitlines()
    made = [
        line.removeprefix("#   ").partition("    ")[0] for line in lines if "docker/.env" in line and line[0] == "#"
    ]
    commands = [line for line in made if line.startswith(("touch", "grep"))]
    (tmp_path / "docker").mkdir()
    file = tmp_path / "docker" / ".env"
    file.write_text("POSTGRES_PASSWORD=x\n")
    file.chmod(0o644)
    kept = set()
    for _ in range(2):
        done = subprocess.run(["sh", "-c", "\n".join(commands)], cwd=tmp_path, check=False)
        assert done.returncode == 0
        kept.add(file.read_text())
    assert len(kept) == 1
    assert re.fullmatch(r"POSTGRES_PASSWORD=x\nPREFECT_AUTH=lakevision:[0-9a-f]{48}\n", kept.pop())
    assert file.stat().st_mode & 0o777 == 0o600


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
