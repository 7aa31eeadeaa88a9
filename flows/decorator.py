"""What every flow shares: results as JSON, one home folder for a plain call, and why it failed or was cancelled."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from httpx import HTTPError, HTTPStatusError, codes
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.callables import get_call_parameters
from pydantic import BaseModel, ValidationError

from tasks.cancellation.task import finish_cancellation, is_being_cancelled, signal_behind
from tasks.config.storage import StorageConfig
from tasks.errors import UserError, WrongInput, explain
from tasks.orchestration.failure import shorten_logs, without_secrets
from tasks.orchestration.task import explain_failure, failed_state
from tasks.storage import resolve_storage
from tasks.system.home import PRIVATE_FOLDER, make_home, make_private_file

logger = logging.getLogger("lakevision.home")

P = ParamSpec("P")
R = TypeVar("R")


def check_server() -> None:
    """Refuse to begin a run on a configured server that is away, or that refuses the login.

    Raises:
        WrongInput: Names the server and the variables to look at.
    """
    server = f"the Prefect server '{PREFECT_API_URL.value()}' (PREFECT_API_URL)"
    try:
        with get_client(sync_client=True) as client:
            client.api_version()  # and not its health, which needs no login
    except HTTPError as error:
        if isinstance(error, HTTPStatusError) and error.response.status_code == codes.UNAUTHORIZED:
            raise WrongInput(f"{server} refuses the login: set PREFECT_API_AUTH_STRING, as 'make up' says") from None
        raise WrongInput(
            f"{server} does not answer ({type(error).__name__}: {error}): start it, with 'make up' where it is the "
            "stack's, or unset PREFECT_API_URL to run without it"
        ) from None


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
        if PREFECT_API_URL.value() and FlowRunContext.get() is None:
            check_server()
        with temporary_server_under(Path(resolve_storage(storage or StorageConfig()).home)):
            return super().__call__(*args, **kwargs)

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters as the flow takes them.

        Raises:
            WrongInput: One of them has a value it cannot have.
        """
        try:
            return super().validate_parameters(parameters)
        except ParameterTypeError as error:
            if isinstance(error.__context__, ValidationError):
                raise WrongInput(explain(error.__context__)) from None
            raise


def _tell_how_it_ends(begun: DagFlow[P, R], function: Callable[P, R]) -> Callable[P, R]:
    """Return the function of a flow, which then says on the run's page why the run failed, or that it was cancelled."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        shorten_logs(is_being_cancelled)  # The first of a run that is called in its process.
        try:
            # Here and not by Prefect, which would fail the run without calling this: wrong values are explained, too.
            validated = begun.validate_parameters(get_call_parameters(function, args, kwargs))
            return function(**validated)  # type: ignore[call-arg]  # no type names its parameters
        except TerminationSignal:
            finish_cancellation()
            raise
        except Exception as error:
            if (signal := signal_behind(error)) is not None:
                finish_cancellation()
                raise signal from None
            explain_failure(error)
            if isinstance(error, UserError):
                # Prefect raises the error that the state holds, for a plain call as for any other.
                return failed_state(error)  # type: ignore[return-value]
            clean = without_secrets(error)
            if clean is not error:
                raise clean from None
            raise

    return run


def dag_flow(name: str) -> Callable[[Callable[P, R]], DagFlow[P, R]]:
    """Make a flow; its results are JSON and not pickles, since they may come from another machine."""

    def decorate(function: Callable[P, R]) -> DagFlow[P, R]:
        made = DagFlow(function, name=name, persist_result=True, result_serializer="json", validate_parameters=False)
        # Only now: Prefect has read the flow's file and parameters off the function itself.
        made.fn = _tell_how_it_ends(made, function)
        # What another flow hands over is not for a person: the form would show an empty alternative.
        made.parameters.properties.pop("cache_ref", None)
        return made

    return decorate
