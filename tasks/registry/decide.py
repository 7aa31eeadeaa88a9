"""The decision between the best run and the champion; it is written to the registry by `promote`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.errors import WrongInput, join_names
from tasks.model_package.description import WEIGHTS_FILE
from tasks.predict.champion import known_classes
from tasks.refs import ModelRef
from tasks.registry import gate
from tasks.registry.aliases import CHAMPION_TAG
from tasks.registry.comparison import judged_text
from tasks.registry.decision import Approval, Comparison, Outcome, Promotion
from tasks.registry.evidence import (
    Challenge,
    ChampionUnusable,
    TableGone,
    compare_on_images,
    num_test_images,
    recorded_accuracy,
)
from tasks.registry.judged import note_judged
from tasks.spark.session import try_without_spark
from tasks.tracking import models
from tasks.tracking.evaluated import EvaluatedRun, evaluated_version


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
    if gate.is_older(best, champion):
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
    best, storage = challenge.best, challenge.storage
    if previous is None:
        return _without_champion(challenge)
    champion = evaluated_version(storage, previous)
    known = (previous, best.accuracy, best.images)
    if previous.run_id == best.run.run_id:
        return _decision(challenge, known, "unchanged", measured(best))
    gate.check_comparable(best, champion, challenge.name, is_given=challenge.promote.model_name is not None)
    run, known = f"run {best.run.run_id}", (previous, champion.accuracy, champion.images)
    if (why := _why_left_out(challenge, champion, previous)) is not None:
        return _decision(challenge, known, "kept", f"{run} {why}")
    _check_size(challenge)
    ours = known_classes(best.run, storage)
    against: list[str] = []
    try:
        try:
            theirs = known_classes(previous, storage)
        except WrongInput as error:
            raise ChampionUnusable(str(error)) from None
        against = gate.class_objections(ours, theirs, challenge.promote)
        try:
            return _by_images(challenge, previous, champion, theirs, against)
        except TableGone:
            return _by_record(challenge, previous, champion, against)
    except ChampionUnusable as unusable:
        return _without_comparison(challenge, known, str(unusable), against)


def _without_champion(challenge: Challenge) -> Promotion:
    """Decide where no version has the alias: the run is the first champion, or the champion was lost."""
    _check_size(challenge)
    number = models.model_tags(challenge.storage, challenge.name).get(CHAMPION_TAG)
    if number is None:
        return _decision(challenge, None, "promoted", f"{measured(challenge.best)}, without a previous champion")
    lost = (
        f"version {number} of '{challenge.name}' was the champion, but has the alias no longer or was deleted (give a "
        "version the alias in MLflow if one is left)"
    )
    return _without_comparison(challenge, None, lost, [])


def _without_comparison(
    challenge: Challenge, known: tuple[ModelRef, float, int | None] | None, problem: str, against: list[str]
) -> Promotion:
    """Decide about a champion that cannot be evaluated: it stays, unless a user has said that the run replaces it.

    Args:
        challenge: The run.
        known: As for `_decision`.
        problem: Why it cannot be evaluated.
        against: The objections to the run's classes.
    """
    best, promote = challenge.best, challenge.promote
    run = best.run.run_id
    is_chosen = promote.replace_unusable or promote.approval == "human" or bool(challenge.reason)
    why = f"run {run} has {measured(best)}; the champion cannot be evaluated"
    if not is_chosen:
        way_out = (
            "set promote.replace_unusable, set promote.approval to human, or run the flow promote with run_ids "
            f"['{run}'] and a reason"
        )
        against = [*against, f"to replace it without a comparison, {way_out}"]
    if against:
        return _decision(challenge, known, "kept", f"{why}, so it stays: {'; '.join([problem, *against])}")
    given = f"; it is replaced, since {challenge.reason}" if challenge.reason else ""
    return _decision(challenge, known, "promoted", f"{why}, so only the limits of a run counted: {problem}{given}")


def with_approval(decision: Promotion, approval: Approval | None, previous: ModelRef | None) -> Promotion:
    """Return the decision after a user was asked about a run that is within all limits.

    Args:
        decision: A decision to promote.
        approval: The answer, or None if nobody was asked yet.
        previous: The current champion, or None.
    """
    if approval is None:
        return decision.model_copy(update={"outcome": "waiting"})
    shown, current = approval.champion_version, None if previous is None else previous.version
    answer = f"{'approved' if approval.approved else 'refused'} by {approval.by}"
    if approval.comment:
        answer += f": {approval.comment}"
    if shown != current:
        asked = "the model had no champion" if shown is None else f"version {shown} was the champion"
        answer = f"{approval.by} was asked when {asked}, which has changed since then: promote it again"
    found: dict[str, object] = {"approved_by": approval.by, "reason": f"{decision.reason}; {answer}"}
    if shown != current or not approval.approved:
        found |= {"outcome": "kept", "champion": previous or decision.champion}
    return decision.model_copy(update=found)


def measured(tested: EvaluatedRun) -> str:
    """Return the recorded test accuracy of a run as text."""
    return f"test accuracy {tested.accuracy:.4f} on {num_test_images(tested)}"


def _by_images(
    challenge: Challenge, previous: ModelRef, champion: EvaluatedRun, classes: Sequence[str], against: list[str]
) -> Promotion:
    """Decide by the predictions of the same images.

    Args:
        challenge: The run.
        previous: The champion.
        champion: Its run.
        classes: Its classes.
        against: The objections to the run's classes.

    Raises:
        TableGone: The run's table is gone.
        ChampionUnusable: The champion cannot be evaluated.
    """
    # Also where a session is open: a driver predicts the test images before Spark's workers have loaded the model.
    compare = partial(compare_on_images, challenge, previous, champion, classes)
    found = try_without_spark(compare, challenge.spark, challenge.storage, even_if_open=True)
    against = [*against, *gate.objections(found, challenge.promote)]
    reason = (
        f"run {challenge.best.run.run_id} classifies {found.challenger_accuracy:.4f} of {found.images} test images "
        f"correctly, the champion {found.champion_accuracy:.4f}"
    )
    if found.left_out:
        reason += f" ({found.left_out} images that one of them was trained on do not count)"
    reason += f"; {judged_text(found.num_judged)}"
    if few := gate.classes_not_judged(found, challenge.promote):
        reason += f"; too few images to judge the recall of {join_names(few[: gate.NUM_NAMED], len(few))}"
    if against:
        reason += f"; {'; '.join(against)}"
    known = (previous, found.champion_accuracy, found.images)
    return _decision(challenge, known, "kept" if against else "promoted", reason, found)


def _by_record(challenge: Challenge, previous: ModelRef, champion: EvaluatedRun, against: list[str]) -> Promotion:
    """Decide by accuracies alone, with the arguments of `_by_images`.

    Raises:
        ChampionUnusable: The champion cannot be loaded or tested.
    """
    best = challenge.best
    theirs, num_tested, measured_on = recorded_accuracy(best, champion, previous, challenge.storage)
    number = note_judged(challenge.storage, challenge.name, best.run, best.content_digest)
    images = best.images or num_tested or 1  # Unknown: the fewest, with which most is chance.
    # The two differ at most on the images that one of them classifies wrongly.
    differing = images * (2 - best.accuracy - theirs)
    promote = challenge.promote
    against = [*against, *gate.gain_objections(best.accuracy, theirs, differing, images, number, promote)]
    reason = f"run {best.run.run_id} has {measured(best)}, the champion {theirs:.4f} {measured_on}"
    reason = "; ".join([reason, judged_text(number), *against])
    return _decision(challenge, (previous, theirs, num_tested), "kept" if against else "promoted", reason)


def _decision(
    challenge: Challenge,
    known: tuple[ModelRef, float, int | None] | None,
    outcome: Outcome,
    reason: str,
    comparison: Comparison | None = None,
) -> Promotion:
    """Return a decision by recorded figures, or by those of a comparison.

    Args:
        challenge: The run.
        known: The champion, its accuracy and its number of images; None without a champion.
        outcome: The outcome.
        reason: The reason.
        comparison: Figures on the same images, if the two were compared image by image.
    """
    best = challenge.best
    champion, accuracy, images = (None, None, None) if known is None else known
    return Promotion(
        champion=champion or ModelRef(name=challenge.name, version=0, run_id=best.run.run_id),
        outcome=outcome,
        challenger=best.run,
        challenger_accuracy=best.accuracy if comparison is None else comparison.challenger_accuracy,
        champion_accuracy=accuracy,
        challenger_images=best.images if comparison is None else comparison.images,
        comparison=comparison,
        previous=champion,
        champion_images=images,
        reason=f"{reason}; its head has {'{:.4f} ({:.4f} to {:.4f})'.format(*best.folds)} in a cross-validation"
        if best.folds
        else reason,
    )


def _check_size(challenge: Challenge) -> None:
    if challenge.promote.max_megabytes is not None:
        with TemporaryDirectory() as scratch:
            folder = models.fetch_logged(challenge.storage, challenge.best.run, Path(scratch))
            gate.check_size((folder / WEIGHTS_FILE).stat().st_size, challenge.promote)
