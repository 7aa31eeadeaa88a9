"""Outcomes after any history of a source are those of a comparison that reads every file anew."""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tasks.config.storage import StorageConfig
from tasks.etl.choice import IGNORED_ARROW
from tasks.etl.outcomes import Comparison
from tasks.schema import FILES_ARROW, IMAGE_KEYS_ARROW, LISTING_ARROW, READ_ARROW
from tasks.storage import resolve_storage
from tasks.tables.relations import Relations

THEN = datetime(2026, 1, 2, tzinfo=UTC)
BAD, UNREADABLE, TEXT = "bad", "unreadable", "text"

Source = dict[str, str]
"""Content by path; the first folder is the split, the second the label."""

PATHS = ["train/cat/1.jpg", "train/cat/2.jpg", "train/cat/3.jpg", "train/dog/1.jpg", "val/cat/1.jpg"]
SOURCES = st.dictionaries(st.sampled_from(PATHS), st.sampled_from(["a", "a", "b", BAD, UNREADABLE, TEXT]))

ONE, TWO, THREE, DOG, VAL = PATHS
SAME = {ONE: "a", TWO: "a", THREE: "b"}
"""Two files with the same content, and a third."""


def read_file(path: str, content: str) -> dict[str, object]:
    """Return the row of a file that was read."""
    split, label, _ = path.split("/")
    row = {"path": path, "label": label, "split": split, "size": len(content)}
    row["modified_at"] = THEN + timedelta(seconds=sum(content.encode()))
    if content == TEXT:
        return row | {"label": None, "split": None, "sha256": None, "part": None, "detail": "d"}
    if content in {BAD, UNREADABLE}:
        reason = {BAD: "not_an_image", UNREADABLE: "unreadable"}[content]
        sha256 = None if content == UNREADABLE else hashlib.sha256(content.encode()).hexdigest()
        return row | {"sha256": sha256, "part": None, "reason": reason, "detail": "d"}
    return row | {"sha256": hashlib.sha256(content.encode()).hexdigest(), "part": "p", "reason": None, "detail": None}


def outcomes_anew(source: Source) -> dict[str, tuple[str, str | None]]:
    """Return outcome and reason by path, by the definition."""
    found: dict[str, tuple[str, str | None]] = {}
    for path, content in sorted(source.items()):
        same = sorted(other for other in source if source[other] == content)
        labels, splits = ({other.split("/")[part] for other in same} for part in (1, 0))
        if content in {BAD, UNREADABLE}:
            found[path] = ("quarantined", {BAD: "not_an_image", UNREADABLE: "unreadable"}[content])
        elif content == TEXT:
            found[path] = ("ignored", "other_file")
        elif len(labels) > 1:
            found[path] = ("quarantined", "label_conflict")
        elif len(splits) > 1:
            found[path] = ("quarantined", "split_conflict")
        else:
            found[path] = ("stored" if path == same[0] else "duplicate", None)
    return found


