"""Subprocesses of tests and benchmarks, which run the project's modules."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
import psutil

ROOT = Path(__file__).resolve().parents[2]


def plain_environment(**variables: str) -> dict[str, str]:
    """Return the environment without Prefect's variables, as without a Prefect server, with these variables set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | variables


def run_python(
    *arguments: str, environment: dict[str, str], timeout: float, cwd: Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    """Run this interpreter to completion, and capture its output."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_printed(command: str, timeout: float) -> "subprocess.CompletedProcess[str]":
    """Run a command of the shell as it is printed, in the checkout and with this interpreter; capture its output."""
    return subprocess.run(
        ["bash", "-c", command.replace(".venv/bin/python", sys.executable, 1)],
        env=plain_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def bare_environment(home: Path, *packages: str) -> dict[str, str]:
    """Return a minimal environment with a home folder and the import path of packages."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(packages),
        # Without its cache matplotlib scans all fonts.
        "MPLCONFIGDIR": mpl.get_cachedir(),
    }


def rank_processes(home: str, among: Iterable[psutil.Process] | None = None) -> list[psutil.Process]:
    """Return the rank processes of a home, without a child of a rank that has not yet started its own program.

    Args:
        home: The home folder.
        among: Processes to look at; None for all of this machine, whose command lines take up to seconds to read.
    """
    found = []
    for process in psutil.process_iter() if among is None else among:
        try:
            command = process.cmdline()
            if "tasks.launch.start_rank" not in command or home not in Path(command[-1]).read_text():
                continue
            parent = process.parent()
            if parent is None or parent.cmdline() != command:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def server_errors(home: Path) -> list[str]:
    """Return the errors in the log of a stack's Prefect server; a healthy server logs none."""
    return logged_errors(home / "logs" / "prefect-server.log")


def logged_errors(log: Path) -> list[str]:
    """Return the errors in the log of a Prefect server or worker."""
    lines = log.read_text(errors="replace").splitlines()
    return [
        line for line in lines if "| ERROR" in line or "| CRITICAL" in line or line.startswith(("ERROR:", "Traceback"))
    ]
