"""Environment variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.environment import (
    MALLOC,
    code_version,
    download_cache,
    java_command,
    lakevision_home,
    mlflow_page,
    portable_environment,
    rank_environment,
    reach_this_machine_directly,
)
from tasks.errors import WrongInput
from tasks.text.markup import markdown_link
from tests.builders.processes import ROOT


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that are set on the machine of the tests."""
    for name in ("LAKEVISION_HOME", "LAKEVISION_CACHE", "LAKEVISION_CODE_VERSION", "XDG_CACHE_HOME", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GLIBC_TUNABLES", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_home_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home is below the current folder, or at $LAKEVISION_HOME with ~ expanded."""
    monkeypatch.chdir(tmp_path)
    assert lakevision_home() == tmp_path / ".lakevision"

    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("LAKEVISION_HOME", "~/runs")
    assert lakevision_home() == Path("/home/someone/runs")

    monkeypatch.setenv("LAKEVISION_HOME", "~no-such-user/runs")
    with pytest.raises(WrongInput, match=r"'~no-such-user/runs' is in the home of the user 'no-such-user', whom this"):
        lakevision_home()


@pytest.mark.parametrize(
    ("given", "expected"), [({"LC_ALL": "C"}, "C.UTF-8"), ({"LC_ALL": "C.UTF-8", "LANG": "C"}, "C.UTF-8"), ({}, "None")]
)
def test_java_names_files_as_python_does(given: dict[str, str], expected: str) -> None:
    """Python writes UTF-8 whatever the locale, and sets LC_CTYPE where no variable names one."""
    program = "import os; from tasks.environment import *; name_files_in_utf8(); print(os.environ.get('LC_ALL'))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("lower", "upper", "names"),
    [
        ("", "", "127.0.0.1,localhost"),
        ("", "example.org, localhost", "example.org,localhost,127.0.0.1"),
        ("example.org", "other.org", "example.org,127.0.0.1,localhost"),
        ("*", "", "*"),
    ],
)
def test_no_proxy_is_asked_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, lower: str, upper: str, names: str
) -> None:
    """A flow's temporary server is on this machine, and the proxy of the environment cannot reach it."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("no_proxy", lower)
    monkeypatch.setenv("NO_PROXY", upper)
    reach_this_machine_directly()
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == (lower, upper)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    reach_this_machine_directly()
    assert {os.environ["no_proxy"], os.environ["NO_PROXY"]} == {names}


def test_empty_variable_counts_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable with an empty value, as Compose files set it by default, counts as unset."""
    monkeypatch.chdir(tmp_path)
    for name in ("LAKEVISION_HOME", "LAKEVISION_CODE_VERSION", "JAVA_HOME"):
        monkeypatch.setenv(name, "")

    assert lakevision_home() == tmp_path / ".lakevision"
    assert code_version() is None
    assert java_command() == "java"


def test_downloads_are_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """$LAKEVISION_CACHE takes precedence over $XDG_CACHE_HOME, and that over ~/.cache."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert download_cache() == Path("/home/someone/.cache/lakevision")

    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert download_cache() == Path("/cache/lakevision")

    monkeypatch.setenv("LAKEVISION_CACHE", "/mine")
    assert download_cache() == Path("/mine")


def test_java_home_determines_the_java_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark starts the java of $JAVA_HOME, or without it the one on PATH."""
    assert java_command() == "java"

    monkeypatch.setenv("JAVA_HOME", "/opt/java")
    assert java_command() == "/opt/java/bin/java"


