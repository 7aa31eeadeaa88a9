"""Metrics on their way to the tracking server: a server that is away ends no training, and loses no metric."""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import mlflow
from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException

from tasks.errors import RunDeleted, TrackingAway
from tasks.storage import Storage
from tasks.tracking.runs import has_run
from tasks.tracking.server import away_named, client_of
from tasks.tracking.tracked_run import resume_system_metrics

logger = logging.getLogger("lakevision.tracking")

RETRY_SECONDS = 10.0
"""Between two tries while the server is away; MLflow's own client tries several times within each."""

FLUSH_SECONDS = 600.0
"""How long the end of a training waits for a server that is away."""


class _Sent(NamedTuple):
    step: int
    timestamp_ms: int
    values: dict[str, float]
    tags: dict[str, str]


class MetricSender:
    """Sends an epoch's metrics in one transaction each, in their order, from a thread of its own.

    MLflow's own thread for the machine's metrics ends with the first sample that a server does not take: it is started
    again when the server is back.
    """

    def __init__(self, storage: Storage, run_id: str, retry_seconds: float = RETRY_SECONDS) -> None:
        self._storage = storage
        self._client: mlflow.MlflowClient = client_of(storage)
        self._shown = storage.tracking_shown
        self._run_id = run_id
        self._retry_seconds = retry_seconds
        self._waiting: queue.Queue[_Sent | None] = queue.Queue()
        self._closing = threading.Event()
        self._deleted = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="metric-sender", daemon=True)
        self._thread.start()

    def steps_sent(self, metric: str) -> set[int]:
        """Return the steps of which the run has this metric already.

        Raises:
            TrackingAway: The server does not answer.
        """
        with away_named(self._storage):
            return {found.step for found in self._client.get_metric_history(self._run_id, metric)}

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step as soon as the server takes them."""
        self._waiting.put(_Sent(step, int(time.time() * 1000), dict(values), {}))

    def send_tag(self, name: str, value: str) -> None:
        """Send a tag as soon as the server takes it; one of that name is replaced."""
        self._waiting.put(_Sent(0, 0, {}, {name: value}))

    def close(self, timeout_seconds: float = FLUSH_SECONDS) -> None:
        """Wait until all is sent.

        Raises:
            TrackingAway: The server did not answer for so long.
            RunDeleted: The run is not there any more.
            Exception: What else ended the thread, whose metrics are not all sent.
        """
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TrackingAway(
                f"the tracking server '{self._shown}' has not answered for {timeout_seconds:.0f} s: the training is in "
                "its checkpoint; mend the server and run again, and what is missing is sent"
            )
        if self._failed is not None:
            raise self._failed
        if self._deleted:
            raise RunDeleted(
                f"MLflow run {self._run_id} of '{self._shown}' was deleted while it was trained: the training is in "
                "its checkpoint; run again, and it goes on from there in a new run"
            )

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception as error:  # Raised by `close`: nobody sees what ends a thread.
            logger.exception("no more metrics are sent: the training goes on, and fails at its end")
            self._failed = error

    def _send_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            away = False
            while not self._try(item, told=away):
                away = True
                # At the end of a training somebody waits.
                time.sleep(min(1.0, self._retry_seconds) if self._closing.wait(self._retry_seconds) else 0.0)
            if away and not self._deleted:
                try:
                    resume_system_metrics(self._run_id)
                except Exception as error:  # Those of the machine, which are no part of the training.
                    logger.warning("the machine's metrics are not sent any more: %s", error)
                logger.info("the tracking server '%s' is back: metrics are sent", self._shown)

    def _try(self, item: _Sent, *, told: bool) -> bool:
        metrics = [Metric(name, value, item.timestamp_ms, item.step) for name, value in item.values.items()]
        tags = [RunTag(name, value) for name, value in item.tags.items()]
        try:
            try:
                self._client.log_batch(self._run_id, metrics=metrics, tags=tags)
            except MlflowException as error:
                if not self._is_deleted(error):
                    raise
                self._deleted = True
        except (MlflowException, OSError) as error:  # Also where the server went while it was asked for the run.
            if not told:
                logger.warning(
                    "the tracking server '%s' does not take metrics (%s): the training goes on, they are sent later",
                    self._shown,
                    type(error).__name__,
                )
            return False
        return True

    def _is_deleted(self, error: MlflowException) -> bool:
        refused = error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
        return refused and not has_run(self._storage, self._run_id)
