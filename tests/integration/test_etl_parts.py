"""Parts of the table `images`: what workers write is committed as it is, written again, or removed."""

import hashlib
import shutil
from collections import Counter
from pathlib import Path

import pytest
from delta.tables import DeltaTable

from tasks.errors import WrongInput
from tasks.etl import ingest, staging
from tasks.etl.outcomes import Comparison
from tasks.tables import delta, parts, rewriting, snapshots
from tasks.tables.delta import TableChanged
from tests.builders import etl_tables
from tests.builders.etl_tables import ledger, stored, versions
from tests.conftest import write_images


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a task read 8 files and write about 4 images a row group."""
    monkeypatch.setattr(ingest, "FILES_PER_TASK", 8)
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 4000)


def lying(storage, table: str = "images") -> set[str]:
    """Return the names of the data files in the folder of the table."""
    return {path.name for path in Path(storage.table(table)).glob("*.parquet")}


def named(spark, storage, table: str = "images") -> set[str]:
    """Return the names of the data files of the newest version of the table."""
    files = spark.read.format("delta").load(storage.table(table)).inputFiles()
    return {file.rsplit("/", 1)[-1] for file in files}


def marks(storage) -> list[Path]:
    """Return the marks of runs that are not done, in both tables."""
    return list(Path(storage.tables).glob("*/_delta_log/_unfinished-*"))


def test_what_the_workers_wrote_is_the_table(spark, source, storage):
    """A part a task, named by one commit with its count of rows; nothing else lies there."""
    etl_tables.ingest(source, storage)
    assert len(lying(storage)) == 8
    assert lying(storage) == named(spark, storage)
    assert marks(storage) == []
    counts = spark.read.format("delta").load(storage.table("images")).groupBy("_metadata.file_name").count().collect()
    assert sum(row["count"] for row in counts) == 60
    log = DeltaTable.forPath(spark, storage.table("images")).history().collect()
    assert [(row["version"], row["operation"]) for row in log] == [(0, "WRITE")]
    changes = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    assert changes.load(storage.table("images")).groupBy("_change_type").count().collect() == [("insert", 60)]


def test_more_images_are_appended_and_what_was_there_is_not_touched(spark, source, storage):
    """The old version reads as it did."""
    first = etl_tables.ingest(source, storage).images
    before = lying(storage)
    write_images(source, per_class=2, first=100)
    etl_tables.ingest(source, storage)
    assert before < lying(storage) == named(spark, storage)
    assert len(stored(spark, storage)) == 66
    assert snapshots.read_version(spark, first).count() == 60


def test_duplicates_and_conflicts_in_other_parts_are_not_in_the_table(spark, source, storage):
    """Parts that hold such are written again without them, and the first versions do not stay."""
    for number in range(20):
        shutil.copy(source / "red" / f"{number:03}.png", source / "red" / f"again-{number}.png")
    for number in range(2):
        shutil.copy(source / "green" / f"{number:03}.png", source / "blue" / f"green-{number}.png")
    report = etl_tables.ingest(source, storage, max_bad_fraction=0.5)
    assert (report.stored, report.duplicates, report.quarantined) == (58, 20, 4)
    rows = spark.read.format("delta").load(storage.table("images")).select("sha256", "label").collect()
    assert Counter(row["label"] for row in rows) == {"red": 20, "green": 18, "blue": 20}
    assert len({row["sha256"] for row in rows}) == 58
    assert lying(storage) == named(spark, storage)
    # The count of rows in the log, by which Delta counts without reading, is that of the files.
    assert spark.read.format("delta").load(storage.table("images")).count() == 58


def test_a_file_that_is_read_again_doubles_no_image(spark, source, storage):
    """Its time changed, its content did not: a new version of the ledger alone."""
    etl_tables.ingest(source, storage)
    before = lying(storage)
    for number in range(8):
        (source / "red" / f"{number:03}.png").touch()
    report = etl_tables.ingest(source, storage)
    assert (report.read, report.stored) == (8, 60)
    assert versions(spark, storage) == (0, 1)
    assert lying(storage) == before


def sha256_of(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def change_feed(spark, storage, first: int, last: int) -> dict[str, set[tuple[str, str]]]:
    """Return sha256 and label of the rows of some commits' change data feed, by kind; each has its content."""
    read = spark.read.format("delta").option("readChangeFeed", "true")
    rows = read.option("startingVersion", first).option("endingVersion", last).load(storage.table("images"))
    found: dict[str, set[tuple[str, str]]] = {}
    for row in rows.collect():
        assert hashlib.sha256(row["content"]).hexdigest() == row["sha256"]
        found.setdefault(row["_change_type"], set()).add((row["sha256"], row["label"]))
    return found


