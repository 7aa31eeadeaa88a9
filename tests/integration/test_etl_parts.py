"""Parts of the table `images`: files written by workers are committed, rewritten or removed."""

import hashlib
import shutil
from collections import Counter
from pathlib import Path

import deltalake
import pytest
from delta.tables import DeltaTable

from tasks.errors import WrongInput
from tasks.etl import commits as etl_commits
from tasks.etl import ingest
from tasks.etl.outcomes import Comparison
from tasks.tables import delta, direct_commits, parts, snapshots
from tasks.tables.writer import TableChanged
from tests.builders import etl_tables
from tests.builders.delta_rows import data_files, delta_rows, newest_rows
from tests.builders.etl_tables import ledger, stored, versions
from tests.conftest import write_images


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set 8 files per task and about 4 images per row group."""
    monkeypatch.setattr(ingest, "FILES_PER_TASK", 8)
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 4000)


def files_on_disk(storage, table: str = "images") -> set[str]:
    """Return the names of all data files in the folder of the table."""
    return {path.name for path in Path(storage.table(table)).glob("*.parquet")}


def files_in_version(storage, table: str = "images") -> set[str]:
    """Return the names of the data files in the newest version of the table."""
    return {path.name for path in data_files(storage.table(table))}


def unfinished_markers(storage) -> list[Path]:
    """Return the marker files of unfinished runs in both tables."""
    return list(Path(storage.tables).glob("*/_delta_log/_unfinished-*"))


def test_files_written_by_workers_are_the_table(spark, source, storage):
    """One commit adds a part per task with its number of rows, and the folder has no other files."""
    etl_tables.ingest(source, storage)
    assert len(files_on_disk(storage)) == 8
    assert files_on_disk(storage) == files_in_version(storage)
    assert unfinished_markers(storage) == []
    counts = spark.read.format("delta").load(storage.table("images")).groupBy("_metadata.file_name").count().collect()
    assert sum(row["count"] for row in counts) == 60
    log = DeltaTable.forPath(spark, storage.table("images")).history().collect()
    assert [(row["version"], row["operation"]) for row in log] == [(0, "CREATE TABLE")]
    changes = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    assert changes.load(storage.table("images")).groupBy("_change_type").count().collect() == [("insert", 60)]


def test_new_images_are_appended_and_existing_files_unchanged(spark, source, storage):
    """The previous version is still readable."""
    first = etl_tables.ingest(source, storage).images
    before = files_on_disk(storage)
    write_images(source, per_class=2, first=100)
    etl_tables.ingest(source, storage)
    assert before < files_on_disk(storage) == files_in_version(storage)
    assert len(stored(spark, storage)) == 66
    assert snapshots.read_version(spark, first).count() == 60


def test_duplicates_and_conflicts_in_other_parts_are_not_in_the_table(spark, source, storage):
    """Their parts are rewritten without them, and the original parts are removed."""
    for number in range(20):
        shutil.copy(source / "red" / f"{number:03}.png", source / "red" / f"again-{number}.png")
    for number in range(2):
        shutil.copy(source / "green" / f"{number:03}.png", source / "blue" / f"green-{number}.png")
    report = etl_tables.ingest(source, storage, max_bad_fraction=0.5)
    assert (report.stored, report.duplicates, report.quarantined) == (58, 20, 4)
    rows = newest_rows(spark, storage.table("images"), "sha256", "label")
    assert Counter(row["label"] for row in rows) == {"red": 20, "green": 18, "blue": 20}
    assert len({row["sha256"] for row in rows}) == 58
    assert files_on_disk(storage) == files_in_version(storage)
    # Delta counts rows from its log without reading files: both must agree.
    assert spark.read.format("delta").load(storage.table("images")).count() == 58


def test_file_that_is_read_again_duplicates_no_image(spark, source, storage):
    """A changed time with unchanged content commits a new version of the ledger only."""
    etl_tables.ingest(source, storage)
    before = files_on_disk(storage)
    for number in range(8):
        (source / "red" / f"{number:03}.png").touch()
    report = etl_tables.ingest(source, storage)
    assert (report.read, report.stored) == (8, 60)
    assert versions(spark, storage) == (0, 1)
    assert files_on_disk(storage) == before


def sha256_of(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def change_feed(spark, storage, first: int, last: int) -> dict[int, dict[str, set[tuple[str, str]]]]:
    """Return sha256 and label per commit and change type in the change data feed, and check all contents."""
    read = spark.read.format("delta").option("readChangeFeed", "true")
    rows = read.option("startingVersion", first).option("endingVersion", last).load(storage.table("images"))
    found: dict[int, dict[str, set[tuple[str, str]]]] = {}
    for row in rows.collect():
        assert hashlib.sha256(row["content"]).hexdigest() == row["sha256"]
        of_commit = found.setdefault(row["_commit_version"], {})
        of_commit.setdefault(row["_change_type"], set()).add((row["sha256"], row["label"]))
    return found


def of_all_commits(feed: dict[int, dict[str, set[tuple[str, str]]]]) -> dict[str, set[tuple[str, str]]]:
    """Return sha256 and label per change type, of all commits of a change data feed."""
    kinds = {kind for of_commit in feed.values() for kind in of_commit}
    return {kind: {row for of_commit in feed.values() for row in of_commit.get(kind, ())} for kind in kinds}


@pytest.mark.parametrize("mode", ["by the driver", "by Spark", "newer features"])
def test_deletions_rewrite_their_files_and_insertions_are_appended(spark, source, storage, monkeypatch, mode):
    """The change data feed has exactly the changes; files with only new images need no change file.

    Spark writes where files are large, and a table with newer Delta features, set by another program.
    """
    newer = mode == "newer features"
    if mode == "by Spark":
        monkeypatch.setattr(direct_commits, "DRIVER_BYTES", 0)
    etl_tables.ingest(source, storage)
    if newer:
        delta.set_properties(spark, storage.table("images"), {"delta.enableDeletionVectors": "true"})
        delta.set_properties(spark, storage.table("files"), {"delta.enableChangeDataFeed": "true"})
    before = files_on_disk(storage)
    moved, deleted = (sha256_of(source / "red" / name) for name in ("000.png", "001.png"))
    (source / "red" / "000.png").rename(source / "green" / "moved.png")
    (source / "red" / "001.png").unlink()
    write_images(source, per_class=1, first=100)
    new = {(sha256_of(source / label / "100.png"), label) for label in ("red", "green", "blue")}
    report = etl_tables.ingest(source, storage)
    assert (report.stored, report.changed) == (62, True)
    # One commit deletes and moves, and one appends.
    assert versions(spark, storage) == (2 + newer, 1 + newer)
    commits = [Path(storage.table("images"), "_delta_log", f"{newer + number:020}.json") for number in (1, 2)]
    # The action's key, since the random ids of a commit may have these letters.
    assert ['{"cdc":' in commit.read_text() for commit in commits] == [True, False]
    feed = change_feed(spark, storage, 1 + newer, 2 + newer)
    appended, changes = feed[2 + newer], of_all_commits(feed)
    assert set(appended) == {"insert"}
    assert appended["insert"] <= new
    # A MERGE calls what moves an update.
    gone, added = ("delete", "insert") if mode == "by the driver" else ("update_preimage", "update_postimage")
    assert changes["insert"] == new | ({(moved, "green")} if added == "insert" else set())
    assert changes["delete"] == {(deleted, "red")} | ({(moved, "red")} if gone == "delete" else set())
    assert (moved, "red") in changes[gone]
    assert (moved, "green") in changes[added]
    assert set(changes) == {"insert", "delete", gone, added}
    rows = stored(spark, storage)
    assert len(rows) == spark.read.format("delta").load(storage.table("images")).count() == 62
    assert (rows[moved], deleted in rows) == ("green", False)
    assert len(ledger(spark, storage)) == 64
    if mode == "by the driver":
        assert len(before & files_in_version(storage)) >= len(before) - 2
    assert unfinished_markers(storage) == []
    assert files_on_disk(storage) <= delta.added_since(storage.table("images"), None)
    assert etl_tables.ingest(source, storage).changed is False


@pytest.mark.parametrize("num_committed", [0, 1], ids=["before the first commit", "between the commits"])
def test_only_the_deleted_image_is_removed_after_compaction_and_a_kill(
    spark, source, storage, monkeypatch, num_committed
):
    """Spark wrote the compacted files; the next run removes the uncommitted parts of the killed run."""
    etl_tables.ingest(source, storage)
    DeltaTable.forPath(spark, storage.table("images")).optimize().executeCompaction()
    (source / "red" / "001.png").unlink()
    write_images(source, per_class=1, first=100)
    commit, commits = direct_commits.commit, []

    def killed(*arguments):
        if len(commits) == num_committed:
            raise KeyboardInterrupt
        commits.append(arguments)
        commit(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(direct_commits, "commit", killed)
        patched.setattr(etl_commits, "_sweep", lambda *_given, **_named: None)
        with pytest.raises(KeyboardInterrupt):
            etl_tables.ingest(source, storage)
    before = stored(spark, storage)
    assert (len(unfinished_markers(storage)), len(before)) == (1, 60 - num_committed)
    assert etl_tables.ingest(source, storage).stored == 62
    after = stored(spark, storage)
    assert len(after) == 62
    assert len(before.keys() - after.keys()) == 1 - num_committed
    assert unfinished_markers(storage) == []
    assert files_on_disk(storage) <= delta.added_since(storage.table("images"), None)


@pytest.mark.parametrize("table", ["images", "files"])
def test_table_that_another_program_partitioned_is_written_by_spark(spark, source, storage, table):
    """A file without the partition's value in the log would have a null there; rows are appended, then replaced."""
    etl_tables.ingest(source, storage)
    path = storage.table(table)
    rows = delta_rows(deltalake.DeltaTable(path))
    assert rows.num_rows == 60
    deltalake.write_deltalake(path, rows, mode="overwrite", schema_mode="overwrite", partition_by=["split"])
    write_images(source, per_class=1, first=100)
    assert etl_tables.ingest(source, storage).stored == 63
    (source / "blue" / "000.png").unlink()
    assert etl_tables.ingest(source, storage).stored == 62
    key = {"images": "sha256", "files": "path"}[table]
    found = newest_rows(spark, path, key, "split")
    assert [row for row in found if row["split"] is None] == []
    assert len(found) == len({row[key] for row in found}) == {"images": 62, "files": 63}[table]
    assert len(stored(spark, storage)) == 62


