"""A flow run asks a user a question; its process ends until the answer, and a worker starts it again."""

from collections.abc import Mapping
from typing import Any, Literal, cast

from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.input.actions import create_flow_run_input, read_flow_run_input
from prefect.runtime import deployment, task_run
from prefect.settings import PREFECT_API_URL
from prefect.utilities.urls import url_for
from pydantic import Field, ValidationError

from tasks.errors import WrongInput

DEPLOYMENT = "promote/promote"
"""The deployment whose runs ask."""

ASKED = "asked"
"""Key under which the server keeps the decision on which a flow run asked."""


class Answer(RunInput):
    """The form."""

    decision: Literal["promote", "keep"] = Field(description="promote: it becomes the champion; keep: nothing changes")
    name: str = Field(min_length=1, max_length=100, description="Your name, for the table promotions")
    comment: str = Field("", max_length=500, description="Why")


def check_can_ask() -> None:
    """Check that the run can wait for an answer: its process ends meanwhile, and a worker starts it again.

    Raises:
        WrongInput: The run is not of a deployment.
    """
    if not deployment.get_id():
        raise WrongInput(
            "promote.approval is 'human', for which a worker must start the run again after the answer",
            setting="promote.approval",
            way_out="run the deployment promote, or set promote.approval to auto",
        )


def asked_before() -> Mapping[str, Any] | None:
    """Return the decision on which this flow run asked a user before it was suspended; None if it did not.

    The answer is about this run and this champion, whatever runs and champion there are by now.
    """
    return cast("Mapping[str, Any] | None", read_flow_run_input(ASKED))


def ask(question: str, decision: Mapping[str, Any], timeout_seconds: int, way_out: str) -> Answer:
    """Return the answer; the process ends until it is given, and the flow begins anew.

    Args:
        question: Markdown above the form.
        decision: What `asked_before` returns in the process that the answer starts.
        timeout_seconds: Time after which the server fails the run (s).
        way_out: What the user can do after that.

    Raises:
        WrongInput: The run was failed by the time limit, and is retried.
    """
    if asked_before() is None:
        # On the server: the results of stages may be on a disk of another worker.
        create_flow_run_input(ASKED, decision)
    # A key of its own: after the answer, this call must find the same question.
    form = Answer.with_initial_data(description=question)
    try:
        return suspend_flow_run(wait_for_input=form, timeout=timeout_seconds, key="approval")
    except ValidationError:
        raise WrongInput(
            f"nobody answered within promote.approval_seconds {timeout_seconds}, and a retry cannot ask again",
            setting="promote.approval_seconds",
            way_out=way_out,
        ) from None


def submit_question(config: Mapping[str, Any]) -> str | None:
    """Submit a run of the deployment that asks, and return its URL or name; None without a server or a deployment.

    Args:
        config: Settings of that run.
    """
    if not PREFECT_API_URL.value():
        return None
    try:
        submitted = run_deployment(
            DEPLOYMENT,
            parameters={"config": config},
            timeout=0,
            as_subflow=False,  # It may wait longer than this run lasts.
            idempotency_key=f"{task_run.get_id()}-approval",
        )
    except ObjectNotFound:
        return None
    assert isinstance(submitted, FlowRun), "called without an event loop, run_deployment returns the run"
    return url_for("flow-run", obj_id=submitted.id) or submitted.name
