"""Promotion: registers the best run and moves the alias `champion` to it if it beats the champion."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from tasks import tracking
from tasks.cache.manifest import open_cache
from tasks.config.promotion import PromoteConfig
from tasks.errors import WrongInput
from tasks.model_package.description import FILE_LIMITS
from tasks.refs import CacheRef, ModelRef, Promotion, RunRef, TableRef
from tasks.registry.compare import champion_accuracy, num_test_images
from tasks.registry.gate import check_comparable, check_minimums, choose_best, is_better, is_older
from tasks.registry.previous import CHAMPION, repair_previous
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.system.locks import exclusive_lock
from tasks.tables.snapshots import newest_snapshot
from tasks.tracking import EvaluatedRun, evaluated_run

logger = logging.getLogger("lakevision.registry")


def promote_best(
    runs: Sequence[RunRef], promote: PromoteConfig, storage: Storage, table: TableRef | None = None
) -> Promotion:
    """Promote the best of the runs on the split `val` if it beats the current champion.

    A run beats the champion by a higher accuracy on the same test images. If the champion was tested on an older
    version of the table, it is tested again on the challenger's images, from the cache or the table. If that fails,
    the champion is kept, and the reason says so.

    A run that was trained on an older version, or registered before the champion, never replaces it: submitting a run
    again does not roll back.

    Args:
        runs: Finished training runs on one table; if empty, the newest finished run and all others on its cache.
        promote: Name of the registered model, and the gate.
        storage: Storage with the tracking URI.
        table: The table whose content the runs were trained on; None for the table that each run recorded.

    Raises:
        WrongInput: A run has no test accuracy, no run passes the gate, no name can be derived, or the champion was
            trained on another table.
    """
    runs = runs or tracking.promotable_runs(storage)
    if not runs:
        raise WrongInput(f"'{storage.tracking_shown}' has no finished run to promote: run the flow train first")
    tested = [_with_table(evaluated_run(storage, run), table) for run in runs]
    _check_one_table(tested)
    name = promote.model_name or _derived_name(tested[0], storage)
    rolled_back = tracking.rolled_back_runs(storage, name)
    # If all were rolled back, the best of them is left out below, with the reason.
    candidates = [one for one in tested if one.run.run_id not in rolled_back] or tested
    best = choose_best(candidates)
    check_minimums(best, len(candidates), promote)
    accuracies = {one.run.run_id: one.val_accuracy for one in candidates}
    with promotion_lock(storage, name):
        earlier = tracking.registered_version(storage, best.run, name)
        is_given = promote.model_name is not None
        tags = {} if earlier is None else tracking.version_tags(storage, earlier)
        challenge = _Challenge(best, accuracies, name, is_given, earlier, storage, tags.get(tracking.ROLLED_BACK_TAG))
        decision = None
        # The lock does not cover other machines: a promotion there may move the alias before this one is written.
        while decision is None:
            decision = _carry_out(challenge, tracking.model_with_alias(storage, name, CHAMPION))
    logger.info("%s", decision.sentence)
    return decision


@dataclass(frozen=True)
class _Challenge:
    """A run that may become the champion.

    Attributes:
        best: The run, with the data it was tested on.
        accuracies: Accuracy (0-1) of all candidate runs on the split `val`, by MLflow run id.
        name: Name of the registered model.
        name_is_given: Whether the name is from `promote.model_name`; else it was derived from the table.
        earlier: Version as which an earlier promotion registered the run, or None.
        storage: Storage with the tracking URI.
        rolled_back: Sentence on the rollback of the run's version, or None.
    """

    best: EvaluatedRun
    accuracies: Mapping[str, float | None]
    name: str
    name_is_given: bool
    earlier: ModelRef | None
    storage: Storage
    rolled_back: str | None


def promotion_lock(storage: Storage, name: str) -> AbstractContextManager[None]:
    """Return the lock of promotions and rollbacks under a name: beside the database file, else in the home."""
    folder = tracking.database_folder(storage) or storage.home
    return exclusive_lock(f"{folder}/promotion-{hashlib.sha256(name.encode()).hexdigest()[:12]}")


def _carry_out(challenge: _Challenge, previous: ModelRef | None) -> Promotion | None:
    """Decide, and write the decision to the registry; return None if the champion is no longer `previous`."""
    best, storage = challenge.best, challenge.storage
    decision = _decide(challenge, previous)
    champion = decision.champion
    source = "" if best.table is None else tracking.source_name(best.table, storage)
    tags = {"lakevision.promotion": decision.sentence}
    if decision.outcome != "kept":
        champion = tracking.register_run(storage, best.run, challenge.name, FILE_LIMITS)
        decision = decision.model_copy(update={"champion": champion})
        tags = {"lakevision.promotion": decision.sentence, "candidates": tracking.to_json(challenge.accuracies)}
        tags |= tracking.evaluation_tags(best, source)
        if challenge.earlier is not None and tracking.TABLE_ID_TAG in tracking.version_tags(storage, champion):
            # It may have been promoted for another table with the same images, whose champion is found by these tags.
            tags = {name: value for name, value in tags.items() if name not in tracking.TABLE_TAGS}
    elif challenge.earlier is None:
        registered = tracking.registered_version(storage, best.run, challenge.name)
        if registered is not None:  # registered by this promotion, before a concurrent one moved the alias
            tracking.tag_version(storage, registered, tags)
    if best.table is not None and not _is_older_than_served(best.table, champion, storage):
        tags |= tracking.serving_tags(best.table, source)
    if decision.outcome == "promoted" and previous is not None:
        # An alias has no history: this is the version to roll back to.
        tags[tracking.PREVIOUS_TAG] = str(previous.version)
    # Before the alias moves, so that it never names a version without its tags.
    tracking.tag_version(storage, champion, tags)
    if decision.outcome == "promoted":
        if tracking.model_with_alias(storage, challenge.name, CHAMPION) != previous:
            return None
        tracking.set_alias(storage, champion, CHAMPION)
    repair_previous(storage, champion)
    return decision


def _is_older_than_served(table: TableRef, champion: ModelRef, storage: Storage) -> bool:
    """Return whether the champion was trained on, or is tagged to serve, a later version of the table.

    A run on an earlier version that loses must not replace the tag with the table's current version.
    """
    of = tracking.evaluated_version(storage, champion)
    known = of.serves if of.table is None else (*of.serves, of.table)
    return any(table.table_id == other.table_id and table.version < other.version for other in known)


def check_promotion(promote: PromoteConfig, storage: Storage, table: TableRef, cache: CacheRef) -> None:
    """Check before training that the champion under the model's name was trained on the same table.

    Raises:
        WrongInput: As `check_comparable`.
    """
    name = promote.model_name or tracking.derived_model_name(table, storage)
    champion = None if name is None else tracking.model_with_alias(storage, name, CHAMPION)
    if name is None or champion is None:
        return
    future_run = EvaluatedRun(RunRef(run_id=""), 0.0, None, table, open_cache(cache).content_digest, cache)
    is_given = promote.model_name is not None
    check_comparable(future_run, tracking.evaluated_version(storage, champion), name, is_given=is_given)


def _with_table(tested: EvaluatedRun, table: TableRef | None) -> EvaluatedRun:
    """Return the run with the given table; without one, add the table's source where an older run lacks it."""
    if table is not None:
        return replace(tested, table=table)
    if tested.table is None or tested.table.source:
        return tested
    try:
        found = newest_snapshot(None, tested.table.path)
    except NeedsSpark:
        return tested
    if found is None or found.table.table_id != (tested.table.table_id or found.table.table_id):
        return tested
    return replace(tested, table=found.table.model_copy(update={"version": tested.table.version}))


