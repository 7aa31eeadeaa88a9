"""The Prefect tasks of a promotion or a rollback, and their artifacts."""

import logging

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import PrefectException
from prefect.states import Completed

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig, RollbackConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.orchestration.stage import publish_mlflow_page, skipped, stage
from tasks.refs import CacheRef, ModelRef, RunRef, TableRef
from tasks.registry.approval import ask_elsewhere
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
    about = f"The champion, {champion}, in MLflow's model registry: its tags, its run and its files"
    location = models.model_location(decision.champion)
    publish_mlflow_page(storage, location, "champion", f"{champion} in MLflow", about)


def _count(value: int | None) -> str:
    return "unknown" if value is None else str(value)
