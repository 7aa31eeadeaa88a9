"""Promotion: moves the alias `champion` to the best run if it beats the champion, or to the winner of a live test."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from tasks.cache.manifest import open_cache
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.refs import CacheRef, ModelRef, RunRef, TableRef
from tasks.registry.aliases import CHALLENGER, CHAMPION, check_predicts, repair_aliases
from tasks.registry.decide import decide, with_approval
from tasks.registry.decision import Approval, Promotion, promotion_section
from tasks.registry.evidence import Challenge
from tasks.registry.gate import check_comparable, check_minimums, choose_best
from tasks.registry.history import DECISION_TAG, DecisionRow, decision_tag, record, record_pending, row_of_promotion
from tasks.storage import Storage
from tasks.system.locks import exclusive_lock
from tasks.tracking import models
from tasks.tracking.evaluated import TABLE_TAGS, EvaluatedRun, evaluated_run, evaluated_version, evaluation_tags
from tasks.tracking.pins import check_pins, newest_without_spark, pin_trained_versions
from tasks.tracking.server import database_file, reachable
from tasks.tracking.trained import no_finished_run, promotable_runs
from tasks.tracking.trained_tables import NOT_PROMOTED_TAG, serving_tags

logger = logging.getLogger("lakevision.registry")

CANDIDATES_TAG = "candidates"
"""Tag of a version that has been champion: the accuracies of the runs that it was chosen from."""

NUM_RECORDED = 1000
"""Number of candidates whose accuracies are recorded with a version; a tag in MLflow has at most 100,000 characters."""


def promote_best(
    runs: Sequence[RunRef],
    promote: PromoteConfig,
    storage: Storage,
    table: TableRef | None = None,
    approval: Approval | None = None,
    spark: SparkConfig = SparkConfig(),
    predict: PredictConfig = PredictConfig(),
    reason: str = "",
) -> Promotion:
    """Promote the best of the runs on the split `val` if it beats the current champion.

    Both are compared by their predictions of the test images in the newest version of the challenger's table, which are
    added to `predictions` where they are missing. Where the table is gone, the recorded accuracies are compared. A
    champion that was tested on other images is then tested again on the cache. A champion that cannot be evaluated
    stays, unless `promote.replace_unusable`, a user's approval, or a reason replaces it. Before the alias moves, the
    version must predict an image in a fresh process.

    A run that was trained on an older version, or registered before the champion, never replaces it: submitting a run
    again does not roll back.

    Args:
        runs: Finished training runs on one table; if empty, the newest finished run on the table `images` of `storage`,
            and all others on its cache.
        promote: Name of the registered model, and the gate.
        storage: Storage with the tracking URI.
        table: The table whose content the runs were trained on; None for the table that each run recorded.
        approval: The answer of the user who was asked, if `promote.approval` is human. Without it, a run that is
            within all limits waits: it is registered with the alias `challenger`, and nothing else changes.
        spark: Settings of the session, which is started for tables that only Spark can read.
        predict: Settings of inference for the rows that are added to `predictions`.
        reason: Why the single run in `runs` replaces a champion that cannot be evaluated; empty: it does not.

    Raises:
        WrongInput: A run has no test accuracy, no run reaches the minimums, or no name can be derived. The champion was
            trained on another table, or the best run's model cannot be loaded. The table's version cannot be pinned.
        TrackingUnavailable: The tracking server does not answer; the next promotion completes the work.
    """
    with reachable(storage):
        best, accuracies, name = _best_run(runs, promote, storage, table)
        with promotion_lock(storage, name):
            earlier = models.registered_version(storage, best.run, name)
            rolled_back = None if earlier is None else models.version_tags(storage, earlier).get(models.ROLLED_BACK_TAG)
            challenge = Challenge(
                best, accuracies, name, promote, storage, spark, predict, approval, reason, earlier, rolled_back
            )
            decision = None
            # The lock does not cover other machines: a promotion there may move the alias before this one is written.
            while decision is None:
                champion = models.model_with_alias(storage, name, CHAMPION)
                if champion is not None:
                    record_pending(storage, champion)
                decision = _carry_out(challenge, champion)
    logger.info("%s", decision.sentence)
    return decision


def _best_run(
    runs: Sequence[RunRef], promote: PromoteConfig, storage: Storage, table: TableRef | None
) -> tuple[EvaluatedRun, dict[str, float | None], str]:
    """Return the best of the runs on the split `val`, the accuracies of the best ones by run id, and the model's name.

    The arguments are those of `promote_best`.

    Raises:
        WrongInput: As for `promote_best`.
    """
    runs = runs or promotable_runs(storage, newest_without_spark(storage.table("images")))
    if not runs:
        raise no_finished_run(storage)
    tested = [_with_table(evaluated_run(storage, run), table) for run in runs]
    _check_one_table(tested)
    name = promote.model_name or _derived_name(tested[0], storage)
    rolled_back = models.rolled_back_runs(storage, name)
    # If all were rolled back, the best of them is left out below, with the reason.
    candidates = [one for one in tested if one.run.run_id not in rolled_back] or tested
    best = choose_best(candidates)
    check_minimums(best, len(candidates), promote)
    check_pins(storage, best.table)
    ranked = sorted(candidates, key=lambda found: found.val_accuracy or 0.0, reverse=True)
    return best, {found.run.run_id: found.val_accuracy for found in ranked[:NUM_RECORDED]}, name


def promotion_lock(storage: Storage, name: str) -> AbstractContextManager[None]:
    """Return the lock of promotions and rollbacks under a name: beside the database file, else in the home."""
    database = database_file(storage)
    folder = storage.home if database is None else database.parent
    return exclusive_lock(f"{folder}/promotion-{hashlib.sha256(name.encode()).hexdigest()[:12]}")


def _carry_out(challenge: Challenge, previous: ModelRef | None) -> Promotion | None:
    """Decide, and write the decision to the registry; return None if the champion is no longer `previous`."""
    best, storage = challenge.best, challenge.storage
    decision = decide(challenge, previous)
    if decision.outcome == "promoted" and challenge.promote.approval == "human":
        decision = with_approval(decision, challenge.approval, previous)
        if decision.outcome == "waiting":
            return _await_approval(challenge, decision)
    champion = decision.champion
    source = "" if best.table is None else models.source_name(best.table, storage)
    tags = {models.PROMOTION_TAG: decision.sentence}
    if decision.outcome != "kept":
        champion = models.register_run(storage, best.run, challenge.name)
        decision = decision.model_copy(update={"champion": champion})
        tags[CANDIDATES_TAG] = json.dumps(challenge.accuracies, sort_keys=True, separators=(",", ":"))
        tags |= {models.PROMOTION_TAG: decision.sentence} | evaluation_tags(best, source)
        if challenge.earlier is not None and models.SOURCE_TAG in models.version_tags(storage, champion):
            # It may have been promoted for another table with the same images, whose champion is found by these tags.
            tags = {name: value for name, value in tags.items() if name not in TABLE_TAGS}
    elif decision.comparison is not None or not _was_promoted(challenge):
        registered = models.registered_version(storage, best.run, challenge.name)
        if registered is not None:
            models.tag_version(storage, registered, tags | {NOT_PROMOTED_TAG: decision.reason})
            models.describe_version(storage, registered, promotion_section(decision.sentence))
    if decision.outcome == "promoted":
        check_predicts(storage, champion, "the best run")
    made_champion = None if previous is None else models.version_tags(storage, previous).get(DECISION_TAG)
    if previous is None and decision.outcome == "kept":
        record(storage, row_of_promotion(decision, made_champion))
        raise WrongInput(f"'{challenge.name}' has no champion, and no run became it: {decision.reason}")
    if best.table is not None and not _is_older_than_served(best.table, champion, storage):
        tags |= serving_tags(best.table, source)
    row = row_of_promotion(decision, made_champion)
    if decision.outcome == "promoted":
        return decision if make_champion(storage, decision, tags, best.table, row) else None
    models.tag_version(storage, champion, tags)
    pin_trained_versions(storage, best.table)
    repair_aliases(storage, champion)
    if decision.outcome != "unchanged":
        record(storage, row)
    return decision


def make_champion(
    storage: Storage, decision: Promotion, tags: Mapping[str, str], table: TableRef | None, row: DecisionRow
) -> bool:
    """Make a version the champion, and record the decision; return False if another run has moved the alias meanwhile.

    Args:
        storage: Storage with the tracking URI.
        decision: A decision to promote, with the version and the champion before it.
        tags: Tags of the version.
        table: The table version that it was trained on, which clean-ups keep; None if it is unknown.
        row: The decision as a row of the table `promotions`.
    """
    champion, previous = decision.champion, decision.previous
    # An alias has no history: this is the version to roll back to.
    before = {} if previous is None else {models.PREVIOUS_TAG: str(previous.version)}
    models.untag_version(storage, champion, NOT_PROMOTED_TAG)
    models.describe_version(storage, champion, promotion_section(decision.sentence))
    # Before the alias moves, so that it never names a version without its tags.
    models.tag_version(storage, champion, {**tags, **before, **decision_tag(row)})
    pin_trained_versions(storage, table)
    if models.model_with_alias(storage, champion.name, CHAMPION) != previous:
        return False
    models.set_alias(storage, champion, CHAMPION)
    repair_aliases(storage, champion)
    record(storage, row)
    return True


def tables_of(of: EvaluatedRun, storage: Storage) -> dict[str, str]:
    """Return the tags of the tables that a version predicts, for the version that predicts them from now on."""
    tags: dict[str, str] = {}
    for table in (*of.serves, *(() if of.table is None else (of.table,))):
        tags |= serving_tags(table, models.source_name(table, storage))
    return tags


def promote_challenger(storage: Storage, champion: ModelRef, challenger: ModelRef, reason: str) -> Promotion:
    """Make a registered version the champion; a kill at any moment leaves the old one or the new one.

    Args:
        storage: Storage with the tracking URI.
        champion: The champion that it was compared with.
        challenger: The version.
        reason: Why, a part of a sentence.

    Raises:
        WrongInput: Another version is the champion by now, the challenger was rolled back, or it cannot be loaded.
        TrackingUnavailable: The tracking server does not answer; another run completes the work.
    """
    with reachable(storage), promotion_lock(storage, champion.name):
        record_pending(storage, champion)
        check_predicts(storage, challenger, "the challenger")
        known = models.version_tags(storage, challenger)
        if (rolled_back := known.get(models.ROLLED_BACK_TAG)) is not None:
            raise WrongInput(f"the challenger is not promoted, since {rolled_back}", way_out="give another challenger")
        of, before = evaluated_version(storage, challenger), evaluated_version(storage, champion)
        decision = Promotion(
            champion=challenger,
            outcome="promoted",
            challenger=RunRef(run_id=challenger.run_id),
            challenger_accuracy=of.accuracy,
            champion_accuracy=before.accuracy,
            challenger_images=of.images,
            champion_images=before.images,
            previous=champion,
            reason=reason,
        )
        source = "" if of.table is None else models.source_name(of.table, storage)
        tags = evaluation_tags(of, source) | {
            models.PROMOTION_TAG: decision.sentence,
            CANDIDATES_TAG: json.dumps({challenger.run_id: of.val_accuracy}),
        }
        tags |= tables_of(before, storage) | tables_of(of, storage)
        if not make_champion(storage, decision, tags, of.table, row_of_promotion(decision, None)):
            raise WrongInput(
                f"{champion.name} version {champion.version} is not the champion any more",
                way_out="run the flow compare-live again, which compares with the present champion",
            )
    logger.info("%s", decision.sentence)
    return decision


def _was_promoted(challenge: Challenge) -> bool:
    """Return whether the run has been champion; a promotion that was killed may have registered it without that."""
    return challenge.earlier is not None and CANDIDATES_TAG in models.version_tags(challenge.storage, challenge.earlier)


def _await_approval(challenge: Challenge, decision: Promotion) -> Promotion:
    """Register the run, with the alias `challenger`, and return the decision with that version."""
    storage = challenge.storage
    challenger = models.register_run(storage, challenge.best.run, challenge.name)
    decision = decision.model_copy(update={"champion": challenger})
    models.tag_version(storage, challenger, {models.PROMOTION_TAG: decision.sentence})
    models.describe_version(storage, challenger, promotion_section(decision.sentence))
    pin_trained_versions(storage, challenge.best.table)
    models.set_alias(storage, challenger, CHALLENGER)
    return decision


def _is_older_than_served(table: TableRef, champion: ModelRef, storage: Storage) -> bool:
    """Return whether the champion was trained on, or is tagged to serve, a later version of the table.

    A run on an earlier version that loses must not replace the tag with the table's current version.
    """
    of = evaluated_version(storage, champion)
    known = of.serves if of.table is None else (*of.serves, of.table)
    return any(table.table_id == other.table_id and table.version < other.version for other in known)


def check_promotion(promote: PromoteConfig, storage: Storage, table: TableRef, cache: CacheRef) -> None:
    """Check before training that the champion was trained on the same table, and that its version can be pinned.

    Raises:
        WrongInput: As `check_comparable` and `check_pins`.
    """
    check_pins(storage, table)
    name = promote.model_name or models.derived_model_name(table, storage)
    champion = None if name is None else models.model_with_alias(storage, name, CHAMPION)
    if name is None or champion is None:
        return
    future_run = EvaluatedRun(RunRef(run_id=""), 0.0, None, table, open_cache(cache).content_digest, cache)
    is_given = promote.model_name is not None
    check_comparable(future_run, evaluated_version(storage, champion), name, is_given=is_given)


def _with_table(tested: EvaluatedRun, table: TableRef | None) -> EvaluatedRun:
    """Return the run with the given table; without one, add the table's source where an older run lacks it."""
    if table is not None:
        return replace(tested, table=table)
    if tested.table is None or tested.table.source:
        return tested
    found = newest_without_spark(tested.table.path)
    if found is None or found.table_id != (tested.table.table_id or found.table_id):
        return tested
    return replace(tested, table=found.model_copy(update={"version": tested.table.version}))


def _check_one_table(tested: Sequence[EvaluatedRun]) -> None:
    for other in tested[1:]:
        first = tested[0]
        known = first.table is not None and other.table is not None
        if known and not (first.same_table(other) or first.same_content(other)):
            raise WrongInput(
                f"run_ids has '{first.run.run_id}' and '{other.run.run_id}', which were trained on different tables, "
                "so the two cannot be compared",
                setting="run_ids",
                way_out="give runs of one table",
            )


def _derived_name(tested: EvaluatedRun, storage: Storage) -> str:
    name = None if tested.table is None else models.derived_model_name(tested.table, storage)
    if name is None:
        raise WrongInput(
            f"promote.model_name is empty, and MLflow run '{tested.run.run_id}' does not record the source of its "
            "images",
            setting="promote.model_name",
            way_out="set promote.model_name",
        )
    return name
