"""ETL and inference from an object store: a real S3 server, read by Hadoop's S3A connector."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import s3fs
from py4j.protocol import Py4JJavaError

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import SourceUnavailable, WrongInput
from tasks.etl import source as etl_source
from tasks.etl.ingest import ingest_source
from tasks.etl.source import prepare_source
from tasks.model_package.classifier import ImageClassifier
from tasks.model_package.structure import other_content
from tasks.predict import source_batch
from tasks.predict.answers import champion_answers
from tasks.predict.source_batch import predict_source
from tasks.registry.promote import promote_best
from tasks.spark.file_systems import FEW_RETRIES, LOG_STORE, OWN_LOG_STORE, conditional_log_store, has_other_log_store
from tasks.storage import Storage, resolve_storage
from tasks.system.listening import free_port
from tasks.tables.delta import newest_commit
from tasks.tables.direct_commits import append_rows
from tasks.tables.snapshots import newest_snapshot
from tests.builders.delta_rows import newest_rows
from tests.builders.etl_tables import etl_settings, ingest, ledger, versions
from tests.builders.object_store import ObjectStore, serve
from tests.builders.processes import ROOT
from tests.builders.untrained_model import log_run
from tests.conftest import write_images
from tests.integration.test_etl_files import LINES, make_source, noise

HANG_SECONDS = 180
"""Timeout of a test with an unreachable store, seconds: Hadoop's default retries take minutes."""


@pytest.fixture(scope="module")
def s3a_settings(spark) -> Iterator[None]:
    """Restore the s3a settings of the shared session at the end."""
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    before = dict(settings.getPropsWithPrefix("fs.s3a."))
    yield
    after = dict(settings.getPropsWithPrefix("fs.s3a."))
    for name in after.keys() - before.keys():
        settings.unset(f"fs.s3a.{name}")
    for name, value in before.items():
        if after.get(name) != value:
            settings.set(f"fs.s3a.{name}", value)
    assert dict(settings.getPropsWithPrefix("fs.s3a.")) == before


@pytest.fixture(scope="module")
def store(spark, s3a_settings, tmp_path_factory) -> Iterator[ObjectStore]:
    """Serve a folder as an S3 store, after fetching the connector's jars if they are missing."""
    subprocess.run([sys.executable, "-m", "deployments.setup.fetch_jars", "s3a"], cwd=ROOT, check=True, timeout=300)
    with serve(tmp_path_factory.mktemp("buckets")) as running:
        settings = spark.sparkContext._jsc.hadoopConfiguration()
        settings.set("fs.s3a.endpoint", running.endpoint)
        settings.set("fs.s3a.path.style.access", "true")
        for bucket in ("photos", "every-kind", "empty"):
            (running.folder / bucket).mkdir()
            running.grant_access(spark, bucket)
        (running.folder / "empty" / "notes.txt").write_text("no image")
        yield running


@pytest.mark.parametrize("fails", ["at its beginning", "within"])
def test_listing_of_a_url_that_fails_is_no_shorter_listing(spark, tmp_path, monkeypatch, fails):
    """A folder that goes away after the check, or between two pages, ends the run with its URL and the reason."""
    write_images(tmp_path / "source", per_class=2)
    monkeypatch.setattr(etl_source, "FILES_PER_PAGE", 1)
    check = etl_source.check_folder

    def check_and_remove(*given: object) -> None:
        check(*given)
        if fails == "at its beginning":
            shutil.rmtree(tmp_path / "source")

    monkeypatch.setattr(etl_source, "check_folder", check_and_remove)
    files = etl_source.remote_files(spark, f"file://{tmp_path}/source")
    if fails == "within":
        assert next(files).paths
        for folder in (tmp_path / "source").iterdir():
            shutil.rmtree(folder)

    with pytest.raises(SourceUnavailable, match=r"'file:///.*/source', whose files could not") as refused:
        list(files)
    assert refused.value.setting == "source"


@pytest.fixture
def bucket(store) -> Path:
    """Return the folder of a bucket with three classes of five images, one with an odd name."""
    folder = store.folder / "photos"
    shutil.rmtree(folder)
    write_images(folder, per_class=5)
    (folder / "größe 猫").mkdir()
    for number, name in enumerate(("a=b 50%.png", "[x]*?.png", "a:b#c+%20.JPG", "_under.png")):
        noise(100 + number).save(folder / "größe 猫" / name, format="PNG")
    return folder


