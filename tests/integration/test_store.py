"""Tables, cache and artifacts on an object store: a real S3 server, for Hadoop, Python and MLflow alike."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import boto3
import deltalake
import httpx
import psutil
import pyarrow as pa
import pytest
import s3fs
import torch

from tasks import object_store
from tasks.cache import sweep
from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.config.storage import StorageConfig
from tasks.errors import LockLost, TableInUse, WrongInput
from tasks.object_store import check_store, file_system, has_conditional_puts, list_names
from tasks.refs import CacheRef
from tasks.registry.history import DecisionRow, record
from tasks.schema import FEEDBACK_ARROW, REQUEST_IMAGES_ARROW, REQUESTS_ARROW, columns_of
from tasks.serve.request_log import journal_file, rows_of
from tasks.spark.session import NeedsSpark
from tasks.storage import resolve_storage
from tasks.system.disk import check_writable
from tasks.system.listening import free_port
from tasks.tables import delta, writer
from tasks.tables.direct_commits import append_rows
from tasks.tables.parquet_rows import spool_rows
from tasks.tables.writer import write_access
from tasks.tracking.server import prepare_tracking
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.object_store import ObjectStore, minio_program, serve, serve_minio
from tests.builders.processes import ROOT, plain_environment, run_python
from tests.builders.services import picture, register, service
from tests.builders.untrained_model import CLASSES
from tests.conftest import write_images


@pytest.fixture
def store(tmp_path, monkeypatch) -> Iterator[ObjectStore]:
    """Serve a folder with the bucket `lake`, with its credentials in the environment."""
    (tmp_path / "buckets" / "lake").mkdir(parents=True)
    with serve(tmp_path / "buckets") as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        forget_stores()
        yield running
        forget_stores()


def forget_stores() -> None:
    """Forget the connections to stores and their capabilities, which are kept per process."""
    s3fs.S3FileSystem.clear_instance_cache()
    object_store.has_conditional_puts.cache_clear()


@pytest.mark.timeout(600)
def test_dag_runs_on_a_store_and_repeats_nothing(tmp_path, monkeypatch):
    """ETL, cache, promotion, inference and maintenance use a store; a second run of a stage finds its work done.

    Without MinIO, the test ends with the cache: rclone takes Hadoop's mark of an empty folder for a file, and Delta
    cannot create a table by a query there.
    """
    subprocess.run([sys.executable, "-m", "deployments.setup.fetch_jars", "s3a"], cwd=ROOT, check=True, timeout=300)
    source, home = tmp_path / "source", tmp_path / "home"
    write_images(source, per_class=6)
    has_minio = minio_program().exists()
    with (serve_minio if has_minio else serve)(tmp_path / "buckets") as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        forget_stores()
        file_system("s3a://lake")[0].mkdir("lake")
        done = run_python(
            *("-m", "tests.builders.store_run", str(source), str(home), "s3a://lake/my data"),
            *("predict",) * has_minio,
            environment=plain_environment(PYTHONPATH=str(ROOT)),
            timeout=500,
        )
        forget_stores()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Stored, read, version of images, version of files: one commit removes an image, another adds three.
    assert found["etl"] == [[18, 18, 0, 0], [18, 0, 0, 0], [20, 3, 2, 1]]
    assert found["caches_built"] == [True, False]
    assert found["rows"] == list(range(len(found["rows"]))) != []
    assert ("ignores If-None-Match" in done.stderr) is not has_minio
    written = [file for file in home.rglob("*") if file.is_file()]
    assert [file for file in written if store.secret.encode() in file.read_bytes()] == []
    # Nothing but logs and the tracking database is local.
    assert {path.name for path in home.iterdir()} & {"tables", "cache", "artifacts"} == set()
    if has_minio:
        decisions = [(decision["outcome"], decision["champion"]["version"]) for decision in found["promoted"]]
        assert decisions == [("promoted", 1), ("promoted", 2)]
        figures = found["promoted"][1]["comparison"]
        tested = figures["images"]
        assert (sum(one["images"] for one in figures["classes"]), figures["left_out"]) == (tested, 0)
        assert figures["challenger_milliseconds"] > 0
        assert done.stderr.count(f"{tested} test images predicted by") == 2
        assert "can only be written by Spark" not in done.stderr
        # The gate predicted the images of the split test, whose rows are those of batch inference.
        assert tested > 0
        assert found["predicted"] == [[20 - tested, 0], [0, 0]]
        # The stream of the table has nothing the second time, that of the folder one more file.
        assert found["streamed"] == [[20, 1, 0], [0, 0, 0], [3, 1, 0], [1, 1, 0]]
        assert found["maintained"] == [
            f"s3a://lake/my data/tables/{name}" for name in ("images", "files", "predictions", "promotions")
        ]


def test_commits_of_others_are_visible_at_once(store):
    """Listings are not cached: a commit after the first listing is found by the second."""
    table = "s3a://lake/tables/images"
    other = boto3.client("s3", region_name="us-east-1")
    assert delta.newest_commit(table) is None
    for version in range(3):
        other.put_object(Bucket="lake", Key=f"tables/images/_delta_log/{version:020}.json", Body=b"{}")
        assert delta.newest_commit(table) == f"{version:020}.json"
    assert list_names("s3a://lake/nothing") == []


def test_decisions_are_appended_on_a_store_without_spark(store, tmp_path):
    """Each once, and with the server's conditional puts."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path / "home"), tables="s3a://lake/my tables"))
    rows = [
        DecisionRow(model_name="photos", decision="kept", from_version=1, to_version=1, run_id=name, reason="worse")
        for name in "ab"
    ]
    for row in (*rows, rows[0]):
        record(storage, row)
    written = deltalake.DeltaTable(store.folder / "lake" / "my tables" / "promotions").to_pyarrow_table()
    assert [DecisionRow.model_validate(row) for row in written.sort_by("decided_at").to_pylist()] == rows


