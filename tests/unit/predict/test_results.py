"""The CSV file of all answers, failed files and thumbnails, from tables that are written without Spark."""

import base64
import csv
import io
import runpy
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from tasks.config.prediction import PredictConfig, PredictRun
from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.predict import answers
from tasks.predict.answers import champion_answers, source_answers, table_answers
from tasks.predict.predictions import check_paths
from tasks.predict.results import BYTE_ORDER_MARK, NUM_FAILED, write_results
from tasks.predict.shown import answers_markdown, answers_text
from tasks.predict.thumbnails import SIDE, contents_in_source, contents_in_table
from tasks.refs import Answers, ModelRef, PredictReport, TableRef
from tasks.schema import FILES_ARROW, IMAGES_ARROW, INPUTS_ARROW, PREDICTIONS_ARROW
from tasks.storage import Storage, csv_file, resolve_storage
from tasks.tables.snapshots import latest

NOON = datetime(2025, 5, 6, 12, tzinfo=UTC)
MODEL = ModelRef(name="photos", version=3, run_id="run")

HARD_NAMES = (
    "=HYPERLINK(1).png", "+1.png", "-2.png", "@sum.png", "\tx.png", "\rx.png", "\nx.png", "\uff1d1.png",
    'quote "1", 2.png', "two\nlines.png", "two\r\nlines.png", "é/日本語.png", "'apostrophe.png", "007", " space .png",
)  # fmt: skip


def write(storage: Storage, name: str, schema: pa.Schema, rows: list[dict[str, Any]]) -> TableRef:
    """Write a table; columns that a row lacks are null, or the schema's zero where null is not allowed."""
    zeros: dict[Any, Any] = {pa.int64(): 0, pa.int32(): 0, pa.string(): "", pa.binary(): b""}
    empty = {field.name: zeros.get(field.type, NOON) for field in schema if not field.nullable}
    deltalake.write_deltalake(storage.table(name), pa.Table.from_pylist([empty | row for row in rows], schema))
    return latest(None, storage.table(name))


def predicted(
    sha256: str, label: str | None, probability: float | None, error: str | None = None, score: float | None = None
) -> dict[str, Any]:
    """Return a row of `predictions`."""
    key = {"sha256": sha256, "model_name": "photos", "model_version": 3, "predicted_at": NOON}
    return key | {"label": label, "probability": probability, "error": error, "unknown_score": score}


def results_of_source(
    storage: Storage, files: list[dict[str, Any]], rows: list[dict[str, Any]], source: Path = Path("/photos")
) -> Answers:
    """Return the results for the files of a source with these predictions."""
    inputs = write(storage, "inputs", INPUTS_ARROW, [{"source": str(source)} | file for file in files])
    write(storage, "predictions", PREDICTIONS_ARROW, rows)
    found = source_answers(None, str(source), MODEL, storage.table("predictions"), storage)
    contents = partial(contents_in_source, None, source, inputs)
    return Answers(**write_results(found, csv_file(None, storage), contents, storage))


def png(*colour: int) -> bytes:
    """Return an image of one colour."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((120, 240, 3), colour, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def test_csv_file_has_each_file_as_pandas_and_excel_read_it(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """Names come back as they were, but for a ' before those that Excel would compute."""
    caplog.set_level("INFO", "lakevision.predict")
    files = [{"path": name, "sha256": f"{place:02}"} for place, name in enumerate(HARD_NAMES)]
    files += [{"path": "broken.png", "sha256": "bb"}, {"path": "closed.png", "sha256": None, "error": "unreadable: no"}]
    files += [{"path": "new.png", "sha256": "new"}]
    rows = [predicted(f"{place:02}", "=cmd|' /C calc'!A0", 0.25, None, 0.75) for place in range(len(HARD_NAMES))]
    rows += [predicted("bb", None, None, "not_an_image: x")]

    report = results_of_source(storage, files, rows)

    assert Path(report.csv) == Path(storage.home, "predictions.csv")
    assert Path(report.csv).read_bytes().startswith(BYTE_ORDER_MARK + b'"path","predicted",')
    table = pd.read_csv(report.csv)
    assert list(table) == ["path", "predicted", "probability", "unknown_score", "error", "sha256", "model"]
    expected = {name: f"'{name}" if name[0] in "=+-@\t\r\n\uff1d" else name for name in HARD_NAMES}
    assert set(table["path"]) == {*expected.values(), "broken.png", "closed.png", "new.png"}
    # The module csv reads it as Excel does: quoted line breaks belong to their cell.
    with Path(report.csv).open(encoding="utf-8-sig", newline="") as file:
        cells = list(csv.DictReader(file))
    assert {row["path"] for row in cells} == set(table["path"])
    assert not [cell for row in cells for cell in row.values() if cell and cell[0] in "=+-@\t\r\n\uff1d"]
    by_path = {row["path"]: row for row in cells}
    assert by_path["007"]["predicted"] == "'=cmd|' /C calc'!A0"
    assert (by_path["007"]["probability"], by_path["007"]["model"]) == ("0.25", "photos version 3")
    assert (by_path["007"]["unknown_score"], by_path["broken.png"]["unknown_score"]) == ("0.75", "")
    assert by_path["broken.png"]["error"] == "not_an_image: x"
    assert by_path["closed.png"]["error"] == "unreadable: no"
    assert by_path["new.png"]["error"] == "not predicted yet"
    assert (report.num_files, report.num_failed) == (len(files), 2)
    assert [(file.path, file.error) for file in report.failed] == [
        ("broken.png", "not_an_image: x"),
        ("closed.png", "unreadable: no"),
    ]
    assert f"{len(HARD_NAMES) + 8} texts in it" in caplog.text
    # A number or a missing value in pandas stays text if it is read as text.
    texts = pd.read_csv(report.csv, dtype=str, keep_default_na=False)
    assert "007" in set(texts["path"])