@pytest.mark.parametrize("how", ["by the driver", "by a job", "merged"])
def test_deleting_and_inserting_at_once_rewrites_what_goes_and_appends_the_rest(
    spark, source, storage, monkeypatch, how
):
    """The change data feed has what changed, and nothing else; files with new images alone are in no change file.

    A table to which another program gave newer features is merged into, the rest is appended there, too.
    """
    newer = how == "merged"
    if how == "by a job":
        monkeypatch.setattr(rewriting, "DRIVER_BYTES", 0)
    etl_tables.ingest(source, storage)
    if newer:
        delta.set_properties(spark, storage.table("images"), {"delta.enableDeletionVectors": "true"})
        delta.set_properties(spark, storage.table("files"), {"delta.enableChangeDataFeed": "true"})
    before = lying(storage)
    moved, gone = (sha256_of(source / "red" / name) for name in ("000.png", "001.png"))
    (source / "red" / "000.png").rename(source / "green" / "moved.png")
    (source / "red" / "001.png").unlink()
    write_images(source, per_class=1, first=100)
    new = {(sha256_of(source / label / "100.png"), label) for label in ("red", "green", "blue")}
    report = etl_tables.ingest(source, storage)
    assert (report.stored, report.changed) == (62, True)
    # One commit takes out, for images that moved with what takes their place, and one appends.
    assert versions(spark, storage) == (2 + newer, 1 + newer)
    commits = [Path(storage.table("images"), "_delta_log", f"{newer + number:020}.json") for number in (1, 2)]
    assert ["cdc" in commit.read_text() for commit in commits] == [True, False]
    appended = change_feed(spark, storage, 2 + newer, 2 + newer)
    assert set(appended) == {"insert"}
    assert appended["insert"] <= new
    assert change_feed(spark, storage, 1 + newer, 2 + newer) == {
        "insert": new,
        "delete": {(gone, "red")},
        "update_preimage": {(moved, "red")},
        "update_postimage": {(moved, "green")},
    }
    rows = stored(spark, storage)
    assert len(rows) == spark.read.format("delta").load(storage.table("images")).count() == 62
    assert (rows[moved], gone in rows) == ("green", False)
    assert len(ledger(spark, storage)) == 64
    if not newer:
        assert len(before & named(spark, storage)) >= len(before) - 2
    assert marks(storage) == []
    assert lying(storage) <= delta.added_since(storage.table("images"), None)
    assert etl_tables.ingest(source, storage).changed is False


