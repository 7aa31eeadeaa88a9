"""Credentials in settings, errors and log lines."""

from typing import Any

import pytest
from pydantic import ValidationError

from tasks.config.checks import RepeatRun
from tasks.config.etl import EtlConfig, EtlRun
from tasks.config.frozen import FrozenConfig
from tasks.config.pipeline import PipelineConfig
from tasks.config.prediction import PromoteRun
from tasks.config.storage import SparkConfig
from tasks.config.tune import TrialRun, TuneRun
from tasks.credentials import check_job_variables, without_credentials
from tasks.errors import WrongInput, explain


@pytest.mark.parametrize(
    "url",
    [
        "/data/photos@home:2024",
        "s3a://bucket/cats@home",
        "s3a://my.bucket-1/a:b/c",
        "hdfs://host:8020/photos",
        "hdfs://host:8020/cats@home",
        "hdfs://[::1]:8020/photos",
        "hdfs:///photos",
        "abfss://container@account.dfs.core.windows.net/photos",
        "file:///data/photos",
        "/data/my photos?token=5",
        "/data/token=5/photos",
        "//data/cats@home",
        "file:///data/a?sig=x",
        "s3a://bucket/signature=5/photos",
        "https://host/photos?version=3",
        "/data/Texas=1/sasquatch",
    ],
)
def test_url_without_credentials_is_accepted(url: str) -> None:
    """Ports, containers, and names with an at sign, a question mark or an equals sign are not credentials."""
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
    """Neither our message nor pydantic's own shows the credential."""
    with pytest.raises(ValidationError) as refused:
        EtlRun.model_validate({"etl": {"source": url}})

    assert "etl.source: it is a URL with a user name or password, which" in explain(refused.value)
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
        "spark.hadoop.dfs.adls.oauth2.credential",
        "spark.executorEnv.DB_PASSWD",
        "spark.executorEnv.API_KEY",
        "spark.executorEnv.MYSQL_PWD",
        "spark.hadoop.service.apikey",
        "spark.hadoop.fs.azure.shared.key",
        "spark.hadoop.fs.cosn.userinfo.secretKey",
        "spark.executorEnv.DB_PASS",
        "spark.hadoop.dbPass",
        "spark.redis.auth",
        "spark.hadoop.fs.azure.account.key.path.dfs.core.windows.net",
        "spark.hadoop.fs.s3a.access.key.path.x",
    ],
)
def test_credential_among_spark_settings_is_refused_and_not_repeated(name: str) -> None:
    """A credential is refused, since the form would show it to everybody who may see the run."""
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
        "spark.security.credentials.hive.enabled",
        "spark.authenticate.secret.file",
        "spark.kubernetes.authenticate.driver.oauthTokenFile",
        "spark.executorEnv.TEXAS",
        "spark.hadoop.bypass",
        "spark.hadoop.oauth",
    ],
)
def test_setting_without_a_credential_is_accepted(name: str) -> None:
    """The location of credentials is not a credential."""
    assert SparkConfig(conf={name: "x"}).conf == {name: "x"}


@pytest.mark.parametrize(
    "value",
    [
        "-Xmx1g -Dfs.s3a.secret.key=SECRET",
        "-DDB_PASSWD=SECRET",
        "-Dfs.cosn.userinfo.secretKey=SECRET",
        "https://u:SECRET@repository.example/maven,https://repo1.maven.org/maven2",
        "jdbc:sqlserver://host;user=me;password=SECRET",
        '{"password": "SECRET"}',
        "s3a://bucket/x?X-Amz-Signature=SECRET",
    ],
)
def test_credential_within_a_value_of_spark_is_refused_and_not_repeated(value: str) -> None:
    """The value of an ordinary setting may have a credential: Java options, repositories, connection strings."""
    with pytest.raises(ValidationError) as refused:
        SparkConfig(conf={"spark.driver.extraJavaOptions": value})

    assert "the value of spark.driver.extraJavaOptions has a credential in it" in explain(refused.value)
    assert "SECRET" not in explain(refused.value) + str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        "(?i)secret|password|token",
        "-Dhadoop.security.credential.provider.path=jceks://hdfs@namenode:9001/keys.jceks",
        "https://repo1.maven.org/maven2,https://host:8443/maven",
        "-Duser.region=Texas",
        "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider",
    ],
)
def test_value_of_spark_without_a_credential_is_accepted(value: str) -> None:
    """Neither a word for a secret nor the location of a secret is a credential."""
    assert SparkConfig(conf={"spark.x": value}).conf == {"spark.x": value}


