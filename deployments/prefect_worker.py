"""Prefect's worker of a process pool, whose flow runs end with it: prefect_worker --pool POOL [OPTIONS].

Otherwise a run whose worker is killed ends only when it next writes output, to a pipe that nobody reads any more. A run
that is quiet never does.
"""

import os
import runpy
import shutil
import sys
from pathlib import Path

RUN_PYTHON = Path(__file__).with_name("end_with_worker.sh")
"""What a worker starts in place of Python. The signal is kept when the process becomes another program."""


def main() -> None:
    """Run `prefect worker start` with the arguments of this process."""
    if sys.platform == "linux" and shutil.which("setpriv"):  # of util-linux; macOS has no such signal
        os.environ["LAKEVISION_WORKER_PYTHON"] = sys.executable
        # Prefect builds the command of a run from it, and has no setting that keeps the rest of that command.
        sys.executable = str(RUN_PYTHON)
    sys.argv = ["prefect", "worker", "start", "--type", "process", *sys.argv[1:]]
    runpy.run_module("prefect", run_name="__main__")


if __name__ == "__main__":
    main()
