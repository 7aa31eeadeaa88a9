"""The cache, built by Spark and read by petastorm."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from delta.tables import DeltaTable
from PIL import Image

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache, read_manifest, verify_files, write_manifest
from tasks.cache.materialize import materialize_cache, plan_files, read_content, with_files
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.model_package.decode import decode_pixels
from tasks.storage import resolve_storage
from tasks.tables.snapshots import latest, read_version
from tests.conftest import write_images

ETL = {"val_fraction": 0.2, "test_fraction": 0.2}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, spark) -> tuple[Path, str]:
    """Return a source of 60 colour images and 2 grayscale images, and the tables that ETL made of it."""
    folder = tmp_path_factory.mktemp("prepared")
    source, storage = folder / "source", resolve_storage(StorageConfig(home=str(folder / "home")))
    write_images(source, 20)
    for number in (0, 1):
        Image.new("L", (40, 17 + number), 90).save(source / "red" / f"gray{number}.png")
    ingest_images(EtlConfig(source=str(source), **ETL), storage, SparkConfig())
    return source, storage.tables


@pytest.fixture
def images(spark, prepared, storage):
    """Return a version of a table with 62 images, which a test may change."""
    shutil.copytree(prepared[1], storage.tables)
    return latest(spark, storage.table("images"))


def build(images, storage, **settings):
    """Build the cache."""
    return materialize_cache(CacheConfig(**({"image_size": 16} | settings)), images, storage, SparkConfig())


def test_every_image_is_in_the_cache_once_with_its_pixels_and_class(spark, images, storage):
    """Grayscale images are included: dropping one-channel images would lose a class."""
    ref, built = build(images, storage)
    assert built
    manifest = open_cache(ref)
    rows = read_version(spark, images).collect()
    wanted = {}
    for split in ("train", "val", "test"):
        for row in rows:
            if row["split"] == split:
                wanted[decode_pixels(row["content"], 16).tobytes()] = row["label"]
        loader = CacheLoader(ref.url, manifest, split, batch_size=7)
        batches = list(loader.epoch(0))
        assert len(batches) == loader.num_steps
        for batch in batches:
            for pixels, label in zip(batch.inputs, batch.labels_B.tolist(), strict=True):
                assert wanted.pop(pixels.numpy().astype(np.uint8).tobytes()) == manifest.classes[label]
    assert not wanted


def test_image_that_cannot_be_decoded_is_left_out_and_named(spark, images, storage, caplog):
    """An image that another program stored is a row of the manifest, and the other images are in the cache."""
    spoilt = read_version(spark, images).where("split = 'train'").first()["sha256"]
    DeltaTable.forPath(spark, images.path).update(f"sha256 = '{spoilt}'", {"content": "unhex('00')"})
    changed = latest(spark, images.path)
    rows = read_version(spark, changed).groupBy("split").count().collect()
    files = read_version(spark, latest(spark, storage.table("files")))
    path = files.where(f"sha256 = '{spoilt}'").first()["path"]

    ref, _built = build(changed, storage)

    manifest = open_cache(ref)
    assert [(image.path, image.sha256, image.split) for image in manifest.quarantined] == [(path, spoilt, "train")]
    assert manifest.quarantined[0].reason.startswith("not_an_image: ")
    left_out = f"1 images cannot be decoded, and are left out of the cache: {path} (not_an_image: "
    assert any(message.startswith(left_out) for message in caplog.messages)
    expected = {row["split"]: row["count"] - (row["split"] == "train") for row in rows}
    assert {split: part.rows for split, part in manifest.splits.items()} == expected
    loader = CacheLoader(ref.url, manifest, "train", batch_size=7)
    numbers = sorted(number for batch in loader.epoch(0) for number in batch.rows_B.tolist())
    assert numbers == list(range(expected["train"]))
    assert build(changed, storage) == (ref, False)
    files = {file.name for part in manifest.splits.values() for file in part.files}
    assert {file.name for file in Path(ref.url).glob("*.parquet")} == files, "the first pass leaves no files"

    few = read_version(spark, changed).groupBy("label").count().orderBy("count", "label").first()["label"]
    for spoilt, problem in [(f"label = '{few}'", r"^\d+ of \d+ images"), ("true", r"^(\d+) of \1 images")]:
        DeltaTable.forPath(spark, images.path).update(spoilt, {"content": "unhex('00')"})
        with pytest.raises(WrongInput, match=problem + " in .* cannot be decoded here, e.g. not_an_image: "):
            build(latest(spark, images.path), storage, image_size=17)


def test_class_is_not_left_out_of_a_cache(spark, images, storage):
    """Its only image cannot be decoded: a model would have a class that it never saw."""
    spoilt = read_version(spark, images).where("split = 'train'").first()["sha256"]
    change = {"label": "'owl'", "content": "unhex('00')"}
    DeltaTable.forPath(spark, images.path).update(f"sha256 = '{spoilt}'", change)
    with pytest.raises(WrongInput, match=r"^all images of 'owl' in .* cannot be decoded here"):
        build(latest(spark, images.path), storage)


def test_same_version_is_built_once_and_other_settings_build_another_cache(spark, images, storage):
    """The name of a cache depends on everything that affects its bytes."""
    first, _ = build(images, storage)
    second, built = build(images, storage)
    assert (second, built) == (first, False)
    other, built = build(images, storage, image_size=20)
    assert built
    assert other.url != first.url


@pytest.mark.long
def test_optimize_does_not_invalidate_the_cache(spark, images, storage):
    """A new table version with the same rows has the same cache."""
    first, _ = build(images, storage)
    for column in ("a", "b"):
        DeltaTable.forPath(spark, images.path).history(1).collect()
        spark.sql(f"ALTER TABLE delta.`{images.path}` SET TBLPROPERTIES ('note' = '{column}')")
    DeltaTable.forPath(spark, images.path).optimize().executeCompaction()
    newer = latest(spark, images.path)
    assert newer.version > images.version
    second, built = build(newer, storage)
    assert (second.url, second.digest, built) == (first.url, first.digest, False)
    assert (open_cache(first).table, open_cache(second).table) == (images, newer)
    # A table that does not record what it scales has the bytes of the version at which its rows last changed.
    DeltaTable.forPath(spark, images.path).update("label = 'red'", {"content": "concat(content, X'00')"})
    changed = latest(spark, images.path)
    versions = (images, newer, changed)
    unknown = [read_content(read_version(spark, table), table, None).stored_digest for table in versions]
    assert (unknown[0] == unknown[1], unknown[1] == unknown[2]) == (True, False)


def other_table(source, storage, name, **settings):
    """Return a table of the same source elsewhere, whose caches are in the same folder."""
    other = resolve_storage(StorageConfig(home=str(storage.home), tables=f"{storage.home}/{name}"))
    return ingest_images(EtlConfig(source=str(source), **ETL, **settings), other, SparkConfig()).images


def test_cache_of_another_table_is_shared_only_if_its_stored_bytes_are_the_same(spark, prepared, images, storage):
    """Images stored with 16 pixels are not taken for the originals; each cache names the table that asked for it."""
    source = prepared[0]
    small = other_table(source, storage, "small", stored_side=16)
    first, _ = build(small, storage, image_size=48)
    # As an older release has left it, which did not record what the bytes are.
    older = Path(first.url).rename(Path(first.url).with_name("0123456789abcdef"))
    write_manifest(str(older), read_manifest(str(older)).model_copy(update={"stored_digest": ""}))
    second, built = build(images, storage, image_size=48)
    assert built
    assert second.digest != first.digest
    # No image is scaled in either table, so that the bytes are those of the files.
    equal = other_table(source, storage, "equal", stored_side=1024)
    third, built = build(equal, storage, image_size=48)
    assert (third.url, third.digest, built) == (second.url, second.digest, False)
    # A cache of an older release serves all versions of its own table.
    spark.sql(f"ALTER TABLE delta.`{small.path}` SET TBLPROPERTIES ('note' = 'a')")
    newer = latest(spark, small.path)
    fourth, built = build(newer, storage, image_size=48)
    assert (fourth.url, fourth.digest, built) == (str(older), first.digest, False)
    assert [open_cache(ref).table for ref in (second, third, fourth)] == [images, equal, newer]


def test_damaged_cache_is_detected_and_rebuilt(spark, images, storage):
    """A truncated file is always detected, and a flipped bit with `verify`."""
    first, _ = build(images, storage)
    file = next(Path(first.url).glob("train-*.parquet"))
    file.write_bytes(file.read_bytes()[:-10])
    second, built = build(images, storage)
    assert built
    assert second.digest == first.digest
    open_cache(second)
    # A flipped bit changes neither size nor footer.
    file = next(Path(second.url).glob("train-*.parquet"))
    content = bytearray(file.read_bytes())
    content[300] ^= 1
    file.write_bytes(content)
    assert build(images, storage) == (second, False)
    third, built = build(images, storage, verify=True)
    assert built
    verify_files(third.url, open_cache(third))


def test_format_jpeg_has_the_same_rows_and_labels(images, storage):
    """Another format is another cache, with rows and labels in the same order and nearly the same pixels."""
    raw, _ = build(images, storage, image_size=32)
    jpeg, built = build(images, storage, image_size=32, format="jpeg", jpeg_quality=95)
    assert built
    assert jpeg.url != raw.url
    raw_batches, jpeg_batches = (
        list(CacheLoader(ref.url, open_cache(ref), "train", batch_size=7, seed=2).epoch(1)) for ref in (raw, jpeg)
    )
    for one, other in zip(raw_batches, jpeg_batches, strict=True):
        assert one.rows_B.tolist() == other.rows_B.tolist()
        assert one.labels_B.tolist() == other.labels_B.tolist()
        assert (one.inputs.int() - other.inputs.int()).abs().double().mean() < 12


def test_cache_without_manifest_is_rebuilt_and_its_files_removed(spark, images, storage):
    """Files of a killed build are neither read nor kept."""
    first, _ = build(images, storage)
    (Path(first.url) / "manifest.json").unlink()
    (Path(first.url) / "train-99999-dead.parquet").write_bytes(b"half")
    second, built = build(images, storage)
    assert built
    names = {file.name for part in open_cache(second).splits.values() for file in part.files}
    assert {file.name for file in Path(second.url).iterdir()} == names | {"manifest.json"}


def test_empty_split_raises_an_error(spark, source, storage):
    """The error has the name of the empty split."""
    settings = EtlConfig(source=str(source), val_fraction=0.0, test_fraction=0.2)
    images = ingest_images(settings, storage, SparkConfig()).images
    with pytest.raises(WrongInput, match="no image of .* is in the split 'val': add at least 1 image "):
        build(images, storage)


def test_row_groups_are_equal_and_padding_is_counted(spark, images, storage):
    """Equal row groups give all ranks the same number of steps."""
    ref, _ = build(images, storage, image_size=1024, row_group_megabytes=6)
    manifest = open_cache(ref)
    for split in manifest.splits.values():
        assert split.rows_per_group <= 2
        padding = sum(file.row_groups for file in split.files) * split.rows_per_group - split.rows
        assert 0 <= padding < split.rows_per_group


def test_files_have_the_images_in_the_order_of_their_sha256(spark, images, storage):
    """Image k of a split in the order of sha256 is in file k // rows of a file, for any number of files."""
    rows = read_version(spark, images)
    hashes = {split: [] for split in ("train", "val", "test")}
    for row in sorted(rows.select("sha256", "split").collect()):
        hashes[row["split"]].append(row["sha256"])
    classes = ["blue", "green", "red"]
    for per_file in ({"train": 2, "val": 1, "test": 3}, {"train": 7, "val": 100, "test": 5}):
        starts = plan_files(spark, images, per_file, storage)
        placed = with_files(spark, rows, starts, classes).select("split", "file", "sha256", "label_index").collect()
        expected = {
            (split, number // per_file[split], sha256)
            for split, found in hashes.items()
            for number, sha256 in enumerate(found)
        }
        assert {(row["split"], row["file"], row["sha256"]) for row in placed} == expected
        assert len(placed) == len(expected)
        labels = {row["sha256"]: row["label"] for row in rows.select("sha256", "label").collect()}
        assert all(classes[row["label_index"]] == labels[row["sha256"]] for row in placed)
