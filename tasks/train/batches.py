"""Whether the data have what a training asks of them: pictures for a step on every rank, classes for its metric."""

from tasks.cache.manifest import CacheManifest
from tasks.config import TrainConfig
from tasks.errors import WrongInput
from tasks.schema import TRAIN


def check_batches(train: TrainConfig, num_ranks: int, rows: int) -> None:
    """Refuse more ranks, or more pictures a step, than there are to train on.

    Args:
        train: Its batch size.
        num_ranks: Ranks that share the split `train`.
        rows: Pictures of the split `train`.

    Raises:
        WrongInput: Names the setting, its value, the pictures there are, and what is possible.
    """
    if rows < num_ranks:
        raise WrongInput(
            f"distributed.num_ranks is {num_ranks}, and the split 'train' has {rows} pictures: give at most {rows}"
        )
    if train.batch_size != "auto" and train.batch_size * num_ranks > rows:
        ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise WrongInput(
            f"train.batch_size is {train.batch_size}{ranks}, and the split 'train' has {rows} pictures: that "
            f"would be a step an epoch; give at most {rows // num_ranks}, a tenth of it or less to learn well"
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