def test_least_sure_image_comes_first_with_a_thumbnail_and_once(storage: Storage, tmp_path: Path) -> None:
    """Of files with the same content, the first by path is shown; a file that is gone has no thumbnail."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "b.png").write_bytes(png(250, 10, 10))
    files = [{"path": f"{name}.png", "sha256": name[0]} for name in ("b", "b2", "c", *(f"d{n}" for n in range(5)))]
    rows = [predicted("b", "cat", 0.4), predicted("c", "dog", 0.3, None, 0.6), predicted("d", "dog", 0.9)]

    shown = results_of_source(storage, files, rows, source).least_confident

    assert [(image.path, image.label, image.probability) for image in shown] == [
        ("c.png", "dog", 0.3),
        ("b.png", "cat", 0.4),
        ("d0.png", "dog", 0.9),
    ]
    assert [image.unknown_score for image in shown] == [0.6, None, None]
    assert [bool(image.thumbnail) for image in shown] == [False, True, False]
    kind, _, content = shown[1].thumbnail.partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as opened:
        assert (opened.format, opened.size) == ("JPEG", (SIDE, SIDE // 2))
        red, green, _ = opened.getpixel((5, 5))
    assert red > 200
    assert green < 60


def test_files_of_a_table_have_label_and_split_and_quarantined_ones_their_reason(storage: Storage) -> None:
    """Each file of the ledger has a row; an image without a file is named by its sha256."""
    images = [
        {"sha256": "a", "label": "cat", "split": "test", "content": png(1, 2, 3)},
        {"sha256": "kept", "label": "dog", "split": "train", "content": b"broken"},
    ]
    table = write(storage, "images", IMAGES_ARROW, images)
    ledger = [
        {"path": "cat/1.png", "sha256": "a", "outcome": "stored"},
        {"path": "cat/copy.png", "sha256": "a", "outcome": "duplicate"},
        {"path": "cat/bad.png", "label": "cat", "outcome": "quarantined", "reason": "zero_bytes", "detail": "empty"},
        {"path": "cat/old.png", "sha256": "kept", "outcome": "deleted"},
    ]
    write(storage, "files", FILES_ARROW, ledger)
    write(storage, "predictions", PREDICTIONS_ARROW, [predicted("a", "cat", 0.7), predicted("kept", "cat", 0.2)])

    found = table_answers(None, table, MODEL, storage.table("predictions"), storage)
    contents = partial(contents_in_table, None, table, storage)
    report = Answers(**write_results(found, Path(storage.home, "new", "x.csv"), contents, storage))

    rows = pd.read_csv(report.csv, keep_default_na=False).set_index("path").to_dict("index")
    assert set(rows) == {"cat/1.png", "cat/copy.png", "cat/bad.png", ""}
    assert [rows["cat/copy.png"][name] for name in ("predicted", "label", "split")] == ["cat", "cat", "test"]
    assert (rows["cat/bad.png"]["error"], rows["cat/bad.png"]["label"]) == ("zero_bytes: empty", "cat")
    assert (rows[""]["sha256"], rows[""]["label"], rows[""]["predicted"]) == ("kept", "dog", "cat")
    assert [(image.path, bool(image.thumbnail)) for image in report.least_confident] == [
        ("kept", False),
        ("cat/1.png", True),
    ]
    assert list(Path(storage.home, "new").iterdir()) == [Path(report.csv)]


def test_table_of_another_program_needs_neither_label_nor_split(storage: Storage) -> None:
    """Labels that are numbers are left out."""
    rows = pa.table({"sha256": ["a"], "content": [png(9, 9, 9)], "label": [7]})
    deltalake.write_deltalake(storage.table("own"), rows)
    table = latest(None, storage.table("own"))
    write(storage, "predictions", PREDICTIONS_ARROW, [predicted("a", "cat", 0.7)])

    (row,) = [
        row
        for batch in table_answers(None, table, MODEL, storage.table("predictions"), storage).batches(storage)
        for row in batch.to_pylist()
    ]

    assert (row["path"], row["label"], row["predicted"], row["sha256"]) == (None, None, "cat", "a")
    assert contents_in_table(None, table, storage, [row]) == {"a": png(9, 9, 9)}


def test_answers_of_the_champion_are_one_call(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home and a source are all that it needs; the result is read at once or in batches."""
    monkeypatch.setattr(answers, "model_of_images", lambda *_: MODEL)
    source = Path(storage.home, "photos")
    source.mkdir(parents=True)
    results_of_source(storage, [{"path": "a.png", "sha256": "a"}], [predicted("a", "cat", 0.5)], source)

    found = champion_answers(storage.home, source=str(source)).read_pandas()

    (row,) = found.to_dict("records")
    assert (row["path"], row["predicted"], row["probability"]) == ("a.png", "cat", 0.5)