class Tables:
    """The tables `images` and `files` as rows, with an ETL whose files are read by `read_file`."""

    def __init__(self, home: Path, *, keep_deleted: bool) -> None:
        """Create empty tables."""
        self._storage = resolve_storage(StorageConfig(home=str(home)))
        self._keep = keep_deleted
        self.ledger: dict[str, dict[str, object]] = {}
        self.images: set[tuple[str, str, str]] = set()
        self.was_up_to_date = False

    def ingest(self, source: Source, *, killed: bool = False) -> list[str]:
        """Synchronize the tables with the source, the ledger only if the run is not killed; return the files read."""
        rows = [read_file(path, content) for path, content in source.items() if content != TEXT]
        texts = [read_file(path, content) for path, content in source.items() if content == TEXT]
        keys = ("sha256", "label", "split")
        with Relations(self._storage) as relations:
            comparison = Comparison(
                relations,
                pa.Table.from_pylist(rows, schema=LISTING_ARROW),
                pa.Table.from_pylist(list(self.ledger.values()), schema=FILES_ARROW),
                pa.Table.from_pylist([dict(zip(keys, row, strict=True)) for row in self.images], IMAGE_KEYS_ARROW),
                replaced=False,
                keep_deleted=self._keep,
                ignored=pa.Table.from_pylist(texts, schema=IGNORED_ARROW),
            )
            self.was_up_to_date = comparison.is_up_to_date()
            chosen = comparison.to_read()["path"].to_pylist()
            comparison.resolve(pa.Table.from_pylist([row for row in rows if row["path"] in chosen], READ_ARROW))
            surplus = set(comparison.surplus()["sha256"].to_pylist())
            self.images = {row for row in self.images if row[0] not in surplus}
            missing = relations.rows("FROM resolved_images ANTI JOIN loose USING (sha256, label, split)")
            assert not self.images & set(missing)
            removed = {row["sha256"] for row in rows if row["path"] in chosen and row["part"]}
            removed -= {sha256 for sha256, _, _ in missing}
            whole, edits = comparison.edits()
            changed = [row for batch in edits for row in batch.to_pylist()]
            assert all(set(row["contents"]) == removed for row in changed)
            assert bool(missing) == bool(whole or changed)
            self.images |= set(missing)
            if not killed:
                changes = comparison.ledger_changes(THEN).table().to_pylist()
                self.ledger |= {str(row["path"]): row for row in changes}
        return chosen


@pytest.mark.parametrize("keep_deleted", [False, True], ids=["remove", "keep"])
def test_any_history_ends_with_the_outcomes_of_a_first_run(tmp_path: Path, keep_deleted: bool) -> None:
    """Files with the content of a changed file get their outcome anew, also after killed runs and lost images."""

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @example([(SAME, "whole")], {TWO: "a", THREE: "b"})
    @example([(SAME, "whole")], SAME | {ONE: "b"})
    @example([(SAME, "whole"), (SAME | {DOG: "a"}, "whole")], SAME)
    @example([(SAME, "whole"), (SAME | {VAL: "a"}, "killed")], SAME | {VAL: "a"})
    @example([(SAME, "lost")], SAME)
    @example([(SAME, "whole"), ({TWO: "a"}, "killed")], SAME)
    @example([({ONE: "b", TWO: "b"}, "lost")], {TWO: "b"})
    @example([(SAME | {DOG: TEXT}, "whole"), (SAME | {ONE: TEXT}, "killed")], SAME | {TWO: TEXT})
    @example([(SAME | {ONE: TEXT}, "whole")], {TWO: "a", THREE: TEXT})
    @example([({ONE: "b", TWO: "b"}, "lost")], {ONE: "a", TWO: "b"})
    @given(st.lists(st.tuples(SOURCES, st.sampled_from(["whole", "killed", "lost"])), min_size=1, max_size=4), SOURCES)
    def check(history: list[tuple[Source, str]], last: Source) -> None:
        tables = Tables(tmp_path, keep_deleted=keep_deleted)
        for source, event in history:
            tables.ingest(source, killed=event == "killed")
            if event == "lost":
                tables.images = set(sorted(tables.images)[1:])
        before = set(tables.images)

        tables.ingest(last)

        expected = outcomes_anew(last)
        found = {path: (row["outcome"], row["reason"]) for path, row in tables.ledger.items()}
        assert {path: outcome for path, outcome in found.items() if outcome[0] != "deleted"} == expected
        stored = {path for path, (outcome, _) in expected.items() if outcome == "stored"}
        wanted = {tuple(read_file(path, last[path])[name] for name in ("sha256", "label", "split")) for path in stored}
        contents = {read_file(path, content)["sha256"] for path, content in last.items()}
        extra = tables.images - wanted
        assert wanted <= tables.images
        assert extra <= {row for row in before if keep_deleted and row[0] not in contents}

        read = tables.ingest(last)
        again = {
            path for path, (_, reason) in expected.items() if reason in {"label_conflict", "split_conflict", UNREADABLE}
        }
        assert set(read) == again
        assert tables.was_up_to_date == (not again)
        assert {path: (row["outcome"], row["reason"]) for path, row in tables.ledger.items()} == found

    check()
