"""Streaming inference on a folder that grows, on a real Spark: equal to batch, exactly once, and its ways out."""

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.predict import source_batch
from tasks.predict.source import list_source
from tasks.registry.promote import promote_best
from tasks.storage import resolve_storage
from tasks.stream import source_stream
from tasks.stream.checkpoint import RESTART
from tasks.stream.processed_files import ProcessedFiles
from tests.builders.delta_rows import local_rows
from tests.builders.image_bytes import encoded, noise
from tests.builders.photo_folder import GOOD, PATHS, write_folder
from tests.builders.streams import stream
from tests.builders.untrained_model import log_run, predict


def rows_of(path, *columns):
    """Return the rows of a table without some columns, sorted."""
    return sorted(
        ({key: row[key] for key in sorted(row.keys() - {*columns})} for row in local_rows(path).to_pylist()), key=repr
    )


def test_new_files_of_a_folder_are_predicted_once(spark, empty_tracking, tmp_path, monkeypatch):
    """Rows equal those of batch inference; later runs read new and changed files only, by the champion of then."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path / "home {a}*?")))
    Path(storage.home).mkdir()
    shutil.copy(empty_tracking, storage.home)
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    promote_best([run], PromoteConfig(model_name="photos"), storage)
    folder, predictions, reports = write_folder(tmp_path), storage.table("predictions"), []

    def run_stream(**settings):
        return stream(storage, "photos", lambda measure: reports.append(measure()), source=str(folder), **settings)

    report = run_stream()
    # The fifth file alone fills a batch. An image with files in both batches is computed in both, and has one row.
    assert (report.batches, report.predicted, report.errors, report.unreadable) == (2, 10, 5, 2)
    assert (report.num_files, report.num_ignored, report.left_by_systems) == (len(PATHS), 1, 1)
    assert [found.files_behind for found in reports] == [len(PATHS) - 5, 0]
    assert (report.files_behind, report.versions_behind, report.seconds_behind) == (0, 0, 0.0)
    other = f"{storage.tables}/other/predictions"
    assert predict(storage, "photos", source=str(folder), predictions=other).predicted == 9
    # Other batches of the forward pass have sums in another order.
    inexact = ("predicted_at", "probability", "top_probabilities")
    assert rows_of(predictions, *inexact) == rows_of(other, *inexact)
    of_stream, of_batch = (
        {row["sha256"]: row["probability"] or 0.0 for row in local_rows(path).to_pylist()}
        for path in (predictions, other)
    )
    assert of_stream == pytest.approx(of_batch, rel=1e-5)
    inputs, others = (path.replace("predictions", "inputs") for path in (predictions, other))
    assert rows_of(inputs, "seen_at") == rows_of(others, "seen_at")

    # Nothing is new: files that cannot be read are not read again, and Spark is not needed.
    monkeypatch.setattr(source_stream, "predict_files", None)
    assert (run_stream().batches, run_stream().predictions) == (0, report.predictions)
    monkeypatch.undo()

    # New, replaced, deleted and copied files; batch inference has predicted one of the new ones, and one vanishes while
    # it is read.
    (folder / "z.png").write_bytes(encoded(noise(24, 24, seed=11)))
    assert predict(storage, "photos", source=str(folder)).predicted == 1
    (folder / "new/_folder").mkdir(parents=True)
    (folder / "new/_folder/[1].png").write_bytes(encoded(noise(24, 24, seed=12)))
    (folder / "bad/empty.jpg").write_bytes(encoded(noise(24, 24, seed=13)))
    (folder / "bad/cut.png").unlink()
    (folder / "copy.png").write_bytes(GOOD["a.png"])
    (folder / "moved.png").write_bytes(encoded(noise(24, 24, seed=14)))
    hidden, read_files = tmp_path / "hidden.png", source_batch.read_files

    def hide_then_read(*given):
        shutil.move(folder / "moved.png", hidden)
        return read_files(*given)

    monkeypatch.setattr(source_batch, "read_files", hide_then_read)
    later = run_stream()
    monkeypatch.undo()
    assert (later.batches, later.predicted, later.errors, later.files_behind) == (1, 3, 0, 0)

    # The alias moves, the file comes back, and too many errors stop the stream until they are mended or accepted.
    second = log_run(storage, tmp_path, seed=2, accuracy=0.6)
    promote_best([second], PromoteConfig(model_name="photos"), storage)
    shutil.move(hidden, folder / "moved.png")
    for number in range(12):
        (folder / f"broken{number}.png").write_bytes(b"broken %d" % number)
    for _attempt in range(2):
        with pytest.raises(WrongInput, match=r"12 of 13 .* predict.max_error_fraction 0.5"):
            run_stream()
    (folder / "broken0.png").write_bytes(encoded(noise(24, 24, seed=31)))
    shutil.move(folder / "broken1.png", hidden)
    accepted = run_stream(max_error_fraction=1.0)
    assert (accepted.predicted, accepted.errors, accepted.files_behind, accepted.model.version) == (12, 10, 0, 2)
    versions = [row["model_version"] for row in local_rows(predictions).to_pylist()]
    assert (versions.count(1), versions.count(2)) == (12, 12)
    shutil.move(hidden, folder / "broken1.png")  # With its old time: it was listed, and away when its batch came.
    back = run_stream()
    assert (back.predicted, back.errors) == (1, 1)

    # A damaged checkpoint has a way out: as for a new stream, all files without a prediction by this version are new.
    (checkpoint,) = Path(f"{predictions}.streams").glob("*/[0-9]*")
    assert [file.name for file in checkpoint.iterdir()] == ["listed.parquet"]
    (checkpoint / "listed.parquet").write_bytes(b"PAR1")
    with pytest.raises(WrongInput, match=r"is damaged \(listed.parquet cannot be read\)") as refused:
        run_stream()
    assert refused.value.way_out == RESTART

    def interrupted(*_arguments, **_named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(source_stream, "predict_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_stream(restart=True)
    assert run_stream().predicted == 10  # The restart is not forgotten with its first batch.
    assert (run_stream().batches, predict(storage, "photos", source=str(folder)).predicted) == (0, 0)

    # An earlier release was killed: its last listing has a file that waits for a batch.
    (folder / "waits.png").write_bytes(encoded(noise(24, 24, seed=32)))
    (checkpoint,) = Path(f"{predictions}.streams").glob("*/[0-9]*")
    ProcessedFiles(str(checkpoint), storage).replace(
        list_source(str(folder), inputs, storage, SparkConfig()).listing, []
    )
    (checkpoint / "listings").mkdir()
    assert run_stream().batches == 0
    pq.write_table(pa.table({"path": ["waits.png"]}), checkpoint / "listings" / "1.parquet")
    assert run_stream().predicted == 1
    assert list(Path(f"{predictions}.streams").glob("*/[0-9]*")) == [checkpoint]
    assert [file.name for file in checkpoint.iterdir()] == ["listed.parquet"]
    assert run_stream().batches == 0
    os.rename(folder, tmp_path / "elsewhere")
    with pytest.raises(WrongInput, match=r"predict.source is '.*', which does not exist"):
        run_stream()

    # A stream without an end looks again after each interval; the folder may be empty.
    folder.mkdir()
    waits = []

    def add_then_stop(seconds):
        waits.append(seconds)
        if len(waits) == 1:
            (folder / "late.png").write_bytes(encoded(noise(24, 24, seed=40)))
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(source_stream, "_sleep", add_then_stop)
    with pytest.raises(KeyboardInterrupt):
        run_stream(interval_seconds=7)
    assert (waits, reports[-1].predicted, reports[-1].files_behind) == ([7, 7, 7], 1, 0)
    assert "late.png" in (Path(storage.home) / "predictions.csv").read_text(encoding="utf-8")
    keys = [(row["sha256"], row["model_name"], row["model_version"]) for row in local_rows(predictions).to_pylist()]
    assert len(keys) == len(set(keys))
