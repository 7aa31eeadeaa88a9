"""What one rank runs: the training loop of tasks.train with the other ranks behind its reducer.

Started as a command by tasks.launch.start_rank, never as a pickled function: Horovod then keeps no second core
busy, and nothing is unpickled. A single process is the case of one rank, without Horovod.
"""

import json
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
from tasks.launch.protocol import EVENT_MARK, EXIT_ENDED, EXIT_FAILED, EXIT_WRONG_INPUT
from tasks.progress.count import heard_by
from tasks.system.signals import interrupt_on
from tasks.text.log_lines import OneLine
from tasks.train.progress import ReportedEpoch
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec


def gpu_obstacle(nccl_built: bool, num_ranks: int, num_gpus: int) -> str | None:
    """Say why ranks on this machine cannot exchange gradients on GPUs, or None.

    Args:
        nccl_built: Whether Horovod was built with NCCL; without it, tensors on a GPU end the rank.
        num_ranks: Ranks on this machine.
        num_gpus: GPUs that torch sees; NCCL refuses two ranks on one.
    """
    if not nccl_built:
        return "Horovod was built without NCCL: run 'HOROVOD_GPU_OPERATIONS=NCCL make setup'"
    if num_ranks > num_gpus:
        return f"distributed.num_ranks is {num_ranks} and there are {num_gpus} GPUs: give at most as many ranks"
    return None


def log_level(rank: int, distributed: DistributedConfig | None) -> int:
    """Return the lowest level of the lines of a rank that are logged."""
    told = rank == 0 or (distributed is not None and distributed.log_ranks == "all")
    return logging.INFO if told else logging.WARNING


class HorovodReducer:
    """The other ranks, behind Horovod."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self.rank: int = hvd.rank()
        self.num_ranks: int = hvd.size()
        self.gpu_obstacle = gpu_obstacle(hvd.nccl_built(), self.num_ranks, torch.cuda.device_count())
        self._num_broadcasts = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        summed: torch.Tensor = self._hvd.allreduce(values.contiguous(), op=self._hvd.Sum)
        return summed

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of the rank `root` on every rank."""
        # Horovod names the operation after the value's type where it gets no name; the root's value is often of another
        # type than the others', and ranks that wait under different names wait for ever.
        self._num_broadcasts += 1
        return self._hvd.broadcast_object(value, root_rank=root, name=f"lakevision.broadcast.{self._num_broadcasts}")

    def broadcast_model(self, model: nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers."""
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return Horovod's optimizer, which averages gradients while backward still computes them."""
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        wrapped: torch.optim.Optimizer = self._hvd.DistributedOptimizer(optimizer, named_parameters=trained)
        # Horovod makes a new optimizer from the parameter groups alone: a resumed one's moments must follow.
        wrapped.load_state_dict(optimizer.state_dict())
        return wrapped

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer hear of no gradient any more."""
        averaging: Any = optimizer
        # Its hooks are on nodes of the graph that it alone keeps. Left there, they would send the gradients of what
        # another optimizer trains next, under names that this one has.
        averaging._grad_accs.clear()

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Wait until the gradients are averaged, let them be seen or changed, and take the step."""
        averaging: Any = optimizer
        averaging.synchronize()
        see_gradients()
        with averaging.skip_synchronize():
            averaging.step()


def emit(event: dict[str, Any]) -> None:
    """Send an event to the process that started this rank."""
    # Of one piece: print writes the end of a line by itself, and what a thread or Horovod says may come between.
    sys.stdout.write(f"{EVENT_MARK}{json.dumps(event)}\n")
    sys.stdout.flush()


def make_reducer(num_ranks: int) -> Reducer:
    """Return the reducer of this rank; Horovod is initialised before anything heavy is loaded, or Gloo gives up."""
    if num_ranks == 1:
        return SingleProcess()
    import horovod.torch as hvd

    hvd.init()
    return HorovodReducer()


def leave_ranks() -> None:
    """Say goodbye to the other ranks: in those, one that is just gone would be an uncaught exception of Horovod's."""
    import horovod.torch as hvd

    hvd.shutdown()


def run_rank(spec: TrainingSpec, reducer: Reducer) -> None:
    """Train; rank 0 says after each epoch where it stands, and at the end which MLflow run it made."""

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


def main(spec_path: str) -> int:
    """Run one rank; return the process's exit status."""
    # An exception, so that the MLflow run ends as killed and not as running for ever. Heard once: a machine that shuts
    # down asks every process, and the parent its ranks again, which would tear the checkpoint that they write.
    interrupt_on(signal.SIGTERM, once=True)
    spec = TrainingSpec.model_validate_json(Path(spec_path).read_text())
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for handler in logging.getLogger().handlers:
        handler.addFilter(OneLine())  # the launcher reads this line by line
    for name in ("alembic", "matplotlib", "mlflow", "mlflow.system_metrics", "git", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A machine without git is none to warn of: the commit is taken from where it is known.
    logging.getLogger("mlflow.utils.git_utils").setLevel(logging.ERROR)
    try:
        reducer = make_reducer(spec.num_ranks)
        logging.getLogger("lakevision").setLevel(log_level(reducer.rank, spec.distributed))
        with heard_by(lambda standing: emit(asdict(standing))):  # only rank 0 counts
            run_rank(spec, reducer)
        if reducer.num_ranks > 1:
            leave_ranks()
    except UserError as error:
        emit({"failed": user_error_name(error), "said": str(error)})
        return EXIT_WRONG_INPUT if isinstance(error, WrongInput) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_ENDED
    return 0
