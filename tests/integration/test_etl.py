"""ETL with Spark on Delta tables."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from delta.tables import DeltaTable
from PIL import Image

from deployments.demo import parameters, parse_arguments
from tasks.config.etl import EtlConfig
from tasks.config.pipeline import PipelineConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl import ingest as ingest_module
from tasks.etl.extract import split_of
from tasks.etl.ingest import ingest_images, ingest_source, prepare_ingest
from tasks.etl.outcomes import Comparison
from tasks.schema import ADDED_TO_FILES
from tasks.storage import resolve_storage
from tests.builders.etl_tables import SETTINGS, etl_settings, ingest, ledger, stored, versions
from tests.conftest import write_images


def test_every_image_is_stored_and_a_second_run_commits_nothing(spark, source, storage):
    """A run without changes leaves both tables at their version."""
    report = ingest(source, storage)
    assert (report.stored, report.quarantined, report.read, report.changed) == (60, 0, 60, True)
    assert versions(spark, storage) == (0, 0)
    again = ingest(source, storage)
    assert (again.stored, again.read, again.changed) == (60, 0, False)
    assert versions(spark, storage) == (0, 0)


def test_listing_older_than_a_commit_of_another_run_is_repeated(spark, source, storage):
    """With the outdated listing, images added by the other run would count as deleted."""
    ingest(source, storage)
    settings = etl_settings(source)
    listed = prepare_ingest(settings, storage, SparkConfig())
    write_images(source, per_class=1, first=100)
    ingest(source, storage)
    report = ingest_source(settings, listed, storage, SparkConfig())
    assert (report.stored, report.changed) == (63, False)


def test_only_new_files_are_read_and_old_images_keep_their_split(spark, source, storage):
    """An incremental run adds new images and moves none; the shares of the splits hold per class."""
    report = ingest(source, storage)
    assert report.classes == {label: {"test": 4, "train": 12, "val": 4} for label in ("red", "green", "blue")}
    read = spark.read.format("delta").load(storage.table("images"))
    before = {row["sha256"]: row["split"] for row in read.select("sha256", "split").collect()}
    write_images(source, per_class=2, first=100)
    report = ingest(source, storage)
    assert (report.read, report.stored) == (6, 66)
    for counts in report.classes.values():
        assert sum(counts.values()) == 22
        assert all(
            abs(counts[split] - 22 * share) < 1 for split, share in (("test", 0.2), ("val", 0.2), ("train", 0.6))
        )
    read = spark.read.format("delta").load(storage.table("images"))
    after = {row["sha256"]: row["split"] for row in read.select("sha256", "split").collect()}
    assert before.items() <= after.items()
    rows = spark.read.format("delta").load(storage.table("images")).groupBy("label", "split").count().collect()
    assert {(row["label"], row["split"]): row["count"] for row in rows} == {
        (label, split): number for label, counts in report.classes.items() for split, number in counts.items()
    }
    assert versions(spark, storage) == (1, 1)


def test_table_split_by_content_keeps_that_split(spark, source, storage, messages_of, caplog):
    """A run with the default splits new images by content as well, and logs that it keeps the table's setting."""
    caplog.set_level("INFO", "lakevision.etl")
    settings = etl_settings(source, split_by="content")
    ingest(source, storage, split_by="content")
    assert not any("etl.split_by" in line for line in messages_of("lakevision.etl"))
    write_images(source, per_class=2, first=100)
    report = ingest(source, storage)
    (line,) = [line for line in messages_of("lakevision.etl") if "etl.split_by" in line]
    assert line.startswith(f"etl.split_by is stratified, but '{storage.table('images')}' was made with content and")
    assert "for another split give other tables (storage.tables)" in line
    assert (report.read, report.stored, report.changed) == (6, 66, True)
    rows = spark.read.format("delta").load(storage.table("images")).select("sha256", "split").collect()
    for row in rows:
        assert row["split"] == split_of(row["sha256"], 1, settings.val_fraction, settings.test_fraction)
    assert ingest(source, storage).changed is False


