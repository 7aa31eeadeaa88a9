"""The decision between the best run and the champion; it is written to the registry by `promote`."""

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession

from tasks import tracking
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.model_package.description import FILE_LIMITS, WEIGHTS_FILE
from tasks.refs import ModelRef
from tasks.registry.aliases import CHALLENGER
from tasks.registry.decision import Approval, Comparison, Outcome, Promotion
from tasks.registry.evidence import (
    ChampionUnusable,
    TableGone,
    compare_on_images,
    current_table,
    num_test_images,
    recorded_accuracy,
)
from tasks.registry.gate import check_comparable, check_size, is_better, is_older, objections
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tracking import EvaluatedRun


@dataclass(frozen=True)
class Challenge:
    """A run that may become the champion.

    Attributes:
        best: The run, with the data it was tested on.
        accuracies: Accuracy (0-1) of all candidate runs on the split `val`, by MLflow run id.
        name: Name of the registered model.
        name_is_given: Whether the name is from `promote.model_name`; else it was derived from the table.
        promote: Settings of the gate.
        storage: Storage with the tracking URI.
        spark: Settings of the session for tables that only Spark can read.
        predict: Settings of inference for the rows that a comparison adds to `predictions`.
        approval: Answer of the user who was asked, or None.
        earlier: Version as which an earlier promotion registered the run, or None.
        rolled_back: Sentence on the rollback of the run's version, or None.
    """

    best: EvaluatedRun
    accuracies: Mapping[str, float | None]
    name: str
    name_is_given: bool
    promote: PromoteConfig
    storage: Storage
    spark: SparkConfig
    predict: PredictConfig
    approval: Approval | None
    earlier: ModelRef | None = None
    rolled_back: str | None = None


def _why_left_out(challenge: Challenge, champion: EvaluatedRun, previous: ModelRef) -> str | None:
    """Return why the run is not even compared with the champion, or None."""
    best, earlier = challenge.best, challenge.earlier
    if challenge.rolled_back is not None:
        return f"is not promoted again, since {challenge.rolled_back}"
    if earlier is not None and earlier.version < previous.version:
        return (
            f"is version {earlier.version} already, which is older, and promoting it again does not move the alias "
            "back (to go back to the previous champion, run the flow rollback)"
        )
    if is_older(best, champion):
        assert best.table is not None, "an older table is known"
        assert champion.table is not None, "an older table is known"
        return (
            f"was trained on version {best.table.version} of the table, and the champion on version "
            f"{champion.table.version}"
        )
    return None


def decide(challenge: Challenge, previous: ModelRef | None) -> Promotion:
    """Return the decision, with version 0 for a champion that is not registered yet.

    A run that is compared with the champion image by image is registered, with the alias `challenger`.

    Args:
        challenge: The run.
        previous: The current champion, or None.

    Raises:
        WrongInput: The weights are too large, the champion was trained on another table, or the run's model cannot be
            loaded.
    """
    best, name, storage = challenge.best, challenge.name, challenge.storage
    champion = None if previous is None else tracking.evaluated_version(storage, previous)
    if previous is None or champion is None:
        _check_size(challenge)
        return _decision(challenge, None, "promoted", f"{measured(best)}, without a previous champion")
    known = (previous, best.accuracy, best.images)
    if previous.run_id == best.run.run_id:
        return _decision(challenge, known, "unchanged", measured(best))
    check_comparable(best, champion, name, is_given=challenge.name_is_given)
    run, known = f"run {best.run.run_id}", (previous, champion.accuracy, champion.images)
    if (why := _why_left_out(challenge, champion, previous)) is not None:
        return _decision(challenge, known, "kept", f"{run} {why}")
    _check_size(challenge)
    try:
        try:
            return _by_images(challenge, previous, champion)
        except TableGone:
            return _by_record(challenge, previous, champion)
    except ChampionUnusable as unusable:
        why = f"{run} has {measured(best)}; the champion cannot be evaluated, so only the limits of a run counted"
        return _decision(challenge, known, "promoted", f"{why}: {unusable}")