@pytest.fixture
def s3fs_of_the_store(store, bucket, monkeypatch) -> Iterator[None]:
    """Let this process itself read and write the store."""
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def collect_command_lines(process: subprocess.Popen[str], found: set[str]) -> None:
    """Collect the command lines of all descendants of a process while it runs."""
    while process.poll() is None:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    found.add(" ".join(child.cmdline()))
        time.sleep(0.2)


def test_credentials_from_the_environment_read_every_kind_of_file_and_are_written_nowhere(spark, store, tmp_path):
    """Outcomes equal those of a folder, and no written file and no command line has the secret."""
    folder = tmp_path / "every kind=50%"
    make_source(folder)
    (folder / "train" / "red" / "_under.png").write_bytes(b"bad")
    for path in [*folder.rglob("*")]:
        if path.is_symlink() or not path.name.isprintable():
            path.unlink()  # an object store has no links, and only Unicode names
    shutil.copytree(folder, store.folder / "every-kind" / "every kind=50%")
    options = {
        "etl.source": "s3a://every-kind/every kind=50%/",
        "etl.split_by": "folder",
        "etl.max_bad_fraction": "1.0",
        "spark.conf": "spark.hadoop.fs.s3a.path.style.access=true",
    }
    command = [sys.executable, "-m", "flows.etl", *(word for name in options for word in (f"--{name}", options[name]))]
    log = tmp_path / "output.txt"
    command_lines: set[str] = set()
    with log.open("w") as output:
        environment = os.environ | store.environment() | {"LAKEVISION_HOME": str(tmp_path / "home")}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True)
        collect_command_lines(run, command_lines)
    assert run.returncode == 0, log.read_text()
    assert any("java" in line for line in command_lines)
    assert not any(store.secret in line or store.key in line for line in command_lines)
    written = [file for file in (log, *(tmp_path / "home").rglob("*")) if file.is_file()]
    assert {"flows.log", "spark.log", "mlflow.db", "temporary.db"} <= {file.name for file in written}
    assert [file for file in written if store.secret.encode() in file.read_bytes()] == []
    files = ledger(spark, resolve_storage(StorageConfig(home=str(tmp_path / "home"))))
    # All files that exist in a bucket, before any change.
    expected = {
        path: (line.outcome, line.reason)
        for line in LINES
        for path in line.paths
        if line.outcome not in {None, "deleted"} and (folder / path).exists()
    }
    assert len(expected) > 25
    assert {path: files.get(path) for path in expected} == expected
    assert files["train/red/_under.png"] == ("quarantined", "not_an_image")
    listed = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    skipped = {path for line in LINES for path in line.paths if line.outcome is None} | {"train/.store/linked.png"}
    assert set(files) == listed - skipped


def test_only_new_and_changed_objects_are_read_and_missing_ones_quarantined(spark, storage, bucket):
    """An object deleted after the listing is quarantined, and stored by a later run once it is restored."""
    etl = etl_settings("s3a://photos")
    listed = prepare_source(etl, storage, SparkConfig())
    content = (bucket / "red" / "001.png").read_bytes()
    (bucket / "red" / "001.png").unlink()
    report = ingest_source(etl, listed, storage, SparkConfig())
    assert (report.stored, report.quarantined, report.read) == (18, 1, 19)
    assert ledger(spark, storage)["red/001.png"] == ("quarantined", "unreadable")
    assert ledger(spark, storage)["größe 猫/a:b#c+%20.JPG"] == ("stored", None)
    files = newest_rows(spark, storage.table("files"), "path", "detail")
    (detail,) = (row["detail"] for row in files if row["path"] == "red/001.png")
    assert detail.startswith("FileNotFoundException: ")

    (bucket / "red" / "001.png").write_bytes(content)
    noise(1, side=30).save(bucket / "red" / "000.png")
    noise(2).save(bucket / "red" / "new.png")
    (bucket / "blue" / "001.png").unlink()
    report = ingest("s3a://photos/", storage)
    # One commit deletes the old contents, another appends the new ones.
    assert (report.read, report.stored, versions(spark, storage)) == (3, 19, (2, 1))
    assert ledger(spark, storage)["blue/001.png"] == ("deleted", None)

    report = ingest("s3a://photos", storage)
    assert (report.read, report.changed, versions(spark, storage)) == (0, False, (2, 1))


