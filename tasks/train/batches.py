"""Checks that a cache has enough images for the ranks, and classes for the metric."""

from tasks.cache.manifest import CacheManifest
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.refs import TRAIN


def check_batches(
    train: TrainConfig, num_ranks: int, rows: int, counted: str = "the split 'train' has {} images"
) -> None:
    """Check that there are enough training images for the ranks; batches are lowered (`TrainConfig.fitting_batch`).

    Args:
        train: Training settings.
        num_ranks: Ranks that share the split `train`.
        rows: Number of images of the split `train`, or an upper bound of it.
        counted: Clause of the error that names the counted images, with `{}` for `rows`.

    Raises:
        WrongInput: There are fewer images than ranks, or than batches of a step. The message names the setting, its
            value, the number of images, and the possible values.
    """
    if rows < num_ranks:
        raise WrongInput(
            f"distributed.num_ranks is {num_ranks}, but {counted.format(rows)}",
            setting="distributed.num_ranks",
            way_out=f"give at most {rows}",
        )
    if rows < num_ranks * train.accumulate_steps:
        raise WrongInput(
            f"train.accumulate_steps is {train.accumulate_steps}, but {counted.format(rows)}, fewer than one step "
            "takes",
            setting="train.accumulate_steps",
            way_out=f"give at most {rows // num_ranks}",
        )


def check_monitor(train: TrainConfig, num_classes: int) -> None:
    """Check that the monitored metric can change.

    Raises:
        WrongInput: It is constant for so few classes.
    """
    if train.monitor == "val_top5_accuracy" and num_classes <= 5:
        raise WrongInput(
            f"train.monitor is 'val_top5_accuracy', which is 1 in every epoch of {num_classes} classes",
            setting="train.monitor",
            way_out="use val_accuracy, val_macro_f1 or val_loss",
        )


def check_data(train: TrainConfig, manifest: CacheManifest, num_ranks: int) -> None:
    """Check that a cache can be trained on with these settings.

    Raises:
        WrongInput: As for `check_batches` and `check_monitor`.
    """
    check_batches(train, num_ranks, manifest.splits[TRAIN].rows)
    check_monitor(train, len(manifest.classes))
