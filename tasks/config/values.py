"""Types of single values in settings, whose validators refuse invalid values before any work starts."""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from tasks.credentials import check_url
from tasks.environment import CALLERS_NAMES
from tasks.errors import WrongInput, loggable

MAX_CHARACTERS = 4096
"""Maximum length of a string, that of a path on Linux."""

YEAR_SECONDS = 366 * 86_400
"""Maximum of every timeout, far below the overflow of clocks and locks."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""A fraction, an accuracy or a probability."""

MAX_THREADS = 4096
"""Maximum number of threads and cores on one machine."""

MIN_HEAP_BYTES, MAX_HEAP_BYTES = 512 << 20, 16 << 40
"""Spark refuses a heap of less than 450 MB; no machine has the memory for more than 16 TB."""

FILE_SCHEMES = (
    "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "webhdfs", "ftp", "sftp",
)  # fmt: skip
"""Schemes of URLs that name one file on one server; other fsspec schemes follow references or open archives."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")

_LOCAL_MASTER = r"local(\[(\*|[0-9]{1,9})(, ?[0-9]{1,9})?\])?|local-cluster\[[0-9]+, ?[0-9]+, ?[0-9]+\]"
_PORT = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
_SPARK = rf"[^\s/@:,]+(:{_PORT})?"
_KUBERNETES = r"([^\s/@:,\[\]]+|\[[0-9a-fA-F:.]+\])"
_CLUSTER_MASTER = (
    rf"yarn|spark://{_SPARK}(,{_SPARK})*|k8s://(https?://{_KUBERNETES}(:{_PORT})?|{_KUBERNETES}:{_PORT})(/\S*)?"
)
_MASTER = f"^({_LOCAL_MASTER}|{_CLUSTER_MASTER})$"
"""Pattern of a Spark master, without named groups: browsers and jsonschema read it, too."""

_MODEL_NAME = r"^\w([\w .()-]*[\w)-])?$"


def check_text(text: str) -> str:
    """Return a string unchanged if it is short enough and has neither control characters nor credentials.

    Raises:
        WrongInput: It is too long, or has a control character or credentials in it.
    """
    if len(text) > MAX_CHARACTERS:
        raise WrongInput(f"it has {len(text):,} characters", way_out=f"give at most {MAX_CHARACTERS:,}")
    check_url(text)
    return check_no_control(text)


def check_variable(name: str) -> str:
    """Return the name of an environment variable unchanged.

    Raises:
        WrongInput: It is one of the caller's.
    """
    if name in CALLERS_NAMES:
        raise WrongInput(f"{name} points at other work with MLflow, and ranks never get it", way_out="remove the name")
    return name


def check_no_control(text: str) -> str:
    """Return a string unchanged if it has no control characters.

    Raises:
        WrongInput: It has one, which is not allowed in a path (NUL) or would start a new line (a line break).
    """
    if found := _CONTROL.search(text):
        raise WrongInput(
            f"it is '{loggable(text)}', which has the control character {found[0]!r} in it", way_out="leave that out"
        )
    return text


def check_master(master: str) -> str:
    """Return a valid Spark master unchanged.

    Raises:
        WrongInput: It is not a URL of a Spark master.
    """
    check_url(master)
    local = re.fullmatch(_LOCAL_MASTER, master)
    if local is None and not re.fullmatch(_CLUSTER_MASTER, master):
        raise WrongInput(
            f"it is '{loggable(master)}', which is not a Spark master",
            way_out="give local[*], local[4], spark://host:7077, yarn or k8s://https://host:443",
        )
    cores = local[2] if local else None
    if cores not in {None, "*"} and not 1 <= int(cores) <= MAX_THREADS:
        raise WrongInput(f"it is '{master}', which has {cores} threads", way_out=f"give 1 to {MAX_THREADS}, or *")
    return master


def memory_bytes(memory: str) -> int:
    """Return a memory size in Java's notation, such as 3g, in bytes."""
    return int(memory[:-1]) << {"k": 10, "m": 20, "g": 30, "t": 40}[memory[-1]]


