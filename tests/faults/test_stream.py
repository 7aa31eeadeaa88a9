"""Streams whose driver is killed at random moments, while images are added to a table or a folder."""

import hashlib
import signal
from pathlib import Path

import pytest

from tasks.config.promotion import PromoteConfig
from tasks.registry.promote import promote_best
from tasks.spark.session import spark_session
from tests.builders.etl_and_cache import SPARK, make_storage
from tests.builders.killed_runs import leftovers
from tests.builders.killed_streams import (
    MODEL,
    batches,
    cancel_in_batch,
    kill_in_batch,
    kill_later,
    start_stream,
    wait_for_files,
)
from tests.builders.streams import commit_images, keys_of, photos_of, stream
from tests.builders.untrained_model import log_run
from tests.conftest import write_images
from tests.faults.conftest import at_most

NUM_KILLS, NUM_KILLS_OF_FILES = map(at_most, (20, 6))


@pytest.mark.timeout(3600)
def test_every_image_is_predicted_once_whenever_the_driver_is_killed(draw, tmp_path) -> None:
    """After each kill a run continues; at the end each image has one row, and no temporary file is left."""
    storage = make_storage(tmp_path / "home")
    write_images(tmp_path / "source", 100)
    images, path = photos_of(tmp_path / "source"), storage.table("own")
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    promote_best([run], PromoteConfig(model_name=MODEL), storage)
    commit_images(path, images[:10])
    for begin in range(10, 120, 2):
        commit_images(path, images[begin : begin + 2])
    killed = 0
    for attempt in range(NUM_KILLS):
        seconds = draw.uniform(0, 12)  # The first batch of a process takes several seconds, the later ones one.
        was_running, ended = kill_in_batch(storage, path, seconds, least=batches(storage)[0])
        assert ended.left_running == [], ended.output
        killed += was_running
        last = ended.output.splitlines()[-1] if ended.output else "none"
        print(f"kill {attempt}, {seconds:.2f} s into a batch: {was_running}, batches {batches(storage)}; last: {last}")
        if attempt % 5 == 4:
            begin = 120 + 10 * attempt
            commit_images(path, images[begin - 40 : begin + 10])
    assert killed >= NUM_KILLS // 2
    commit_images(path, images[280:300])
    cancelled = cancel_in_batch(storage, path, least=batches(storage)[0] + 1)
    # Python ends itself by SIGINT after KeyboardInterrupt; with 1 if the JVM, which got the signal too, ended first.
    assert cancelled.returncode in {1, -signal.SIGINT}, cancelled.output
    assert cancelled.left_running == [], cancelled.output
    assert "KeyboardInterrupt" in cancelled.output
    with spark_session(SPARK, storage) as spark:
        report = stream(storage, MODEL, table=path)
        rows = keys_of(storage.table("predictions"))
        known = {row["sha256"] for row in spark.read.format("delta").load(path).select("sha256").collect()}
        print(f"the last run predicted {report.predicted} of {len(known)} images")
    assert rows == sorted((name, 1) for name in known)
    assert report.versions_behind == 0
    assert [name for name in leftovers(storage) if "spark-temp" in name] == []


@pytest.mark.timeout(3600)
def test_every_file_is_predicted_once_whenever_the_driver_is_killed(draw, tmp_path) -> None:
    """Files come and are replaced between the kills; at the end each has one row, and no record of a batch is left."""
    storage, source = make_storage(tmp_path / "home"), tmp_path / "source"
    write_images(source, 5)
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    promote_best([run], PromoteConfig(model_name=MODEL), storage)
    killed, extra = 0, b"a comment after the end of the image"
    for attempt in range(NUM_KILLS_OF_FILES):
        started, is_late = start_stream(storage, str(source)), attempt % 2 == 1
        if is_late:
            wait_for_files(started, storage)
        seconds = draw.uniform(
            0, 10 if is_late else 30
        )  # A process starts in ten seconds, and processes a batch in ten.
        was_running, ended = kill_later(started, seconds)
        assert ended.left_running == [], ended.output
        killed += was_running
        print(f"kill {attempt}, {seconds:.2f} s {'into a batch' if is_late else 'after the start'}: {was_running}")
        write_images(source, 2, first=5 + 2 * attempt)
        file = source / "red" / f"{attempt:03d}.png"
        file.write_bytes(file.read_bytes() + extra)
    assert killed >= NUM_KILLS_OF_FILES // 2
    with spark_session(SPARK, storage) as spark:
        report = stream(storage, MODEL, source=str(source))
        keys = keys_of(storage.table("predictions"))
        rows = spark.read.format("delta").load(storage.table("inputs")).collect()
        print(f"the last run predicted {report.predicted} images")
    files = {str(file.relative_to(source)): file.read_bytes() for file in source.rglob("*.png")}
    assert len(files) == 15 + 6 * NUM_KILLS_OF_FILES
    digests = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    assert sorted((row["path"], row["sha256"]) for row in rows) == sorted(digests.items())
    assert len(set(keys)) == len(keys)
    assert {(digest, 1) for digest in digests.values()} <= set(keys)
    assert report.files_behind == 0
    records = Path(f"{storage.table('predictions')}.streams").glob("*/*/*")
    assert [file.name for file in records] == ["listed.parquet"]
    assert [name for name in leftovers(storage) if "spark-temp" in name] == []
