"""The decorator of all flows: JSON results, one home folder for a direct call, and explained failures."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from httpx import HTTPError, HTTPStatusError, codes
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext, get_settings_context
from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.callables import get_call_parameters
from pydantic import BaseModel, ValidationError

from tasks.checks.given import check_given
from tasks.config.storage import StorageConfig
from tasks.environment import prefect_url_variable, reach_this_machine_directly
from tasks.errors import UserError, WrongInput, invalid_settings
from tasks.orchestration.cancellation import (
    causing_signal,
    finish_cancellation,
    is_being_cancelled,
    watched_cancellation,
)
from tasks.orchestration.failure import shorten_logs, without_secrets
from tasks.orchestration.stage import explain_failure, failed_state, note_host
from tasks.storage import resolve_storage
from tasks.system.home import PRIVATE_FOLDER, check_home, make_home, make_private_file

logger = logging.getLogger("lakevision.home")

P = ParamSpec("P")
R = TypeVar("R")


def check_server() -> None:
    """Check that the configured Prefect server answers and accepts the login.

    Raises:
        WrongInput: It does not; the message names the server and the variables to set.
    """
    profile = get_settings_context().profile
    where, unset = "PREFECT_API_URL", "unset PREFECT_API_URL"
    if prefect_url_variable() is None and PREFECT_API_URL in profile.settings:
        where = f"of the Prefect profile '{profile.name}'"
        unset = f"run 'prefect --profile {profile.name} config unset PREFECT_API_URL'"
    elif prefect_url_variable() is None:
        where, unset = "of .env, prefect.toml or pyproject.toml", "remove it there"
    server = f"the Prefect server '{PREFECT_API_URL.value()}' ({where})"
    try:
        with get_client(sync_client=True) as client:
            client.api_version()  # not the health endpoint, which needs no login
    except HTTPError as error:
        if isinstance(error, HTTPStatusError) and error.response.status_code == codes.UNAUTHORIZED:
            raise WrongInput(
                f"{server} refuses the login", way_out="set PREFECT_API_AUTH_STRING as printed by 'make up'"
            ) from None
        raise WrongInput(
            f"{server} does not answer ({type(error).__name__}: {error})",
            way_out=f"start it ('make up' starts that of the local stack), or {unset} to run without it",
        ) from None


def temporary_server_under(home: Path) -> AbstractContextManager[object]:
    """Keep database and results of a direct call's temporary server below `home`, and turn off its analytics.

    Has no effect where a server is configured, and overrides no setting of the user.
    """
    if PREFECT_API_URL.value():
        return nullcontext()
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
        # Its first start, from a cold disk, takes longer than Prefect's default of 20 s.
        "server.ephemeral.startup_timeout_seconds": 120,
    }
    return temporary_settings(set_defaults=defaults)


class DagFlow(Flow[P, R]):
    """A flow whose direct call writes everything into one folder; a worker runs it like any other flow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the flow in this process."""
        reach_this_machine_directly()
        config = args[0] if args else kwargs.get("config")
        given = getattr(config, "storage", None) if isinstance(config, BaseModel) else None
        if PREFECT_API_URL.value() and FlowRunContext.get() is None:
            check_server()
        storage = resolve_storage(given or StorageConfig())
        home = Path(storage.home)
        check_home(home, storage.home_entries if PREFECT_API_URL.value() else (*storage.home_entries, "prefect"))
        if isinstance(config, BaseModel) and FlowRunContext.get() is None:
            check_given(config)
        try:
            with temporary_server_under(home):
                return super().__call__(*args, **kwargs)
        except UserError as error:
            # Without Prefect's frames, which say nothing to its user; the run's log has them.
            raise error.with_traceback(None) from None

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the validated parameters of the flow.

        Raises:
            WrongInput: A parameter has an invalid value.
        """
        try:
            return super().validate_parameters(parameters)
        except ParameterTypeError as error:
            if isinstance(error.__context__, ValidationError):
                raise invalid_settings(error.__context__) from None
            raise


def _report_outcome(wrapped_flow: DagFlow[P, R], function: Callable[P, R]) -> Callable[P, R]:
    """Wrap the function of a flow so that the run's page shows why it failed, or that it was cancelled."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        shorten_logs(is_being_cancelled)  # Nothing of this project runs earlier in the run's process.
        try:
            note_host()
            # Here and not by Prefect, which would fail the run without calling this: wrong values are explained, too.
            validated = wrapped_flow.validate_parameters(get_call_parameters(function, args, kwargs))
            with watched_cancellation():
                return function(**validated)  # type: ignore[call-arg]  # P does not name its parameters
        except TerminationSignal:
            finish_cancellation()
            raise
        except Exception as error:
            if (signal := causing_signal(error)) is not None:
                finish_cancellation()
                raise signal from None
            explain_failure(error)
            if isinstance(error, UserError):
                # Prefect raises the error that the state holds, for a direct call as for any other.
                return failed_state(error)  # type: ignore[return-value]  # Prefect unpacks a returned state
            clean = without_secrets(error)
            if clean is not error:
                raise clean from None
            raise

    return run


def dag_flow(name: str) -> Callable[[Callable[P, R]], DagFlow[P, R]]:
    """Return a decorator that makes a flow; results are JSON, not pickles, as they may come from another machine."""

    def decorate(function: Callable[P, R]) -> DagFlow[P, R]:
        created = DagFlow(function, name=name, persist_result=True, result_serializer="json", validate_parameters=False)
        # Only after the constructor, by which Prefect reads the flow's file and parameters from the function itself.
        created.fn = _report_outcome(created, function)
        # Only other flows pass this parameter, and the form would show an empty alternative for it.
        created.parameters.properties.pop("cache_ref", None)
        return created

    return decorate
