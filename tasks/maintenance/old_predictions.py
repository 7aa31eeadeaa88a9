"""Removal of the predictions by old versions of a model."""

import logging
from collections import defaultdict

from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tasks import tracking
from tasks.config.maintenance import MaintainConfig
from tasks.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.writer import commit

logger = logging.getLogger("lakevision.maintenance")


def delete_old_predictions(spark: SparkSession, path: str, config: MaintainConfig, storage: Storage) -> None:
    """Delete the rows of `predictions` by all but the newest versions of each model, in one commit.

    Rows of the versions with the aliases `champion`, `previous` and `challenger` stay, whatever their number. So do
    those of models that this tracking server does not have, whose aliases are not known, except with `release_pins`.

    Args:
        spark: The session.
        path: Path or URL of the table.
        config: `keep_model_versions`, the number of versions of each model to keep, and `release_pins`.
        storage: Storage with the tracking URI.
    """
    keep = config.keep_model_versions
    assert keep is not None, "otherwise all are kept"
    rows = snapshots.read_version(spark, snapshots.latest(spark, path))
    found: dict[str, list[int]] = defaultdict(list)
    for name, version in rows.select("model_name", "model_version").distinct().collect():
        found[name].append(version)
    doomed = F.lit(False)  # Spark's literal
    removed = []
    for name, versions in sorted(found.items()):
        if not config.release_pins and not tracking.has_model(storage, name):
            logger.info("%s: predictions by %s stay, which '%s' does not have", path, name, storage.tracking_shown)
            continue
        named = {tracking.model_with_alias(storage, name, alias) for alias in (CHAMPION, PREVIOUS, CHALLENGER)}
        kept = {model.version for model in named if model is not None} | set(sorted(versions)[-keep:])
        if old := sorted(set(versions) - kept):
            doomed |= (F.col("model_name") == name) & F.col("model_version").isin(old)
            removed += [f"{name} version {version}" for version in old]
    if removed:
        table = DeltaTable.forPath(spark, path)
        commit(path, lambda: table.delete(doomed))
        logger.info("%s: removed the predictions by %s", path, ", ".join(removed))
