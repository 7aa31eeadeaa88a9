"""Credentials have no place in settings: forms, logs, tables and MLflow show those to everybody."""

import re
from typing import Annotated

from pydantic import AfterValidator

CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
"""URLs of Azure name a container where others have a user name: abfss://container@account.dfs.core.windows.net/."""

_SECRET = re.compile(
    r"(secret|password|token|(?<![a-z])sas|(access|account|private|encryption)[._-]?key(_id)?)"
    r"($|[._-](?!(provider|file)([._-]|$)))",
    re.IGNORECASE,
)
"""What a setting is called that holds a secret, and not where one is found; environment variables have underscores."""


def without_credentials(text: str) -> str:
    """Return a text in which three stars stand for the user name and password of every URL."""
    return re.sub(r"(?<=://)[^/\s]*@", "***@", text)


def check_url(url: str) -> str:
    """Return a path or URL as it is, unless a user name or password is in it.

    Raises:
        ValueError: There is one; the sentence does not repeat it.
    """
    scheme, separator, rest = url.partition("://")
    container, _, host = rest.split("/", 1)[0].rpartition("@")
    allowed = scheme.lower() in CONTAINER_SCHEMES and not {":", "@"} & set(container)
    # A key with a slash in it ends the host early: what is left of it looks like a port that is no number.
    if separator and ((container and not allowed) or not re.fullmatch(r"([^:]*|\[.*\])(:\d*)?", host)):
        raise ValueError(
            "it is a URL with a user name or password in it, which logs and tables would show: leave them out, and "
            "give credentials in the environment or in a credential store of Hadoop"
        )
    return url


def check_settings(settings: dict[str, str]) -> dict[str, str]:
    """Return Spark settings as they are, unless one of them is a credential.

    Raises:
        ValueError: Names the setting, and does not repeat its value.
    """
    for name in settings:
        if _SECRET.search(name):
            raise ValueError(
                f"{name} is a credential, which the form and logs would show: give it in the environment "
                "(AWS_ACCESS_KEY_ID, ...), in core-site.xml or in a credential store of Hadoop"
            )
    return settings


Url = Annotated[str, AfterValidator(check_url)]
"""A path or URL in a form."""

SparkSettings = Annotated[dict[str, str], AfterValidator(check_settings)]
"""Settings of Spark in a form."""
