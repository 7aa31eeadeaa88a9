"""Peers of a benchmark: their log file, their environments and their processes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.environment import lakevision_home
from tests.builders.processes import ROOT


def log_file(benchmark: str) -> Path:
    """Return the log file of a benchmark's peers."""
    file = lakevision_home() / "bench" / f"{benchmark}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def install_beside(folder: Path, packages: Sequence[str], module: str, log: Any) -> str | None:
    """Return the interpreter of an environment with packages on top of ours, or None where they cannot be installed."""
    uv = shutil.which("uv")
    if uv is None:
        return None
    python = folder / "bin" / "python"
    for command in (
        [uv, "venv", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--python", str(python), "--no-deps", *packages],
    ):
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
            return None
    shared = next(path for path in sys.path if path.endswith("site-packages"))
    next(folder.glob("lib/python*/site-packages")).joinpath("zz_shared.pth").write_text(shared + "\n")
    tried = subprocess.run([str(python), "-c", f"import {module}"], stdout=log, stderr=log, check=False)
    return None if tried.returncode else str(python)


class Peer:
    """A script of tests/benchmarks in its own process, which runs one round per request."""

    def __init__(
        self,
        script: str,
        name: str,
        folder: Path,
        log: Any,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log.name
        self._process = subprocess.Popen(
            [python, str(ROOT / "tests/benchmarks" / script), name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )

    def run_round(self) -> dict[str, float]:
        """Run one round, and return the answer of the process."""
        self.begin_round()
        return self.end_round()

    def begin_round(self) -> None:
        """Begin a round, together with other processes."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end_round(self) -> dict[str, float]:
        """Wait for the end of the round, and return the answer of the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"'{self.name}' ended: see {self._log}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
