"""Checks of what Spark needs to start, without starting it."""

from pathlib import Path

import pyspark
import pytest

from tasks.errors import WrongInput
from tasks.spark.jvm import check_java


@pytest.mark.parametrize("jars", [[], ["spark-core_2.12-3.5.1.jar"]], ids=["gone", "another version"])
def test_stale_installation_of_spark_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jars: list[str]
) -> None:
    """A SPARK_HOME of an older Spark, whose files pyspark would start; pyspark's own is accepted."""
    (tmp_path / "jars").mkdir()
    for name in jars:
        (tmp_path / "jars" / name).touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    with pytest.raises(WrongInput) as refused:
        check_java()
    assert str(refused.value) == (
        f"SPARK_HOME is '{tmp_path}', which has no Spark {pyspark.__version__}: unset SPARK_HOME"
    )
    monkeypatch.setenv("SPARK_HOME", str(Path(pyspark.__file__).parent))
    assert "version" in check_java()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("PYSPARK_SUBMIT_ARGS", "--packages a:b:1", "which lacks pyspark-shell"),
        ("SPARK_REMOTE", "sc://host", "and Spark Connect has no driver here"),
    ],
)
def test_variables_of_another_spark_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str
) -> None:
    """They are left in an environment by notebooks and other projects."""
    monkeypatch.setenv(name, value)
    with pytest.raises(WrongInput) as refused:
        check_java()
    assert str(refused.value) == f"{name} is '{value}', {problem}: unset {name}"


def test_user_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may run as any user id; Java's message is a gateway process that exited."""
    monkeypatch.setattr("os.geteuid", lambda: 54_321_000)
    with pytest.raises(WrongInput, match=r"the user id 54321000 has no name in /etc/passwd, .*: add a line"):
        check_java()