def test_replacing_all_images_is_one_commit(spark, source, storage, make_images):
    """No reader sees an empty table in between, and no image is copied into the change data feed."""
    etl_tables.ingest(source, storage)
    other = make_images(per_class=5, side=20, name="other")
    assert etl_tables.ingest(other, storage, replace_source=True).stored == 15
    assert versions(spark, storage) == (2, 2)  # the second commit sets the new source as a table property
    assert list((Path(storage.table("images")) / "_change_data").glob("*.parquet")) == []
    changes = of_all_commits(change_feed(spark, storage, 1, 2))
    assert {kind: len(rows) for kind, rows in changes.items()} == {"insert": 15, "delete": 60}
    assert files_on_disk(storage) >= files_in_version(storage)


def test_failed_gate_leaves_no_part(spark, source, storage):
    """No part remains, in a new table or in an existing one."""
    for number in range(20):
        (source / "red" / f"bad{number}.jpg").write_bytes(b"bad")
    with pytest.raises(WrongInput, match="max_bad_fraction"):
        etl_tables.ingest(source, storage)
    assert list(Path(storage.table("images")).iterdir()) == []
    etl_tables.ingest(source, storage, max_bad_fraction=0.5)
    before = files_on_disk(storage)
    write_images(source, per_class=1, first=100)
    with pytest.raises(WrongInput, match="max_bad_fraction"):
        etl_tables.ingest(source, storage)
    assert files_on_disk(storage) == before
    assert unfinished_markers(storage) == []


