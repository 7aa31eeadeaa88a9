"""The hosts of distributed training: their names and the number of ranks on each, as one setting."""

import re
from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator, Field

from tasks.credentials import check_url
from tasks.errors import loggable

MAX_SLOTS = 4096
"""Maximum number of ranks on one host."""

# No leading '-', which ssh would read as an option, and no user or port, which belong into ssh's configuration.
_HOST = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}:[1-9][0-9]{0,3}"
_HOSTS = rf"^({_HOST}( ?, ?{_HOST})*)?$"


def parse_hosts(hosts: str, without: Collection[str] = ()) -> list[tuple[str, int]]:
    """Return the names of the hosts and the number of ranks that fit on each, in the given order.

    Args:
        hosts: The setting.
        without: Names of hosts to leave out.
    """
    places = [place.strip().rpartition(":") for place in hosts.split(",") if place.strip()]
    return [(name, int(slots)) for name, _, slots in places if name not in without]


def check_hosts(hosts: str) -> str:
    """Return a valid list of hosts unchanged.

    Raises:
        ValueError: It is not a list of names and numbers, or names a host twice.
    """
    check_url(hosts)
    if not re.fullmatch(_HOSTS, hosts):
        raise ValueError(
            f"it is '{loggable(hosts)}', which is not a list of hosts: write names and numbers of ranks, as "
            "node1:4,node2:4, with user, port and key of a host in ssh's configuration"
        )
    names = [name for name, _ in parse_hosts(hosts)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"it is '{hosts}', which names '{twice[0]}' twice: give each host once, with all of its ranks")
    if too_many := [slots for _, slots in parse_hosts(hosts) if slots > MAX_SLOTS]:
        raise ValueError(f"it is '{hosts}', with {too_many[0]} ranks on a host: give at most {MAX_SLOTS}")
    return hosts


Hosts = Annotated[str, AfterValidator(check_hosts), Field(json_schema_extra={"pattern": _HOSTS})]
"""A list of hosts with their numbers of ranks, such as node1:4,node2:4."""
