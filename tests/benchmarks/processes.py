"""Run a benchmark's side in a process of its own, and take its wall time and the peak memory of its whole tree."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil

from tests.processes import ROOT

SAMPLE_SECONDS = 1.0
"""To count a JVM's pages takes a core for tens of milliseconds: every tenth of a second, it slowed Spark by a fifth."""


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    seconds: float
    peak_python_bytes: int
    """Driver and Python workers at the same moment, shared pages counted once (PSS)."""
    peak_bytes: int
    """With the JVM."""


def _memory(process: psutil.Process) -> tuple[int, int]:
    python = whole = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            held = member.memory_full_info().pss
            whole += held
            python += 0 if "java" in member.name() else held
        except psutil.Error:
            continue  # It ended between the listing and the look.
    return python, whole


def measure(script: str, *arguments: str) -> Measured:
    """Run `script` of tests/benchmarks with this interpreter, to its end.

    Raises:
        RuntimeError: It failed; carries its last lines.
    """
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / script), *arguments]
    began = time.perf_counter()
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    peaks = [0, 0]
    stop = threading.Event()

    def watch() -> None:
        process = psutil.Process(running.pid)
        while not stop.wait(SAMPLE_SECONDS):
            try:
                peaks[:] = map(max, peaks, _memory(process))
            except psutil.Error:
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    said, _ = running.communicate()
    seconds = time.perf_counter() - began
    stop.set()
    watcher.join()
    if running.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {running.returncode}:\n{said[-3000:]}")
    return Measured(seconds, *peaks)