@pytest.mark.parametrize("deleting", [False, True], ids=["appended", "merged"])
@pytest.mark.parametrize("table", ["images", "files"])
def test_concurrent_commit_of_another_program_fails_the_run_and_is_kept(
    spark, source, storage, monkeypatch, table, deleting
):
    """The changes were computed from an outdated version; the next run commits all of them."""
    etl_tables.ingest(source, storage)
    write_images(source, per_class=1, first=100)
    if deleting:
        (source / "blue" / "000.png").unlink()
    name = {"images": "surplus", "files": "ledger_changes"}[table]
    choose = getattr(Comparison, name)

    def choose_late(*arguments):
        chosen = choose(*arguments)
        DeltaTable.forPath(spark, storage.table(table)).delete("label = 'red'")
        return chosen

    monkeypatch.setattr(Comparison, name, choose_late)
    with pytest.raises(TableChanged, match=f"another program wrote to '.*{table}' during this run: run again"):
        etl_tables.ingest(source, storage)
    monkeypatch.setattr(Comparison, name, choose)
    assert "red" not in {row["label"] for row in newest_rows(spark, storage.table(table), "label")}
    assert files_on_disk(storage, table) <= delta.added_since(storage.table(table), None)
    assert len(unfinished_markers(storage)) == 1  # After this failure a task may still be writing.
    assert etl_tables.ingest(source, storage).stored == 63 - deleting
    assert len(stored(spark, storage)) == 63 - deleting
    assert len(ledger(spark, storage)) == 63
    assert unfinished_markers(storage) == []


