"""The mark that every process of a stack inherits, and by which those that lead sessions of their own are ended."""

import os
from collections.abc import Mapping

import psutil

STACK_MARK = "LAKEVISION_STACK"
"""Environment variable that every process of one stack inherits: what carries it at the end is ended too."""


def end_marked(mark: str, seconds: float) -> None:
    """End every process that carries a mark, but for this one; return when none is left.

    Args:
        mark: Of one stack.
        seconds: Half of them is the time to end in before a process is killed.
    """
    # Flow runs, JVMs and ranks lead sessions of their own; they carry the mark wherever they went.
    left = [process for process in psutil.process_iter() if _carries(process, mark)]
    for straggler in left:
        straggler.terminate()
    _gone, left = psutil.wait_procs(left, timeout=seconds / 2)
    for straggler in left:
        straggler.kill()
    psutil.wait_procs(left, timeout=seconds)


def _carries(process: psutil.Process, mark: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        environment: Mapping[str, str] = process.environ()
    except psutil.Error:
        return False
    return environment.get(STACK_MARK) == mark
