"""The one place that reads the environment."""

import os
import sys
from pathlib import Path

MLFLOW_PORT = 5000
"""Of MLflow's UI, if $LAKEVISION_MLFLOW_PORT names no other."""


def lakevision_home() -> Path:
    """Return the folder under which a run writes everything: $LAKEVISION_HOME, or ./.lakevision."""
    return Path(os.environ.get("LAKEVISION_HOME") or ".lakevision").expanduser().absolute()


def download_cache() -> Path:
    """Return the user's cache of what set-up fetched or built: $LAKEVISION_CACHE, or lakevision under the XDG cache."""
    if chosen := os.environ.get("LAKEVISION_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lakevision"


def java_command() -> str:
    """Return the java that Spark starts: $JAVA_HOME/bin/java, or the one on PATH."""
    java_home = os.environ.get("JAVA_HOME")
    return str(Path(java_home) / "bin" / "java") if java_home else "java"


def cxx_compiler() -> str:
    """Return the one C++ compiler that `torch.compile` tries for a CPU: $CXX, or else g++, on macOS clang++."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def code_version() -> str | None:
    """Return the code version an image was built from ($LAKEVISION_CODE_VERSION), or None."""
    return os.environ.get("LAKEVISION_CODE_VERSION") or None


def given_threads() -> int | None:
    """Return the threads that a launcher of ranks gave this process to compute with ($OMP_NUM_THREADS), or None."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else None


def visible_gpus() -> list[str]:
    """Return the GPUs that this process is told to see, $CUDA_VISIBLE_DEVICES; none named means all that there are."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


# What a rank or a JVM needs from its parent; the rest (credentials of other services, tokens) stays behind.
_RANK_NAMES = frozenset(
    {
        *(
            "PATH",
            "HOME",
            "USER",
            "LANG",
            "LC_ALL",
            "TZ",
            "TMPDIR",
            "LD_LIBRARY_PATH",
            "PYTHONPATH",
            "VIRTUAL_ENV",
            "DO_NOT_TRACK",
            "GLIBC_TUNABLES",
            "CUBLAS_WORKSPACE_CONFIG",
            "CXX",
        ),
        *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME"),
    }
)
_RANK_PREFIXES = (
    *("LAKEVISION_", "HOROVOD_", "NCCL_", "GLOO_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_"),
    *("MLFLOW_", "AWS_", "AZURE_", "GOOGLE_", "GIT_PYTHON_"),
)


MALLOC = "glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"
"""Keeps freed memory for the next step, in huge pages: a step allocates what the one before it has freed, and giving it
back to the kernel and taking it again was a third of a training's CPU time (LOG.md). Other C libraries look past it."""


CUBLAS_WORKSPACE = ":4096:8"
"""Eight buffers of 4,096 KiB, one of the two settings with which cuBLAS gives the same result each time also where it
runs in several streams at once: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility."""


def rank_environment() -> dict[str, str]:
    """Return what a rank starts with: the part of the environment that it needs, its memory, and cuBLAS's."""
    return {"GLIBC_TUNABLES": MALLOC, "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE} | {
        name: value for name, value in os.environ.items() if name in _RANK_NAMES or name.startswith(_RANK_PREFIXES)
    }


def tracking_uri() -> str | None:
    """Return the default tracking server, $LAKEVISION_TRACKING_URI, or None.

    Not MLflow's own variable: MLflow writes it whenever a server is chosen, and a later run of the same process
    under another home would track into the first one's.
    """
    return os.environ.get("LAKEVISION_TRACKING_URI") or None


def mlflow_page(tracking: str, location: str) -> str | None:
    """Return where a browser finds a page of MLflow, or None where no UI shows this tracking database.

    $LAKEVISION_MLFLOW_UI shows what $LAKEVISION_TRACKING_URI names; without them it is the tracking server's own page,
    or `make up`'s port. A server chosen beside them is its own page; a database chosen beside them has none.
    """
    default, is_server = tracking_uri(), tracking.startswith("http")
    other = default is not None and tracking != default
    if other and not is_server:
        return None
    served = tracking if is_server else f"http://127.0.0.1:{MLFLOW_PORT}"
    root = ("" if other else os.environ.get("LAKEVISION_MLFLOW_UI") or "").rstrip("/") or served.rstrip("/")
    return f"{root}{location}"
