"""Checks that every trial of a search can be trained, before a cache is built for it."""

from itertools import islice

from tasks.config.tune import MAX_CORNERS, TuneRun, corners, with_values
from tasks.preflight.check import train_rows
from tasks.refs import TableRef
from tasks.tune.space import fit_batches


def check_search_sizes(config: TuneRun, images: TableRef) -> None:
    """Raise an error if a trial may draw a batch larger than the number of training images.

    Raises:
        WrongInput: As `fit_batches`.
    """
    if rows := train_rows(images):
        fit_batches(config.train, config.tune, rows)


def check_search(config: TuneRun, *, here: bool = True) -> None:
    """Raise an error if a trial could not be trained, before a cache is built for the search.

    Args:
        config: The search.
        here: Whether its trials run on this machine, as in `check_training`.

    Raises:
        WrongInput: Names the setting, its value, and the way out.
    """
    drawn = [with_values(config.train, values) for values in islice(corners(config.tune.space), MAX_CORNERS)]
    from tasks.model.device import choose_device  # Here: they load torch.
    from tasks.model.precision import choose_precision
    from tasks.preflight.trainable import check_training

    for device, precision in {(one.device, one.precision) for one in drawn if here}:
        choose_precision(precision, choose_device(device, 0))
    # Each network is built once, whichever other settings are searched.
    for train in {(one.model, one.weights, one.freeze_backbone): one for one in drawn}.values():
        check_training(train, config.cache, here=here)
