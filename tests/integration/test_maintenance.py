"""Maintenance on real Delta tables and a real registry."""

import hashlib
import os
import shutil
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import mlflow
import mlflow.cli
import pyarrow as pa
import pyarrow.dataset
import pytest
from click.testing import CliRunner
from delta.tables import DeltaTable
from mlflow.exceptions import MlflowException
from pyspark.sql import SparkSession

from tasks.cache.materialize import materialize_cache
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.config.maintenance import MaintainConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.maintenance.maintain import RETENTION_CHECK, maintain_table, maintain_tables
from tasks.refs import TableRef
from tasks.schema import PREDICTIONS_ARROW, PREDICTIONS_PARTITION, PREDICTIONS_PROPERTIES
from tasks.serve.journal import Journal, NewRow
from tasks.serve.request_log import journal_file, move_rows
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage, resolve_storage
from tasks.tables import snapshots
from tasks.tables.direct_commits import append_rows
from tasks.tracking.pins import pin_trained_versions, read_pins
from tasks.tracking.tracked_run import tracked_run
from tasks.tracking.trained_tables import table_tags
from tests.builders.delta_rows import delta_rows, local_rows
from tests.conftest import write_images


@pytest.fixture
def any_retention(spark: SparkSession):
    """Let VACUUM delete files that were removed from the table a moment ago."""
    spark.conf.set(RETENTION_CHECK, "false")
    yield
    spark.conf.unset(RETENTION_CHECK)


def ingest(source, storage) -> TableRef:
    """Run ETL, and return the table of images."""
    return ingest_images(EtlConfig(source=str(source), max_deleted_fraction=1), storage, SparkConfig()).images


def hashes(table: TableRef) -> set[str]:
    """Return the sha256 of every image of a table version, after reading all content."""
    rows = local_rows(table.path, "sha256", "content", version=table.version).to_pylist()
    return {row["sha256"] for row in rows if row["content"]}


def hashes_by_spark(spark: SparkSession, table: TableRef) -> set[str]:
    """Return the same of a table in a folder that delta-rs cannot read."""
    rows = snapshots.read_version(spark, table).select("sha256", "content").collect()
    return {row["sha256"] for row in rows if row["content"]}


def register(storage, table: TableRef, name: str = "lakevision", *, tagged: bool = False) -> str:
    """Register a model that was trained on this version of the table, and return the id of its run."""
    data = {"table": table.path, "version": table.version, "table_id": table.table_id}
    with tracked_run(storage, "by hand", "key", {"data": data}, {}, None) as run:
        pass
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    tags = table_tags(client.get_run(run.run_id).data.params) if tagged else None
    client.create_registered_model(name)
    client.create_model_version(name, source=f"runs:/{run.run_id}/model", run_id=run.run_id, tags=tags)
    return run.run_id


def purge(storage, *run_ids: str) -> None:
    """Delete runs permanently, with `mlflow gc`, in this process, which has imported MLflow."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    for run_id in run_ids:
        client.delete_run(run_id)
    arguments = ["--backend-store-uri", storage.tracking, "--run-ids", ",".join(run_ids)]
    done = CliRunner().invoke(mlflow.cli.gc, arguments, env={"MLFLOW_TRACKING_URI": storage.tracking})
    assert done.exit_code == 0, done.output
    for run_id in run_ids:
        with pytest.raises(MlflowException, match="not found"):
            client.get_run(run_id)


def data_bytes(table: TableRef) -> int:
    """Return the size of the table's data files in bytes, removed ones included."""
    return sum(file.stat().st_size for file in Path(table.path).rglob("*.parquet") if file.parent.name != "_delta_log")


