"""Rows of a journal in the Delta tables: each once, whatever is killed when, and images as long as they are kept."""

from datetime import UTC, datetime
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.schema import FEEDBACK_ARROW, REQUESTS_ARROW, columns_of
from tasks.serve.journal import Journal, Kind, NewRow
from tasks.serve.request_log import (
    check_tables,
    has_request,
    journal_file,
    move_rows,
    remove_old_images,
    rows_of,
)
from tasks.storage import Storage, resolve_storage

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.fixture
def journal(storage: Storage) -> Journal:
    """Return the journal of the home."""
    journal_file(storage).parent.mkdir(parents=True)
    return Journal(journal_file(storage))


def add(journal: Journal, tables: str, name: str, day: str = "2026-11-30") -> None:
    """Add an answer and its image."""
    row = {"day": day, "request_id": f"{day}-{name}", "image": 0, "answered_at": NOON.isoformat(), "label": name}
    values = row | {"top_labels": ["a", "b"], "seconds": 0.25}
    journal.add("requests", [NewRow(tables, f"{day}-{name} 0", values)])
    journal.add("request_images", [NewRow(tables, f"{day} {name}", {"day": day, "sha256": name}, name.encode())])


def labels(storage: Storage) -> list[str]:
    """Return the labels in the table `requests`, sorted."""
    found: list[str] = rows_of(storage, "requests", columns_of(REQUESTS_ARROW, "label"))["label"].to_pylist()
    return sorted(found)


def test_rows_are_moved_with_their_types(storage: Storage, journal: Journal) -> None:
    """Times are times, and what a row lacks is null."""
    add(journal, storage.tables, "aa")
    journal.add_feedback(NewRow(storage.tables, "2026-11-30-aa 0", _feedback("2026-11-30-aa")))

    move_rows(journal, storage)
    move_rows(journal, storage)
    assert journal.newest() == {}
    table = deltalake.DeltaTable(storage.table("requests")).to_pyarrow_table()
    (row,) = table.to_pylist()
    assert row["answered_at"] == NOON
    assert row["top_labels"] == ["a", "b"]
    assert row["error"] is None
    assert row["day"] == "2026-11-30"
    assert set(table.column_names) == set(REQUESTS_ARROW.names)
    (feedback,) = rows_of(storage, "feedback", columns_of(FEEDBACK_ARROW, "label", "given_at")).to_pylist()
    assert feedback == {"label": "cat", "given_at": NOON}
    (image,) = deltalake.DeltaTable(storage.table("request_images")).to_pyarrow_table().to_pylist()
    assert image["content"] == b"aa"


def _feedback(request_id: str) -> dict[str, object]:
    return {"day": request_id[:10], "request_id": request_id, "image": 0, "label": "cat", "given_at": NOON.isoformat()}


def test_an_image_that_is_sent_again_has_one_row_a_day(storage: Storage, journal: Journal) -> None:
    """Also if the earlier row was moved already; the row of another day is removed later."""
    for name, day in (("aa", "2026-11-29"), ("aa", "2026-11-30"), ("aa", "2026-11-30"), ("bb", "2026-11-30")):
        add(journal, storage.tables, name, day)
        move_rows(journal, storage)

    rows = deltalake.DeltaTable(storage.table("request_images")).to_pyarrow_table().to_pylist()
    found = sorted((row["day"], row["sha256"]) for row in rows)
    assert found == [("2026-11-29", "aa"), ("2026-11-30", "aa"), ("2026-11-30", "bb")]


def test_a_file_of_images_that_is_gone_does_not_stop_the_log(storage: Storage, journal: Journal) -> None:
    """Images of its day may have a second row."""
    add(journal, storage.tables, "aa")
    move_rows(journal, storage)
    for file in Path(storage.table("request_images")).glob("*/*.parquet"):
        file.unlink()
    add(journal, storage.tables, "bb")
    move_rows(journal, storage)

    assert journal.newest() == {}
    assert labels(storage) == ["aa", "bb"]


