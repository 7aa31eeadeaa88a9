"""Whether a split has the pictures for a step on every rank."""

from tasks.config import TrainConfig
from tasks.errors import WrongInput


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