def rewrite(spark: SparkSession, path: str, times: int) -> None:
    """Rewrite every row of the table `times` times."""
    for _ in range(times):
        spark.sql(f"UPDATE delta.`{path}` SET width = width + 1")  # noqa: S608  # a path of the test


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, spark) -> tuple[Path, Storage]:
    """Return a source, and a home with three versions of its table, of which only the first has some images."""
    folder = tmp_path_factory.mktemp("prepared")
    source, storage = folder / "source", resolve_storage(StorageConfig(home=str(folder / "home")))
    write_images(source, 20)
    ingest(source, storage)
    write_images(source, 5, first=100)
    ingest(source, storage)
    for file in source.glob("red/00*.png"):
        file.unlink()
    ingest(source, storage)
    return source, storage


def copy_three_versions(spark, prepared, storage, *names: str) -> tuple[TableRef, set[str]]:
    """Copy the prepared tables of these names, by default the images; return their first version, and its images.

    Without the table `files`, whose maintenance takes seconds, there is less to do.
    """
    for name in names or ("images",):
        shutil.copytree(prepared[1].table(name), storage.table(name))
    first = snapshots.at_version(spark, storage.table("images"), 0)
    return first, hashes(first)


def test_maintenance_compacts_and_keeps_versions_of_registered_models(spark, prepared, storage, any_retention):
    """Images and caches stay as they are; only a version without a registered model loses its files."""
    first, held = copy_three_versions(spark, prepared, storage, "images", "files")
    run_id = register(storage, first)
    promoted = pa.Table.from_pylist([{"run_id": run_id, "decision": "promoted"}])
    append_rows(storage.table("promotions"), promoted)
    newest = snapshots.latest(spark, first.path)
    kept = hashes(newest)
    assert kept != held
    cache, built = materialize_cache(CacheConfig(image_size=16), newest, storage, SparkConfig())
    assert built

    # A data file that no commit names, as a killed run leaves it.
    uncommitted = Path(first.path) / "part-00000-killed.zstd.parquet"
    uncommitted.touch()
    os.utime(uncommitted, (0, 0))

    report = maintain_tables(MaintainConfig(vacuum_hours=0), storage, SparkConfig())

    assert not uncommitted.exists()
    images = next(done for done in report.tables if done.table.path == first.path)
    assert images.files_compacted > images.files_written
    assert images.kept_versions == [first.version]
    assert hashes(first) == held
    assert hashes(images.table) == kept
    again, built = materialize_cache(CacheConfig(image_size=16), images.table, storage, SparkConfig())
    assert (again.url, again.digest, built) == (cache.url, cache.digest, False)

    # A version of the registry that is gone may be missing from a copy of the database only. Its run is purged.
    mlflow.MlflowClient(tracking_uri=storage.tracking).delete_registered_model("lakevision")
    purge(storage, run_id)
    done = maintain_tables(MaintainConfig(vacuum_hours=0), storage, SparkConfig()).tables[0]
    assert (done.files_deleted, done.kept_versions) == (0, [first.version])
    assert hashes(first) == held
    done = maintain_tables(MaintainConfig(vacuum_hours=0, release_pins=True), storage, SparkConfig()).tables[0]
    assert done.files_deleted > 0
    assert done.kept_versions == []
    assert hashes(done.table) == kept