def test_rows_that_a_killed_move_has_committed_are_not_moved_again(
    storage: Storage, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit names the last of them; later rows are added beside them."""
    add(journal, storage.tables, "aa")
    with monkeypatch.context() as killed:
        killed.setattr(Journal, "remove", _raise)
        with pytest.raises(KeyboardInterrupt):
            move_rows(journal, storage)
    left = len(journal.pending("request_images", storage.tables, 10))
    add(journal, storage.tables, "bb")
    move_rows(journal, storage)

    assert left == 1
    assert labels(storage) == ["aa", "bb"]
    images = deltalake.DeltaTable(storage.table("request_images")).to_pyarrow_table()["sha256"].to_pylist()
    assert sorted(images) == ["aa", "bb"]


def _raise(*_arguments: object) -> None:
    raise KeyboardInterrupt


def test_journals_of_two_homes_share_tables(storage: Storage, journal: Journal, tmp_path: Path) -> None:
    """The numbers of their rows are the same, and their transactions are not."""
    other = Journal(tmp_path / "other.db")
    add(journal, storage.tables, "aa")
    add(other, storage.tables, "bb")
    for each in (journal, other):
        move_rows(each, storage)

    assert labels(storage) == ["aa", "bb"]


def test_many_rows_take_several_commits(storage: Storage, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images have megabytes each. Rows that come meanwhile are left, so that no commit is made for each of them."""
    monkeypatch.setattr("tasks.serve.journal.PENDING_BYTES", 1)
    for name in ("aa", "bb"):
        add(journal, storage.tables, name)
    removed, remove = [], Journal.remove

    def remove_and_add(own: Journal, kind: Kind, tables: str, up_to: int) -> None:
        remove(own, kind, tables, up_to)
        removed.append(kind)
        add(own, storage.tables, f"later {len(removed)}")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Journal, "remove", remove_and_add)
        move_rows(journal, storage)

    assert removed == ["request_images"] * 2 + ["requests"] * 2
    assert labels(storage) == ["aa", "bb"]
    move_rows(journal, storage)
    assert len(labels(storage)) == 6


def test_each_service_has_its_rows_in_its_tables(storage: Storage, journal: Journal) -> None:
    """Whichever of them moves the rows of the home."""
    other = storage.model_copy(update={"tables": f"{storage.home}/photos-tables"})
    add(journal, storage.tables, "aa")
    add(journal, other.tables, "bb")
    move_rows(journal, storage)

    assert (labels(storage), labels(other)) == (["aa"], ["bb"])


def test_a_request_is_found_by_its_day(storage: Storage, journal: Journal) -> None:
    """In the table, and no other image of it."""
    assert not has_request(storage, "2026-11-30-aa", 0)
    add(journal, storage.tables, "aa")
    add(journal, storage.tables, "aa", "2026-11-29")
    move_rows(journal, storage)

    assert has_request(storage, "2026-11-30-aa", 0)
    assert has_request(storage, "2026-11-29-aa", 0)
    assert not has_request(storage, "2026-11-28-aa", 0)
    assert not has_request(storage, "2026-11-30-aa", 1)


def test_old_images_are_removed_and_answers_are_not(storage: Storage, journal: Journal) -> None:
    """Their files leave the disk, too, a day after the table."""
    for day in ("2026-11-01", "2026-11-29", "2026-11-30"):
        add(journal, storage.tables, f"on {day}", day)
    move_rows(journal, storage)
    remove_old_images(storage, 0, NOON)
    before = deltalake.DeltaTable(storage.table("request_images")).to_pyarrow_table().num_rows
    remove_old_images(storage, 7, NOON)

    kept = deltalake.DeltaTable(storage.table("request_images")).to_pyarrow_table()
    assert before == 3
    assert sorted(kept["day"].to_pylist()) == ["2026-11-29", "2026-11-30"]
    assert len(labels(storage)) == 3


def test_the_files_of_removed_images_leave_the_disk(
    storage: Storage, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time for readers of an older version, here none."""
    monkeypatch.setattr("tasks.serve.request_log.VACUUM_HOURS", 0)
    add(journal, storage.tables, "aa", "2026-11-01")
    add(journal, storage.tables, "bb")
    move_rows(journal, storage)
    remove_old_images(storage, 7, NOON)

    days = {file.parent.name for file in Path(storage.table("request_images")).rglob("*.parquet")}
    assert days == {"day=2026-11-30"}


def test_there_is_nothing_to_remove_without_a_table(storage: Storage) -> None:
    """No table is made for it."""
    remove_old_images(storage, 7, NOON)

    assert not Path(storage.table("request_images")).exists()


def test_tables_that_only_spark_can_write_are_refused(tmp_path: Path) -> None:
    """Before the service starts, with the way out."""
    home = str(tmp_path)
    azure = resolve_storage(StorageConfig(home=home, tables="abfss://data@account.dfs.core.windows.net/tables"))

    with pytest.raises(WrongInput, match="can only be written by Spark: set it to false, or give tables"):
        check_tables(azure)
    check_tables(resolve_storage(StorageConfig(home=home)))


def test_a_condition_reads_only_its_rows(storage: Storage, journal: Journal) -> None:
    """And days read only their files."""
    for name, day in (("aa", "2026-11-29"), ("bb", "2026-11-30")):
        add(journal, storage.tables, name, day)
    move_rows(journal, storage)
    columns = columns_of(REQUESTS_ARROW, "label")

    assert rows_of(storage, "requests", columns, pa.dataset.field("label") == "bb")["label"].to_pylist() == ["bb"]
    assert rows_of(storage, "requests", columns, day="2026-11-29")["label"].to_pylist() == ["aa"]
    assert rows_of(storage, "feedback", columns_of(FEEDBACK_ARROW, "label")).num_rows == 0