def test_uncommitted_parts_of_others_stay_on_a_store(store):
    """The files of a table without a commit are removed from a folder only: on a store another run may commit them."""
    part = store.folder / "lake" / "tables" / "images" / "part-00000-a.parquet"
    part.parent.joinpath("_delta_log").mkdir(parents=True)
    part.write_bytes(b"rows")
    part.parent.joinpath("_delta_log", "_unfinished--1-a").touch()

    delta.clear_uncommitted("s3a://lake/tables/images")

    assert part.read_bytes() == b"rows"


@pytest.fixture
def cache(store, source) -> tuple[CacheRef, CacheRef]:
    """Return a cache in a folder, and the same one by its URL on the store."""
    ref = hand_made_cache(source, str(store.folder / "lake" / "cache" / "by-hand"))
    return ref, CacheRef(url="s3a://lake/cache/by-hand", digest=ref.digest)


def test_cache_on_a_store_gives_the_batches_of_a_folder(cache):
    """Images, labels and row numbers are equal, in the order of an epoch."""
    local, remote = ([*CacheLoader(ref.url, open_cache(ref), "train", 8, seed=3).epoch(1)] for ref in cache)
    assert len(local) == len(remote) > 1
    for batch, other in zip(local, remote, strict=True):
        assert torch.equal(batch.inputs, other.inputs)
        assert torch.equal(batch.labels_B, other.labels_B)
        assert batch.rows_B.tolist() == other.rows_B.tolist()


