"""Drivers that share tables on a real object store with conditional puts, and drivers that are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pytest
import s3fs

from tasks.config.promotion import PromoteConfig
from tasks.object_store import file_system, has_conditional_puts, list_names
from tasks.refs import TableRef
from tasks.registry.promote import promote_best
from tasks.storage import Storage
from tests.builders.delta_rows import delta_rows
from tests.builders.object_store import ObjectStore, build_minio, serve_minio
from tests.builders.processes import ROOT, plain_environment
from tests.builders.store_run import make_storage
from tests.builders.untrained_model import log_run
from tests.conftest import write_images

WAIT_SECONDS = 600


@pytest.fixture
def store(tmp_path, monkeypatch) -> Iterator[ObjectStore]:
    """Run MinIO with the bucket `lake`, with its credentials in the environment."""
    if not build_minio():
        pytest.skip("MinIO is built with Go, which is not installed")
    with serve_minio(tmp_path / "minio") as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        file_system("s3a://lake")[0].mkdir("lake")
        yield running
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def source(tmp_path) -> Path:
    """Return a source with 3 classes of 6 images."""
    write_images(tmp_path / "source", per_class=6)
    return tmp_path / "source"


@pytest.fixture
def storage(tmp_path, store) -> Storage:
    """Return a storage with tables, caches and artifacts on the store."""
    return make_storage(tmp_path / "home", "s3a://lake")


def start(stage: str, source: Path, storage: Storage, go: Path) -> "subprocess.Popen[str]":
    """Start a driver in a process group of its own, and wait until it is ready."""
    words = (stage, source, storage.home, "s3a://lake", go)
    log = go.parent / f"{stage}.log"
    with log.open("a") as file:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.builders.store_driver", *map(str, words)],
            cwd=ROOT,
            env=plain_environment(PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n", log.read_text()[-3000:]
    return driver


def run_to_end(*drivers: "subprocess.Popen[str]", go: Path) -> list[int]:
    """Let ready drivers work at the same time; return the number of attempts of each."""
    go.touch()
    printed = [driver.communicate(timeout=WAIT_SECONDS)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * len(drivers), go.parent
    return [int(text) for text in printed]


def opened(storage: Storage, name: str) -> deltalake.DeltaTable:
    """Return a table, opened by delta-rs."""
    options = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    return deltalake.DeltaTable(storage.table(name).replace("s3a://", "s3://"), storage_options=options)


def rows(storage: Storage, name: str, *columns: str) -> list[tuple[str, ...]]:
    """Return the sorted rows of a table, read without Spark and without this project's code."""
    found = delta_rows(opened(storage, name), *columns)
    return sorted(zip(*(found[column].to_pylist() for column in columns), strict=True))


@pytest.mark.timeout(2 * WAIT_SECONDS)
def test_two_etl_runs_at_once_lose_nothing(store, storage, source, tmp_path):
    """Two drivers that listed different new files write each of them once; one of them has to repeat its commit."""
    assert has_conditional_puts("s3a://lake")
    run_to_end(start("etl", source, storage, tmp_path / "first"), go=tmp_path / "first")
    write_images(source, per_class=1, first=100)
    go = tmp_path / "second"
    early = start("etl", source, storage, go)
    write_images(source, per_class=1, first=200)
    late = start("etl", source, storage, go)

    attempts = run_to_end(early, late, go=go)

    ledger = rows(storage, "files", "path", "outcome")
    assert [path for path, _ in ledger] == sorted(str(path.relative_to(source)) for path in source.rglob("*.png"))
    assert {outcome for _, outcome in ledger} == {"stored"}
    images = rows(storage, "images", "sha256")
    assert len(images) == len(set(images)) == 24
    assert max(attempts) > 1, "both committed the version that they had read"


@pytest.mark.timeout(2 * WAIT_SECONDS)
def test_two_inference_runs_at_once_predict_each_image_once(store, storage, source, tmp_path):
    """Both drivers find the table of predictions missing; it is created once, with one row per image."""
    run_to_end(start("etl", source, storage, tmp_path / "first"), go=tmp_path / "first")
    table = opened(storage, "images")
    table_id = str(table.metadata().id)
    images = TableRef(path=storage.table("images"), version=table.version(), table_id=table_id, source=str(source))
    promote_best([log_run(storage, tmp_path, 1, 0.5, images)], PromoteConfig(), storage)
    go = tmp_path / "second"

    run_to_end(*(start("predict", source, storage, go) for _ in range(2)), go=go)

    assert rows(storage, "predictions", "sha256") == rows(storage, "images", "sha256")


@pytest.mark.timeout(2 * WAIT_SECONDS)
@pytest.mark.parametrize(("folder", "prefix"), [("images/_delta_log", "_unfinished-"), ("files", "part-")])
def test_run_after_a_killed_driver_completes_both_tables(store, storage, source, tmp_path, folder, prefix):
    """The driver is killed before it commits, or between the commits of the two tables."""
    driver = start("etl", source, storage, tmp_path / "first")
    (tmp_path / "first").touch()
    while not any(name.startswith(prefix) for name in list_names(f"{storage.tables}/{folder}")):
        assert driver.poll() is None
        time.sleep(0.02)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()

    run_to_end(start("etl", source, storage, tmp_path / "second"), go=tmp_path / "second")

    ledger = rows(storage, "files", "path", "outcome")
    assert ledger == [(str(path.relative_to(source)), "stored") for path in sorted(source.rglob("*.png"))]
    images = rows(storage, "images", "sha256")
    assert len(images) == len(set(images)) == len(ledger)
