"""The champion's accuracy for the comparison with a challenger, on the same test images where possible."""

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
class ChampionAccuracy:
    """The champion's accuracy for a comparison with a challenger.

    Attributes:
        accuracy: Fraction of test images that were classified correctly, 0-1.
        images: Number of test images; None if it is unknown.
        measured_on: Description of the images, for the reason of the decision.
        is_comparable: Whether a challenger with a higher accuracy may replace the champion.
    """

    accuracy: float
    images: int | None
    measured_on: str
    is_comparable: bool = True


def champion_accuracy(
    best: EvaluatedRun, champion: EvaluatedRun, version: ModelRef, storage: Storage
) -> ChampionAccuracy:
    """Return the champion's accuracy, measured again on the challenger's test images if they are different ones."""
    if best.same_content(champion):
        return ChampionAccuracy(champion.accuracy, champion.images, "on the same images")
    from tasks.predict.accuracy import accuracy_on_cache, accuracy_on_table, load_registered  # torch: seconds

    recorded = f"on {num_test_images(champion)} of an earlier version of the table"
    try:
        classifier = load_registered(version, storage)
    except WrongInput as error:
        # A champion that can no longer predict must not keep the alias for ever.
        logger.warning("the champion cannot be loaded: the accuracies recorded by the runs are compared: %s", error)
        return ChampionAccuracy(champion.accuracy, champion.images, f"{recorded}; it cannot be loaded: {error}")
    again = "on the same images, on which it was tested again"
    problems = []
    measures: list[Callable[[], float]] = []
    if best.cache is not None:
        measures.append(partial(accuracy_on_cache, classifier, best.cache))
    if best.table is not None:
        measures.append(partial(accuracy_on_table, classifier, best.table))
    for measure in measures:
        try:
            return ChampionAccuracy(measure(), best.images, again)
        except (WrongInput, CacheDamaged, NeedsSpark, OSError, pa.ArrowInvalid) as error:
            problems.append(str(error) or "only Spark can read the table")
    problem = "; ".join(problems) or "the challenger's run records neither its cache nor its table"
    logger.warning("the champion is kept, since it could not be tested on the challenger's images: %s", problem)
    measured_on = (
        f"{recorded}, so the two cannot be compared; it could not be tested again: {problem} "
        "(to promote the run all the same, remove the alias from the model in MLflow and promote the run again)"
    )
    return ChampionAccuracy(champion.accuracy, champion.images, measured_on, is_comparable=False)


def num_test_images(tested: EvaluatedRun) -> str:
    """Return the number of images that a run was tested on, as text."""
    return "an unknown number of test images" if tested.images is None else f"{tested.images} test images"
