"""The repetition of a training run as Prefect tasks."""

from prefect.artifacts import create_table_artifact

from tasks.config.storage import SparkConfig
from tasks.orchestration.task import flow_run_tags, stage
from tasks.refs import CacheRef, RepeatReport, RunRef, TableRef
from tasks.repeat.original_run import OriginalRun, read_training
from tasks.report.task import publish_run
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tables.delta import check_table_path
from tasks.tables.snapshots import at_version
from tasks.text.markup import in_cells
from tasks.tracking.server import check_tracking


@stage("read-training", timeout_seconds=1800)
def read_original_run(run_id: str | None, storage: Storage) -> OriginalRun:
    """Read settings and data version of a finished MLflow run."""
    # Otherwise an unreachable server would look like a server without the run.
    check_tracking(storage)
    return read_training(run_id, storage)


@stage("choose-trained-images", timeout_seconds=1800)
def choose_trained_images(original: OriginalRun, storage: Storage, spark_config: SparkConfig) -> TableRef:
    """Return the table version that a run was trained on."""
    check_table_path(original.table)
    return try_without_spark(
        lambda session: at_version(session, original.table, original.version), spark_config, storage
    )


@stage("repeat-training", timeout_seconds=None)
def repeat_original_run(original: OriginalRun, cache: CacheRef, storage: Storage) -> RepeatReport:
    """Repeat a training run, and publish a comparison with the original."""
    from tasks.repeat.repeat import repeat_training  # Here: it loads torch, which no other stage of this module needs.

    report = repeat_training(original, cache, storage, flow_run_tags())
    rows = [in_cells(pair.model_dump() | {"agrees": pair.agrees}) for pair in report.metrics]
    weights = "equal" if report.weights_equal else "not equal"
    about = f"MLflow run {report.run_id} repeats {report.repeat_of}; the weights are {weights}"
    create_table_artifact(table=rows, key="repeat-comparison", description="; ".join([about, *report.differences]))
    publish_run(RunRef(run_id=report.run_id), storage, "repeat")
    return report