def test_objects_without_the_name_of_an_image_are_looked_at_once(spark, storage, bucket, monkeypatch):
    """The ledger tells the next run which of them to ignore; a changed one is looked at again."""
    looked = []
    monkeypatch.setattr(etl_source, "other_content", lambda head: looked.append(head) or other_content(head))
    (bucket / "red" / "notes.txt").write_text("no image")
    noise(300).save(bucket / "red" / "plain", format="PNG")
    first = ingest("s3a://photos", storage)
    assert (first.stored, first.ignored, len(looked)) == (20, 1, 2)
    assert {"red/notes.txt": ("ignored", "other_file"), "red/plain": ("stored", None)}.items() <= (
        ledger(spark, storage).items()
    )
    looked.clear()
    again = ingest("s3a://photos", storage)
    assert (again.changed, again.ignored, len(looked)) == (False, 1, 1)
    assert looked[0].startswith(b"\x89PNG")

    noise(301).save(bucket / "red" / "notes.txt", format="PNG")
    changed = ingest("s3a://photos", storage)
    assert (changed.stored, changed.ignored) == (21, 0)


@pytest.mark.timeout(HANG_SECONDS)
@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s3a://photos/nowhere", "'s3a://photos/nowhere', which does not exist"),
        ("s3a://photos/red/000.png", "which is a file: give a folder"),
        ("s3a://empty", "'s3a://empty', which holds no image"),
        ("s3a://no-such-bucket/x", "but the bucket 'no-such-bucket' does not exist"),
        ("s3a://wrong-key/x", "which the credentials that were found may not read"),
        ("s3a://no-credentials/x", "no credentials were found: set AWS_ACCESS_KEY_ID"),
        ("s3a://unreachable/x", "whose server does not answer: check the URL"),
        ("gs://bucket/x", "the jars for gs:// are not there: .*/jars/gs"),
        ("hdfs://127.0.0.1:1/x", "whose server does not answer"),
        ("s3a:photos", "'s3a:photos', which is neither a path nor a URL"),
    ],
)
def test_unreadable_source_is_refused_in_one_sentence(spark, store, storage: Storage, bucket, url, sentence):
    """The error has the value and the way out but no secret, and no table is created."""
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    for name in ("no-such-bucket", "wrong-key", "unreachable"):
        store.grant_access(spark, name)
    settings.set("fs.s3a.bucket.wrong-key.secret.key", "another")
    settings.set("fs.s3a.bucket.unreachable.endpoint", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(WrongInput, match=sentence) as refused:
        ingest(url, storage)
    assert refused.value.setting == "source"
    assert refused.value.way_out
    assert "\n" not in str(refused.value)
    assert not any(secret in str(refused.value) for secret in (store.secret, "another"))
    assert not Path(storage.tables).exists()


def test_objects_are_predicted_without_a_table(spark, storage, bucket, tmp_path, monkeypatch):
    """Predictions equal the classifier's. Only new objects are read, and those that are gone by then have no row."""
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    promote = PromoteConfig(model_name="photos")
    promote_best([run], promote, storage)
    (bucket / "empty.jpg").touch()
    (bucket / "text.png").write_bytes(b"no image")
    settings = PredictConfig(source="s3a://photos/")
    report = predict_source(settings, promote, storage, SparkConfig())
    assert (report.predicted, report.errors, report.unreadable) == (21, 2, 0)
    rows = champion_answers(storage.home, source="s3a://photos/", model_name="photos").read_all()
    answers = {row["path"]: row for row in rows.to_pylist()}
    assert len([image for image in report.least_confident if image.thumbnail]) == 19
    files = {file.relative_to(bucket).as_posix(): file.read_bytes() for file in bucket.rglob("*") if file.is_file()}
    assert answers.keys() == files.keys()
    direct = ImageClassifier.load(tmp_path / "classifier-1").predict(list(files.values()))
    for (path, content), found in zip(files.items(), direct, strict=True):
        assert answers[path]["sha256"] == hashlib.sha256(content).hexdigest()
        assert (answers[path]["predicted"], answers[path]["error"]) == (found.label, found.error)
    again = predict_source(settings, promote, storage, SparkConfig())
    assert (again.predicted, again.predictions, again.inputs) == (0, report.predictions, report.inputs)

    noise(200).save(bucket / "red" / "new.png")
    noise(201).save(bucket / "red" / "soon gone.png")
    read_files = source_batch.read_files

    def remove_then_read(spark, files, location):
        assert files["path"].to_pylist() == ["red/new.png", "red/soon gone.png"]
        (bucket / "red" / "soon gone.png").unlink()
        return read_files(spark, files, location)

    monkeypatch.setattr(source_batch, "read_files", remove_then_read)
    report = predict_source(settings, promote, storage, SparkConfig())
    assert (report.predicted, report.unreadable) == (1, 0)
    with pytest.raises(WrongInput, match="'s3a://photos/no', which does not exist") as refused:
        predict_source(PredictConfig(source="s3a://photos/no"), promote, storage, SparkConfig())
    assert refused.value.setting == "predict.source"


def test_table_on_a_store_without_its_jars_is_refused(spark):
    """The error names the URL and what to fetch, before Delta is asked."""
    with pytest.raises(WrongInput, match=r"'gs://bucket/t' .* the jars for gs://"):
        newest_snapshot(spark, "gs://bucket/t")
    # Hadoop's own default is "64m", which Google's connector takes for a number.
    assert spark.sparkContext._jsc.hadoopConfiguration().getLong("fs.gs.block.size", 0) == 64 << 20


def test_jvm_commits_to_a_store_only_within_its_lease(spark, store, s3fs_of_the_store):
    """It asks again at each put to the log: a lease may end while a commit computes its rows."""
    table = "s3a://photos/tables/numbers"
    append_rows(table, pa.table({"number": [1]}))
    log = conditional_log_store(spark, table)
    rows = spark.createDataFrame([(2,)], "number long").write.format("delta").mode("append")

    log.lease(table, -1)
    with pytest.raises(Py4JJavaError, match="the lease of this driver has ended"):
        rows.save(table)
    assert newest_commit(table) == f"{0:020}.json"
    log.lease(table, 60_000)
    rows.save(table)
    log.lease(table, -1)
    log.release(table)
    rows.save(table)
    assert newest_commit(table) == f"{2:020}.json"
    settings = spark.sparkContext._jsc.sc().conf()
    settings.set(LOG_STORE, "io.delta.storage.S3DynamoDBLogStore")
    has_other = has_other_log_store(spark, table)
    settings.set(LOG_STORE, OWN_LOG_STORE)
    assert (has_other, has_other_log_store(spark, table), has_other_log_store(spark, "/tables")) == (True, False, False)


@contextmanager
def busy_server() -> Iterator[tuple[str, list[str]]]:
    """Respond as an overloaded store; yield the endpoint and the list of requested paths."""
    requests: list[str] = []

    class Busy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(503 if len(requests) <= 10 else 403)  # 403 ends retries that would take minutes
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.fault
@pytest.mark.timeout(HANG_SECONDS)
def test_overloaded_store_is_retried_as_often_as_give_up_early_sets(spark, store, storage):
    """Hadoop's defaults would retry many times more; an overloaded store is not a user error."""
    store.grant_access(spark, "busy")
    with busy_server() as (endpoint, requests):
        spark.sparkContext._jsc.hadoopConfiguration().set("fs.s3a.bucket.busy.endpoint", endpoint)
        with pytest.raises(SourceUnavailable, match="'s3a://busy/x', which cannot be listed: ") as refused:
            ingest("s3a://busy/x", storage)
        assert refused.value.setting == "source"
    # The SDK retries each call, and S3A retries those.
    sdk_retries, s3a_retries = (
        int(FEW_RETRIES[f"fs.s3a.{name}"]) for name in ("attempts.maximum", "retry.throttle.limit")
    )
    assert len(requests) == (1 + sdk_retries) * (1 + s3a_retries)