def test_report_names_some_failed_files_and_csv_all(storage: Storage) -> None:
    """The JSON of a run stays short, and the terminal says that there are more."""
    files = [{"path": f"{n:03}.png", "sha256": None, "error": "unreadable: gone"} for n in range(NUM_FAILED + 5)]

    answers = results_of_source(storage, files, [])

    assert (answers.num_failed, len(answers.failed)) == (NUM_FAILED + 5, NUM_FAILED)
    assert len(pd.read_csv(answers.csv)) == NUM_FAILED + 5
    report = PredictReport(
        predictions=latest(None, storage.table("predictions")), model=MODEL, predicted=0, errors=0, seconds=0.0,
        **dict(answers),
    )  # fmt: skip
    assert f"Failed: {NUM_FAILED + 5}, the first 20:\n" in answers_text(report, PredictRun())
    assert f"## Failed: {NUM_FAILED + 5}, the first 20\n" in answers_markdown(report)


def test_terminal_ends_with_table_csv_file_and_next_command(storage: Storage) -> None:
    """Columns are straight with wide characters, and names cannot send commands to the terminal."""
    files = [{"path": path, "sha256": path} for path in ("日本.png", "\x1b[31mred.png", "long name.png")]
    rows = [predicted("日本.png", "犬", 0.5), predicted("\x1b[31mred.png", "dog", 0.6)]
    rows += [predicted("long name.png", None, None, "not_an_image: x")]
    answers = results_of_source(storage, files, rows)
    report = PredictReport(
        predictions=latest(None, storage.table("predictions")), model=MODEL, predicted=3, errors=1, seconds=0.0,
        **dict(answers),
    )  # fmt: skip
    settings = {"storage": {"home": storage.home}, "predict": {"source": "/new photos"}}

    text = answers_text(report, PredictRun.model_validate(settings))

    assert text.splitlines() == [
        "Least sure, by photos version 3:",
        "  probability  label  file",
        "  0.5000       犬     日本.png",
        r"  0.6000       dog    \x1b[31mred.png",
        "",
        "Failed: 1:",
        "  file           error",
        "  long name.png  not_an_image: x",
        "",
        f"all answers  {storage.home}/predictions.csv (3 files, 1 of them failed)",
        f"next         .venv/bin/python -m flows.predict_stream --storage.home {storage.home} "
        "--predict.source '/new photos' --interval_seconds 30   (new images as they come)",
    ]
    assert '"failed":[{"path":"long name.png","error":"not_an_image: x"}]' in report.model_dump_json()


@pytest.mark.parametrize("flow", ["predict_batch", "predict_stream"])
def test_commands_of_inference_end_with_the_answers(flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both print the table of the least sure images, the CSV file and the next command."""
    printed: list[object] = []
    monkeypatch.setattr("flows.command_line.run_from_command_line", lambda *given: printed.append(given[2]))
    monkeypatch.delitem(sys.modules, f"flows.{flow}", raising=False)
    runpy.run_module(f"flows.{flow}", run_name="__main__")
    assert printed == [answers_text]


@pytest.mark.parametrize(
    ("tables", "given", "expected"),
    [
        ("", "", "{home}/predictions.csv"),
        ("photos-tables", "", "{home}/predictions-photos-tables.csv"),
        ("s3a://lake/tables/", "", "{home}/predictions.csv"),
        ("s3a://lake", "", "{home}/predictions-lake.csv"),
        ("", "mine.csv", "{home}/mine.csv"),
        ("", "/tmp/mine.csv", "/tmp/mine.csv"),
    ],
)
def test_csv_file_is_in_the_home(storage: Storage, tables: str, given: str, expected: str) -> None:
    """Each folder of tables has a file of its own, also on a store, unless a setting names it."""
    storage = resolve_storage(StorageConfig(home=storage.home, tables=tables or None))
    assert str(csv_file(PredictConfig(csv=given or None).csv, storage)) == expected.format(home=storage.home)


@pytest.mark.parametrize(
    ("given", "message"),
    [("s3a://bucket/x.csv", "^predict.csv is 's3a.* local file"), ("/tmp", "a folder"), ("/dev/null/x.csv", "nothing")],
)
def test_csv_file_that_cannot_be_written_is_refused_before_work_starts(
    storage: Storage, given: str, message: str
) -> None:
    """The sentence names the setting."""
    table = storage.table("predictions")
    with pytest.raises(WrongInput, match=message) as refused:
        check_paths(table, table, PredictConfig(csv=given), storage)
    assert refused.value.setting == "predict.csv"