def fields_of(model: type[FrozenConfig], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every setting of a model, without groups."""
    paths = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        is_group = isinstance(inner, type) and issubclass(inner, FrozenConfig)
        paths += fields_of(inner, (*before, name)) if is_group else [(*before, name)]
    return paths


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return nested settings with one value at a path."""
    for name in reversed(path):
        value = {name: value}
    return value


SECRETS = [
    "s3a://KEY:SECRET@bucket/x.csv",
    "https://u:SECRET@host/x.csv",
    "https://host/x?password=SECRET&y=.csv",
    "https://host/x?v=1&sig=SECRET",
    "https://host/x?p%61ssword=SECRET",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3DSECRET",
    "postgresql://host/db?sslmode=require&password=SECRET",
    "//u:SECRET@host/x.csv",
    "s3a://KEY:SE/SECRET@bucket/x.csv",
    "s3a://KEY:7/SECRET@bucket/x.csv",
    "https://host/x?secretKey=SECRET&y=.csv",
    "zip://a.csv::https://u:SECRET@host/x.zip",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("model", [PipelineConfig, TuneRun, TrialRun, RepeatRun, PromoteRun], ids=lambda m: m.__name__)
def test_no_setting_accepts_a_secret_and_no_error_repeats_it(model: type[FrozenConfig], secret: str) -> None:
    """A secret is refused as a value, in a list, in a dict and as a group, and neither text of the error has it."""
    for path in fields_of(model):
        for value in (secret, [secret], {"name": secret}):
            with pytest.raises(ValidationError) as refused:
                model.model_validate(nested(path, value))
            assert "SECRET" not in explain(refused.value) + str(refused.value), path
    for group in ("storage", "train"):
        if group in model.model_fields:
            with pytest.raises(ValidationError) as refused:
                model.model_validate({group: secret})
            assert "SECRET" not in explain(refused.value) + str(refused.value)


@pytest.mark.parametrize("secret", SECRETS)
def test_errors_and_log_lines_omit_credentials(secret: str) -> None:
    """A secret from the environment, where it is allowed, does not appear in errors and log lines."""
    assert "SECRET" not in str(WrongInput(f"the tracking server '{secret}' does not answer ({secret})"))
    assert "SECRET" not in without_credentials(f"opened {secret}, then closed it")


@pytest.mark.parametrize(
    "text",
    [
        "stored abfss://container@account.dfs.core.windows.net/photos",
        "etl.source is '/data/my photos?version=3'",
        "worker: read 224 files, 0 of them unusable",
        "keys are in jceks://hdfs@namenode:9001/keys.jceks",
        "http://127.0.0.1:4200/runs?tab=logs",
    ],
)
def test_log_line_without_credentials_is_unchanged(text: str) -> None:
    """A text without credentials is returned unchanged; the container of a URL is not a user name."""
    assert without_credentials(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "a" * 100_000,
        "//" * 50_000,
        "//a:b" * 5_000,
        "//" + "a:" * 50_000,
        "//a:a:a:" * 12_000,
        "//a@b" * 20_000,
        "=a" * 50_000,
        "a-" * 50_000,
        "%" * 100_000,
    ],
)
def test_time_is_linear_in_the_length_of_a_line(text: str) -> None:
    """Long lines are processed without backtracking, which would exceed the test's timeout."""
    assert without_credentials(text) == text


@pytest.mark.parametrize(
    "variables",
    [
        {"password": "hidden"},
        {"env": {"AWS_SECRET_ACCESS_KEY": "hidden"}},
        {"env": {"INDEX": "https://me:hidden@host/simple"}},
        {"volumes": ["https://me:hidden@host/share"]},
    ],
)
def test_job_variable_with_a_credential_is_refused(variables: dict[str, Any]) -> None:
    """The message names the variable, and does not repeat its value."""
    with pytest.raises(ValueError, match="is or has a credential") as raised:
        check_job_variables(variables)
    assert "hidden" not in str(raised.value)


def test_job_variables_without_credentials_are_unchanged() -> None:
    """Numbers, lists and environment variables are job variables."""
    given = {"gpus": 4, "networks": ["a"], "env": {"CUDA_VISIBLE_DEVICES": "0,1"}, "stream_output": False}
    assert check_job_variables(given) == given
