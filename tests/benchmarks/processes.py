"""Run a benchmark's side in a process of its own, and take its wall time and the peak memory of its whole tree."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil

from tests.processes import ROOT

SAMPLE_SECONDS = 0.2


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    seconds: float
    peak_python_bytes: int
    """0 where it was not looked at. Driver and Python workers at the same moment, shared pages counted once (PSS)."""
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


def measure(script: str, *arguments: str, memory: bool = False) -> Measured:
    """Run `script` of tests/benchmarks with this interpreter, to its end.

    Args:
        script: Name of the script.
        arguments: What it is given.
        memory: Whether to look at its memory, for which its time is worth nothing: to count a JVM's pages stops it.

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
    if memory:
        watcher.start()
    said, _ = running.communicate()
    seconds = time.perf_counter() - began
    stop.set()
    if memory:
        watcher.join()
    if running.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {running.returncode}:\n{said[-3000:]}")
    return Measured(seconds, *peaks)