def test_code_version_is_that_of_the_container_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code version is the commit that a container image was built from, or None outside one."""
    assert code_version() is None

    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "abc")
    assert code_version() == "abc"


def test_rank_gets_only_the_variables_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, proxies, library settings and storage credentials are passed; tokens of other services are withheld."""
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
        "DATABRICKS_TOKEN": "t",
        "AWS_ACCESS_KEY_ID": "k",
        "FSSPEC_S3_ENDPOINT_URL": "http://store",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": "/inductor",
        "TRITON_CACHE_DIR": "/triton",
        "KMP_AFFINITY": "compact",
        "GOMP_CPU_AFFINITY": "0-3",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "LD_PRELOAD": "/lib/libtcmalloc.so",
        "HADOOP_CONF_DIR": "/hadoop",
        "JAVA_HOME": "/java",
        "KRB5CCNAME": "/tmp/krb5",
        "PGPASSFILE": "/pgpass",
        "UCX_TLS": "tcp",
        "FI_PROVIDER": "efa",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "HF_HOME": "/hf",
        "SSL_CERT_DIR": "/certs",
        "ALL_PROXY": "socks5://proxy",
        "all_proxy": "socks5://proxy",
    }
    withheld = {
        "PREFECT_API_KEY": "secret",
        "GITHUB_TOKEN": "secret",
        "DATABASE_URL": "secret",
        "HF_TOKEN": "secret",
        "NVIDIA_API_KEY": "secret",
        "MY_PATH": "x",
        # Of other work with MLflow, such as `mlflow run`.
        "MLFLOW_RUN_ID": "1f",
        "MLFLOW_EXPERIMENT_ID": "7",
        "MLFLOW_EXPERIMENT_NAME": "theirs",
        "MLFLOW_TRACKING_URI": "sqlite:////theirs.db",
        "MLFLOW_REGISTRY_URI": "sqlite:////theirs.db",
        "MLFLOW_RUN_CONTEXT": "{}",
        "MLFLOW_PARENT_RUN_ID": "1f",
        "MLFLOW_ACTIVE_MODEL_ID": "m-1f",
        "MLFLOW_TRACING_DESTINATION": "7",
    }
    for name, value in (passed | withheld).items():
        monkeypatch.setenv(name, value)

    environment = rank_environment()

    assert passed.items() <= environment.items()
    for name, given, own in (
        ("GLIBC_TUNABLES", MALLOC, "glibc.malloc.arena_max=1"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ":16:8"),
        ("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false", "true"),
    ):
        assert environment[name] == given
        monkeypatch.setenv(name, own)
        assert rank_environment()[name] == own
    assert not withheld.keys() & environment.keys()
    assert "secret" not in environment.values()
    assert rank_environment(["MY_PATH", "NOT_SET"]) == rank_environment() | {"MY_PATH": "x"}
    assert rank_environment(["MLFLOW_RUN_ID"]) == rank_environment()


def test_rank_on_another_host_has_that_hosts_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that name files or devices are not passed on, unless the user names them."""
    own = {"PATH", "HOME", "CUDA_VISIBLE_DEVICES", "HF_HUB_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    passed = {"LAKEVISION_HOME", "NCCL_DEBUG", "AWS_ACCESS_KEY_ID", "TORCHINDUCTOR_MAX_AUTOTUNE"}
    for name in own | passed:
        monkeypatch.setenv(name, "x")

    environment = portable_environment()
    assert passed <= environment.keys()
    assert not own & environment.keys()
    assert own & portable_environment(["TRITON_CACHE_DIR"]).keys() == {"TRITON_CACHE_DIR"}


def test_links_lead_to_mlflows_ui(monkeypatch: pytest.MonkeyPatch) -> None:
    """The UI is $LAKEVISION_MLFLOW_UI, the tracking server, or the port of `make up`, without a trailing slash."""
    monkeypatch.delenv("LAKEVISION_MLFLOW_UI", raising=False)
    assert mlflow_page("sqlite:////home/mlflow.db", "") == "http://127.0.0.1:5000"
    assert mlflow_page("http://mlflow:5000/", "") == "http://mlflow:5000"

    monkeypatch.setenv("LAKEVISION_MLFLOW_UI", "https://mlflow.example/")
    assert mlflow_page("http://mlflow:5000", "") == "https://mlflow.example"


def test_links_of_another_tracking_server_lead_to_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tracking server is its own UI, since the default UI does not have its runs."""
    monkeypatch.setenv("LAKEVISION_MLFLOW_UI", "http://127.0.0.1:5000")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "sqlite:////stack/mlflow.db")
    assert mlflow_page("sqlite:////stack/mlflow.db", "") == "http://127.0.0.1:5000"
    assert mlflow_page("https://tracking.example/", "") == "https://tracking.example"


def test_database_outside_the_stack_has_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in another database than the stack's has no link, which would be a 404 in the stack's UI."""
    monkeypatch.setenv("LAKEVISION_MLFLOW_UI", "http://127.0.0.1:5000")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "sqlite:////stack/mlflow.db")
    assert mlflow_page("sqlite:////other/mlflow.db", "/#/runs/1") is None
    assert mlflow_page("sqlite:////stack/mlflow.db", "/#/runs/1") == "http://127.0.0.1:5000/#/runs/1"
    assert markdown_link("run", None) == "run (no MLflow UI shows its database)"
    assert markdown_link("run", "http://x") == "[run](http://x)"


@pytest.mark.parametrize(("given", "pool"), [({}, "jemalloc"), ({"ARROW_DEFAULT_MEMORY_POOL": "system"}, "system")])
def test_arrow_allocates_by_jemalloc_unless_the_environment_chooses(monkeypatch, given, pool) -> None:
    """PyArrow reads the variable once, at its import; a module that imports it does so after `tasks`."""
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    script = "import tasks.schema, pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == pool
