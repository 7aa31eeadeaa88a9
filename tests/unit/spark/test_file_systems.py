"""Messages about stores that cannot be read."""

from pathlib import Path

import pyspark
import pytest

from tasks.spark.file_systems import HADOOP, explain_problem, scheme_of, store_jars


@pytest.mark.parametrize(
    ("url", "scheme"), [("s3a://b/x", "s3a"), ("S3A://b", "s3a"), ("/a://b", None), ("a:b", None), ("photos", None)]
)
def test_scheme_is_found_in_urls_only(url: str, scheme: str | None) -> None:
    """A URL has a scheme in lower case, and a path has None."""
    assert scheme_of(url) == scheme


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ("RuntimeException: x\nClassNotFoundException: Class org.x.S3AFileSystem not found", "make jars-s3a"),
        ("UnknownStoreException: gone\nNoSuchBucketException: null", "the bucket 'bucket' does not exist"),
        ("FileNotFoundException: No such file or directory", "does not exist"),
        ("AccessDeniedException: x\nNoAuthWithAWSException: No AWS Credentials", "no credentials were found"),
        ("AccessDeniedException: x\nS3Exception: (Service: S3, Status Code: 403)", "may not read"),
        ("AWSClientIOException: x\nSdkClientException: y\nConnectException: refused", "does not answer"),
    ],
)
def test_exception_chain_is_explained(chain: str, expected: str) -> None:
    """The innermost known exception determines the message, except for a missing bucket, which an outer one names."""
    explained = explain_problem(chain, "s3a://bucket/photos")

    assert explained is not None
    assert expected in ": ".join(explained)


def test_unknown_exceptions_are_not_user_errors() -> None:
    """An unknown exception has no message for a user: it may be temporary, and is retried."""
    assert explain_problem("AWSServiceIOException: slow down\nS3Exception: 503", "s3a://bucket/photos") is None


def test_message_names_the_folder_for_the_jars_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message for a store whose jars are not downloaded by make names the folder for them in the user's cache."""
    monkeypatch.setenv("LAKEVISION_CACHE", str(tmp_path))

    explained = explain_problem('UnsupportedFileSystemException: No FileSystem for scheme "gs"', "gs://bucket/photos")

    assert store_jars("gs") == tmp_path / "jars" / "gs"
    assert explained is not None
    assert str(tmp_path / "jars" / "gs") in explained[1]


def test_jars_of_a_store_have_the_version_of_sparks_hadoop_client() -> None:
    """An upgrade of Spark may bring another version of Hadoop."""
    installed = Path(pyspark.__file__).with_name("jars").glob("hadoop-client-api-*.jar")

    assert [jar.name for jar in installed] == [f"hadoop-client-api-{HADOOP}.jar"]
