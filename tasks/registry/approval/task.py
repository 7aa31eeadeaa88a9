"""The question to a user whether a run becomes the champion, as a form in the Prefect UI."""

from typing import Literal

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

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.registry.comparison import comparison_markdown
from tasks.registry.decision import Approval, Promotion
from tasks.text.markup import markdown_text

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
            "promote.approval is 'human', for which a worker must start the run again after the answer: run the "
            "deployment promote, or set promote.approval to auto"
        )


def asked_before() -> Promotion | None:
    """Return the decision on which this flow run asked a user before it was suspended; None if it did not.

    The answer is about this run and this champion, whatever runs and champion there are by now.
    """
    found = read_flow_run_input(ASKED)
    return None if found is None else Promotion.model_validate(found)


def ask(decision: Promotion, promote: PromoteConfig) -> Approval:
    """Return the answer; the process ends until it is given, and the flow begins anew.

    After `promote.approval_seconds` without an answer, the server fails the run.

    Raises:
        WrongInput: The run was failed by the time limit, and is retried.
    """
    if asked_before() is None:
        # On the server: the results of stages may be on a disk of another worker.
        create_flow_run_input(ASKED, decision.model_dump(mode="json"))
    # A key of its own: after the answer, this call must find the same question.
    form = Answer.with_initial_data(description=question(decision))
    try:
        answer = suspend_flow_run(wait_for_input=form, timeout=promote.approval_seconds, key="approval")
    except ValidationError:
        raise WrongInput(
            f"nobody answered within promote.approval_seconds {promote.approval_seconds}, and a retry cannot ask again:"
            f" submit another run of the deployment promote, with run_ids ['{decision.challenger.run_id}']"
        ) from None
    return Approval(
        approved=answer.decision == "promote",
        by=answer.name,
        comment=answer.comment,
        champion_version=None if decision.previous is None else decision.previous.version,
    )


def question(decision: Promotion) -> str:
    """Return the question with all figures as Markdown."""
    figures = "" if decision.comparison is None else comparison_markdown(decision.comparison)
    asked = f"{decision.champion.name} version {decision.champion.version}"
    return f"## Shall {markdown_text(asked)} become the champion?\n\n{markdown_text(decision.reason)}.\n{figures}"


def ask_elsewhere(
    decision: Promotion,
    promote: PromoteConfig,
    storage: StorageConfig | None,
    spark: SparkConfig,
    predict: PredictConfig,
) -> str:
    """Submit a run of the deployment `promote` that asks; return what a user has to do, as a part of a sentence.

    Args:
        decision: A decision that waits for an approval.
        promote: Settings of the gate.
        storage: Locations as the user gave them; None if no run is to be submitted.
        spark: Settings of the Spark session.
        predict: Settings of inference.
    """
    by_hand = f"run the deployment promote with run_ids ['{decision.challenger.run_id}'] and answer its question"
    if storage is None or not PREFECT_API_URL.value():
        return by_hand
    config = {
        "run_ids": [decision.challenger.run_id],
        # The name of this table's model: the run may record another table with the same images.
        "promote": promote.model_dump(mode="json") | {"model_name": decision.champion.name},
        "storage": storage.model_dump(mode="json"),
        "spark": spark.model_dump(mode="json"),
        "predict": predict.model_dump(mode="json"),
    }
    try:
        submitted = run_deployment(
            DEPLOYMENT,
            parameters={"config": config},
            timeout=0,
            as_subflow=False,  # It may wait longer than this run lasts.
            idempotency_key=f"{task_run.get_id()}-approval",
        )
    except ObjectNotFound:
        return by_hand
    assert isinstance(submitted, FlowRun), "called without an event loop, run_deployment returns the run"
    return f"answer the question of {url_for('flow-run', obj_id=submitted.id) or submitted.name}"
