"""The table `promotions`: one row for each decision of a promotion or a rollback, appended without Spark.

A decision that moves an alias is first written as a tag of the version that becomes the champion, and appended to the
table once the alias has moved. After a kill in between, the next promotion or rollback appends it.
"""

import logging
import re
from datetime import UTC, datetime
from hashlib import sha256
from uuid import uuid4

import pyarrow as pa
from pydantic import AwareDatetime, Field, ValidationError

from tasks.refs import ModelRef, Ref
from tasks.registry.decision import Promotion, Rollback
from tasks.schema import PROMOTIONS_ARROW
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables.direct_commits import append_rows, has_row
from tasks.tables.writer import write_access
from tasks.tracking import models

logger = logging.getLogger("lakevision.registry")

DECISION_TAG = "lakevision.decision"
"""Tag of a version that became the champion, with the row of the decision as JSON."""


MEASURED = re.compile(r"\d+\.\d+ ms|\d+\.\d+ times")
"""Measured times in a reason, which are others when the same decision is taken again."""


class DecisionRow(Ref):
    """A row of the table `promotions`; values that a decision does not have are None."""

    decision_id: str = Field(default_factory=lambda: uuid4().hex)
    decided_at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    model_name: str
    decision: str
    from_version: int | None
    to_version: int | None
    run_id: str
    images: int | None = None
    challenger_accuracy: float | None = None
    champion_accuracy: float | None = None
    challenger_macro_f1: float | None = None
    champion_macro_f1: float | None = None
    p_value: float | None = None
    reason: str
    approved_by: str | None = None


def row_of_promotion(decision: Promotion, made_champion: str | None) -> DecisionRow:
    """Return the row of a promotion.

    A decision that changes nothing has the id of its content: after a kill, the next run takes the same one again.

    Args:
        decision: The decision.
        made_champion: Tag with the decision by which the previous champion became that, or None.
    """
    found, previous = decision.comparison, decision.previous
    after = decision.champion if decision.outcome == "promoted" else previous
    before = None if previous is None else previous.version
    content = (
        decision.champion.name,
        decision.challenger.run_id,
        MEASURED.sub("", decision.reason),
        decision.approved_by,
        before,
        made_champion,
    )
    is_repeatable = decision.outcome == "kept"
    names = {"challenger_macro_f1", "champion_macro_f1", "p_value"}
    figures = {} if found is None else found.model_dump(include=names)
    return DecisionRow(
        decision_id=sha256(repr(content).encode()).hexdigest()[:32] if is_repeatable else uuid4().hex,
        model_name=decision.champion.name,
        decision=decision.outcome,
        from_version=before,
        to_version=None if after is None else after.version,
        run_id=decision.challenger.run_id,
        images=decision.challenger_images,
        challenger_accuracy=decision.challenger_accuracy,
        champion_accuracy=decision.champion_accuracy,
        **figures,
        reason=decision.reason,
        approved_by=decision.approved_by,
    )


def row_of_rollback(done: Rollback) -> DecisionRow:
    """Return the row of a rollback."""
    return DecisionRow(
        model_name=done.champion.name,
        decision="rolled back",
        from_version=done.rolled_back.version,
        to_version=done.champion.version,
        run_id=done.champion.run_id,
        reason=done.reason,
    )


def decision_tag(row: DecisionRow) -> dict[str, str]:
    """Return the tag with which a version remembers the decision until its row is in the table."""
    return {DECISION_TAG: row.model_dump_json()}


def record(storage: Storage, row: DecisionRow) -> None:
    """Append a row to the table `promotions`, which is created if it is missing, unless it is there.

    A table that only Spark can write gets no rows, with a warning: a promotion does not start Spark.

    Raises:
        DiskFull: The disk is full; the table is unchanged.
    """
    path = storage.table("promotions")
    try:
        with write_access(path), translate_disk_full(path, storage.home):
            if not has_row(path, "decision_id", row.decision_id):
                append_rows(path, pa.Table.from_pylist([row.model_dump()], PROMOTIONS_ARROW))
    except NeedsSpark:
        logger.warning("'%s' can only be written by Spark, so the decision is not in it: see its tags in MLflow", path)


def record_pending(storage: Storage, champion: ModelRef) -> None:
    """Append the decision that made a version the champion, if a kill kept it from the table.

    Raises:
        DiskFull: As for `record`.
    """
    known = models.version_tags(storage, champion).get(DECISION_TAG)
    if known is None:  # of an earlier release
        return
    try:
        row = DecisionRow.model_validate_json(known)
    except ValidationError:
        logger.warning(
            "the tag %s of %s version %d in MLflow is not a valid decision: it is ignored",
            DECISION_TAG,
            champion.name,
            champion.version,
        )
        return
    record(storage, row)
