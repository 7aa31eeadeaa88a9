"""The Prefect tasks that check and carry out a promotion or a rollback, and their artifacts."""

import logging

import httpx
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.exceptions import PrefectException
from prefect.states import Completed

from tasks import tracking
from tasks.config.promotion import PromoteConfig
from tasks.config.rollback import RollbackConfig
from tasks.environment import mlflow_page
from tasks.orchestration.task import skipped, stage
from tasks.refs import CacheRef, ModelRef, RunRef, TableRef
from tasks.registry.decision import Comparison, Promotion
from tasks.registry.promote import check_promotion, promote_best
from tasks.registry.rollback import roll_back
from tasks.storage import Storage
from tasks.text.markup import markdown_table, markdown_text

logger = logging.getLogger("lakevision.registry")

NUM_CLASSES = 50
"""Maximum number of classes in the artifact."""

KEPT = "Kept"
"""Name of the state of a promotion that did not change the champion."""


@stage("check-promotion", timeout_seconds=1800)
def check_promotable(promote: PromoteConfig, storage: Storage, table: TableRef, cache: CacheRef) -> None:
    """Check before training that the champion under the model's name was trained on the same table."""
    check_promotion(promote, storage, table, cache)


@stage("promote", timeout_in="promote")
def promote_run(
    runs: list[RunRef], promote: PromoteConfig, storage: Storage, table: TableRef | None = None
) -> ModelRef:
    """Promote the best run if it beats the current champion, and return the champion."""
    decision = promote_best(runs, promote, storage, table)
    publish_promotion(decision, storage)
    if decision.outcome == "unchanged":
        return skipped(decision.champion, decision.sentence)
    if decision.outcome == "kept":
        # As in `skipped`: Prefect uses a returned state as the task's own.
        return Completed(name=KEPT, message=decision.sentence, data=decision.champion)  # type: ignore[return-value]  # Prefect unpacks a returned state
    return decision.champion


@stage("rollback", timeout_seconds=1800, retries=0)
def roll_back_champion(rollback: RollbackConfig, storage: Storage) -> ModelRef:
    """Make the previous champion the champion again, and return it; a retry could go back a second time."""
    done = roll_back(rollback, storage)
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
        ["best run", _accuracy(decision.challenger_accuracy), _count(decision.challenger_images)],
        ["previous champion", _accuracy(decision.champion_accuracy), _count(decision.champion_images)],
    ]
    table = markdown_table(["", "test accuracy", "test images"], rows)
    details = "" if decision.comparison is None else comparison_markdown(decision.comparison)
    create_markdown_artifact(
        f"## {decision.outcome.capitalize()}\n\n{markdown_text(decision.sentence)}.\n\n{table}\n{details}",
        key="promotion",
        description="Whether the best run became the champion, and why",
    )
    page = mlflow_page(storage.tracking, tracking.model_location(decision.champion))
    if page is not None:
        create_link_artifact(
            link=page,
            link_text=f"{champion} in MLflow",
            key="champion",
            description=f"The champion, {champion}, in MLflow's model registry: its tags, its run and its files",
        )


def comparison_markdown(found: Comparison) -> str:
    """Return the figures of both models on the same images, and their recall by class, as Markdown."""
    figures = [
        ["accuracy", _accuracy(found.challenger_accuracy), _accuracy(found.champion_accuracy)],
        ["macro F1", _accuracy(found.challenger_macro_f1), _accuracy(found.champion_macro_f1)],
        ["images that only this model classifies correctly", str(found.only_challenger), str(found.only_champion)],
    ]
    if found.challenger_milliseconds is not None and found.champion_milliseconds is not None:
        figures.append(
            ["ms for an image", f"{found.challenger_milliseconds:.1f}", f"{found.champion_milliseconds:.1f}"]
        )
    # The classes that lost most come first: they are what a reader looks for.
    by_change = sorted(found.classes, key=lambda one: one.challenger - one.champion)
    classes = [
        [markdown_text(one.label), str(one.images), _accuracy(one.challenger), _accuracy(one.champion)]
        for one in by_change[:NUM_CLASSES]
    ]
    omitted = len(by_change) - len(classes)
    return "\n".join(
        [
            "",
            f"### On the same {found.images} images",
            "",
            markdown_table(["", "best run", "champion"], figures),
            "",
            f"McNemar's exact test: p = {found.p_value:.3g}.",
            "",
            markdown_table(["class", "images", "recall, best run", "recall, champion"], classes),
            *(["", f"{omitted} more classes, which lost less, are not shown."] if omitted > 0 else []),
            "",
        ]
    )


def _accuracy(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else str(value)
