"""What every flow shares: results as JSON, and Prefect's own data under the home folder when it is called plainly."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import BaseModel

from tasks.config import StorageConfig
from tasks.home import PRIVATE_FOLDER, make_home, make_private_file
from tasks.storage import resolve_storage

logger = logging.getLogger("lakevision.home")

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def temporary_server_under(home: Path) -> Iterator[None]:
    """Let the temporary server of a plain call keep its database and results below `home`, and call nobody.

    Changes nothing where a server is configured, and no setting that a person made.
    """
    if PREFECT_API_URL.value():
        yield
        return
    if closed := make_home(home):
        logger.warning("%s", closed)
    folder = home / "prefect"
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    make_private_file(folder / "temporary.db")
    defaults = {
        # Not the database of `make up`: that server may run at the same time.
        "server.database.connection_url": f"sqlite+aiosqlite:///{folder / 'temporary.db'}",
        "results.local_storage_path": folder / "storage",
        "server.analytics_enabled": False,
        # Its first start, from a cold disk, takes longer than Prefect's 20 s.
        "server.ephemeral.startup_timeout_seconds": 120,
    }
    with temporary_settings(set_defaults=defaults):
        yield


class DagFlow(Flow[P, R]):
    """A flow whose plain call leaves everything it writes in one folder; a worker runs it like any flow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the flow in this process."""
        config = args[0] if args else kwargs.get("config")
        storage = getattr(config, "storage", None) if isinstance(config, BaseModel) else None
        with temporary_server_under(Path(resolve_storage(storage or StorageConfig()).home)):
            return super().__call__(*args, **kwargs)


def dag_flow(name: str) -> Callable[[Callable[P, R]], DagFlow[P, R]]:
    """Make a flow; its results are JSON and not pickles, since they may come from another machine."""

    def decorate(function: Callable[P, R]) -> DagFlow[P, R]:
        return DagFlow(function, name=name, persist_result=True, result_serializer="json")

    return decorate
