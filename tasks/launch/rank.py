"""A training process: one of many ranks, or a single process.

The command `tasks.launch.start_rank` runs it. Horovod's own launcher of pickled functions is not used: it keeps a
second core busy, and unpickles code. Nor is torchrun: ranks would not end with their launcher.
"""

import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.collectives.reducer import Reducer
from tasks.config.distributed import DistributedConfig
from tasks.config.recipe import monitored
from tasks.environment import rendezvous
from tasks.errors import UserError, WrongInput, error_record
from tasks.launch.protocol import EXIT_ENDED, EXIT_FAILED, EXIT_WRONG_INPUT
from tasks.launch.rendezvous import collective_timeout
from tasks.progress.activity import working
from tasks.progress.count import listener
from tasks.progress.start_clock import process_start
from tasks.system.signals import interrupt_on
from tasks.text.log_lines import SingleLineFilter
from tasks.train.progress import ReportedEpoch
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec

WARN_ONLY = ("alembic", "matplotlib", "mlflow", "mlflow.system_metrics", "git", "urllib3", "botocore", "aiobotocore")
"""Loggers of packages that log only warnings."""


def log_level(rank: int, distributed: DistributedConfig | None) -> int:
    """Return the log level of a rank."""
    is_verbose = rank == 0 or (distributed is not None and distributed.log_ranks == "all")
    return logging.INFO if is_verbose else logging.WARNING


Emit = Callable[[dict[str, Any]], None]
"""A function that sends an event to the process that started this rank."""


def make_reducer(num_ranks: int, distributed: DistributedConfig | None, stall_seconds: float = 0.0) -> Reducer:
    """Return the reducer of this rank; it is made before data and weights load, or the other ranks time out.

    Only the chosen backend is imported.

    Args:
        num_ranks: Number of ranks that run, of those that are configured.
        distributed: Their settings; None for a single process.
        stall_seconds: Limit of the launcher's watchdog.
    """
    if distributed is None or num_ranks == 1:
        return Reducer()
    if distributed.backend == "torch":
        from tasks.collectives.torch_reducer import TorchReducer

        timeout = collective_timeout(stall_seconds)
        return TorchReducer(rendezvous(), timeout, distributed.gradient_compression)
    from tasks.collectives.horovod_reducer import HorovodReducer

    return HorovodReducer(distributed.gradient_compression)


def run_rank(spec: TrainingSpec, reducer: Reducer, emit: Emit) -> None:
    """Train; rank 0 emits an event after each epoch, and the id of the MLflow run at the end."""
    monitor = monitored(spec.train)

    def on_epoch(metrics: ReportedEpoch) -> None:
        emit(
            {
                "epoch": metrics.epoch + 1,
                "max_epochs": metrics.max_epochs,
                "ends_training": metrics.ends_training,
                "val_accuracy": metrics.val_accuracy,
                "monitor": monitor,
                "value": getattr(metrics, monitor),
            }
        )

    run = train_model(spec, reducer, on_epoch)
    if reducer.rank == 0:
        emit({"run_id": run.run_id})


def main(spec_path: str, emit: Emit) -> int:
    """Run one rank, which sends its events with `emit`; return the process's exit status."""
    # SIGTERM raises an exception, so that the MLflow run does not stay in the state RUNNING. Only the first one does:
    # at a shutdown of the machine a rank gets a second one from its parent, which would interrupt the checkpoint.
    interrupt_on(signal.SIGTERM, once=True)
    spec = TrainingSpec.model_validate_json(Path(spec_path).read_text())
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for handler in logging.getLogger().handlers:
        handler.addFilter(SingleLineFilter())  # the launcher reads the output line by line
    for name in WARN_ONLY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # No warning about a missing git: the commit is known from another source then.
    logging.getLogger("mlflow.utils.git_utils").setLevel(logging.ERROR)
    try:
        with working("preparing"):
            reducer = make_reducer(spec.num_ranks, spec.distributed, spec.stall_limit[1])
            process_start.passed("rendezvous")
            logging.getLogger("lakevision").setLevel(log_level(reducer.rank, spec.distributed))
            with listener(lambda progress: emit(asdict(progress))):  # only rank 0 reports progress
                run_rank(spec, reducer, emit)
            reducer.shut_down()
    except UserError as error:
        emit({"failed": error_record(error)})
        return EXIT_WRONG_INPUT if isinstance(error, WrongInput) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_ENDED
    return 0
