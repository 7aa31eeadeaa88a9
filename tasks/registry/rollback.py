"""Rollback: gives the alias `champion` back to the version that had it before."""

import logging

from deltalake.exceptions import DeltaError

from tasks import tracking
from tasks.config.rollback import RollbackConfig
from tasks.errors import DiskFull, WrongInput
from tasks.refs import ModelRef
from tasks.registry.aliases import CHAMPION, previous_champion, repair_aliases
from tasks.registry.decision import Rollback
from tasks.registry.history import decision_tag, record, record_pending, row_of_rollback
from tasks.registry.promote import promotion_lock
from tasks.registry.trial import check_predicts
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tables.snapshots import newest_snapshot

logger = logging.getLogger("lakevision.registry")


def roll_back(rollback: RollbackConfig, storage: Storage) -> Rollback:
    """Make the previous champion the champion again; promotions leave the version out that was the champion.

    The previous version is loaded first, in a fresh process, and must predict an image. The tag of the version that is
    rolled back is written before the alias moves: after a kill in between, another rollback does the rest.

    Args:
        rollback: Name of the registered model, and the reason.
        storage: Storage with the tracking URI, and the table from which a name is derived.

    Raises:
        WrongInput: The model has no champion, or no version to go back to; or that version cannot be loaded.
    """
    name = rollback.model_name or _derived_name(storage)
    with promotion_lock(storage, name):
        champion = tracking.model_with_alias(storage, name, CHAMPION)
        if champion is None:
            raise WrongInput(f"the registered model '{name}' has no champion: run the flow promote first")
        previous = previous_champion(storage, champion)
        if previous is None:
            raise WrongInput(
                f"{name} version {champion.version} has no previous champion that is still registered, to which "
                "it could be rolled back: promote another run"
            )
        record_pending(storage, champion)
        check_predicts(storage, previous, "the previous champion")
        # The lock does not cover other machines.
        if tracking.model_with_alias(storage, name, CHAMPION) != champion:
            raise WrongInput(
                f"{name} version {champion.version} is not the champion any more, since another run promoted or rolled "
                "back meanwhile: look at the aliases in MLflow, and run the rollback again if it is still wanted"
            )
        done = Rollback(champion=previous, rolled_back=champion, reason=rollback.reason)
        tracking.tag_version(storage, champion, {tracking.ROLLED_BACK_TAG: done.sentence})
        row = row_of_rollback(done)
        tracking.tag_version(storage, previous, _tables_of(champion, storage) | decision_tag(row))
        repair_aliases(storage, previous)
        tracking.set_alias(storage, previous, CHAMPION)
        try:
            record(storage, row)
        except (OSError, DeltaError, DiskFull) as error:
            # A failed run would be repeated, and would go back once more.
            logger.warning("rolled back, but the table promotions has no row of it until the next run: %s", error)
    logger.info("%s", done.sentence)
    return done


def _tables_of(champion: ModelRef, storage: Storage) -> dict[str, str]:
    """Return the tags of the tables that a champion predicts, for the version that predicts them from now on."""
    of = tracking.evaluated_version(storage, champion)
    tags: dict[str, str] = {}
    for table in (*of.serves, *(() if of.table is None else (of.table,))):
        tags |= tracking.serving_tags(table, table.source)
    return tags


def _derived_name(storage: Storage) -> str:
    try:
        found = newest_snapshot(None, storage.table("images"))
    except NeedsSpark:
        found = None
    name = None if found is None else tracking.derived_model_name(found.table, storage)
    if name is None:
        raise WrongInput(
            f"rollback.model_name is empty, and no name follows from the table '{storage.table('images')}': set "
            "rollback.model_name"
        )
    return name
