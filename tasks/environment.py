"""Environment variables: the only module that reads them."""

import locale
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from tasks.credentials import is_secret
from tasks.errors import WrongInput
from tasks.paths import expand_user

MLFLOW_PORT = 5000
"""Default port of MLflow's UI, without $LAKEVISION_MLFLOW_PORT."""

DEFAULT_HOME = ".lakevision"
"""Folder for all output of a run without $LAKEVISION_HOME, in the current folder."""

API_KEY = "LAKEVISION_API_KEY"
"""The variable with the key of a service, which no rank gets."""

SPARK_SECRET = "_SPARK_AUTH_SECRET"  # noqa: S105  # the name of a variable
"""The variable from which Spark's own processes read the secret of a standalone cluster."""


def lakevision_home() -> Path:
    """Return the folder for all output of a run: $LAKEVISION_HOME, or ./.lakevision.

    Raises:
        WrongInput: As `expand_user`.
    """
    return expand_user(Path(os.environ.get("LAKEVISION_HOME") or DEFAULT_HOME)).absolute()


def download_cache() -> Path:
    """Return the cache of the set-up's downloads and builds: $LAKEVISION_CACHE, or lakevision in XDG's cache.

    Raises:
        WrongInput: As `expand_user`.
    """
    if chosen := os.environ.get("LAKEVISION_CACHE"):
        return expand_user(Path(chosen)).absolute()
    return expand_user(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "lakevision"


def s3_endpoint() -> str | None:
    """Return the URL of an S3 server other than Amazon's: $AWS_ENDPOINT_URL, or None."""
    return os.environ.get("AWS_ENDPOINT_URL") or None


def java_command() -> str:
    """Return the java command that Spark starts: $JAVA_HOME/bin/java, or java on PATH."""
    java_home = os.environ.get("JAVA_HOME")
    return str(Path(java_home) / "bin" / "java") if java_home else "java"


def java_environment() -> str:
    """Return the options that every JVM takes from the environment."""
    return " ".join(os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"))


def name_files_in_utf8() -> None:
    """Let programs that this process starts name files in UTF-8, as Python does; Java takes the locale's encoding."""
    if sys.getfilesystemencoding() == "utf-8" and locale.getencoding().lower() != "utf-8":
        os.environ["LC_ALL"] = "C.UTF-8"


def no_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep requests to this machine, and the login in them, away from a proxy."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if "*" not in names:
        names += [name for name in ("127.0.0.1", "localhost") if name not in names]
    # Some clients read the lower-case variable, some the upper-case one.
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(names))


def reach_this_machine_directly() -> None:
    """Let this process and its children reach servers on this machine without the proxy of the environment, if any."""
    if {"http_proxy", "https_proxy", "all_proxy"} & {name.lower() for name, value in os.environ.items() if value}:
        os.environ.update(no_proxy(os.environ))


def spark_variable(name: str) -> str | None:
    """Return a variable that pyspark reads, or None.

    $PYSPARK_PYTHON is the Python interpreter of executors, $SPARK_LOCAL_IP the address that Spark binds to on this
    machine. By others, such as $SPARK_HOME, pyspark starts another Spark than its own.
    """
    return os.environ.get(name) or None


def runs_under_spark_submit() -> bool:
    """Return whether spark-submit started this process, and before it the JVM ($PYSPARK_GATEWAY_PORT)."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def has_spark_secret() -> bool:
    """Return whether the secret of a standalone cluster is in the environment, where Spark's JVM reads it."""
    return bool(os.environ.get(SPARK_SECRET))


PRELOAD = "LAKEVISION_PRELOAD"
"""The variable with the module that the daemon of Spark's Python workers imports; set by `preload` of the session."""


def module_to_preload() -> str | None:
    """Return the module that the daemon of Spark's Python workers imports ($LAKEVISION_PRELOAD), or None."""
    return os.environ.get(PRELOAD) or None


def cxx_compiler() -> str:
    """Return the C++ compiler that `torch.compile` uses for a CPU: $CXX, else g++, on macOS clang++."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def code_version() -> str | None:
    """Return the code version that a container image was built from ($LAKEVISION_CODE_VERSION), or None."""
    return os.environ.get("LAKEVISION_CODE_VERSION") or None


def given_threads() -> int | None:
    """Return the number of compute threads that the launcher of ranks set ($OMP_NUM_THREADS), or None."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else None


def visible_gpus() -> list[str]:
    """Return the GPUs named by $CUDA_VISIBLE_DEVICES; an empty list means all GPUs of the machine."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


_MACHINE_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"),
        *("VIRTUAL_ENV", "CXX", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        # Of file systems and databases: HDFS, Kerberos, PostgreSQL.
        *("CURL_CA_BUNDLE", "JAVA_HOME", "HADOOP_HOME", "HADOOP_CONF_DIR", "KRB5CCNAME", "KRB5_CONFIG", "PGPASSFILE"),
    }
)
"""Variables that every rank has, from its parent or, on another machine, from that machine."""

# Variables that a rank needs from its parent; others (credentials of other services, tokens) are withheld.
_RANK_NAMES = _MACHINE_NAMES | {
    *("TZ", "DO_NOT_TRACK", "GLIBC_TUNABLES", "CUBLAS_WORKSPACE_CONFIG"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
}
PROGRESS_BARS = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
"""The variable that shows MLflow's progress bars, which are meant for notebooks."""

_RANK_PREFIXES = (
    *("LAKEVISION_", "HOROVOD_", "GLOO_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_"),
    # Of tracking and storage; these include credentials, without which a rank can neither read nor log.
    *("MLFLOW_", "DATABRICKS_", "AWS_", "AZURE_", "GOOGLE_", "FSSPEC_", "GIT_PYTHON_"),
)
CALLERS_NAMES = frozenset(
    {
        *("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"),
        *("MLFLOW_RUN_ID", "MLFLOW_RUN_NAME", "MLFLOW_PARENT_RUN_ID", "MLFLOW_NESTED_RUN", "MLFLOW_RUN_CONTEXT"),
        *("MLFLOW_TAGS", "MLFLOW_ACTIVE_MODEL_ID", "MLFLOW_TRACING_DESTINATION"),
    }
)
"""Variables that point at runs, experiments and models of other work in this environment, as `mlflow run` sets them."""

_HOST_NAMES = _MACHINE_NAMES | {
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "NCCL_TOPO_FILE"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE"),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_CLIENT_CERT_PATH"),
    *("TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HOROVOD_TIMELINE"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR"),
}
"""Variables that name files and devices of one machine: a rank on another one has those of its own machine."""

_LIBRARY_PREFIXES = (
    *("CUDA_", "NVIDIA_", "NCCL_", "UCX_", "FI_", "PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_"),
    *("KMP_", "GOMP_", "ONEDNN_", "DNNL_", "HF_", "ARROW_"),
)
"""Prefixes of libraries' settings; tokens among them, such as HF_TOKEN, are of services that no rank uses."""


MALLOC = "glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"
"""Tunables of glibc that keep freed memory for the next step, in huge pages. Each step allocates what the previous one
freed; returning it to the kernel in between took a third of the CPU time of a training run (LOG.md). Other C libraries
ignore them."""


_MEMORY_NAMES = ("GLIBC_TUNABLES", "ARROW_DEFAULT_MEMORY_POOL")


def worker_memory() -> dict[str, str]:
    """Return the variables of Spark's Python workers that choose how memory is allocated, or MALLOC for glibc."""
    return {"GLIBC_TUNABLES": MALLOC, **{name: os.environ[name] for name in _MEMORY_NAMES if name in os.environ}}


CUBLAS_WORKSPACE = ":4096:8"
"""Eight buffers of 4,096 KiB, one of the two settings with which cuBLAS is deterministic even in several concurrent
streams: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility."""


def rank_environment(further: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of a rank: the variables that it needs, and the settings of glibc's malloc and cuBLAS.

    Args:
        further: Names of further variables, `train.environment`.
    """

    def is_passed(name: str) -> bool:
        if name in CALLERS_NAMES or name == API_KEY:
            return False
        if name in _RANK_NAMES or name in further or name.startswith(_RANK_PREFIXES):
            return True
        return name.startswith(_LIBRARY_PREFIXES) and not is_secret(name)

    given = {name: value for name, value in os.environ.items() if is_passed(name)}
    defaults = {"GLIBC_TUNABLES": MALLOC, "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE, PROGRESS_BARS: "false"}
    return defaults | given


def portable_environment(further: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of a rank on another machine, without the variables that are that machine's own.

    Args:
        further: As `rank_environment`; these are passed whatever they name.
    """
    return {
        name: value for name, value in rank_environment(further).items() if name in further or name not in _HOST_NAMES
    }


_LOCAL_RANK, _LOCAL_SIZE = "LAKEVISION_LOCAL_RANK", "LAKEVISION_LOCAL_SIZE"
"""Variables of a rank, set by its launcher."""


def local_rank_environment(local_rank: int, local_size: int) -> dict[str, str]:
    """Return the environment from which a rank reads its number among the ranks of its machine."""
    return {_LOCAL_RANK: str(local_rank), _LOCAL_SIZE: str(local_size)}


def local_rank_and_size() -> tuple[int, int] | None:
    """Return the number of this rank among those of its machine, and how many these are; None without a launcher."""
    given = os.environ.get(_LOCAL_RANK), os.environ.get(_LOCAL_SIZE)
    return None if given[0] is None or given[1] is None else (int(given[0]), int(given[1]))


def ssh_address() -> str | None:
    """Return the address of this machine by which ssh reached it: the third word of $SSH_CONNECTION; None without ssh.

    The four words are addresses and ports of client and server (ssh(1), ENVIRONMENT).
    """
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


_RENDEZVOUS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("LAKEVISION_RENDEZVOUS_HOST", "LAKEVISION_RENDEZVOUS_PORT", "LAKEVISION_RENDEZVOUS_SECRET"),
)
"""Variables of a rendezvous, in the order of its fields; the numbers have the names of torch's own launcher."""


class Rendezvous(NamedTuple):
    """Number of a rank of the backend torch, and the server of its launcher."""

    rank: int
    num_ranks: int
    local_rank: int
    """Number of the rank among those of its machine."""
    local_size: int
    """Number of ranks of its machine."""
    host: str
    port: int
    secret: str

    def environment(self) -> dict[str, str]:
        """Return the environment from which the rank reads them."""
        return dict(zip(_RENDEZVOUS, map(str, self), strict=True))


def rendezvous() -> Rendezvous:
    """Return the rendezvous of this rank, as its launcher set it."""
    *numbers, host, port, secret = (os.environ[name] for name in _RENDEZVOUS)
    rank, num_ranks, local_rank, local_size = map(int, numbers)
    return Rendezvous(rank, num_ranks, local_rank, local_size, host, int(port), secret)


def sets_mlflow_log() -> bool:
    """Return whether a variable is set that MLflow reads, and may refuse, when it is imported, which takes seconds."""
    return bool(os.environ.keys() & {"MLFLOW_CONFIGURE_LOGGING", "MLFLOW_LOGGING_LEVEL"})


def import_configured(*modules: str) -> None:
    """Import modules of libraries that read their settings, from the environment or a file, when they are imported.

    Raises:
        WrongInput: A library refuses one of its settings.
    """
    for module in modules:
        library = module.partition(".")[0]
        printed = StringIO()
        try:
            if module != library:
                # Prefect prints the error as well, in many lines, and raises it only with its first module.
                with redirect_stderr(printed):
                    import_module(library)
            import_module(module)
            sys.stderr.write(printed.getvalue())
        except ValueError as error:  # also of pydantic, and of an invalid TOML file
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            refused = str(error).lower()  # A library may have changed the case of the value.
            given = [
                f"{name} is '{value}'"
                for name, value in os.environ.items()
                if name.startswith(f"{library.upper()}_")
                and (f"'{value}'".lower() in refused or name.lower() in refused)
            ]
            named = " and ".join(given) or f"a setting of {library} is invalid"
            raise WrongInput(
                f"{named}, with which {library} cannot be imported ({problem})",
                way_out=f"correct or unset it, in the environment or in {library}'s own files",
            ) from None


def prefect_url_variable() -> str | None:
    """Return the address of the Prefect server in the environment ($PREFECT_API_URL), or None."""
    return os.environ.get("PREFECT_API_URL") or None


def without_prefect_login(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server that others use: without Prefect's login, which permits to run code."""

    def is_login(name: str) -> bool:
        return name.startswith("PREFECT_") and name.endswith("AUTH_STRING")

    return {name: value for name, value in environment.items() if not is_login(name)}


def api_key() -> str | None:
    """Return the key that a service requires of its clients ($LAKEVISION_API_KEY), or None."""
    return os.environ.get(API_KEY) or None


def tracking_uri() -> str | None:
    """Return the default tracking server, $LAKEVISION_TRACKING_URI, or None.

    MLflow's own variable is not read: MLflow sets it whenever a server is chosen, and a later run of the same process
    with another home would track into the first one's database.
    """
    return os.environ.get("LAKEVISION_TRACKING_URI") or None


def artifacts_url() -> str | None:
    """Return the default location of MLflow's artifacts, $LAKEVISION_ARTIFACTS, or None."""
    return os.environ.get("LAKEVISION_ARTIFACTS") or None


def mlflow_page(tracking: str, location: str) -> str | None:
    """Return the URL of a page in MLflow's UI, or None if no UI shows this tracking database.

    $LAKEVISION_MLFLOW_UI is the UI of $LAKEVISION_TRACKING_URI. Without them, it is the tracking server itself, or the
    port of `make up` for a database. Any other tracking server is its own UI; any other database has none.
    """
    default, is_server = tracking_uri(), tracking.startswith("http")
    other = default is not None and tracking != default
    if other and not is_server:
        return None
    served = tracking if is_server else f"http://127.0.0.1:{MLFLOW_PORT}"
    root = ("" if other else os.environ.get("LAKEVISION_MLFLOW_UI") or "").rstrip("/") or served.rstrip("/")
    return f"{root}{location}"