@pytest.mark.parametrize("done", [0, 1], ids=["before the first commit", "between the commits"])
def test_after_compaction_and_a_kill_a_deleted_image_goes_and_nothing_else(spark, source, storage, monkeypatch, done):
    """Compacted files are Spark's own; killed before a commit, the run leaves what the next one removes."""
    etl_tables.ingest(source, storage)
    DeltaTable.forPath(spark, storage.table("images")).optimize().executeCompaction()
    (source / "red" / "001.png").unlink()
    write_images(source, per_class=1, first=100)
    commit, commits = delta.commit_files, []

    def killed(*given):
        if len(commits) == done:
            raise KeyboardInterrupt
        commits.append(given)
        commit(*given)

    with monkeypatch.context() as patched:
        patched.setattr(delta, "commit_files", killed)
        patched.setattr(staging, "_sweep", lambda *_given, **_named: None)
        with pytest.raises(KeyboardInterrupt):
            etl_tables.ingest(source, storage)
    feed = Path(storage.table("images")) / "_change_data"
    left = set(feed.glob("*.parquet"))
    before = stored(spark, storage)
    assert (len(marks(storage)), len(before)) == (1, 60 - done)
    assert len(left) == 1  # the compacted file's; the new images are in none
    assert etl_tables.ingest(source, storage).stored == 62
    after = stored(spark, storage)
    assert len(after) == 62
    assert len(before.keys() - after.keys()) == 1 - done
    assert marks(storage) == []
    assert lying(storage) <= delta.added_since(storage.table("images"), None)
    assert len(left & set(feed.glob("*.parquet"))) == done


def test_replacing_all_images_is_one_commit(spark, source, storage, make_images):
    """Nobody reads a table without images in between, and nothing is copied into the change data feed."""
    etl_tables.ingest(source, storage)
    other = make_images(per_class=5, side=20, name="other")
    assert etl_tables.ingest(other, storage, replace_source=True).stored == 15
    assert versions(spark, storage) == (2, 2)  # the second is the tables' new source, a property
    assert list((Path(storage.table("images")) / "_change_data").glob("*.parquet")) == []
    changes = change_feed(spark, storage, 1, 2)
    assert {kind: len(rows) for kind, rows in changes.items()} == {"insert": 15, "delete": 60}
    assert lying(storage) >= named(spark, storage)


def test_a_gate_that_closes_leaves_no_part(spark, source, storage):
    """Neither of a new table nor of one that is there."""
    for number in range(20):
        (source / "red" / f"bad{number}.jpg").write_bytes(b"bad")
    with pytest.raises(WrongInput, match="max_bad_fraction"):
        etl_tables.ingest(source, storage)
    assert list(Path(storage.table("images")).iterdir()) == []
    etl_tables.ingest(source, storage, max_bad_fraction=0.5)
    before = lying(storage)
    write_images(source, per_class=1, first=100)
    with pytest.raises(WrongInput, match="max_bad_fraction"):
        etl_tables.ingest(source, storage)
    assert lying(storage) == before
    assert marks(storage) == []


@pytest.mark.parametrize("deleting", [False, True], ids=["appended", "merged"])
@pytest.mark.parametrize("table", ["images", "files"])
def test_another_programs_commit_in_between_fails_the_run_and_keeps_its_rows(
    spark, source, storage, monkeypatch, table, deleting
):
    """What to write was chosen by a version that is not the newest any more; a run after it brings all in."""
    etl_tables.ingest(source, storage)
    write_images(source, per_class=1, first=100)
    if deleting:
        (source / "blue" / "000.png").unlink()
    name = {"images": "surplus", "files": "ledger_changes"}[table]
    choose = getattr(Comparison, name)

    def choose_late(*given):
        chosen = choose(*given)
        DeltaTable.forPath(spark, storage.table(table)).delete("label = 'red'")
        return chosen

    monkeypatch.setattr(Comparison, name, choose_late)
    with pytest.raises(TableChanged, match=f"another program wrote to '.*{table}' during this run: run again"):
        etl_tables.ingest(source, storage)
    monkeypatch.setattr(Comparison, name, choose)
    rows = spark.read.format("delta").load(storage.table(table))
    assert rows.where("label = 'red'").count() == 0
    assert lying(storage, table) <= delta.added_since(storage.table(table), None)
    assert len(marks(storage)) == 1  # Of this failure it is not known whether a task still writes.
    assert etl_tables.ingest(source, storage).stored == 63 - deleting
    assert len(stored(spark, storage)) == 63 - deleting
    assert len(ledger(spark, storage)) == 63
    assert marks(storage) == []


