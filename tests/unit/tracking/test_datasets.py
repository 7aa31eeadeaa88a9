"""Tests of the datasets of a run, as logged to MLflow and resolved by it."""

import json

import mlflow.data
from mlflow.entities import DatasetInput

from tasks.refs import TableRef
from tasks.tracking.tracked_run import TrainingData, dataset_inputs

DIGEST = "0123456789abcdef" * 4


def inputs(source: str | None = "/data/photos/", path: str = "/home/tables/images") -> list[DatasetInput]:
    """Build the datasets of version 0 of a table."""
    table = TableRef(path=path, version=0, table_id="a27e8783")
    return dataset_inputs(TrainingData(table, DIGEST, {"train": 8, "test": 2}, source))


def test_each_split_is_a_dataset_with_version_digest_and_rows() -> None:
    """The digest is that of the content, as in the cache, and not a hash of a query plan."""
    train, test = (found.dataset for found in inputs())

    assert (train.name, test.name) == ("photos v0 train", "photos v0 test")
    assert train.digest == test.digest
    assert train.digest.startswith(f"{DIGEST[:16]}-")
    assert len(train.digest) <= 36
    # MLflow shows the source of the first dataset of a name and digest for all of them.
    assert len({inputs(path=path)[0].dataset.digest for path in ("/a/images", "/b/images", "/a/images")}) == 2
    assert json.loads(train.profile) == {"num_rows": 8, "content_digest": DIGEST}
    assert [(tag.key, tag.value) for tag in inputs()[1].tags] == [("mlflow.data.context", "test")]


def test_source_names_table_version_and_folder_of_the_images() -> None:
    """The source has version 0 and the table's id as well, which MLflow's own source omits."""
    assert json.loads(inputs()[0].dataset.source) == {
        "path": "/home/tables/images",
        "delta_table_version": 0,
        "delta_table_id": "a27e8783",
        "images_from": "/data/photos/",
    }


def test_mlflow_resolves_the_version_of_the_table() -> None:
    """MLflow's `get_source` returns a Delta source with the path and the version."""
    source = mlflow.data.get_source(inputs()[0])

    assert (source.path, source.delta_table_version) == ("/home/tables/images", 0)


def test_dataset_without_a_source_is_named_after_its_table() -> None:
    """A table whose source is unknown gives the dataset its name."""
    (train, _test) = (found.dataset for found in inputs(source=None, path="s3a://bucket/tables/images"))

    assert train.name == "images v0 train"
    assert "images_from" not in json.loads(train.source)


def test_dataset_name_is_one_short_printable_line() -> None:
    """Escape sequences and line breaks are replaced, and long folder names are cut to 100 characters."""
    assert inputs(source="/data/my\x1b[31m\nphotos")[0].dataset.name == "my [31m photos v0 train"
    assert len(inputs(source="/data/" + 200 * "x")[0].dataset.name) == len(" v0 train") + 100
    assert inputs(source="s3a://bucket")[0].dataset.name == "bucket v0 train"