def test_only_abandoned_files_are_removed_from_a_cache_on_a_store(store, cache):
    """Another run may be building the same cache there: its files stay, those of a week ago do not."""
    folder = store.folder / "lake" / "cache" / "by-hand"
    for name, age in (("young.parquet", 0), ("old.parquet", 2 * sweep.ABANDONED_SECONDS)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    manifest = open_cache(cache[1])

    sweep.discard(cache[1].url)
    sweep.remove_unnamed(cache[1].url, manifest)

    assert open_cache(cache[1]) == manifest
    assert {path.name for path in folder.glob("*.parquet")} & {"young.parquet", "old.parquet"} == {"young.parquet"}


def test_location_that_cannot_be_written_to_is_refused(store, tmp_path, monkeypatch):
    """The error names setting, URL, reason and variables; the check leaves no object in a writable bucket."""
    check_writable("s3a://lake/tables", "storage.tables")
    assert list((store.folder / "lake").rglob("*")) == []
    with pytest.raises(WrongInput, match=r"storage.tables is 's3a://gone/x', .* \(The specified bucket does not exist"):
        check_writable("s3a://gone/x", "storage.tables")
    with pytest.raises(WrongInput, match=r"Hadoop's name for this store is s3a: write s3a://lake/x"):
        check_store("s3://lake/x", "storage.tables")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    forget_stores()
    with pytest.raises(WrongInput, match=r"signature.*: check AWS_ACCESS_KEY_ID") as refused:
        check_writable("s3a://lake/tables", "storage.tables")
    assert "another" not in str(refused.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    forget_stores()
    with pytest.raises(WrongInput, match="Could not connect to the endpoint"):
        check_writable("s3a://lake/tables", "storage.tables")


def test_second_driver_is_refused_where_puts_are_not_conditional(store, monkeypatch, messages_of):
    """On a server that ignores If-None-Match, one driver writes; the mark of a killed one counts for a while."""
    monkeypatch.setattr(writer, "RENEWAL_SECONDS", 1.5)
    table = "s3a://lake/tables/images"
    assert not has_conditional_puts("s3a://lake/tables")
    marks = store.folder / "lake" / "tables" / "images.writers"
    with write_access(table):
        assert len(list(marks.iterdir())) == 1
        with pytest.raises(TableInUse, match=f"another driver writes to '{table}'"), write_access(table):
            pytest.fail("a second driver was let in")
        assert len(list(marks.iterdir())) == 1
    assert not list(marks.glob("*"))
    assert any("ignores If-None-Match" in line for line in messages_of("lakevision.tables"))

    monkeypatch.setattr(writer, "ABANDONED_SECONDS", 3.0)
    marks.mkdir(parents=True, exist_ok=True)
    (marks / "killed").touch()
    with write_access(table):
        assert len(list(marks.iterdir())) == 2


def no_route(*_given: object) -> None:
    """Fail as a request without a network."""
    raise OSError("no route")


def test_driver_that_cannot_renew_its_mark_commits_nothing(store, tmp_path, monkeypatch):
    """Its lease ends before the mark counts as that of a killed one: a second driver would write at the same time."""
    monkeypatch.setattr(writer, "RENEWAL_SECONDS", 0.1)
    monkeypatch.setattr(writer, "LEASE_SECONDS", 0.5)
    table, rows = "s3a://lake/tables/promotions", pa.table({"name": ["a"]})
    marks = store.folder / "lake" / "tables" / "promotions.writers"
    with write_access(table):
        time.sleep(1)  # renewed several times
        append_rows(table, rows)
        with pytest.raises(NeedsSpark):  # Many rows take long to write, after which only Spark asks again.
            append_rows(table, spool_rows(rows.to_batches(), rows.schema))
        with monkeypatch.context() as lost:
            lost.setattr(file_system(table)[0], "pipe_file", no_route)
            time.sleep(1)
            with pytest.raises(
                LockLost, match=f"lock of '{table}' was not renewed .for 1 s.*: nothing was committed; run"
            ):
                append_rows(table, rows)
        assert len(list(marks.iterdir())) == 1
    log = store.folder / "lake" / "tables" / "promotions" / "_delta_log"
    assert [file.name for file in log.glob("*.json")] == [f"{0:020}.json"]


def test_a_service_logs_requests_and_feedback_on_a_store_that_may_be_away(store, tmp_path):
    """Each row once, for feedback in the next service, too. While the store is away, rows stay in the journal."""
    local = resolve_storage(StorageConfig(home=str(tmp_path / "home")))
    storage = local.model_copy(update={"tables": "s3a://lake/my tables"})
    prepare_tracking(local)
    register(local, tmp_path, 1, "champion")
    asked: list[str] = []
    given = []
    for first in range(2):
        with service(storage, num_workers=1, keep_images=True) as running, httpx.Client(trust_env=False) as client:
            for seed in range(3):
                image = {"content": picture(seed), "headers": {"Content-Type": "image/png"}}
                answer = client.post(f"{running.url}/predict", **image, timeout=60).raise_for_status().json()
                asked.append(answer["request_id"])
            # The second service has the first one's rows in the table alone.
            for request_id in asked[first : first + 2]:
                feedback = {"request_id": request_id, "image": 0, "label": CLASSES[0]}
                given.append(client.post(f"{running.url}/feedback", json=feedback, timeout=60).status_code)

    assert given == [200, 200, 409, 200]
    columns = columns_of(REQUESTS_ARROW, "request_id", "image")
    assert sorted(rows_of(storage, "requests", columns)["request_id"].to_pylist()) == sorted(asked)
    assert rows_of(storage, "feedback", columns_of(FEEDBACK_ARROW, "label"))["label"].to_pylist() == [CLASSES[0]] * 3
    kept = rows_of(storage, "request_images", columns_of(REQUEST_IMAGES_ARROW, "content"))
    assert sorted(kept["content"].to_pylist()) == sorted(picture(seed) for seed in range(3))
    with service(storage, num_workers=1) as running, httpx.Client(trust_env=False) as client:
        [server] = [child for child in psutil.Process().children() if "rclone" in child.name()]
        server.kill()
        unknown = {"request_id": f"{asked[0][:11]}{'0' * 32}", "image": 0, "label": CLASSES[0]}
        refused = client.post(f"{running.url}/feedback", json=unknown, timeout=60)
        client.post(f"{running.url}/predict", **image, timeout=60).raise_for_status()
        running.process.terminate()
        ended = running.process.wait(60)
    with closing(sqlite3.connect(journal_file(storage))) as journal:
        left = journal.execute("SELECT kind, count(*) FROM rows").fetchone()

    assert (refused.status_code, ended, left) == (503, 0, ("requests", 1))
    assert refused.json()["detail"].startswith("the feedback cannot be stored now (Could not connect to the endpoint")
