"""Whether the data have what a training asks of them: images for a step on every rank, classes for its metric."""

from tasks.cache.manifest import CacheManifest
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.schema import TRAIN

STEPS_TO_LEARN = 10
"""Steps per epoch that an error advises. With one or two, an epoch moves the weights once or twice."""


def check_batches(
    train: TrainConfig, num_ranks: int, rows: int, counted: str = "the split 'train' has {} images"
) -> None:
    """Refuse more ranks, or a larger global batch, than there are images to train on.

    Args:
        train: Its batch size.
        num_ranks: Ranks that share the split `train`.
        rows: Images of the split `train`, or a number that they cannot exceed.
        counted: Says what was counted, with `{}` for `rows`.

    Raises:
        WrongInput: Names the setting, its value, the images there are, and what is possible.
    """
    if rows < num_ranks:
        raise WrongInput(f"distributed.num_ranks is {num_ranks}, but {counted.format(rows)}: give at most {rows}")
    if train.batch_size != "auto" and train.batch_size * num_ranks > rows:
        ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        most = rows // num_ranks
        better = f", or {most // STEPS_TO_LEARN} for {STEPS_TO_LEARN} steps per epoch" if most >= STEPS_TO_LEARN else ""
        raise WrongInput(
            f"train.batch_size is {train.batch_size}{ranks}, but {counted.format(rows)}, fewer than one step takes: "
            f"give at most {most}{better}"
        )


def check_data(train: TrainConfig, manifest: CacheManifest, num_ranks: int) -> None:
    """Refuse settings that these data cannot be trained with.

    Raises:
        WrongInput: As `check_batches`, or a metric that says nothing of these classes.
    """
    check_batches(train, num_ranks, manifest.splits[TRAIN].rows)
    if train.monitor == "val_top5_accuracy" and len(manifest.classes) <= 5:
        raise WrongInput(
            f"train.monitor is 'val_top5_accuracy', which is 1 in every epoch of {len(manifest.classes)} "
            "classes: watch val_accuracy, val_macro_f1 or val_loss"
        )
