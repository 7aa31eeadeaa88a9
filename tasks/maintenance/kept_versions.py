"""The versions of the table `images` that a clean-up keeps for models, or none where it must not remove anything."""

import logging

from pyspark.sql import SparkSession

from tasks.config.maintenance import MaintainConfig
from tasks.errors import WrongInput, join_names
from tasks.object_store import list_names
from tasks.schema import PROMOTIONS_ARROW, columns_of
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.delta import check_table_path
from tasks.tracking.pins import PINS, missing_runs, read_pins, release_pins, tracking_id, versions_to_keep, write_pins
from tasks.tracking.server import reachable
from tasks.tracking.trained_tables import trained_versions

logger = logging.getLogger("lakevision.maintenance")

MOVED_ALIAS = ("promoted", "rolled back")
"""Decisions in the table `promotions` about a run that was registered."""


def kept_versions(spark: SparkSession, config: MaintainConfig, storage: Storage) -> list[int] | None:
    """Pin the versions of `images` that models of this tracking server need, and return all pinned versions.

    Args:
        spark: The session.
        config: Whether this tracking server is trusted, and whether its unused pins are removed.
        storage: Locations of the tables, with the tracking URI.

    Returns:
        The versions; empty if the table is missing. None if its log has no commits, or if neither this server nor
        another one pinned a version of it. Then nothing shows that this server knows the models of the table, and
        nothing may be removed.

    Raises:
        WrongInput: Another tracking server pinned versions, or promoted models, and this one is not trusted. The pins
            cannot be read or written.
        TrackingUnavailable: The tracking server does not answer.
    """
    path = storage.table("images")
    if not check_table_path(path):
        # Listed, since `exists` is also False for a folder that cannot be read.
        return None if "_delta_log" in list_names(path) else []
    with reachable(storage):
        own, pinned = tracking_id(storage), read_pins(path)
        needed = versions_to_keep(snapshots.latest(spark, path), trained_versions(storage))
        if not config.trust_tracking:
            _check_servers({found.shown for server, found in pinned.items() if server != own}, path, storage)
            if own not in pinned or not pinned[own].is_checked:
                _check_promotions(spark, storage)
    if not (needed or own in pinned or config.trust_tracking):
        logger.warning(
            "nothing is removed from '%s': no registered model of '%s' was trained on it, and no version is pinned in "
            "'%s'. Run maintain with storage.tracking of the server that has the models. If there are none, set "
            "maintain.trust_tracking to true", path, storage.tracking_shown, PINS,
        )  # fmt: skip
        return None
    write_pins(path, own, storage.tracking_shown, needed, is_checked=True)
    kept = {version for found in pinned.values() for version in found.versions} | set(needed)
    unused = sorted(pinned[own].versions - set(needed)) if own in pinned else []
    if unused and config.release_pins:
        release_pins(path, own, unused)
        others = {version for server, found in pinned.items() if server != own for version in found.versions}
        kept -= set(unused) - others
        logger.info("%s: removed the pins of versions %s, which no registered model needs", path, unused)
    elif unused:
        logger.info(
            "%s: versions %s are pinned, and no registered model of '%s' needs them any more; they are kept until "
            "maintain.release_pins is true", path, unused, storage.tracking_shown,
        )  # fmt: skip
    return sorted(kept)


def _check_servers(others: set[str], path: str, storage: Storage) -> None:
    """Check that no other tracking server pinned versions.

    Raises:
        WrongInput: One did.
    """
    asked = storage.tracking_shown
    former = " (a former database there)"
    names = [f"'{shown}'{former if shown == asked else ''}" for shown in sorted(others)]
    if names:
        raise WrongInput(
            f"versions of '{path}' are pinned by another tracking server, {join_names(names, len(names))}, and "
            f"'{asked}' may not have all models of the table",
            setting="storage.tracking",
            way_out="set storage.tracking to that server. If several servers have models of this table, set "
            "maintain.trust_tracking to true: the pinned versions of all of them stay",
        )


def _check_promotions(spark: SparkSession, storage: Storage) -> None:
    """Check that the promoted runs are those of this server: one of an earlier release pinned no versions.

    Once per server is enough: later promotions write pins, and runs that it has now may be purged from it. Own pins
    alone do not show that it was checked, since a promotion writes them as well.

    Raises:
        WrongInput: A run is unknown here.
    """
    path = storage.table("promotions")
    if not check_table_path(path):
        return
    columns = columns_of(PROMOTIONS_ARROW, "run_id", "decision")
    rows = snapshots.read_columns(spark, snapshots.latest(spark, path), columns).to_pylist()
    missing = missing_runs(storage, (row["run_id"] for row in rows if row["decision"] in MOVED_ALIAS))
    if missing:
        raise WrongInput(
            f"'{path}' has promotions of {len(missing)} MLflow runs that '{storage.tracking_shown}' does not have, "
            f"such as '{missing[0]}', so that another tracking server may have models of these tables",
            setting="storage.tracking",
            way_out="set storage.tracking to that server; or if those models are gone, set maintain.trust_tracking to "
            "true",
        )
