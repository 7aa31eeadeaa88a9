"""The results of a run for people: a CSV file with the answer for each file, failed files, the least sure images."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.csv import CSVWriter
from pyspark.sql import SparkSession

from tasks.predict.answers import AnswerRows, table_answers
from tasks.predict.thumbnails import contents_in_table, thumbnail
from tasks.refs import Answers, FailedFile, ModelRef, PredictedImage, TableRef
from tasks.spark.scratch import Scratch, scratch_root
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full

logger = logging.getLogger("lakevision.predict")

NUM_SHOWN = 20
"""Number of the least confident images that are shown."""

NUM_FAILED = 100
"""Number of failed files that a report names; the CSV file has all of them."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""First bytes of the CSV file, without which Excel reads it in the encoding of its country, and not as UTF-8."""

FORMULA = r"\A([=+\-@\t\r\n\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}])"
"""First character of a cell that a spreadsheet computes: OWASP, CSV Injection; the last four are full-width signs."""

NOT_YET = "not predicted yet"

Contents = Callable[[list[dict[str, Any]]], dict[str, bytes]]
"""A function that returns the content of images, rows with path and sha256, by sha256; of some, if others are gone."""


@dataclass
class _Shown:
    """The rows that people see, chosen in one pass over all answers.

    Attributes:
        num_files: Number of rows.
        num_failed: Number of rows with an error.
        failed: The first of these.
        least: Images with the lowest probabilities; of files with the same content, the first by path.
    """

    num_files: int = 0
    num_failed: int = 0
    failed: list[FailedFile] = field(default_factory=list)
    least: list[dict[str, Any]] = field(default_factory=list)

    def add(self, answers: pa.RecordBatch) -> None:
        """Add a batch of answers, in the order of their paths."""
        self.num_files += answers.num_rows
        bad = answers.filter(pc.is_valid(answers["error"]))
        self.num_failed += bad.num_rows
        self.failed += [
            FailedFile(path=row["path"] or row["sha256"], error=row["error"])
            for row in bad.slice(0, NUM_FAILED - len(self.failed)).to_pylist()
        ]
        names = ["sha256", "path", "predicted", "probability", "unknown_score"]
        rows = pa.Table.from_batches([answers.filter(pc.is_valid(answers["probability"])).select(names)])
        rows = pa.concat_tables([pa.Table.from_pylist(self.least, rows.schema), rows])
        images = rows.group_by("sha256").aggregate([(name, "min") for name in names[1:]]).rename_columns(names)
        order = [("probability", "ascending"), ("sha256", "ascending")]
        self.least = images.sort_by(order).slice(0, NUM_SHOWN).to_pylist()


def table_results(
    spark: SparkSession | None, table: TableRef, predictions: str, model: ModelRef, csv: Path, storage: Storage
) -> dict[str, Any]:
    """Write the CSV file of a table of images, and return the fields of `Answers`.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the tables.
        DiskFull: As `write_results`.
    """
    rows = table_answers(spark, table, model, predictions, storage)
    return write_results(rows, csv, partial(contents_in_table, spark, table, storage), storage)


def write_results(rows: AnswerRows, file: Path, contents: Contents, storage: Storage) -> dict[str, Any]:
    """Write the CSV file with all answers of a model version, and return the fields of `Answers`.

    Rows are streamed: ten million of them need no more memory than a batch. The file is replaced when it is complete.

    Args:
        rows: The rows of the answers.
        file: The CSV file, which is replaced.
        contents: Returns the contents of images.
        storage: Storage with the home, to which queries spill.

    Raises:
        DiskFull: A disk is full; an earlier CSV file stays.
    """
    shown = _Shown()
    scratch = Scratch(scratch_root(storage))  # The next run removes it after a kill.
    try:
        with translate_disk_full(str(file.parent), storage.home):
            num_marked = _write(rows, scratch.folder / "predictions.csv", shown, storage)
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(scratch.folder / "predictions.csv", file)
    finally:
        scratch.remove()
    logger.info("%s has a row for each of %d files, %d of them failed", file, shown.num_files, shown.num_failed)
    if num_marked:
        logger.info("%d texts in it that a spreadsheet would compute, such as =A1, begin with '", num_marked)
    found = contents(shown.least) if shown.least else {}
    least = tuple(
        PredictedImage(
            path=row["path"] or row["sha256"],
            label=row["predicted"],
            probability=row["probability"],
            unknown_score=row["unknown_score"],
            thumbnail=thumbnail(found.get(row["sha256"])),
        )
        for row in shown.least
    )
    answers = Answers(
        csv=str(file),
        num_files=shown.num_files,
        num_failed=shown.num_failed,
        failed=tuple(shown.failed),
        least_confident=least,
    )
    return dict(answers)


def _write(rows: AnswerRows, file: Path, shown: _Shown, storage: Storage) -> int:
    """Write all answers to a new file and add them to `shown`; return the number of texts with a mark before them."""
    num_marked = 0
    with file.open("wb") as sink:
        sink.write(BYTE_ORDER_MARK)
        with CSVWriter(sink, _in_csv(rows.schema.empty_table(), rows).schema) as writer:
            for batch in rows.batches(storage):
                shown.add(batch)
                cells, marked = _without_formulas(_in_csv(pa.Table.from_batches([batch]), rows))
                num_marked += marked
                writer.write_table(cells)
    return num_marked


def _in_csv(answers: pa.Table, rows: AnswerRows) -> pa.Table:
    """Return the columns of the CSV file: the model in place of its version, and a reason in each row without a label.

    Times are left out: Excel shows those of Arrow as text.
    """
    is_pending = pc.and_(pc.is_null(answers["predicted"]), pc.is_null(answers["error"]))
    answers = answers.set_column(
        answers.schema.get_field_index("error"), "error", pc.if_else(is_pending, NOT_YET, answers["error"])
    )
    model = pc.if_else(pc.is_valid(answers["model_version"]), f"{rows.model.name} version {rows.model.version}", None)
    return answers.drop_columns(["model_version", "predicted_at"]).append_column("model", model)


def _without_formulas(cells: pa.Table) -> tuple[pa.Table, int]:
    """Return a table with ' before each text that a spreadsheet would compute, and the number of these texts."""
    num_marked = 0
    for place, name in enumerate(cells.schema.names):
        if pa.types.is_string(cells.schema.types[place]):
            num_marked += pc.sum(pc.match_substring_regex(cells[name], FORMULA)).as_py() or 0
            cells = cells.set_column(place, name, pc.replace_substring_regex(cells[name], FORMULA, r"'\1"))
    return cells, num_marked