def check_memory(memory: str) -> str:
    """Return a valid size of a Java heap unchanged.

    Raises:
        WrongInput: It is not in Java's notation, or Spark cannot run with it.
    """
    if not re.fullmatch(r"[0-9]{1,15}[kmgt]", memory):
        raise WrongInput(
            f"it is '{loggable(memory)}', which is not a size of memory",
            way_out="write a number with k, m, g or t, as 3g",
        )
    if not MIN_HEAP_BYTES <= memory_bytes(memory) <= MAX_HEAP_BYTES:
        raise WrongInput(f"it is '{memory}', with which Spark cannot run", way_out="give 512m to 16t")
    return memory


def is_url(path: str) -> bool:
    """Return whether a path is the URL of a remote file, or a chained URL of fsspec."""
    return bool(re.match(r"(?!file:)[\w.+-]+(://|::)", path, re.IGNORECASE))


def check_remote_file(url: str) -> str:
    """Return the URL of one remote file unchanged.

    Raises:
        WrongInput: Its scheme is not in FILE_SCHEMES, or it is a chained URL of fsspec.
    """
    scheme, _, rest = url.partition("://")
    # A bracketed IPv6 address has colons, too.
    if "::" in scheme or "::" in (rest.partition("]")[2] if rest.startswith("[") else rest) or not rest:
        raise WrongInput(
            f"it is '{loggable(url)}', a chain of several URLs",
            way_out="copy the file itself to a folder, and give its path or URL",
        )
    if scheme.lower() not in FILE_SCHEMES:
        raise WrongInput(
            f"it is '{loggable(url)}', whose scheme '{loggable(scheme)}' is not one of {', '.join(FILE_SCHEMES)}",
            way_out="use one of them",
        )
    return url


def check_model_name(name: str) -> str:
    """Return a valid name of a registered model unchanged.

    Raises:
        WrongInput: MLflow's registry refuses it, or cannot search for it: in a search, a quote ends the name.
    """
    check_url(name)
    if len(name) > 250 or not re.fullmatch(_MODEL_NAME, name):
        raise WrongInput(
            f"it is '{loggable(name[:MAX_CHARACTERS])}', which is not a name for a registered model",
            way_out=(
                "use at most 250 letters, digits, spaces and _ . - ( ), beginning with a letter or digit, "
                "not ending with a space or dot"
            ),
        )
    return name


Text = Annotated[str, AfterValidator(check_text)]
"""A name or path without control characters and credentials."""

ModelName = Annotated[str, AfterValidator(check_model_name), Field(json_schema_extra={"pattern": _MODEL_NAME})]
"""The name of a registered model."""

SparkMaster = Annotated[str, AfterValidator(check_master), Field(json_schema_extra={"pattern": _MASTER})]
"""The URL of a Spark master."""

Memory = Annotated[str, AfterValidator(check_memory), Field(json_schema_extra={"pattern": "^[0-9]+[kmgt]$"})]
"""The size of a Java heap."""

KeepDays = Annotated[int, BeforeValidator(lambda given: 0 if given is None else given), Field(ge=0, le=36_500)]
"""Days after which something unused is removed, 0 for never; older deployments and runs have None for that."""

Seconds = Annotated[int, Field(ge=1, le=YEAR_SECONDS)]
"""A time limit or an interval, in seconds."""

Epochs = Annotated[int, Field(ge=1, le=10_000)]
"""A number of epochs."""

TableVersion = Annotated[int, Field(ge=0, lt=2**53)]
"""A version of a Delta table; a form's numbers are exact up to 2^53."""

RunId = Annotated[str, Field(max_length=256, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]*$")]
"""The id of an MLflow run, by MLflow's own rule."""

VariableName = Annotated[
    str, AfterValidator(check_variable), Field(max_length=256, pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")
]
"""The name of an environment variable, without its value, which may be a credential."""