def test_run_killed_between_its_commits_changes_no_split(spark, source, storage, monkeypatch):
    """Committed images keep their splits, and the next run, with more images, completes the ledger."""
    write = ingest_module.write_files

    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(ingest_module, "write_files", killed)
    with pytest.raises(KeyboardInterrupt):
        ingest(source, storage)
    monkeypatch.setattr(ingest_module, "write_files", write)
    read = spark.read.format("delta").load(storage.table("images"))
    before = {row["sha256"]: row["split"] for row in read.select("sha256", "split").collect()}
    write_images(source, per_class=1, first=100)
    assert ingest(source, storage).stored == 63
    found = spark.read.format("delta").load(storage.table("files")).select("sha256", "split").collect()
    splits = {row["sha256"]: row["split"] for row in found}
    assert len(before) == 60
    assert before.items() <= splits.items()


def test_bad_files_are_quarantined_with_a_reason_and_do_not_fail_the_run(spark, source, storage):
    """Corrupt files and files without a label are in the ledger with their reasons."""
    whole = (source / "red" / "000.png").read_bytes()
    (source / "red" / "empty.png").write_bytes(b"")
    (source / "red" / "text.jpg").write_bytes(b"no image at all")
    (source / "red" / "half.png").write_bytes(whole[: len(whole) // 2])
    (source / "lone.png").write_bytes(whole[:-1] + b"x")
    report = ingest(source, storage)
    found = ledger(spark, storage)
    assert found["red/empty.png"] == ("quarantined", "zero_bytes")
    assert found["red/text.jpg"] == ("quarantined", "not_an_image")
    assert found["red/half.png"] == ("quarantined", "truncated")
    assert found["lone.png"] == ("quarantined", "label_missing")
    assert (report.stored, report.quarantined) == (60, 4)


def test_too_many_bad_files_fail_the_run_and_leave_the_tables_unchanged(spark, source, storage):
    """The gate is checked before anything is written."""
    ingest(source, storage)
    for number in range(20):
        (source / "red" / f"bad{number}.jpg").write_bytes(b"bad")
    with pytest.raises(WrongInput, match=r"20 of 80 .* \(20 not_an_image\).* 0.1") as refused:
        ingest(source, storage)
    assert refused.value.setting == "etl.max_bad_fraction"
    assert versions(spark, storage) == (0, 0)


def test_duplicates_are_stored_once_and_the_next_path_takes_over(spark, source, storage):
    """An exact copy is only in the ledger until the first file is deleted."""
    shutil.copy(source / "red" / "000.png", source / "red" / "zzz.png")
    report = ingest(source, storage)
    assert (report.stored, report.duplicates) == (60, 1)
    assert ledger(spark, storage)["red/zzz.png"] == ("duplicate", None)
    (source / "red" / "000.png").unlink()
    report = ingest(source, storage)
    assert (report.stored, report.duplicates) == (60, 0)
    found = ledger(spark, storage)
    assert found["red/000.png"] == ("deleted", None)
    assert found["red/zzz.png"] == ("stored", None)


def test_content_with_two_labels_is_quarantined_until_resolved(spark, source, storage):
    """Both files are quarantined, whichever came first, until one of them is deleted."""
    ingest(source, storage)
    shutil.copy(source / "red" / "000.png", source / "green" / "red.png")
    report = ingest(source, storage)
    found = ledger(spark, storage)
    assert found["red/000.png"] == found["green/red.png"] == ("quarantined", "label_conflict")
    assert (report.stored, len(stored(spark, storage))) == (59, 59)
    (source / "green" / "red.png").unlink()
    report = ingest(source, storage)
    assert (report.stored, len(stored(spark, storage))) == (60, 60)
    assert ledger(spark, storage)["red/000.png"] == ("stored", None)


def test_changed_moved_and_deleted_files_reach_the_table(spark, source, storage):
    """After any change to the folder the table equals that of a first run."""
    ingest(source, storage)
    os.replace(source / "red" / "001.png", source / "green" / "moved.png")
    (source / "blue" / "002.png").unlink()
    Image.new("RGB", (30, 30), (1, 2, 3)).save(source / "red" / "003.png")
    report = ingest(source, storage)
    assert report.stored == 59
    incremental = stored(spark, storage)
    fresh = storage.model_copy(update={"tables": f"{storage.tables}-fresh"})
    ingest(source, fresh)
    assert incremental == stored(spark, fresh)


def test_class_folder_that_is_not_mounted_ends_the_run_before_a_table_changes(spark, source, storage):
    """Its images do not count as deleted; once the user says so, they leave."""
    ingest(source, storage)
    before = ledger(spark, storage)
    (source / "red").rename(source.parent / "not mounted")
    (source / "red").mkdir()
    with pytest.raises(WrongInput, match=r"lose 20 of 60 images, 'red' 20 of 20") as refused:
        ingest(source, storage)
    assert refused.value.setting == "etl.max_deleted_fraction"
    assert (versions(spark, storage), ledger(spark, storage)) == ((0, 0), before)
    report = ingest(source, storage, max_deleted_fraction=1)
    assert (report.stored, set(report.classes)) == (40, {"blue", "green"})
    assert versions(spark, storage) == (1, 1)


def drop_added_columns(spark, storage):
    """Give the ledger the columns of an earlier release."""
    old = spark.read.format("delta").load(storage.table("files")).drop(*ADDED_TO_FILES)
    old.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(storage.table("files"))


def without_inode(spark, storage):
    """Return the paths of the ledger whose rows have no inode."""
    rows = spark.read.format("delta").load(storage.table("files"))
    return {row["path"] for row in rows.collect() if row.asDict().get("inode") is None}


def test_file_replaced_in_place_is_seen_and_touched_files_change_no_image(spark, source, storage):
    """Also in the home of an earlier release, whose ledger is completed with the first change, and not before."""
    ingest(source, storage)
    drop_added_columns(spark, storage)
    assert (ingest(source, storage).changed, versions(spark, storage)) == (False, (0, 1))
    file, size = source / "red" / "new.png", []
    for colour in ((1, 2, 3), (4, 5, 6)):
        before = file.stat() if file.exists() else None
        Image.new("RGB", (30, 30), colour).save(file, compress_level=0)
        size.append(file.stat().st_size)
        if before is not None:
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        report = ingest(source, storage)
        assert (report.read, report.stored) == (1, 61)
    assert size[0] == size[1]
    assert hashlib.sha256(file.read_bytes()).hexdigest() in stored(spark, storage)
    assert len(stored(spark, storage)) == 61
    assert without_inode(spark, storage) == set()
    images, files = versions(spark, storage)
    for path in (source / "blue").iterdir():
        path.chmod(0o640)
    assert ingest(source, storage).read == 20
    assert versions(spark, storage) == (images, files + 1)
    assert ingest(source, storage).changed is False


@pytest.mark.long
def test_ledger_of_an_earlier_release_that_only_spark_reads_is_continued(spark, source, storage, monkeypatch):
    """As on a store: delta-rs does not read tables with a percent sign in their path. Changes are computed once."""
    storage = storage.model_copy(update={"tables": f"{storage.tables} 100%"})
    ingest(source, storage)
    drop_added_columns(spark, storage)
    images, files = versions(spark, storage)
    assert (ingest(source, storage).changed, versions(spark, storage)) == (False, (images, files))
    write_images(source, per_class=1, first=100)
    computed, find = [], Comparison.ledger_changes
    monkeypatch.setattr(Comparison, "ledger_changes", lambda *given: computed.append(find(*given)) or computed[-1])
    assert ingest(source, storage).stored == 63
    assert len(computed) == 1
    assert without_inode(spark, storage) == set()
    assert versions(spark, storage) == (images + 1, files + 2)


def test_run_killed_between_its_commits_is_completed_by_the_next(spark, source, storage):
    """With images but no ledger, the next run writes the ledger and duplicates no image."""
    ingest(source, storage)
    shutil.rmtree(storage.table("files"))
    report = ingest(source, storage)
    assert (report.stored, len(ledger(spark, storage))) == (60, 60)
    assert versions(spark, storage) == (0, 0)


def test_large_images_are_scaled_down_and_small_ones_kept_byte_for_byte(spark, source, storage):
    """`content` is the original unless its longest side exceeds `stored_side`."""
    Image.new("RGB", (300, 100), (9, 9, 9)).save(source / "red" / "wide.png")
    ingest(source, storage, stored_side=64)
    rows = spark.read.format("delta").load(storage.table("images")).collect()
    wide = next(row for row in rows if row["width"] == 300)
    assert (wide["height"], wide["content"][:2]) == (100, b"\xff\xd8")
    originals = {file.read_bytes() for file in source.glob("*/0*.png")}
    assert {bytes(row["content"]) for row in rows if row["width"] == 24} == originals


def test_other_settings_and_another_source_are_refused(spark, source, storage, make_images):
    """A table is created with one set of settings, which the error shows."""
    ingest(source, storage)
    with pytest.raises(WrongInput, match="is 7, but the table .* was made with 1") as refused:
        ingest(source, storage, split_seed=7)
    assert refused.value.setting == "etl.split_seed"
    other = make_images(per_class=5, side=20, name="other")
    with pytest.raises(WrongInput, match="etl.replace_source"):
        ingest(other, storage)
    assert versions(spark, storage) == (0, 0)
    report = ingest(other, storage, replace_source=True)
    assert (report.stored, len(stored(spark, storage))) == (15, 15)


def test_demo_leaves_the_default_tables_with_another_source_as_they_are(spark, source, storage, make_images):
    """Only `etl.replace_source` replaces a table, and the demo does not set it."""
    fractions = {name: EtlConfig().model_dump()[name] for name in SETTINGS}
    report = ingest(source, storage, **fractions)
    before = stored(spark, storage)
    other = make_images(per_class=5, side=20, name="other")
    values = parameters(parse_arguments(["--source", str(other)]))["config"]
    config = PipelineConfig.model_validate({"storage": {"home": storage.home}, **values})
    assert ingest_images(config.etl, resolve_storage(config.storage), SparkConfig()).stored == 15
    assert (stored(spark, storage), versions(spark, storage)) == (before, (0, 0))
    assert ingest(source, storage, **fractions) == report.model_copy(update={"read": 0, "changed": False})


def test_table_with_other_columns_is_refused_and_unchanged(spark, source, storage):
    """ETL never changes a schema; the error has the unknown columns."""
    ingest(source, storage)
    spark.sql(f"ALTER TABLE delta.`{storage.table('files')}` ADD COLUMNS (note STRING)")
    with pytest.raises(WrongInput, match="'.*/files' has note, which is unknown") as refused:
        ingest(source, storage)
    assert refused.value.setting == "storage.tables"
    assert versions(spark, storage) == (0, 1)


def test_class_with_too_few_images_fails_the_run_and_leaves_the_tables_unchanged(spark, source, storage):
    """The gate is checked before anything is written, and again when only the bound has changed."""
    ingest(source, storage, min_images_per_class=20)
    (source / "few").mkdir()
    Image.new("RGB", (9, 9)).save(source / "few" / "1.png")
    (source / "none").mkdir()
    (source / "none" / "bad.jpg").write_bytes(b"bad")
    with pytest.raises(WrongInput, match=r"2 of 5 classes .* 2 \('none' 0, 'few' 1\)") as refused:
        ingest(source, storage, min_images_per_class=2)
    assert refused.value.setting == "etl.min_images_per_class"
    assert versions(spark, storage) == (0, 0)
    ingest(source, storage)
    with pytest.raises(WrongInput, match="5 of 5 classes"):
        ingest(source, storage, min_images_per_class=21)
    assert versions(spark, storage) == (1, 1)


def test_folder_that_is_not_a_table_is_refused_and_unchanged(spark, source, storage):
    """The folder may have a user's files, which stay."""
    folder = Path(storage.table("images"))
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(WrongInput, match="is not a Delta table"):
        ingest(source, storage)
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


def test_images_missing_from_their_table_are_read_again(spark, source, storage):
    """The ledger alone is not trusted: it is compared with the table images."""
    ingest(source, storage)
    shutil.rmtree(storage.table("images"))
    report = ingest(source, storage)
    assert (report.stored, len(stored(spark, storage))) == (60, 60)
    DeltaTable.forPath(spark, storage.table("images")).delete("label = 'red'")
    report = ingest(source, storage)
    assert (report.read, len(stored(spark, storage))) == (20, 60)
    assert ingest(source, storage).changed is False


def test_file_that_becomes_readable_is_stored_although_its_time_is_unchanged(spark, source, storage):
    """Files quarantined because of a setting or a permission are read again by later runs."""
    Image.new("RGB", (200, 200)).save(source / "red" / "big.png")
    report = ingest(source, storage, max_pixels=10_000)
    assert (report.stored, ledger(spark, storage)["red/big.png"]) == (60, ("quarantined", "too_many_pixels"))
    assert ingest(source, storage, max_pixels=10_000).changed is False
    assert ingest(source, storage).stored == 61
