"""The training stage as a Prefect task: one process, outside the flow's own, so that its heartbeats go on."""

import json
import logging
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.context import TaskRunContext

from tasks import tracking
from tasks.config import DistributedConfig, SparkConfig, TrainConfig
from tasks.distributed.launch import launch_ranks
from tasks.distributed.spec import RankSpec
from tasks.environment import mlflow_page
from tasks.etl.delta import check_table_path
from tasks.etl.snapshots import at_version
from tasks.markup import in_cells, markdown_link
from tasks.orchestration.task import flow_run_tags, skipped, stage
from tasks.progress.epochs import EpochProgress
from tasks.refs import CacheRef, RepeatReport, RunRef, TableRef
from tasks.spark import without_spark_first
from tasks.storage import Storage
from tasks.train.first_training import FirstTraining, read_training
from tasks.train.identity import run_key
from tasks.train.report_files import (
    CALIBRATION_FILE,
    CLASSES_FILE,
    CONFUSION_FILE,
    LEARNING_CURVES_FILE,
    MISTAKES_FILE,
    MODEL_CARD_FILE,
)
from tasks.train.thumbnails import fit_pictures

logger = logging.getLogger("lakevision.train")

MAX_PICTURE_BYTES = 200_000
"""Of all pictures together that go into a Prefect artifact, which is a row of its server's database."""


def train_with_artifacts(spec: RankSpec, key: str) -> RunRef:
    """Train in processes of their own, with the progress of the epochs and the metrics at the end."""
    epochs = EpochProgress(key, spec.train.total_epochs)
    run = launch_ranks(spec, epochs.hear)
    epochs.end()
    publish_run(run, spec.storage, key)
    return run


def publish_run(run: RunRef, storage: Storage, key: str) -> None:
    """Publish a run: metrics and classes as tables, its model card, and a link to it in MLflow."""
    metrics = tracking.run_metrics(storage, run)
    wanted = {name: value for name, value in metrics.items() if not name.startswith(tracking.SYSTEM_METRICS)}
    create_table_artifact(
        table=[in_cells({"metric": name, "value": four_digits(value)}) for name, value in sorted(wanted.items())],
        key=f"{key}-metrics",
        description=f"MLflow run {run.run_id}",
    )
    page = mlflow_page(storage.tracking, tracking.run_location(storage, run))
    if page is not None:
        create_link_artifact(
            link=page,
            link_text="MLflow run",
            key=f"{key}-run",
            description="The training run in MLflow: settings, metrics per epoch, figures, model card, and the model",
        )
    # Runs of before there were model cards are found and not trained again.
    if (table := tracking.read_artifact(storage, run, CLASSES_FILE)) is not None:
        classes = json.loads(table)
        create_table_artifact(
            table=[
                in_cells(
                    {
                        name: four_digits(value) if isinstance(value, float) else value
                        for name, value in zip(classes["columns"], row, strict=True)
                    }
                )
                for row in classes["data"]
            ],
            key=f"{key}-classes",
            description=f"Precision, recall and F1 of each class on the split test, MLflow run {run.run_id}",
        )
    if (card := tracking.read_artifact(storage, run, MODEL_CARD_FILE)) is not None:
        create_markdown_artifact(
            f"{card.decode()}\n{_pictures(run, storage, page)}",
            key=f"{key}-model-card",
            description=f"MLflow run {run.run_id}",
        )


def four_digits(value: float) -> float:
    """Return a metric as a table shows it: four digits after the point, or four that count where it is smaller."""
    return round(value, 4) if abs(value) >= 1 else float(f"{value:.4g}")


def _pictures(run: RunRef, storage: Storage, page: str | None) -> str:
    """Return the figures of a run as Markdown, smaller where there is little room, and where they are in full.

    In the text itself, as data: an image artifact is no more than a URL, and MLflow may be a database that nobody
    serves, or a server that this process reaches and the reader's browser does not. Last, so that a UI that shows no
    such picture still shows everything else.
    """
    names = (LEARNING_CURVES_FILE, CALIBRATION_FILE, CONFUSION_FILE, MISTAKES_FILE)
    contents = {name: tracking.read_artifact(storage, run, name) for name in names}
    figures = {name: content for name, content in contents.items() if content is not None}
    shown = [f"![{name}]({uri})" for name, uri in fit_pictures(figures, MAX_PICTURE_BYTES).items()]
    everything = markdown_link("all training runs", mlflow_page(storage.tracking, tracking.runs_location(storage)))
    where = (
        "All figures in full, tables and event files are among the artifacts of "
        f"{markdown_link('the MLflow run', page)}; {everything} are listed with their metrics."
    )
    return "\n\n".join(["## Figures", *shown, where])


def existing_run_key(
    train: TrainConfig, cache: CacheRef, storage: Storage, distributed: DistributedConfig | None
) -> str | None:
    """Return a cache key where the finished MLflow run still exists, else None."""
    if not tracking.answers(storage):
        return None  # The stage itself waits for the server, and says so.
    found = tracking.find_finished_run(storage, run_key(train, cache, distributed))
    return None if found is None else f"train-{found.run_id}"


def _key(_context: TaskRunContext, parameters: dict[str, Any]) -> str | None:
    return existing_run_key(parameters["train"], parameters["cache"], parameters["storage"], None)


@stage("train", timeout_seconds=None, cache_key=_key)
def train_single(train: TrainConfig, cache: CacheRef, storage: Storage) -> RunRef:
    """Train in one process, or find the same training finished."""
    if found := tracking.find_finished_run(storage, run_key(train, cache, None)):
        publish_run(found, storage, "train")
        return skipped(found, f"MLflow run {found.run_id} has trained this already")
    spec = RankSpec(train=train, distributed=None, cache=cache, storage=storage, tags=flow_run_tags())
    return train_with_artifacts(spec, "train")


@stage("read-training", timeout_seconds=1800)
def read_first_training(run_id: str | None, storage: Storage) -> FirstTraining:
    """Read what a finished MLflow run trained, and from what."""
    # Or a server that is away would be one that does not have the run.
    tracking.check_tracking(storage)
    return read_training(run_id, storage)


@stage("choose-trained-images", timeout_seconds=1800)
def choose_trained_images(first: FirstTraining, storage: Storage, spark: SparkConfig) -> TableRef:
    """Return the table version that a run was trained from."""
    check_table_path(first.table)
    return without_spark_first(lambda session: at_version(session, first.table, first.version), spark, storage)


@stage("repeat-training", timeout_seconds=None)
def train_again(first: FirstTraining, cache: CacheRef, storage: Storage) -> RepeatReport:
    """Train again what a run trained, and show both beside each other."""
    from tasks.train.repeat import repeat_training  # Here: it loads torch, which no other stage of this module needs.

    report = repeat_training(first, cache, storage, flow_run_tags())
    rows = [in_cells(pair.model_dump() | {"agrees": pair.agrees}) for pair in report.metrics]
    weights = "equal" if report.weights_equal else "not equal"
    about = f"MLflow run {report.run_id} repeats {report.repeat_of}; the weights are {weights}"
    create_table_artifact(table=rows, key="repeat-comparison", description="; ".join([about, *report.differences]))
    publish_run(RunRef(run_id=report.run_id), storage, "repeat")
    return report