def test_commit_at_the_same_moment_is_a_conflict(spark, source, storage, monkeypatch):
    """Delta's own writer commits the next version first."""
    etl_tables.ingest(source, storage)
    write_images(source, per_class=1, first=100)

    def add_late(*given, **named) -> None:
        DeltaTable.forPath(spark, storage.table("images")).delete("label = 'red'")
        return add(*given, **named)

    add = deltalake.DeltaTable.create_write_transaction
    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", add_late)
    with pytest.raises(TableChanged, match="another program wrote to '.*images' during this run: run again"):
        etl_tables.ingest(source, storage)


@pytest.mark.parametrize("committed", [False, True])
def test_uncommitted_files_of_a_killed_run_are_removed_by_the_next(spark, source, storage, committed):
    """The marker of a run has the version after which a commit may contain its files; committed files are kept."""
    etl_tables.ingest(source, storage)
    kept = {table: files_on_disk(storage, table) for table in ("images", "files")}
    for table, names in kept.items():
        run = next(iter(names)).split("-")[2] if committed else "dead"
        folder = Path(storage.table(table))
        marker = folder / "_delta_log" / f"_unfinished-{-1 if committed else 0}-{run}"
        marker.touch()
        (folder / f"part-00001-{run}-0123456789ab.parquet").write_bytes(b"PAR1 and no more")
    write_images(source, per_class=1, first=100)
    assert etl_tables.ingest(source, storage).stored == 63
    for table, names in kept.items():
        assert names < files_on_disk(storage, table) == files_in_version(storage, table)
    assert unfinished_markers(storage) == []


def test_run_without_changes_removes_files_of_a_killed_run(spark, source, storage):
    """The JVM of the killed driver committed both tables: only its unused files remain to be removed."""
    etl_tables.ingest(source, storage)
    kept = files_on_disk(storage)
    run = next(iter(kept)).split("-")[2]
    table = Path(storage.table("images"))
    (table / "_delta_log" / f"_unfinished--1-{run}").touch()
    (table / f"part-00001-{run}-0123456789ab.parquet").write_bytes(b"PAR1 and no more")
    assert not etl_tables.ingest(source, storage).changed
    assert files_on_disk(storage) == kept
    assert unfinished_markers(storage) == []


def test_run_after_a_kill_before_the_first_commit_creates_the_table(spark, source, storage):
    """The killed run leaves a marker, an incomplete commit and parts, which are all removed."""
    table = Path(storage.table("images"))
    (table / "_delta_log").mkdir(parents=True)
    (table / "_delta_log" / "_unfinished--1-dead").touch()
    (table / "_delta_log" / ".00000000000000000000.json.5eed.tmp").write_text("{")
    (table / "part-00001-dead-0123456789ab.parquet").write_bytes(b"PAR1 and no more")
    etl_tables.ingest(source, storage)
    assert versions(spark, storage) == (0, 0)
    assert files_on_disk(storage) == files_in_version(storage)
    assert list(table.rglob("*.tmp")) == []


def test_committed_files_of_a_killed_run_are_kept_after_the_log_expires(spark, source, storage):
    """A checkpoint has replaced the commit that added the parts, as after a month of maintenance only."""
    etl_tables.ingest(source, storage)
    kept = {table: files_on_disk(storage, table) for table in ("images", "files")}
    for table, names in kept.items():
        folder = Path(storage.table(table))
        (folder / "_delta_log" / f"_unfinished--1-{next(iter(names)).split('-')[2]}").touch()
        deltalake.DeltaTable(folder).alter.set_table_properties({"delta.checkpointInterval": "7"})
        deltalake.DeltaTable(folder).create_checkpoint()
        (folder / "_delta_log" / f"{0:020}.json").unlink()
    write_images(source, per_class=1, first=100)
    assert etl_tables.ingest(source, storage).stored == 63
    for table, names in kept.items():
        assert names < files_on_disk(storage, table) == files_in_version(storage, table)
    assert (len(stored(spark, storage)), len(ledger(spark, storage))) == (63, 63)
    assert unfinished_markers(storage) == []
