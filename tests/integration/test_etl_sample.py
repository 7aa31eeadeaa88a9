"""A stable sample of the images of a source."""

import pytest

from tasks.config.storage import StorageConfig
from tasks.errors import WrongInput
from tasks.storage import resolve_storage
from tests.builders.delta_rows import newest_rows
from tests.builders.etl_tables import ingest


def paths_of(spark, storage) -> set[str]:
    """Return the paths in the table `files`."""
    return {row["path"] for row in newest_rows(spark, storage.table("files"), "path")}


def test_sample_is_stable_nested_and_kept_by_its_tables(spark, source, storage, tmp_path, caplog):
    """The images outside are counted; a table with another fraction is not changed."""
    caplog.set_level("INFO", "lakevision.etl")
    small = ingest(source, storage, sample_fraction=0.5)

    assert small.stored + small.outside_sample == 60
    assert 15 < small.stored < 45
    assert f"60 files = {small.stored} stored" in caplog.text
    assert f"+ {small.outside_sample} outside the sample" in caplog.text
    assert not ingest(source, storage, sample_fraction=0.5).changed
    for other in ({}, {"sample_fraction": 0.8}):
        with pytest.raises(WrongInput, match=r"etl.sample_fraction is .*, but the table .* was made with 0.5"):
            ingest(source, storage, **other)
    paths = paths_of(spark, storage)
    assert len(paths) == small.stored

    elsewhere = resolve_storage(StorageConfig(home=str(tmp_path / "larger")))
    larger = ingest(source, elsewhere, sample_fraction=0.8)
    assert small.stored < larger.stored < 60
    assert paths < paths_of(spark, elsewhere)


def test_sample_without_an_image_is_refused(source, storage):
    """The sentence has the number of images, and the way out."""
    with pytest.raises(WrongInput, match=r"is 1e-09, which leaves none of the 60 images .*: give a larger one"):
        ingest(source, storage, sample_fraction=1e-9)