def test_a_commit_at_the_same_moment_is_a_conflict(spark, source, storage, monkeypatch):
    """Begun by the newest version, and beaten to the next one by Delta's own writer."""
    etl_tables.ingest(source, storage)
    write_images(source, per_class=1, first=100)

    def quote_late(name: str) -> str:
        DeltaTable.forPath(spark, storage.table("images")).delete("label = 'red'")
        return name

    monkeypatch.setattr(delta, "quote", quote_late)
    with pytest.raises(TableChanged, match="another program wrote to '.*images' during this run: run again"):
        etl_tables.ingest(source, storage)


@pytest.mark.parametrize("table", ["images", "files"])
@pytest.mark.parametrize("committed", [False, True])
def test_what_a_killed_run_left_is_removed_by_the_next_unless_it_was_committed(
    spark, source, storage, committed, table
):
    """It is found by its mark, which tells the version from which on a commit may name it."""
    etl_tables.ingest(source, storage)
    kept = lying(storage, table)
    run = next(iter(kept)).split("-")[2] if committed else "dead"
    folder = Path(storage.table(table))
    mark = folder / "_delta_log" / f"_unfinished-{-1 if committed else 0}-{run}"
    mark.touch()
    (folder / f"part-00001-{run}-0123456789ab.parquet").write_bytes(b"PAR1 and no more")
    write_images(source, per_class=1, first=100)
    assert etl_tables.ingest(source, storage).stored == 63
    assert kept < lying(storage, table) == named(spark, storage, table)
    assert marks(storage) == []


def test_a_run_with_nothing_new_removes_what_a_killed_one_left(spark, source, storage):
    """Its driver died, its JVM committed both tables: there is nothing to do but to sweep."""
    etl_tables.ingest(source, storage)
    kept = lying(storage)
    run = next(iter(kept)).split("-")[2]
    table = Path(storage.table("images"))
    (table / "_delta_log" / f"_unfinished--1-{run}").touch()
    (table / f"part-00001-{run}-0123456789ab.parquet").write_bytes(b"PAR1 and no more")
    assert not etl_tables.ingest(source, storage).changed
    assert lying(storage) == kept
    assert marks(storage) == []


def test_a_run_killed_before_the_first_commit_leaves_no_table_and_the_next_makes_it(spark, source, storage):
    """A log with nothing but a mark and half a commit, and parts."""
    table = Path(storage.table("images"))
    (table / "_delta_log").mkdir(parents=True)
    (table / "_delta_log" / "_unfinished--1-dead").touch()
    (table / "_delta_log" / ".00000000000000000000.json.5eed.tmp").write_text("{")
    (table / "part-00001-dead-0123456789ab.parquet").write_bytes(b"PAR1 and no more")
    etl_tables.ingest(source, storage)
    assert versions(spark, storage) == (0, 0)
    assert lying(storage) == named(spark, storage)
    assert list(table.rglob("*.tmp")) == []


@pytest.mark.parametrize("table", ["images", "files"])
def test_what_a_killed_run_committed_stays_also_where_the_log_expired(spark, source, storage, table):
    """Only maintenance committed for a month, so a checkpoint took the place of the commit that names the parts."""
    etl_tables.ingest(source, storage)
    kept = lying(storage, table)
    folder = Path(storage.table(table))
    (folder / "_delta_log" / f"_unfinished--1-{next(iter(kept)).split('-')[2]}").touch()
    delta.set_properties(spark, str(folder), {"delta.checkpointInterval": "7"})
    delta._delta_log(spark, str(folder)).checkpoint()
    (folder / "_delta_log" / f"{0:020}.json").unlink()
    write_images(source, per_class=1, first=100)
    assert etl_tables.ingest(source, storage).stored == 63
    assert kept < lying(storage, table) == named(spark, storage, table)
    assert (len(stored(spark, storage)), len(ledger(spark, storage))) == (63, 63)
    assert marks(storage) == []
