"""The Prefect tasks of a promotion or a rollback, their artifacts, and the form that asks a user to approve one."""

import logging
from typing import Literal

import httpx
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.input.actions import create_flow_run_input, read_flow_run_input
from prefect.runtime import deployment, task_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed
from prefect.utilities.urls import url_for
from pydantic import Field, ValidationError

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig, RollbackConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.environment import mlflow_page
from tasks.errors import WrongInput
from tasks.orchestration.stage import skipped, stage
from tasks.refs import CacheRef, ModelRef, RunRef, TableRef
from tasks.registry.comparison import accuracy_text, comparison_markdown
from tasks.registry.decision import Approval, Promotion
from tasks.registry.promote import check_promotion, promote_best
from tasks.registry.rollback import roll_back
from tasks.storage import Storage
from tasks.text.markup import markdown_table, markdown_text
from tasks.tracking import models

logger = logging.getLogger("lakevision.registry")

WAITING = "Waiting"
"""Name of the state of a promotion that waits for an approval."""

KEPT = "Kept"
"""Name of the state of a promotion that did not change the champion."""


DEPLOYMENT = "promote/promote"
"""The deployment whose runs ask."""

ASKED = "asked"
"""Key under which the server keeps the decision on which a flow run asked."""


@stage("check-promotion", timeout_seconds=1800)
def check_promotable(promote: PromoteConfig, storage: Storage, table: TableRef, cache: CacheRef) -> None:
    """Check before training that the champion under the model's name was trained on the same table."""
    check_promotion(promote, storage, table, cache)


@stage("promote", timeout_in="promote")
def promote_run(
    runs: list[RunRef],
    promote: PromoteConfig,
    storage: Storage,
    spark_config: SparkConfig,
    table: TableRef | None = None,
    approval: Approval | None = None,
    ask_in: StorageConfig | None = None,
    predict: PredictConfig = PredictConfig(),
    reason: str = "",
) -> ModelRef:
    """Promote the best run if it beats the current champion, and return the champion.

    Args:
        runs: As for `promote_best`.
        promote: As for `promote_best`.
        storage: As for `promote_best`.
        spark_config: As for `promote_best`.
        table: As for `promote_best`.
        approval: As for `promote_best`.
        ask_in: Locations of a run of the deployment `promote`, which is submitted if a user must be asked.
        predict: As for `promote_best`.
        reason: As for `promote_best`.

    Raises:
        WrongInput: As for `promote_best`; or a user must be asked, and the model has no champion yet.
    """
    decision = promote_best(runs, promote, storage, table, approval, spark_config, predict, reason)
    publish_promotion(decision, storage)
    if decision.outcome == "waiting":
        where = ask_elsewhere(decision, promote, ask_in, spark_config, predict)
        if decision.previous is None:
            raise WrongInput(
                f"{decision.champion.name} version {decision.champion.version} waits for an approval, and the model "
                "has no champion yet that could predict",
                way_out=f"{where}, then run the flow predict-batch",
            )
        logger.info("%s", where)
        return Completed(name=WAITING, message=decision.sentence, data=decision.previous)  # type: ignore[return-value]  # Prefect unpacks a returned state
    if decision.outcome == "unchanged":
        return skipped(decision.champion, decision.sentence)
    if decision.outcome == "kept":
        # As in `skipped`: Prefect uses a returned state as the task's own.
        return Completed(name=KEPT, message=decision.sentence, data=decision.champion)  # type: ignore[return-value]  # Prefect unpacks a returned state
    return decision.champion


@stage("compare", timeout_in="promote")
def compare_run(
    runs: list[RunRef], promote: PromoteConfig, storage: Storage, spark_config: SparkConfig, predict: PredictConfig
) -> Promotion:
    """Compare the best run with the champion, and publish the figures that a user is asked to decide by."""
    decision = promote_best(runs, promote, storage, spark=spark_config, predict=predict)
    publish_promotion(decision, storage)
    return decision


@stage("rollback", timeout_seconds=1800, retries=0)
def roll_back_champion(rollback: RollbackConfig, storage: Storage, spark_config: SparkConfig) -> ModelRef:
    """Make the previous champion the champion again, and return it; a retry could go back a second time."""
    done = roll_back(rollback, storage, spark_config)
    try:
        create_markdown_artifact(
            f"## Rolled back\n\n{markdown_text(done.sentence)}.\n",
            key="rollback",
            description="Which version is the champion again, and why",
        )
    except (PrefectException, httpx.HTTPError) as error:
        # A failed run would be repeated, and would go back once more.
        logger.warning("rolled back, but the artifact is missing: %s", error)
    return done.champion


def publish_promotion(decision: Promotion, storage: Storage) -> None:
    """Publish the decision and its accuracies as a Markdown artifact, and a link to the champion in MLflow."""
    champion = f"{decision.champion.name} version {decision.champion.version}"
    rows = [
        ["best run", accuracy_text(decision.challenger_accuracy), _count(decision.challenger_images)],
        ["previous champion", accuracy_text(decision.champion_accuracy), _count(decision.champion_images)],
    ]
    table = markdown_table(["", "test accuracy", "test images"], rows)
    details = "" if decision.comparison is None else comparison_markdown(decision.comparison)
    create_markdown_artifact(
        f"## {decision.outcome.capitalize()}\n\n{markdown_text(decision.sentence)}.\n\n{table}\n{details}",
        key="promotion",
        description="Whether the best run became the champion, and why",
    )
    page = mlflow_page(storage.tracking, models.model_location(decision.champion))
    if page is not None:
        create_link_artifact(
            link=page,
            link_text=f"{champion} in MLflow",
            key="champion",
            description=f"The champion, {champion}, in MLflow's model registry: its tags, its run and its files",
        )


def _count(value: int | None) -> str:
    return "unknown" if value is None else str(value)


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
            f"nobody answered within promote.approval_seconds {promote.approval_seconds}, and a retry cannot ask again",
            setting="promote.approval_seconds",
            way_out=f"submit another run of the deployment promote, with run_ids ['{decision.challenger.run_id}']",
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
