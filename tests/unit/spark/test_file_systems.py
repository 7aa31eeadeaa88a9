"""What a person is told when a store cannot be read."""

from pathlib import Path

import pytest

from tasks.spark.file_systems import explain_problem, scheme_of, store_jars


@pytest.mark.parametrize(
    ("url", "scheme"), [("s3a://b/x", "s3a"), ("S3A://b", "s3a"), ("/a://b", None), ("a:b", None), ("photos", None)]
)
def test_scheme_is_that_of_a_url(url: str, scheme: str | None) -> None:
    """A path has none, whatever is in it."""
    assert scheme_of(url) == scheme


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ("RuntimeException: x\nClassNotFoundException: Class org.x.S3AFileSystem not found", "make jars-s3a"),
        ("UnknownStoreException: gone\nNoSuchBucketException: null", "there is no bucket 'bucket'"),
        ("FileNotFoundException: No such file or directory", "does not exist"),
        ("AccessDeniedException: x\nNoAuthWithAWSException: No AWS Credentials", "no credentials were found"),
        ("AccessDeniedException: x\nS3Exception: (Service: S3, Status Code: 403)", "may not read"),
        ("AWSClientIOException: x\nSdkClientException: y\nConnectException: refused", "does not answer"),
    ],
)
def test_cause_is_told_as_what_to_do(chain: str, words: str) -> None:
    """The innermost exception that is known decides; a missing bucket is known only outside."""
    sentence = explain_problem(chain, "s3a://bucket/photos")

    assert sentence is not None
    assert words in sentence


def test_other_causes_are_nobodys_wrong_input() -> None:
    """What is not known may go by itself, and is tried again."""
    assert explain_problem("AWSServiceIOException: slow down\nS3Exception: 503", "s3a://bucket/photos") is None


def test_jars_of_a_store_lie_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that is not fetched by us is put where the sentence says."""
    monkeypatch.setenv("LAKEVISION_CACHE", str(tmp_path))

    sentence = explain_problem('UnsupportedFileSystemException: No FileSystem for scheme "gs"', "gs://bucket/photos")

    assert store_jars("gs") == tmp_path / "jars" / "gs"
    assert sentence is not None
    assert str(tmp_path / "jars" / "gs") in sentence
