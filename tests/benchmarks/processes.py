"""Run a benchmark's side in a process of its own, and take its wall time and the peak memory of its whole tree."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil

from tests.builders.processes import ROOT

SAMPLE_SECONDS = 0.05
"""How often the Python processes are looked at: what ETL's driver holds when it decides, it holds for some tenths."""

JVM_SECONDS = 1.0
"""How often the JVM is, for longer than a look at it takes."""


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    seconds: float
    peak_python_bytes: int
    """0 where it was not looked at. Driver and Python workers at the same moment, shared pages counted once (PSS)."""
    peak_bytes: int
    """With the JVM."""


def _memory(process: psutil.Process, *, jvm: bool) -> int:
    """Return the bytes that the JVMs of a tree hold, or its other processes."""
    held = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            if ("java" in member.name()) is jvm:
                held += member.memory_full_info().pss
        except psutil.Error:
            continue  # It ended between the listing and the look.
    return held


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
        in_jvm, looked = 0, 0.0
        while not stop.wait(SAMPLE_SECONDS):
            try:
                if time.perf_counter() - looked > JVM_SECONDS:
                    in_jvm, looked = _memory(process, jvm=True), time.perf_counter()
                python = _memory(process, jvm=False)
            except psutil.Error:
                return
            peaks[:] = map(max, peaks, (python, python + in_jvm))

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
