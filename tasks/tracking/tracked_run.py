"""An open MLflow run: its metrics, tables, figures and model, and its data as datasets, one per split."""

import hashlib
import json
import logging
import posixpath
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Run, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.utils.autologging_utils import BatchMetricsLogger
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from tasks.config.frozen import flat_params
from tasks.credentials import without_credentials
from tasks.errors import AccessDenied, TrackingUnavailable
from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tracking.files import log_table, log_text, run_files
from tasks.tracking.logged_model import log_package
from tasks.tracking.models import DESCRIPTION_TAG, MAX_RUN_DESCRIPTION, fit_description
from tasks.tracking.runs import CODE_TAG, KEY_TAG, code_commit, context_tags, log_settings, version_params
from tasks.tracking.server import client_of, log_metrics, prepare_writing, translate_outage

logger = logging.getLogger("lakevision.tracking")

DATASET_ATTEMPTS = 5
"""Attempts to log the datasets of a run while other runs log the same ones."""

SAMPLING_SECONDS = 2.0
"""Interval of system metrics, for runs of a few seconds, too: MLflow's default is 10 s, with none at the end."""

UNIQUE_VIOLATED = re.compile(r"unique constraint|duplicate (key|entry)", re.IGNORECASE)
"""Message of SQLite, PostgreSQL or MySQL about a row that another process has just added."""


DELTA_SOURCE = "delta_table"
"""The source type by which `mlflow.data.get_source` resolves a Delta table."""

DIGEST_CHARACTERS = 16
"""MLflow accepts at most 36 and shows all of them in its lists; 64 bits distinguish the versions of a table."""

TABLE_CHARACTERS = 8
"""Characters of the digest that distinguish tables with the same content."""

NAME_CHARACTERS = 100


@dataclass(frozen=True)
class TrainingData:
    """The version of a table that a run is trained on."""

    table: TableRef
    content_digest: str
    rows: Mapping[str, int]
    """Images by split."""
    source: str | None
    """Folder or URL that the images came from; None if the table does not record it."""


@dataclass(frozen=True)
class TrackedRun:
    """A running MLflow run."""

    storage: Storage
    run_id: str
    code_version: str | None = None
    """Commit of the code that started the run, if it is known."""
    params: dict[str, str] = field(default_factory=dict)
    """Parameters of the run when it was opened; empty for a new run."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics at a step, except those that the run already has with the same values."""
        existing = client_of(self.storage).get_run(self.run_id).data.metrics
        now = int(time.time() * 1000)
        new = [Metric(name, value, now, step) for name, value in metrics.items() if existing.get(name) != value]
        log_metrics(self.storage, self.run_id, new)

    def log_table(self, rows: dict[str, list[Any]], name: str) -> None:
        """Log a table, given as columns by name, as JSON that the UI shows; an existing table is replaced."""
        log_table(self.storage, self.run_id, rows, name)

    def log_figure(self, figure: Any, name: str) -> None:
        """Log a matplotlib figure."""
        with TemporaryDirectory() as scratch, warnings.catch_warnings():
            # The font lacks some scripts, and matplotlib logs a line for each of their letters.
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            figure.savefig(Path(scratch) / name)
            run_files(self.storage, self.run_id).log_artifact(f"{scratch}/{name}")

    def log_text(self, text: str, name: str) -> None:
        """Log a text file."""
        log_text(self.storage, self.run_id, text, name)

    def log_data(self, data: TrainingData) -> None:
        """Log the training data as datasets of the run; a resumed run keeps those that it has."""
        if client_of(self.storage).get_run(self.run_id).inputs.dataset_inputs:
            return  # Of an older release, with other digests.
        for attempts_left in reversed(range(DATASET_ATTEMPTS)):
            try:
                client_of(self.storage).log_inputs(self.run_id, datasets=dataset_inputs(data))
            except MlflowException as error:
                # MLflow looks for a dataset before it adds it: another run on the same data may add it in between.
                if not attempts_left or not UNIQUE_VIOLATED.search(str(error)):
                    raise
            else:
                return

    def set_tag(self, name: str, text: str) -> None:
        """Set a tag of the run."""
        client_of(self.storage).set_tag(self.run_id, name, text)

    def describe(self, text: str) -> None:
        """Set the run's description, in Markdown, which is shown at the top of its page."""
        self.set_tag(DESCRIPTION_TAG, fit_description(text, MAX_RUN_DESCRIPTION))

    def log_folder(self, folder: Path, name: str) -> None:
        """Log the files of a folder into the folder `name` of the artifacts."""
        run_files(self.storage, self.run_id).log_artifacts(str(folder), name)

    def log_model(self, folder: Path) -> None:
        """Log the model package with the files that `save_classifier` wrote into `folder`."""
        log_package(self.storage, self.run_id, folder)


