"""Short training runs, and what they logged to MLflow."""

from pathlib import Path

import mlflow
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.launch.launcher import launch_ranks
from tasks.model_package.description import WEIGHTS_FILE
from tasks.refs import CacheRef, RunRef
from tasks.storage import Storage
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.models import register_run
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec

SMALL = TrainConfig(
    recipe="given",
    model="squeezenet1_1",
    weights="none",
    freeze_backbone=False,
    batch_size=8,
    reference_batch_size=8,
    max_epochs=2,
    learning_rate=1e-3,
    schedule="constant",
    precision="fp32",  # as on a CPU with images this small, also on a GPU
    seed=3,
)

# No batch norm, whose rounding grows from step to step, and one number format and thread on every machine.
ROUNDED = SMALL.model_copy(update={"optimizer": "sgd", "monitor": "val_loss", "num_threads": 1})
"""A training run whose result differs by rounding alone on another number of ranks."""


def train(cache: CacheRef, storage: Storage, num_ranks: int | None = None, on_event=None, **settings) -> RunRef:
    """Train with the tests' settings."""
    distributed = None if num_ranks is None else DistributedConfig(num_ranks=num_ranks)
    return launch_ranks(
        TrainingSpec(train=SMALL.model_copy(update=settings), distributed=distributed, cache=cache, storage=storage),
        on_event,
    )


def train_here(cache: CacheRef, storage: Storage, num_ranks: int | None, **settings) -> RunRef:
    """Train as `train`, but a single process in this one, which saves imports and gives the same result."""
    if num_ranks is not None:
        return train(cache, storage, num_ranks, **settings)
    return train_model(TrainingSpec(train=SMALL.model_copy(update=settings), cache=cache, storage=storage))


def weights(run: RunRef, storage: Storage, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that the run logged."""
    model = register_run(storage, run, f"model-{run.run_id}")
    package = fetch_registered(storage, model, folder / run.run_id)
    return load_file(package / WEIGHTS_FILE)


def epochs_in_event_file(run: RunRef, storage: Storage, folder: Path) -> list[int]:
    """Return the steps of the training loss as TensorBoard shows them."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    events = EventAccumulator(client.download_artifacts(run.run_id, "tensorboard", str(folder))).Reload()
    return [event.step for event in events.Scalars("loss/train")]
