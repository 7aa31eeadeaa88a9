"""Rollback: gives the alias `champion` back to the version that had it before."""

import logging

from tasks.config.promotion import RollbackConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.refs import ModelRef
from tasks.registry.aliases import CHAMPION, check_predicts, previous_champion, repair_aliases
from tasks.registry.decision import Rollback
from tasks.registry.history import decision_tag, record, record_pending, row_of_rollback
from tasks.registry.promote import promotion_lock, tables_of
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tables.snapshots import newest_snapshot
from tasks.tracking import models
from tasks.tracking.evaluated import evaluated_version
from tasks.tracking.server import reachable

logger = logging.getLogger("lakevision.registry")


def roll_back(rollback: RollbackConfig, storage: Storage, spark: SparkConfig = SparkConfig()) -> Rollback:
    """Make the previous champion the champion again; promotions leave the version out that was the champion.

    The previous version is loaded first, in a fresh process, and must predict an image. The tag of the version that is
    rolled back is written before the alias moves: after a kill in between, another rollback does the rest. With
    `rollback.version`, a rollback that is repeated after a kill at any moment changes nothing that is done.

    Args:
        rollback: Name of the registered model, and the reason.
        storage: Storage with the tracking URI, and the table from which a name is derived.
        spark: Settings of the session, which is started to derive a name from a table that only Spark can read.

    Raises:
        WrongInput: The model has no champion, or no version to go back to; or that version cannot be loaded. The
            version to roll back is not the champion, and was not rolled back before.
        TrackingUnavailable: The tracking server does not answer; another rollback completes the work.
    """
    name = rollback.model_name or _derived_name(storage, spark)
    with reachable(storage), promotion_lock(storage, name):
        champion = models.model_with_alias(storage, name, CHAMPION)
        if champion is None:
            raise WrongInput(f"the registered model '{name}' has no champion", way_out="run the flow promote first")
        record_pending(storage, champion)
        if rollback.version in {None, champion.version}:
            done = _roll_back(rollback.reason, champion, storage)
        else:
            done = _done_before(rollback, champion, storage)
            repair_aliases(storage, champion)
    logger.info("%s", done.sentence)
    return done


def _roll_back(reason: str, champion: ModelRef, storage: Storage) -> Rollback:
    name = champion.name
    previous = previous_champion(storage, champion)
    if previous is None:
        raise WrongInput(
            f"{name} version {champion.version} has no previous champion that is still registered, to which it could "
            "be rolled back",
            way_out="promote another run",
        )
    check_predicts(storage, previous, "the previous champion")
    # The lock does not cover other machines.
    if models.model_with_alias(storage, name, CHAMPION) != champion:
        raise WrongInput(
            f"{name} version {champion.version} is not the champion any more, since another run promoted or rolled "
            "back meanwhile",
            way_out="look at the aliases in MLflow, and run the rollback again if it is still wanted",
        )
    done = Rollback(champion=previous, rolled_back=champion, reason=reason)
    models.tag_version(storage, champion, {models.ROLLED_BACK_TAG: done.sentence})
    row = row_of_rollback(done)
    models.tag_version(storage, previous, tables_of(evaluated_version(storage, champion), storage) | decision_tag(row))
    repair_aliases(storage, previous)
    models.set_alias(storage, previous, CHAMPION)
    try:
        record(storage, row)
    except Exception as error:  # A failed run, for any reason, would be repeated, and would go back once more.
        logger.warning("rolled back, but the table promotions has no row of it until the next run: %s", error)
    return done


def _done_before(rollback: RollbackConfig, champion: ModelRef, storage: Storage) -> Rollback:
    """Return the rollback of a version that an earlier run rolled back.

    Raises:
        WrongInput: It was not rolled back, and is not the champion.
    """
    version = models.numbered_version(storage, champion.name, str(rollback.version))
    if version is None or models.ROLLED_BACK_TAG not in models.version_tags(storage, version):
        raise WrongInput(
            f"rollback.version is {rollback.version}, but the champion of '{champion.name}' is version "
            f"{champion.version}",
            setting="rollback.version",
            way_out="give that version, or leave the setting empty",
        )
    return Rollback(champion=champion, rolled_back=version, reason=rollback.reason, is_repeated=True)


def _derived_name(storage: Storage, config: SparkConfig) -> str:
    found = try_without_spark(lambda spark: newest_snapshot(spark, storage.table("images")), config, storage)
    name = None if found is None else models.derived_model_name(found.table, storage)
    if name is None:
        raise WrongInput(
            f"rollback.model_name is empty, and no name follows from the table '{storage.table('images')}'",
            setting="rollback.model_name",
            way_out="set rollback.model_name",
        )
    return name
