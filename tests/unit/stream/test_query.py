"""Errors of a streaming query as sentences for users."""

import json
from urllib.parse import quote
from zipfile import ZipFile

import pytest

from tasks.errors import TableInUse, WrongInput
from tasks.spark.jvm import delta_jars
from tasks.stream.query import GONE, ColumnsChanged, explain_failure

SOURCE = "/data/tables/my images"
LOG = "[DELTA_TRUNCATED_TRANSACTION_LOG] {}/_delta_log/00000000000000000003.json: Unable to reconstruct state"


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (LOG.format(SOURCE), WrongInput, "were deleted, by VACUUM or by the clean-up"),
        (LOG.format("file:/data/tables/my%20images"), WrongInput, "were deleted, by VACUUM or by the clean-up"),
        (LOG.format("/data/tables/predictions"), type(None), "None"),
        (LOG.format(f"{SOURCE}/predictions"), type(None), "None"),
        ("[DELTA_VERSIONS_NOT_CONTIGUOUS] Versions are not contiguous", WrongInput, "were deleted"),
        (f"FileNotFoundException: {SOURCE}/part-0.parquet", WrongInput, "were deleted"),
        ("FileNotFoundException: /data/tables/predictions/part-0.parquet", type(None), "None"),
        ("[DELTA_LOG_FILE_NOT_FOUND] Unable to retrieve the delta log files", WrongInput, "were deleted"),
        ("[DELTA_STREAMING_TRAILING_COMMIT_MISSING] x", WrongInput, "has lost versions that the stream has read"),
        ("[DELTA_MISSING_CHANGE_DATA] Error getting change data", WrongInput, "had no change data feed"),
        ("[DELTA_SCHEMA_CHANGED] Detected schema change", ColumnsChanged, SOURCE),
        ("[MALFORMED_LOG_FILE]", WrongInput, "the checkpoint '/c' of the stream is damaged: set stream.restart"),
        ("[CONCURRENT_STREAM_LOG_UPDATE]", TableInUse, "another driver runs the same stream"),
        ("OutOfMemoryError: Java heap space", type(None), "None"),
    ],
)
def test_failure_is_explained_by_its_condition_and_table(text: str, kind: type, said: str) -> None:
    """A condition that names the log or a file of another table is not about the changes of the source."""
    found = explain_failure(text, SOURCE, "/c")

    assert type(found) is kind
    assert said in str(found)


def test_conditions_are_those_of_the_installed_delta() -> None:
    """A release of Delta may rename one, and the sentence would be lost."""
    with ZipFile(delta_jars()[0]) as jar:
        conditions = json.loads(jar.read("error/delta-error-classes.json")).keys()

    assert {*GONE, "DELTA_STREAMING_TRAILING_COMMIT_MISSING", "DELTA_MISSING_CHANGE_DATA"} <= conditions


@pytest.mark.parametrize("path", ["/data/a b(1)", "/data/bilder ä", "s3a://lake/my data/100%25", "/data/[1]/"])
@pytest.mark.parametrize("safe", ["/", "/()+=,'@&äÄ"])
def test_path_may_be_written_as_a_uri(path: str, safe: str) -> None:
    """Java leaves other characters as they are than Python."""
    found = explain_failure(LOG.format(f"file:{quote(path.rstrip('/'), safe)}"), path, "/c")

    assert isinstance(found, WrongInput)
