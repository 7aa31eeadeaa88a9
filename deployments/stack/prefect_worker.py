"""Prefect's worker of a process pool, whose flow runs end with it: prefect_worker --pool POOL [OPTIONS].

Otherwise a run whose worker is killed ends only when it next writes output, to a pipe that nobody reads any more. A run
that is quiet never does. So the worker itself does not end in an outage of the server, as Prefect's does after a while.
"""

import os
import runpy
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from prefect.utilities.services import critical_service_loop
from prefect.workers import base

RUN_PYTHON = Path(__file__).with_name("end_with_worker.sh")
"""What a worker starts in place of Python. The signal is kept when the process becomes another program."""

GIVEN_UP = "Service exceeded error threshold."
"""Prefect's error when several requests in a row have failed, after all their retries."""


async def poll_through_outages(
    workload: Callable[[], Coroutine[Any, Any, Any]], interval: float, **options: Any
) -> None:
    """Repeat a request of the worker as Prefect does, but begin again where Prefect gives up.

    Args:
        workload: The request.
        interval: Seconds between two requests.
        options: Further options of Prefect's loop.
    """
    while True:
        try:
            return await critical_service_loop(workload, interval, **options)
        except RuntimeError as error:
            if str(error) != GIVEN_UP:
                raise
            print("the Prefect server does not answer: the worker waits for it, and its runs continue", flush=True)


def main() -> None:
    """Run `prefect worker start` with the arguments of this process."""
    # Prefect has no setting for it.
    base.critical_service_loop = poll_through_outages  # type: ignore[attr-defined,assignment]  # an import of that module
    if sys.platform == "linux" and shutil.which("setpriv"):  # of util-linux; macOS has no such signal
        os.environ["LAKEVISION_WORKER_PYTHON"] = sys.executable
        # Prefect builds the command of a run from it, and has no setting that keeps the rest of that command.
        sys.executable = str(RUN_PYTHON)
    sys.argv = ["prefect", "worker", "start", "--type", "process", *sys.argv[1:]]
    runpy.run_module("prefect", run_name="__main__")


if __name__ == "__main__":
    main()
