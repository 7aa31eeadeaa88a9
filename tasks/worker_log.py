"""What a Spark Python worker says, in a form that the driver finds again."""

import sys

WORKER_MARK = "lakevision-worker: "


def say(message: str) -> None:
    """Write one line that reaches the run's log (on a cluster: the executor's stderr)."""
    print(f"{WORKER_MARK}{message}", file=sys.stderr, flush=True)