def test_tracking_server_without_the_models_removes_nothing(
    spark, prepared, storage, make_home, any_retention, messages_of
):
    """It is told apart by its database, wherever that is; a server that has the models pins their versions."""
    first, held = copy_three_versions(spark, prepared, storage)
    register(storage, first)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    client.set_registered_model_alias("lakevision", "champion", 1)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    by = [
        {"sha256": "a", "model_name": "lakevision", "model_version": version, "predicted_at": at} for version in (1, 2)
    ]
    predictions = pa.Table.from_pylist(by, PREDICTIONS_ARROW)
    append_rows(storage.table("predictions"), predictions, PREDICTIONS_PROPERTIES, PREDICTIONS_PARTITION)
    laptop = make_home("laptop").model_copy(update={"tables": storage.tables})
    remove = MaintainConfig(vacuum_hours=0, keep_model_versions=1)

    # The table is of an earlier release, which pinned nothing.
    done = maintain_tables(remove, laptop, SparkConfig()).tables[0]
    assert (done.files_deleted, done.kept_versions, read_pins(first.path)) == (0, [], {})
    assert hashes(first) == held
    (line,) = (line for line in messages_of("lakevision.maintenance") if "nothing is removed" in line)
    assert f"no registered model of '{laptop.tracking}' was trained on it" in line
    # A promotion by a run that the laptop does not have shows that there are models elsewhere.
    register(laptop, first, "of the laptop")
    pin_trained_versions(laptop, first)  # as its own promotions do
    row = {"run_id": "0" * 32, "decision": "promoted"}
    append_rows(storage.table("promotions"), pa.Table.from_pylist([row]))
    with pytest.raises(WrongInput, match=r"promotions of 1 MLflow runs that .*laptop/mlflow.db'") as refused:
        maintain_tables(remove, laptop, SparkConfig())
    assert refused.value.setting == "storage.tracking"
    with pytest.raises(WrongInput, match="set maintain.trust_tracking to true"):
        maintain_tables(remove, storage, SparkConfig())

    own = maintain_tables(remove.model_copy(update={"trust_tracking": True}), storage, SparkConfig()).tables[0]
    assert own.kept_versions == [first.version]
    newest = own.table
    with pytest.raises(WrongInput, match=f"'{storage.tracking}', and '{laptop.tracking}'") as refused:
        maintain_tables(remove, laptop, SparkConfig())
    assert refused.value.setting == "storage.tracking"
    assert snapshots.latest(spark, first.path) == newest
    # Two servers that share a table: the versions of both stay.
    register(laptop, newest, "newest")
    rewrite(spark, first.path, 1)
    both = maintain_tables(remove.model_copy(update={"trust_tracking": True}), laptop, SparkConfig()).tables[0]
    assert both.kept_versions == [first.version, newest.version]
    assert {found.shown for found in read_pins(first.path).values()} == {storage.tracking, laptop.tracking}
    assert hashes(first) == held
    left = delta_rows(deltalake.DeltaTable(storage.table("predictions")), "model_version")
    assert set(left["model_version"].to_pylist()) == {1, 2}


def test_predictions_by_old_versions_are_removed(spark, prepared, storage, any_retention):
    """Those of the aliases stay, and those of the newest versions of each model."""
    images, _held = copy_three_versions(spark, prepared, storage)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    run_id = register(storage, images, "cats")
    register(storage, images, "dogs")
    for _ in range(5):
        client.create_model_version("cats", source=f"runs:/{run_id}/model", run_id=run_id)
    for alias, version in (("champion", 3), ("previous", 2), ("challenger", 4)):
        client.set_registered_model_alias("cats", alias, version)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        {"sha256": sha256, "model_name": name, "model_version": version, "predicted_at": at}
        for name, versions in (("cats", range(1, 7)), ("dogs", range(1, 2)))
        for version in versions
        for sha256 in "ab"
    ]
    predictions = pa.Table.from_pylist(rows, PREDICTIONS_ARROW)
    append_rows(storage.table("predictions"), predictions, PREDICTIONS_PROPERTIES, PREDICTIONS_PARTITION)

    def left() -> Counter[tuple[str, int]]:
        rows = delta_rows(deltalake.DeltaTable(storage.table("predictions")), "model_name", "model_version").to_pylist()
        return Counter((row["model_name"], row["model_version"]) for row in rows)

    maintain_tables(MaintainConfig(), storage, SparkConfig())
    assert len(left()) == 7
    for keep, cats in ((2, (2, 3, 4, 5, 6)), (1, (2, 3, 4, 6))):
        maintain_tables(MaintainConfig(keep_model_versions=keep), storage, SparkConfig())
        assert left() == {("cats", version): 2 for version in cats} | {("dogs", 1): 2}
        shutil.rmtree(images.path, ignore_errors=True)  # A user who only predicts folders has no table images.


