"""Checks that a cache has enough images for the ranks and the batch size, and classes for the metric."""

from tasks.cache.manifest import CacheManifest
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.refs import TRAIN

RECOMMENDED_STEPS = 10
"""Steps per epoch that an error recommends; with one or two, an epoch updates the weights once or twice."""


def check_batches(
    train: TrainConfig, num_ranks: int, rows: int, counted: str = "the split 'train' has {} images"
) -> None:
    """Check that there are enough training images for the ranks and the global batch size.

    Args:
        train: Training settings with the batch size.
        num_ranks: Ranks that share the split `train`.
        rows: Number of images of the split `train`, or an upper bound of it.
        counted: Clause of the error that names the counted images, with `{}` for `rows`.

    Raises:
        WrongInput: There are fewer images than ranks, or than a step takes. The message names the setting, its value,
            the number of images, and the possible values.
    """
    if rows < num_ranks:
        raise WrongInput(
            f"distributed.num_ranks is {num_ranks}, but {counted.format(rows)}",
            setting="distributed.num_ranks",
            way_out=f"give at most {rows}",
        )
    num_batches = num_ranks * train.accumulate_steps
    if rows < num_batches:
        raise WrongInput(
            f"train.accumulate_steps is {train.accumulate_steps}, but {counted.format(rows)}, fewer than one step "
            "takes",
            setting="train.accumulate_steps",
            way_out=f"give at most {rows // num_ranks}",
        )
    if train.batch_size != "auto" and train.batch_size * num_batches > rows:
        ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        ranks += f", accumulated over {train.accumulate_steps} batches" if train.accumulate_steps > 1 else ""
        most = rows // num_batches
        way_out = f"give at most {most}"
        if most >= RECOMMENDED_STEPS:
            way_out += f", or {most // RECOMMENDED_STEPS} for {RECOMMENDED_STEPS} steps per epoch"
        raise WrongInput(
            f"train.batch_size is {train.batch_size}{ranks}, but {counted.format(rows)}, fewer than one step takes",
            setting="train.batch_size",
            way_out=way_out,
        )


def check_data(train: TrainConfig, manifest: CacheManifest, num_ranks: int) -> None:
    """Check that a cache can be trained on with these settings.

    Raises:
        WrongInput: As for `check_batches`, or the monitored metric is constant for so few classes.
    """
    check_batches(train, num_ranks, manifest.splits[TRAIN].rows)
    if train.monitor == "val_top5_accuracy" and len(manifest.classes) <= 5:
        raise WrongInput(
            f"train.monitor is 'val_top5_accuracy', which is 1 in every epoch of {len(manifest.classes)} classes",
            setting="train.monitor",
            way_out="use val_accuracy, val_macro_f1 or val_loss",
        )
