"""A training process: one of many ranks with a Horovod reducer, or a single process without Horovod.

The command `tasks.launch.start_rank` runs it. Horovod's own launcher of pickled functions is not used: it keeps a
second core busy, and unpickles code.
"""

import logging
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.collectives import Reducer, SingleProcess
from tasks.config.distributed import DistributedConfig
from tasks.errors import UserError, WrongInput, user_error_name
from tasks.launch.protocol import EXIT_ENDED, EXIT_FAILED, EXIT_WRONG_INPUT
from tasks.progress.activity import waiting_for_ranks, working
from tasks.progress.count import listener
from tasks.system.signals import interrupt_on
from tasks.text.log_lines import SingleLineFilter
from tasks.train.progress import ReportedEpoch
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec


def gpu_obstacle(nccl_built: bool, num_ranks: int, num_gpus: int) -> str | None:
    """Return the reason why ranks on this machine cannot exchange gradients on GPUs, or None.

    Args:
        nccl_built: Whether Horovod was built with NCCL; without it, a rank with tensors on a GPU fails.
        num_ranks: Ranks on this machine.
        num_gpus: GPUs that torch sees; NCCL does not support two ranks on one GPU.
    """
    if not nccl_built:
        return "Horovod was built without NCCL: run 'HOROVOD_GPU_OPERATIONS=NCCL make setup'"
    if num_ranks > num_gpus:
        return f"distributed.num_ranks is {num_ranks} and there are {num_gpus} GPUs: give at most as many ranks"
    return None


def log_level(rank: int, distributed: DistributedConfig | None) -> int:
    """Return the log level of a rank."""
    is_verbose = rank == 0 or (distributed is not None and distributed.log_ranks == "all")
    return logging.INFO if is_verbose else logging.WARNING


class HorovodReducer:
    """Reducer over Horovod ranks."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self.rank: int = hvd.rank()
        self.num_ranks: int = hvd.size()
        self.gpu_obstacle = gpu_obstacle(hvd.nccl_built(), hvd.local_size(), torch.cuda.device_count())
        self._num_broadcasts = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        with waiting_for_ranks():
            summed: torch.Tensor = self._hvd.allreduce(values.contiguous(), op=self._hvd.Sum)
        return summed

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of the rank `root` on every rank."""
        # By default Horovod names the operation after the value's type, which often differs between the root and the
        # other ranks. Ranks that wait under different names deadlock.
        self._num_broadcasts += 1
        with waiting_for_ranks():
            return self._hvd.broadcast_object(
                value, root_rank=root, name=f"lakevision.broadcast.{self._num_broadcasts}"
            )

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to every rank."""
        with waiting_for_ranks():
            self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return Horovod's optimizer, which averages gradients during the backward pass."""
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        wrapped: torch.optim.Optimizer = self._hvd.DistributedOptimizer(optimizer, named_parameters=trained)
        # Horovod creates a new optimizer from the parameter groups only: copy the state of a resumed one.
        wrapped.load_state_dict(optimizer.state_dict())
        return wrapped

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the optimizer's gradient hooks."""
        averaging: Any = optimizer
        # The hooks are on graph nodes that only this optimizer references. If they stayed, they would send the
        # gradients of the next optimizer's training under this one's names.
        averaging._grad_accs.clear()

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Wait for the averaged gradients, call `see_gradients`, which may change them, and step."""
        averaging: Any = optimizer
        with waiting_for_ranks():
            averaging.synchronize()
        see_gradients()
        with averaging.skip_synchronize():
            averaging.step()


Emit = Callable[[dict[str, Any]], None]
"""A function that sends an event to the process that started this rank."""


def make_reducer(num_ranks: int) -> Reducer:
    """Return the reducer of this rank; Horovod is initialised before data and weights load, or Gloo times out."""
    if num_ranks == 1:
        return SingleProcess()
    import horovod.torch as hvd

    with waiting_for_ranks():
        hvd.init()
    return HorovodReducer()


def shut_down_horovod() -> None:
    """Shut Horovod down; without it, the exit of this rank raises an uncaught exception in the other ranks."""
    import horovod.torch as hvd

    with waiting_for_ranks():
        hvd.shutdown()


def run_rank(spec: TrainingSpec, reducer: Reducer, emit: Emit) -> None:
    """Train; rank 0 emits an event after each epoch, and the id of the MLflow run at the end."""

    def on_epoch(metrics: ReportedEpoch) -> None:
        emit(
            {
                "epoch": metrics.epoch + 1,
                "max_epochs": spec.train.total_epochs,
                "ends_training": metrics.ends_training,
                "val_accuracy": metrics.val_accuracy,
                "monitor": spec.train.monitor,
                "value": getattr(metrics, spec.train.monitor),
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
    for name in (
        "alembic",
        "matplotlib",
        "mlflow",
        "mlflow.system_metrics",
        "git",
        "urllib3",
        "botocore",
        "aiobotocore",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    # No warning about a missing git: the commit is known from another source then.
    logging.getLogger("mlflow.utils.git_utils").setLevel(logging.ERROR)
    try:
        with working("preparing"):
            reducer = make_reducer(spec.num_ranks)
            logging.getLogger("lakevision").setLevel(log_level(reducer.rank, spec.distributed))
            with listener(lambda progress: emit(asdict(progress))):  # only rank 0 reports progress
                run_rank(spec, reducer, emit)
            if reducer.num_ranks > 1:
                shut_down_horovod()
    except UserError as error:
        emit({"failed": user_error_name(error), "message": str(error)})
        return EXIT_WRONG_INPUT if isinstance(error, WrongInput) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_ENDED
    return 0
