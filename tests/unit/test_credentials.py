"""What is refused where everybody can read it."""

import pytest
from pydantic import ValidationError

from tasks.config import EtlConfig, EtlRun, SparkConfig
from tasks.errors import explain


@pytest.mark.parametrize(
    "url",
    [
        "/data/photos@home:2024",
        "s3a://bucket/cats@home",
        "s3a://my.bucket-1/a:b/c",
        "hdfs://host:8020/photos",
        "hdfs://[::1]:8020/photos",
        "hdfs:///photos",
        "abfss://container@account.dfs.core.windows.net/photos",
        "file:///data/photos",
    ],
)
def test_url_without_credentials_is_taken(url: str) -> None:
    """Ports, containers and names with an at sign are none."""
    assert EtlConfig(source=url).source == url


@pytest.mark.parametrize(
    "url",
    [
        "s3a://AKIAKEY:hush@bucket/photos",
        "s3a://AKIAKEY:hu/sh@bucket/photos",
        "s3a://AKIAKEY@bucket/photos",
        "S3A://AKIAKEY:hush@bucket",
        "abfss://container:hush@account.dfs.core.windows.net/photos",
        "abfss://a@b@account/photos",
    ],
)
def test_url_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    """Neither the sentence nor pydantic's own text shows what was put there."""
    with pytest.raises(ValidationError) as refused:
        EtlRun.model_validate({"etl": {"source": url}})

    assert "etl.source: it is a URL with a user name or password in it" in explain(refused.value)
    assert not any(part in explain(refused.value) + str(refused.value) for part in ("AKIAKEY", "hush", "a@b"))


@pytest.mark.parametrize(
    "name",
    [
        "spark.hadoop.fs.s3a.secret.key",
        "spark.hadoop.fs.s3a.access.key",
        "spark.hadoop.fs.s3a.bucket.photos.session.token",
        "spark.hadoop.fs.s3a.encryption.key",
        "spark.hadoop.fs.azure.account.key.account.dfs.core.windows.net",
        "spark.hadoop.fs.azure.account.oauth2.client.secret",
        "spark.hadoop.fs.gs.auth.service.account.private.key",
        "spark.hadoop.fs.azure.account.key.filestore01.dfs.core.windows.net",
        "spark.hadoop.fs.azure.sas.container.account.blob.core.windows.net",
        "spark.executorEnv.AWS_SECRET_ACCESS_KEY",
        "spark.yarn.appMasterEnv.AWS_ACCESS_KEY_ID",
        "spark.ssl.keyStorePassword",
    ],
)
def test_credential_among_spark_settings_is_refused_and_not_repeated(name: str) -> None:
    """The form would show it to everybody who may see the run."""
    with pytest.raises(ValidationError) as refused:
        EtlRun.model_validate({"spark": {"conf": {name: "hush"}}})

    assert f"spark.conf: {name} is a credential" in explain(refused.value)
    assert "hush" not in explain(refused.value) + str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "spark.hadoop.fs.s3a.endpoint",
        "spark.hadoop.fs.s3a.path.style.access",
        "spark.hadoop.fs.s3a.aws.credentials.provider",
        "spark.hadoop.hadoop.security.credential.provider.path",
        "spark.hadoop.fs.azure.account.key.provider.type",
        "spark.hadoop.fs.s3a.delegation.tokens.enabled",
        "spark.sql.shuffle.partitions",
    ],
)
def test_other_settings_are_taken(name: str) -> None:
    """Where credentials are found is no credential."""
    assert SparkConfig(conf={name: "x"}).conf == {name: "x"}