def test_moved_home_keeps_versions_of_registered_models(spark, prepared, storage, any_retention):
    """A moved table is recognised by its id.

    delta-rs does not read its new path, so Spark finds the file of a deleted image; a MERGE removes it in one commit.
    """
    first, held = copy_three_versions(spark, prepared, storage, "images", "files")
    register(storage, first)
    pin_trained_versions(storage, first)  # with the former path of the database, as maintenance does
    moved = Path(storage.home).rename(Path(storage.home).with_name("moved per%20cent home"))
    storage = resolve_storage(StorageConfig(home=str(moved)))

    report = maintain_tables(MaintainConfig(vacuum_hours=0), storage, SparkConfig())

    images = report.tables[0]
    assert images.kept_versions == [first.version]
    assert [pins.shown for pins in read_pins(images.table.path).values()] == [storage.tracking]
    assert images.files_deleted > 0
    assert hashes_by_spark(spark, first.model_copy(update={"path": storage.table("images")})) == held

    source = prepared[0]
    gone = source / "blue" / "000.png"
    sha256 = hashlib.sha256(gone.read_bytes()).hexdigest()
    gone.unlink()
    with pytest.raises(NeedsSpark):
        snapshots.files_containing(images.table, "sha256", pa.array([sha256]))
    newest = ingest(source, storage)
    assert hashes_by_spark(spark, newest) == hashes_by_spark(spark, images.table) - {sha256}
    operations = [row["operation"] for row in DeltaTable.forPath(spark, newest.path).history(1).collect()]
    assert (newest.version, operations) == (images.table.version + 1, ["MERGE"])


def test_only_files_of_kept_versions_stay(spark, prepared, storage, any_retention):
    """Files of versions between two registered versions are deleted: disk use does not grow with each version."""
    first, held = copy_three_versions(spark, prepared, storage)
    register(storage, first, "first")
    path = first.path
    rewrite(spark, path, 1)
    second = snapshots.latest(spark, path)
    seen = hashes(second)
    register(storage, second, "second")
    rewrite(spark, path, 2)
    between, newest = second.model_copy(update={"version": second.version + 1}), snapshots.latest(spark, path)
    before = data_bytes(newest)

    # Files of a run that was killed long ago, and of a running run that is about to commit.
    old, young = (Path(path) / f"part-00000-{name}-1.parquet" for name in ("killed", "running"))
    for file in (old, young):
        file.write_bytes(b"uncommitted")
    # The change data of every rewrite, which no version needs.
    for file in (old, *Path(path, "_change_data").iterdir()):
        os.utime(file, (0, 0))

    done = maintain_tables(MaintainConfig(vacuum_hours=0), storage, SparkConfig()).tables[0]

    assert done.kept_versions == [first.version, second.version]
    assert (old.exists(), young.exists()) == (False, True)
    assert done.bytes_deleted > before / 2
    assert data_bytes(newest) < before / 2
    assert not list(Path(path, "_change_data").glob("*.parquet"))
    assert (hashes(first), hashes(second), hashes(done.table)) == (held, seen, seen)
    with pytest.raises(FileNotFoundError):
        hashes(between)
    # The log still names the files of kept versions: its retention is raised.
    assert snapshots.newest_snapshot(spark, path).properties["delta.logRetentionDuration"] == "interval 36500 days"
    again = maintain_tables(MaintainConfig(vacuum_hours=0), storage, SparkConfig()).tables[0]
    assert (again.files_deleted, again.table.version) == (0, done.table.version)


