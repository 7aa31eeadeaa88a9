"""The one place that reads the environment."""

from pathlib import Path

import pytest

from tasks.environment import (
    MALLOC,
    code_version,
    download_cache,
    java_command,
    lakevision_home,
    mlflow_page,
    rank_environment,
)
from tasks.text.markup import markdown_link


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what the machine that runs the tests has set."""
    for name in ("LAKEVISION_HOME", "LAKEVISION_CACHE", "LAKEVISION_CODE_VERSION", "XDG_CACHE_HOME", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GLIBC_TUNABLES", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_home_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default below the current folder; with $LAKEVISION_HOME there, ~ being the user's folder."""
    monkeypatch.chdir(tmp_path)
    assert lakevision_home() == tmp_path / ".lakevision"

    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("LAKEVISION_HOME", "~/runs")
    assert lakevision_home() == Path("/home/someone/runs")


def test_empty_variable_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files set what is not given to the empty string."""
    monkeypatch.chdir(tmp_path)
    for name in ("LAKEVISION_HOME", "LAKEVISION_CODE_VERSION", "JAVA_HOME"):
        monkeypatch.setenv(name, "")

    assert lakevision_home() == tmp_path / ".lakevision"
    assert code_version() is None
    assert java_command() == "java"


def test_downloads_lie_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """$LAKEVISION_CACHE wins over $XDG_CACHE_HOME, which wins over ~/.cache."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert download_cache() == Path("/home/someone/.cache/lakevision")

    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert download_cache() == Path("/cache/lakevision")

    monkeypatch.setenv("LAKEVISION_CACHE", "/mine")
    assert download_cache() == Path("/mine")


def test_java_is_that_of_java_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark starts the Java that is pointed at, else the one on PATH."""
    assert java_command() == "java"

    monkeypatch.setenv("JAVA_HOME", "/opt/java")
    assert java_command() == "/opt/java/bin/java"


def test_code_version_is_that_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image says from which commit it was built."""
    assert code_version() is None

    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "abc")
    assert code_version() == "abc"


def test_rank_gets_what_it_needs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, proxies, libraries and storage credentials pass; tokens of other services stay behind."""
    passed = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "0",
        "https_proxy": "http://proxy",
        "LAKEVISION_HOME": "/home",
        "HOROVOD_CYCLE_TIME": "1",
        "NCCL_DEBUG": "INFO",
        "CXX": "clang++",
        "MLFLOW_TRACKING_TOKEN": "t",
        "AWS_ACCESS_KEY_ID": "k",
    }
    kept_back = {"PREFECT_API_KEY": "secret", "GITHUB_TOKEN": "secret", "DATABASE_URL": "secret", "MY_PATH": "x"}
    for name, value in (passed | kept_back).items():
        monkeypatch.setenv(name, value)

    environment = rank_environment()

    assert passed.items() <= environment.items()
    for name, given, own in (
        ("GLIBC_TUNABLES", MALLOC, "glibc.malloc.arena_max=1"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ":16:8"),
    ):
        assert environment[name] == given
        monkeypatch.setenv(name, own)
        assert rank_environment()[name] == own
    assert not kept_back.keys() & environment.keys()
    assert "secret" not in environment.values()


def test_links_lead_to_mlflow_s_ui(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the tracking server or where `make up` serves a database; a slash at the end makes no second one."""
    monkeypatch.delenv("LAKEVISION_MLFLOW_UI", raising=False)
    assert mlflow_page("sqlite:////home/mlflow.db", "") == "http://127.0.0.1:5000"
    assert mlflow_page("http://mlflow:5000/", "") == "http://mlflow:5000"

    monkeypatch.setenv("LAKEVISION_MLFLOW_UI", "https://mlflow.example/")
    assert mlflow_page("http://mlflow:5000", "") == "https://mlflow.example"


def test_links_of_another_tracking_server_lead_to_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The UI of the default tracking server or database does not have its runs."""
    monkeypatch.setenv("LAKEVISION_MLFLOW_UI", "http://127.0.0.1:5000")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "sqlite:////stack/mlflow.db")
    assert mlflow_page("sqlite:////stack/mlflow.db", "") == "http://127.0.0.1:5000"
    assert mlflow_page("https://tracking.example/", "") == "https://tracking.example"


def test_a_database_beside_the_stack_s_own_has_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack's UI shows its own database: a link to a run of another one would be a 404."""
    monkeypatch.setenv("LAKEVISION_MLFLOW_UI", "http://127.0.0.1:5000")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "sqlite:////stack/mlflow.db")
    assert mlflow_page("sqlite:////other/mlflow.db", "/#/runs/1") is None
    assert mlflow_page("sqlite:////stack/mlflow.db", "/#/runs/1") == "http://127.0.0.1:5000/#/runs/1"
    assert markdown_link("run", None) == "run (no MLflow UI shows its database)"
    assert markdown_link("run", "http://x") == "[run](http://x)"
