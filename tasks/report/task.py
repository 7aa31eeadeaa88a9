"""Prefect artifacts of a training run: tables, a link to MLflow, and the model card with its figures."""

import json
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.orchestration.stage import publish_mlflow_page
from tasks.refs import RunRef
from tasks.report import CLASSES_FILE, MODEL_CARD_FILE
from tasks.report.page import card_with_figures, run_figures
from tasks.storage import Storage
from tasks.text.markup import in_cells


def publish_run(run: RunRef, storage: Storage, key: str) -> None:
    """Publish the artifacts of a run: tables of metrics and classes, the model card, and a link to MLflow."""
    from tasks.tracking.runs import (  # Here: it loads MLflow, which a process that starts ranks needs only at the end.
        SYSTEM_METRICS,
        read_artifact,
        run_location,
        run_metrics,
    )

    metrics = run_metrics(storage, run)
    wanted = {name: value for name, value in metrics.items() if not name.startswith(SYSTEM_METRICS)}
    create_table_artifact(
        table=[_rounded({"metric": name, "value": value}) for name, value in sorted(wanted.items())],
        key=f"{key}-metrics",
        description=f"MLflow run {run.run_id}",
    )
    about = "The training run in MLflow: settings, metrics per epoch, figures, model card, and the model"
    publish_mlflow_page(storage, run_location(storage, run), f"{key}-run", "MLflow run", about)
    # Runs of older versions, which had no model cards, are reused as well.
    if (table := read_artifact(storage, run, CLASSES_FILE)) is not None:
        classes = json.loads(table)
        create_table_artifact(
            table=[_rounded(dict(zip(classes["columns"], row, strict=True))) for row in classes["data"]],
            key=f"{key}-classes",
            description=f"Precision, recall and F1 of each class on the split test, MLflow run {run.run_id}",
        )
    if (card := read_artifact(storage, run, MODEL_CARD_FILE)) is not None:
        create_markdown_artifact(
            card_with_figures(card.decode(), run_figures(run, storage)),
            key=f"{key}-model-card",
            description=f"MLflow run {run.run_id}",
        )


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return in_cells({name: four_digits(value) if isinstance(value, float) else value for name, value in row.items()})


def four_digits(value: float) -> float:
    """Return a metric rounded to four decimals, or to four significant digits if it is below 1."""
    return round(value, 4) if abs(value) >= 1 else float(f"{value:.4g}")
