"""Detection and removal of credentials in settings, which forms, logs, tables and MLflow show to everybody."""

import re
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator

CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
"""Azure's URLs have a container in place of the user name: abfss://container@account.dfs.core.windows.net/."""

KEYSTORE_SCHEMES = ("jceks", "bcfks")
"""URLs of Hadoop's credential stores have a file system in its place: jceks://hdfs@host:8020/keys.jceks."""

BUCKET_SCHEMES = ("s3", "s3a", "s3n", "gs", "gcs", "oss", "obs", "cosn")
"""URLs of object stores name a bucket, which has no port: a colon there ends a user name."""

_SECRET = re.compile(
    r"(secret|passw(or)?d|passphrase|(?<![a-z])(pwd|pass|sas|sig)|(?-i:(?<=[a-z])Pass)|signature|token|"
    r"(secret|access|account|private|encryption|api|shared|client)[._-]?key([._-]?id)?)"
    r"\d*($|[._-](?!provider([._-]|$)|(file|path)$))"
    r"|credentials?$|odbc_connect$|(?<![a-z])auth$",
    re.IGNORECASE,
)
"""Matches the name of a setting that holds a secret, but not of a setting that holds its location.

Words match as a whole or at the end of another word (keyStorePassword); environment variables have underscores. Short
words do not match within another word, such as pass in bypass.
"""

_IN_QUERY = re.compile(r"^(key|pass|auth|googleaccessid)$", re.IGNORECASE)
"""Further names of secrets among the query parameters of a URL."""

# All repeats are bounded, so that the time is linear in the length of the text.
_AUTHORITY, _PORT = re.compile(r"[^/\s@'\"\[]{0,501}"), re.compile(r"\d{0,501}([/\s'\",;)?#]|$)")
_PASSWORD, _NAME = re.compile(r"[^\s'\"]{0,2001}"), re.compile(r"[^/\s'\"?#]{0,2001}")

_HOST = r"([^:]*|\[.*\])(:\d*)?"
_SCHEME = re.compile(r"([\w.+-]*):$")

_NAMED = re.compile(
    r"(?<![\w.%])(?P<name>[\w%][\w.%-]{0,100})(?P<equals>\s{0,3}=\s{0,3}|\"\s{0,3}:\s{0,3})"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&'\"]+)"
)
"""A name and its value in a URL's query, a Java option, a connection string, or JSON."""


class ShownCredential(ValueError):
    """A setting that is or has a credential; the message does not repeat it.

    Attributes:
        way_out: Advice how to continue, which ends the message after a colon.
    """

    def __init__(self, message: str, way_out: str) -> None:
        super().__init__(f"{message}: {way_out}")
        self.way_out = way_out


def is_secret(name: str, in_query: bool = False) -> bool:
    """Return whether a setting, environment variable or query parameter of this name holds a secret."""
    return bool(_SECRET.search(name) or (in_query and _IN_QUERY.search(name)))


def _scheme(text: str, place: int) -> str | None:
    """Return the scheme of a URL whose `//` is at `place`, in lower case."""
    found = _SCHEME.search(text[max(place - 40, 0) : place])
    return None if found is None else found[1].lower()


def _end_of_user(text: str, begin: int, scheme: str | None) -> int:
    """Return the place of the at sign after a user name and password that begin at `begin`, or -1."""
    colon = _place_after(_AUTHORITY, text, begin)
    while (colon := text.rfind(":", begin, colon)) >= 0:
        # A key with a slash ends the authority early: the rest of it looks like a port that is not a number.
        if scheme in BUCKET_SCHEMES or not _PORT.match(text, colon + 1):
            found = text.rfind("@", colon + 1, _place_after(_PASSWORD, text, colon + 1))
            if found >= 0:
                return found
            break
    return text.rfind("@", begin, _place_after(_NAME, text, begin))


def _place_after(pattern: re.Pattern[str], text: str, begin: int) -> int:
    found = pattern.match(text, begin)
    return begin if found is None else found.end()


