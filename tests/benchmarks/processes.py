"""Wall time and peak memory of a benchmark script in a separate process, child processes included."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil

from tests.builders.processes import ROOT

SAMPLE_SECONDS = 0.05
"""Interval between two samples of the Python processes; the peak in ETL's driver lasts some tenths of a second."""

JVM_SECONDS = 1.0
"""Interval between two samples of the JVM, longer than one sample takes."""


@dataclass(frozen=True)
class Measured:
    """Time and memory of one run."""

    seconds: float
    peak_python_bytes: int
    """Driver and Python workers at the same moment, shared pages counted once (PSS); 0 where not measured."""
    peak_bytes: int
    """The same with the JVM."""
    whole_seconds: float = 0.0
    """Time from the start of the process to its end; `seconds` may be a part of it."""
    last_line: str = ""
    """The last line that the script printed."""


YOUNG_SECONDS = 2.0
"""Age from which a process is counted: until it runs its own program, it shares the memory of its parent.

The pages of a process between vfork and exec are those of its parent. They would be counted twice, and a child of the
JVM has the name of the thread that started it.
"""


def _memory(process: psutil.Process, *, jvm: bool) -> int:
    """Return the memory of the JVMs of a process tree, or of its other processes, in bytes."""
    used = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            if time.time() - member.create_time() > YOUNG_SECONDS and ("java" in member.name()) is jvm:
                used += member.memory_full_info().pss
        except psutil.Error:
            continue  # The process ended meanwhile.
    return used


def measure(script: str, *arguments: str, memory: bool = False) -> Measured:
    """Run `script` of tests/benchmarks with this interpreter, to its end.

    Args:
        script: Name of the script.
        arguments: Arguments of the script.
        memory: Whether to measure memory. Counting the pages of a JVM stops it, so that the time is not valid then.

    Raises:
        RuntimeError: The script failed; the message has its last lines.
    """
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / script), *arguments]
    began = time.perf_counter()
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    peaks = [0, 0]
    stop = threading.Event()

    def watch() -> None:
        process = psutil.Process(running.pid)
        in_jvm, sampled = 0, 0.0
        while not stop.wait(SAMPLE_SECONDS):
            try:
                if time.perf_counter() - sampled > JVM_SECONDS:
                    in_jvm, sampled = _memory(process, jvm=True), time.perf_counter()
                python = _memory(process, jvm=False)
            except psutil.Error:
                return
            peaks[:] = map(max, peaks, (python, python + in_jvm))

    watcher = threading.Thread(target=watch, daemon=True)
    if memory:
        watcher.start()
    output, _ = running.communicate()
    seconds = time.perf_counter() - began
    stop.set()
    if memory:
        watcher.join()
    if running.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {running.returncode}:\n{output[-3000:]}")
    return Measured(seconds, *peaks, seconds, next(reversed(output.splitlines()), ""))
