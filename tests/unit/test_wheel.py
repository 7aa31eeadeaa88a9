"""The wheel is complete: it contains all modules that an executor and a rank import."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.builders.processes import ROOT, bare_environment, run_python

BACKEND_MISSING = ("Failed to fetch", "Could not connect", "dns error", "error sending request", "No solution found")
"""Messages of uv when it cannot fetch the build backend."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the contents of the wheel."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv to build the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [uv, "build", "--wheel", "--out-dir", str(folder / "dist"), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if built.returncode != 0 and any(text in built.stderr for text in BACKEND_MISSING):
        pytest.skip(f"needs the network to fetch the build backend: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    command = [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*command, str(wheel)], capture_output=True, timeout=300, check=True)
    return folder / "site"


@pytest.mark.timeout(600)
def test_installed_wheel_has_what_ranks_and_executors_import(installed: Path, tmp_path: Path) -> None:
    """The UDF and the rank import from the wheel in another folder, without access to the checkout."""
    program = """
from tasks.launch.rank import run_rank
from tasks.predict.scoring import make_predictor
import flows, sys, tasks

assert callable(run_rank) and callable(make_predictor)
for name in sorted(sys.modules):
    if name.split(".")[0] in {"tasks", "flows"}:
        print(sys.modules[name].__file__)
"""
    packages = sysconfig.get_path("purelib")
    environment = bare_environment(tmp_path, str(installed), packages)
    # -S: without the module site, and so without a .pth file that points to the checkout.
    done = run_python("-S", "-c", program, environment=environment, timeout=120, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.splitlines()]
    assert len(files) > 10
    assert [file for file in files if not file.is_relative_to(installed)] == []


def test_wheel_has_every_module_and_nothing_else(installed: Path) -> None:
    """The wheel contains each module of flows and tasks, and no test, secret or cache of the checkout."""
    expected = {
        file.relative_to(ROOT).as_posix()
        for folder in ("flows", "tasks")
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in {".py", ".java"}
    }
    files = {file.relative_to(installed).as_posix() for file in installed.rglob("*") if file.is_file()}

    assert expected - files == set()
    top = {path.split("/")[0] for path in files}
    assert {name for name in top if not name.endswith(".dist-info")} - {
        "flows",
        "tasks",
        "deployments",
        ".lock",
    } == set()
