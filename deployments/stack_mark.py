"""The environment variable that marks a stack's processes, by which those in their own sessions are ended."""

import os
from collections.abc import Mapping

import psutil

STACK_MARK = "LAKEVISION_STACK"
"""Environment variable that every process of one stack inherits, and by which the last of them are found."""


def end_marked(mark: str, seconds: float) -> None:
    """End every process with a mark except this one, and return when none is left.

    Args:
        mark: The mark of one stack.
        seconds: Processes are killed after half of this time.
    """
    # Flow runs, JVMs and ranks have their own sessions, but inherit the mark.
    remaining = [process for process in psutil.process_iter() if _has_mark(process, mark)]
    for process in remaining:
        process.terminate()
    _gone, remaining = psutil.wait_procs(remaining, timeout=seconds / 2)
    for process in remaining:
        process.kill()
    psutil.wait_procs(remaining, timeout=seconds)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        environment: Mapping[str, str] = process.environ()
    except psutil.Error:
        return False
    return environment.get(STACK_MARK) == mark