def _check_one_table(tested: Sequence[EvaluatedRun]) -> None:
    for other in tested[1:]:
        first = tested[0]
        known = first.table is not None and other.table is not None
        if known and not (first.same_table(other) or first.same_content(other)):
            raise WrongInput(
                f"run_ids has '{first.run.run_id}' and '{other.run.run_id}', which were trained on different tables, "
                "so the two cannot be compared: give runs of one table"
            )


def _derived_name(tested: EvaluatedRun, storage: Storage) -> str:
    name = None if tested.table is None else tracking.derived_model_name(tested.table, storage)
    if name is None:
        raise WrongInput(
            f"promote.model_name is empty, and MLflow run '{tested.run.run_id}' does not record the source of its "
            "images: set promote.model_name"
        )
    return name


def _why_left_out(challenge: _Challenge, champion: EvaluatedRun, previous: ModelRef) -> str | None:
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


def _decide(challenge: _Challenge, previous: ModelRef | None) -> Promotion:
    """Return the decision, with version 0 for a champion that is not registered yet."""
    best, name, storage = challenge.best, challenge.name, challenge.storage
    measured = f"test accuracy {best.accuracy:.4f} on {num_test_images(best)}"
    champion = None if previous is None else tracking.evaluated_version(storage, previous)

    def decision(outcome: str, accuracy: float | None, images: int | None, reason: str) -> Promotion:
        return Promotion.model_validate(
            {
                "champion": previous or ModelRef(name=name, version=0, run_id=best.run.run_id),
                "outcome": outcome,
                "challenger": best.run,
                "challenger_accuracy": best.accuracy,
                "champion_accuracy": accuracy,
                "challenger_images": best.images,
                "champion_images": images,
                "reason": reason,
            }
        )

    if previous is None or champion is None:
        return decision("promoted", None, None, f"{measured}, without a previous champion")
    if previous.run_id == best.run.run_id:
        return decision("unchanged", best.accuracy, best.images, measured)
    check_comparable(best, champion, name, is_given=challenge.name_is_given)
    if (why := _why_left_out(challenge, champion, previous)) is not None:
        return decision("kept", champion.accuracy, champion.images, f"run {best.run.run_id} {why}")
    known = champion_accuracy(best, champion, previous, storage)
    if not known.is_comparable:
        reason = f"run {best.run.run_id} has {measured}, the champion {known.accuracy:.4f} {known.measured_on}"
        return decision("kept", known.accuracy, known.images, reason)
    outcome = "promoted" if is_better(best.accuracy, known.accuracy) else "kept"
    verdict = "better than" if outcome == "promoted" else "not better than"
    reason = f"run {best.run.run_id} has {measured}, {verdict} the champion's {known.accuracy:.4f} {known.measured_on}"
    return decision(outcome, known.accuracy, known.images, reason)