def with_approval(decision: Promotion, approval: Approval | None, previous: ModelRef | None) -> Promotion:
    """Return the decision after a user was asked about a run that is within all limits.

    Args:
        decision: A decision to promote.
        approval: The answer, or None if nobody was asked yet.
        previous: The current champion, or None.
    """
    if approval is None:
        return decision.model_copy(update={"outcome": "waiting"})
    comment = f": {approval.comment}" if approval.comment else ""
    found = {"approved_by": approval.by}
    current = None if previous is None else previous.version
    if approval.champion_version != current:
        shown = approval.champion_version
        asked = "the model had no champion" if shown is None else f"version {shown} was the champion"
        why = f"{approval.by} was asked when {asked}, which has changed since then: promote it again"
        return _refused(decision, f"{decision.reason}; {why}", found, previous)
    if not approval.approved:
        return _refused(decision, f"{decision.reason}; refused by {approval.by}{comment}", found, previous)
    return decision.model_copy(update=found | {"reason": f"{decision.reason}; approved by {approval.by}{comment}"})


def _refused(decision: Promotion, reason: str, found: dict[str, str], previous: ModelRef | None) -> Promotion:
    champion = decision.champion if previous is None else previous
    return decision.model_copy(update=found | {"outcome": "kept", "reason": reason, "champion": champion})


def measured(tested: EvaluatedRun) -> str:
    """Return the recorded test accuracy of a run as text."""
    return f"test accuracy {tested.accuracy:.4f} on {num_test_images(tested)}"


def _by_images(challenge: Challenge, previous: ModelRef, champion: EvaluatedRun) -> Promotion:
    """Decide by the predictions of the same images.

    Raises:
        TableGone: The run's table is gone.
        ChampionUnusable: The champion cannot be evaluated.
    """
    best, storage = challenge.best, challenge.storage

    def run(spark: SparkSession | None) -> Comparison:
        table = current_table(spark, best, storage)
        challenger = tracking.register_run(storage, best.run, challenge.name, FILE_LIMITS)
        if tracking.model_with_alias(storage, challenge.name, CHALLENGER) != challenger:
            tracking.set_alias(storage, challenger, CHALLENGER)
        settings = challenge.promote, challenge.predict
        return compare_on_images(spark, challenger, best, previous, champion, table, *settings, storage)

    # Also where a session is open: a driver predicts the test images before Spark's workers have loaded the model.
    found = try_without_spark(run, challenge.spark, storage, even_if_open=True)
    against = objections(found, challenge.promote)
    reason = (
        f"run {best.run.run_id} classifies {found.challenger_accuracy:.4f} of {found.images} test images correctly, "
        f"the champion {found.champion_accuracy:.4f}"
    )
    if found.left_out:
        reason += f" ({found.left_out} images that one of them was trained on do not count)"
    if against:
        reason += f"; {'; '.join(against)}"
    decision = _decision(
        challenge, (previous, found.champion_accuracy, found.images), "kept" if against else "promoted", reason
    )
    return decision.model_copy(
        update={
            "comparison": found,
            "challenger_accuracy": found.challenger_accuracy,
            "challenger_images": found.images,
        }
    )


def _by_record(challenge: Challenge, previous: ModelRef, champion: EvaluatedRun) -> Promotion:
    """Decide by accuracies alone.

    Raises:
        ChampionUnusable: The champion cannot be loaded.
    """
    best = challenge.best
    found = recorded_accuracy(best, champion, previous, challenge.storage)
    known, run = (previous, found.accuracy, found.images), f"run {best.run.run_id}"
    if not found.is_comparable:
        reason = f"{run} has {measured(best)}, the champion {found.accuracy:.4f} {found.measured_on}"
        return _decision(challenge, known, "kept", reason)
    promoted = is_better(best.accuracy, found.accuracy, challenge.promote.min_accuracy_gain)
    verdict = "better than" if promoted else "not better than"
    reason = f"{run} has {measured(best)}, {verdict} the champion's {found.accuracy:.4f} {found.measured_on}"
    return _decision(challenge, known, "promoted" if promoted else "kept", reason)


def _decision(
    challenge: Challenge,
    known: tuple[ModelRef, float, int | None] | None,
    outcome: Outcome,
    reason: str,
) -> Promotion:
    """Return a decision by recorded figures; `known` has the champion, its accuracy and its number of images."""
    best = challenge.best
    champion, accuracy, images = (None, None, None) if known is None else known
    return Promotion(
        champion=champion or ModelRef(name=challenge.name, version=0, run_id=best.run.run_id),
        outcome=outcome,
        challenger=best.run,
        challenger_accuracy=best.accuracy,
        champion_accuracy=accuracy,
        challenger_images=best.images,
        previous=champion,
        champion_images=images,
        reason=reason,
    )


def _check_size(challenge: Challenge) -> None:
    if challenge.promote.max_megabytes is not None:
        num_bytes = tracking.logged_size(challenge.storage, challenge.best.run, WEIGHTS_FILE, FILE_LIMITS)
        check_size(num_bytes, challenge.promote)