def test_version_younger_than_the_retention_stays_without_its_tombstones(spark, prepared, storage, any_retention):
    """Delta forgets after a week when a file was removed, and would then delete it, however long the retention."""
    first, held = copy_three_versions(spark, prepared, storage)
    forgets = (
        "'delta.deletedFileRetentionDuration' = 'interval 0 hours', 'delta.logRetentionDuration' = 'interval 1 day'"
    )
    spark.sql(f"ALTER TABLE delta.`{first.path}` SET TBLPROPERTIES ({forgets})")
    for file in Path(first.path).glob("*.parquet"):
        os.utime(file, (0, 0))

    done = maintain_table(spark, first.path, MaintainConfig(vacuum_hours=1), [])

    assert done.files_deleted == 0
    assert hashes(first) == hashes_by_spark(spark, first) == held
    kept = maintain_table(spark, first.path, MaintainConfig(vacuum_hours=0), [first.version])
    assert kept.files_deleted > 0
    assert hashes(first) == hashes_by_spark(spark, first) == held
    assert (
        snapshots.newest_snapshot(spark, first.path).properties["delta.logRetentionDuration"] == "interval 36500 days"
    )


def test_purged_run_does_not_stop_maintenance(spark, prepared, storage, any_retention, messages_of):
    """Tags of the model version replace the purged run; a version without tags is logged."""
    first, held = copy_three_versions(spark, prepared, storage)
    second = snapshots.at_version(spark, first.path, 1)
    seen = hashes(second)
    tagged, unknown = register(storage, first, "tagged", tagged=True), register(storage, second, "unknown")
    purge(storage, tagged, unknown)
    assert seen != held

    done = maintain_tables(MaintainConfig(vacuum_hours=0), storage, SparkConfig()).tables[0]

    assert done.kept_versions == [first.version]
    assert hashes(first) == held
    assert [line for line in messages_of("lakevision.tracking") if "purged" in line] == [
        "unknown version 1 does not record which table version it was trained on, and its run "
        f"{unknown} was purged from MLflow: that version's files are not retained"
    ]


def test_retention_below_the_minimum_of_delta_is_rejected(spark, prepared, storage):
    """A retention below 168 hours is reported in one sentence with both values."""
    copy_three_versions(spark, prepared, storage)
    with pytest.raises(WrongInput, match="is 24, but Delta retains at least 168 hours") as refused:
        maintain_tables(MaintainConfig(vacuum_hours=24), storage, SparkConfig())
    assert refused.value.setting == "maintain.vacuum_hours"


def test_table_with_unknown_columns_is_rejected_and_unchanged(spark, source, storage):
    """ETL names the unknown columns, and writes nothing."""
    before = ingest(source, storage)
    spark.sql(f"ALTER TABLE delta.`{before.path}` ADD COLUMNS (author STRING)")
    changed = snapshots.latest(spark, before.path)
    with pytest.raises(WrongInput, match=f"the table '{before.path}' has author, which is unknown"):
        ingest(source, storage)
    assert snapshots.latest(spark, before.path) == changed


def test_the_request_log_is_compacted_and_still_knows_its_rows(
    spark: SparkSession, storage: Storage, any_retention: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service commits each minute. Rows that a killed move has committed before are not added after it."""
    journal_file(storage).parent.mkdir(parents=True)
    journal = Journal(journal_file(storage))
    day = {"day": "2026-11-30", "image": 0, "answered_at": datetime(2026, 11, 30, tzinfo=UTC).isoformat()}
    for number in range(4):
        row = day | {"request_id": f"2026-11-30-{number}"}
        journal.add("requests", [NewRow(storage.tables, f"{number} 0", row)])
        with monkeypatch.context() as killed, suppress(KeyboardInterrupt):
            if number == 3:
                killed.setattr(Journal, "remove", _interrupted)
            move_rows(journal, storage)
    done = maintain_tables(MaintainConfig(vacuum_hours=0), storage, SparkConfig())
    move_rows(journal, storage)

    (table,) = done.tables
    assert (table.files_compacted, table.files_written, table.files_deleted) == (4, 1, 4)
    rows = deltalake.DeltaTable(storage.table("requests")).to_pyarrow_table()["request_id"].to_pylist()
    assert sorted(rows) == [f"2026-11-30-{number}" for number in range(4)]
    assert journal.newest() == {}


def _interrupted(*_given):
    raise KeyboardInterrupt