def _users(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of user names and passwords in the URLs of a text, from `//` to the place after `@`."""
    last, place = text.rfind("@"), text.find("//")
    while 0 <= place < last:
        scheme = _scheme(text, place)
        end = _end_of_user(text, place + 2, scheme)
        if end >= 0 and _is_user(scheme, text[place + 2 : end]):
            yield place, end + 1
        place = text.find("//", place + 1 if end < 0 else end + 1)


def _is_user(scheme: str | None, user: str) -> bool:
    if scheme is None:
        return ":" in user  # without a scheme, only a user name with a password makes it a URL
    return scheme not in (*CONTAINER_SCHEMES, *KEYSTORE_SCHEMES) or bool({":", "@"} & set(user))


def _names_secret(found: re.Match[str]) -> bool:
    before = found.string[max(found.start() - 1, 0) : found.start()]
    return found["value"] != "***" and is_secret(unquote(found["name"]), in_query=before in {"?", "&"})


def without_credentials(text: str) -> str:
    """Return a text with `***` for the user name and password of each URL, and for each value named as a secret."""
    shown, rest = [], 0
    for begin, end in _users(text):
        shown += [text[rest:begin], "//***@"]
        rest = end
    return _NAMED.sub(
        lambda found: f"{found['name']}{found['equals']}***" if _names_secret(found) else found[0],
        "".join([*shown, text[rest:]]),
    )


def check_url(url: str) -> str:
    """Return a path or URL unchanged if it contains neither a user name, nor a password, nor another secret.

    Raises:
        ShownCredential: It contains one, which the message does not repeat.
    """
    scheme, separator, rest = url.partition("://")
    container, _, host = rest.split("/", 1)[0].split("?", 1)[0].rpartition("@")
    allowed = scheme.lower() in CONTAINER_SCHEMES and not {":", "@"} & set(container)
    # A chained URL of fsspec (zip://a.csv::https://host/a.zip) has a colon here; where it is invalid, it is refused.
    odd_port = "::" not in url and not all(re.fullmatch(_HOST, each) for each in host.split(","))
    in_url = separator and ((container and not allowed) or odd_port)
    if in_url or any(_users(url)):
        raise ShownCredential(
            "it is a URL with a user name or password, which logs and tables would show",
            "give them in the environment or in a credential store of Hadoop instead",
        )
    # In a path and in file://, a question mark does not begin a query: photos?token=1 is the name of a folder.
    if (separator or url.startswith("//")) and scheme.lower() != "file":
        for found in _NAMED.finditer(url):
            if found.start() and url[found.start() - 1] in "?&;#" and _names_secret(found):
                raise ShownCredential(
                    f"it is a URL with a secret in it ({unquote(found['name'])}), which logs and tables would show",
                    "leave it out, and give it in the environment or in a credential store of Hadoop",
                )
    return url


def check_settings(settings: dict[str, str]) -> dict[str, str]:
    """Return Spark settings unchanged if none of them is a credential or has one in its value.

    Raises:
        ShownCredential: One is or has; the message names the setting and does not repeat its value.
    """
    for name, value in settings.items():
        if is_secret(name):
            raise ShownCredential(
                f"{name} is a credential, which the form and logs would show",
                "give it in the environment (AWS_ACCESS_KEY_ID, ...), in core-site.xml or in a credential store of "
                "Hadoop",
            )
        if without_credentials(value) != value:
            raise ShownCredential(
                f"the value of {name} has a credential in it, which the form and logs would show",
                "give it in the environment, in core-site.xml or in a credential store of Hadoop instead",
            )
    return settings


JobVariable = bool | int | float | str | list[str] | dict[str, str]
"""A value of a job variable; dicts are those of environment variables, labels and the like."""


def check_job_variables(variables: dict[str, JobVariable]) -> dict[str, JobVariable]:
    """Return the job variables of a submitted run unchanged if none of them is a credential or has one in its value.

    Raises:
        ShownCredential: One is or has; the message names the variable and does not repeat its value.
    """
    for name, value in variables.items():
        for inner, text in (value if isinstance(value, dict) else {"": value}).items():
            shown = f"{name}.{inner}" if inner else name
            if is_secret(name) or is_secret(inner) or without_credentials(str(text)) != str(text):
                raise ShownCredential(
                    f"{shown} is or has a credential, which the form and logs would show",
                    "give it in the environment of the worker, or in the base job template of the pool",
                )
    return variables


JobVariables = Annotated[dict[str, JobVariable], AfterValidator(check_job_variables)]
"""Job variables without credentials, as a type for settings."""

Url = Annotated[str, AfterValidator(check_url)]
"""A path or URL without credentials, as a type for settings."""

SparkSettings = Annotated[dict[str, str], AfterValidator(check_settings)]
"""Spark settings without credentials, as a type for settings."""
