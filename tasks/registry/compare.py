"""The accuracy of a champion beside a challenger's: on the same test images, or not compared."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from tasks.cache.manifest import CacheDamaged
from tasks.errors import WrongInput
from tasks.refs import ModelRef
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tracking import EvaluatedRun

logger = logging.getLogger("lakevision.registry")


@dataclass(frozen=True)
class Known:
    """The champion's accuracy beside the challenger's.

    Attributes:
        accuracy: Share of right test images, 0-1.
        images: Their number; None where it is not known.
        how: What it was measured on, for the reason.
        is_comparable: Whether a challenger with a higher accuracy is to replace it.
    """

    accuracy: float
    images: int | None
    how: str
    is_comparable: bool = True


def champion_accuracy(best: EvaluatedRun, champion: EvaluatedRun, version: ModelRef, storage: Storage) -> Known:
    """Return what is known of the champion: measured on the challenger's test images where they are others."""
    if best.same_content(champion):
        return Known(champion.accuracy, champion.images, "on the same images")
    from tasks.predict.on_images import accuracy_on_cache, accuracy_on_table, load_registered  # torch: seconds

    recorded = f"on {counted(champion)} of an earlier version of the table"
    try:
        classifier = load_registered(version, storage)
    except WrongInput as error:
        # A champion that predicts nothing any more must not stay one for ever.
        logger.warning("the champion cannot be loaded, and what each run recorded is compared: %s", error)
        return Known(champion.accuracy, champion.images, f"{recorded}; it cannot be loaded: {error}")
    again = "on the same images, on which it was tested again"
    problems = []
    measures: list[Callable[[], float]] = []
    if best.cache is not None:
        measures.append(partial(accuracy_on_cache, classifier, best.cache))
    if best.table is not None:
        measures.append(partial(accuracy_on_table, classifier, best.table))
    for measure in measures:
        try:
            return Known(measure(), best.images, again)
        except (WrongInput, CacheDamaged, NeedsSpark, OSError, pa.ArrowInvalid) as error:
            problems.append(str(error) or "only Spark can read the table")
    problem = "; ".join(problems) or "the challenger's run names neither its cache nor its table"
    logger.warning("the champion could not be tested again on the challenger's images, and stays: %s", problem)
    how = (
        f"{recorded}, so the two cannot be compared; it could not be tested again: {problem} "
        "(to make the run the champion all the same, remove the alias from the model in MLflow and promote the run)"
    )
    return Known(champion.accuracy, champion.images, how, is_comparable=False)


def counted(tested: EvaluatedRun) -> str:
    """Return how many images a run was tested on, in words."""
    return "an unknown number of test images" if tested.images is None else f"{tested.images} test images"