@contextmanager
def tracked_run(
    storage: Storage, name: str, key: str, config: dict[str, Any], tags: dict[str, str], resume: str | None
) -> Iterator[TrackedRun]:
    """Open a new MLflow run, or resume one; it ends as finished, failed or killed.

    Args:
        storage: Storage with the tracking URI.
        name: Name of a new run.
        key: Key of the inputs, by which `find_unfinished_run` and `find_finished_run` find the run.
        config: Settings of the training run; a resumed run keeps the values that it already has.
        tags: Tags in addition to that of the key.
        resume: Id of the run to resume, or None.

    Raises:
        TrackingUnavailable, AccessDenied: The server does not answer or denies access, here or within the context.
        BaseException: Any error raised within the context, also if the server does not accept the final status.
    """
    within: BaseException | None = None
    try:
        with translate_outage(storage):  # outside, since setting the final status sends a request as well
            run = _opened(storage, name, {KEY_TAG: key, **tags}, resume)
            status = RunStatus.FAILED
            try:
                code, params = run.data.tags.get(CODE_TAG) or code_commit(), flat_params(config) | version_params()
                log_settings(storage, run, config, params, {CODE_TAG: code} if code else {})
                yield TrackedRun(storage, run.info.run_id, code, dict(run.data.params))
                status = RunStatus.FINISHED
            except BaseException as raised:
                within = raised
                if isinstance(raised, KeyboardInterrupt):
                    status = RunStatus.KILLED
                raise
            finally:
                client_of(storage).set_terminated(run.info.run_id, RunStatus.to_string(status))
                monitors.pop(run.info.run_id).finish()
    except (TrackingUnavailable, AccessDenied) as away:
        if within in (None, away) or isinstance(within, MlflowException):
            raise
        logger.warning("MLflow run %s is left as running: %s", run.info.run_id, away)
    if within is not None:
        raise within


def _opened(storage: Storage, name: str, tags: dict[str, str], resume: str | None) -> Run:
    """Return a new run, or the resumed one, with a thread that logs system metrics.

    A new run is created with its key, so that the run of a killed process can always be found.
    """
    client, experiment = client_of(storage), prepare_writing(storage)
    if resume is None:
        run = client.create_run(experiment.experiment_id, tags=context_tags() | tags, run_name=name)
    else:
        client.update_run(resume, RunStatus.to_string(RunStatus.RUNNING))
        client.log_batch(resume, tags=[RunTag(tag, value) for tag, value in tags.items()])
        run = client.get_run(resume)
    _start_monitor(storage, run.info.run_id, is_resumed=resume is not None)
    return run


class _Samples(BatchMetricsLogger):  # type: ignore[misc]  # MLflow has no types
    """Log of system metrics without the model that the process has set as active."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        super().__init__(run_id, storage.tracking)
        self._storage = storage

    def _timed_log_batch(self) -> None:
        log_metrics(self._storage, self.run_id, self.data)


monitors: dict[str, SystemMetricsMonitor] = {}
"""MLflow's threads for system metrics, by run."""


def _start_monitor(storage: Storage, run_id: str, *, is_resumed: bool) -> None:
    monitor = SystemMetricsMonitor(
        run_id, sampling_interval=SAMPLING_SECONDS, resume_logging=is_resumed, tracking_uri=storage.tracking
    )
    monitor.mlflow_logger = _Samples(storage, run_id)
    monitors[run_id] = monitor
    monitor.start()


def resume_system_metrics(storage: Storage, run_id: str) -> None:
    """Restart MLflow's thread for system metrics of a run if it has ended, since the server did not accept a sample."""
    monitor = monitors.get(run_id)
    if monitor is None or monitor._process is None or monitor._process.is_alive():
        return
    monitor.finish()
    _start_monitor(storage, run_id, is_resumed=True)


def dataset_inputs(data: TrainingData) -> list[DatasetInput]:
    """Return a dataset per split.

    MLflow's own `load_delta` uses a digest of the query plan, which does not depend on the content, and its source
    lacks version 0 and the table's id.
    """
    source = {
        "path": without_credentials(data.table.path),
        "delta_table_version": data.table.version,
        "delta_table_id": data.table.table_id,
        "images_from": data.source,
    }
    # MLflow takes datasets of one name and digest for the same, and would show the source of the first one.
    table = hashlib.sha256(f"{data.table.path}|{data.table.table_id}".encode()).hexdigest()
    digest = f"{data.content_digest[:DIGEST_CHARACTERS]}-{table[:TABLE_CHARACTERS]}"
    schema = {"mlflow_colspec": [{"name": "content", "type": "binary"}, {"name": "label", "type": "string"}]}
    return [
        DatasetInput(
            Dataset(
                # The split is part of the name, since a run stores each pair of name and digest only once.
                name=f"{_short_name(data)} v{data.table.version} {split}",
                digest=digest,
                source_type=DELTA_SOURCE,
                source=json.dumps({name: value for name, value in source.items() if value not in (None, "")}),
                schema=json.dumps(schema),
                profile=json.dumps({"num_rows": rows, "content_digest": data.content_digest}),
            ),
            tags=[InputTag(MLFLOW_DATASET_CONTEXT, split)],
        )
        for split, rows in data.rows.items()
    ]


def _short_name(data: TrainingData) -> str:
    """Return the last folder of the source, or that of the table's path if the source is unknown."""
    name = posixpath.basename((data.source or data.table.path).rstrip("/"))
    # Folder names may have line breaks and escape sequences; MLflow's lists show one line.
    shown = "".join(character if character.isprintable() else " " for character in name)
    return " ".join(shown.split())[:NAME_CHARACTERS] or "images"
