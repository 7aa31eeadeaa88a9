"""Asynchronous sending of metrics: an outage of the tracking server stops no training run and loses no metric."""

import logging
import queue
import threading
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException

from tasks.errors import RunDeleted, TrackingUnavailable
from tasks.storage import Storage
from tasks.tracking.runs import has_run
from tasks.tracking.server import client_of, is_missing, log_metrics, translate_outage
from tasks.tracking.tracked_run import resume_system_metrics

logger = logging.getLogger("lakevision.tracking")

RETRY_SECONDS = 10.0
"""Delay between two attempts during an outage; MLflow's client makes several requests in each."""

FLUSH_SECONDS = 600.0
"""How long the end of a training run waits for an unavailable server."""


class MetricSender:
    """Sender of metrics in order, from its own thread, with one transaction per epoch.

    MLflow's thread for system metrics ends with the first sample that the server does not accept; it is restarted
    after the outage.
    """

    def __init__(self, storage: Storage, run_id: str, retry_seconds: float = RETRY_SECONDS) -> None:
        self._storage = storage
        self._client: MlflowClient = client_of(storage)
        self._shown = storage.tracking_shown
        self._run_id = run_id
        self._retry_seconds = retry_seconds
        self._waiting: queue.Queue[tuple[list[Metric], list[RunTag]] | None] = queue.Queue()
        self._closing = threading.Event()
        self._deleted = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="metric-sender", daemon=True)
        self._thread.start()

    def steps_sent(self, metric: str) -> set[int]:
        """Return the steps at which the run has this metric already.

        Raises:
            TrackingUnavailable: The server does not answer.
        """
        with translate_outage(self._storage):
            return {found.step for found in self._client.get_metric_history(self._run_id, metric)}

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step, to be sent as soon as the server accepts them."""
        now = int(time.time() * 1000)
        self._waiting.put(([Metric(name, value, now, step) for name, value in values.items()], []))

    def send_tag(self, name: str, value: str) -> None:
        """Queue a tag, to be sent as soon as the server accepts it; an existing value is replaced."""
        self._waiting.put(([], [RunTag(name, value)]))

    def close(self, timeout_seconds: float = FLUSH_SECONDS) -> None:
        """Wait until everything is sent.

        Raises:
            TrackingUnavailable: The server did not answer within `timeout_seconds`.
            RunDeleted: The run was deleted.
            Exception: Any other error that ended the thread before all metrics were sent.
        """
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TrackingUnavailable(
                f"the tracking server '{self._shown}' has not answered for {timeout_seconds:.0f} s",
                way_out="the training state is in its checkpoint; fix the server and run again, and the missing "
                "metrics are sent",
            )
        if self._failed is not None:
            raise self._failed
        if self._deleted:
            raise RunDeleted(
                f"MLflow run {self._run_id} of '{self._shown}' was deleted during training",
                way_out="the training state is in its checkpoint; run again, and training resumes from it in a new run",
            )

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception as error:  # Raised by `close`: an exception in a thread is not seen elsewhere.
            logger.exception("no more metrics are sent: training continues, and fails at its end")
            self._failed = error

    def _send_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            away = False
            while not self._try(item, has_warned=away):
                away = True
                # Shorter once `close` waits for the end.
                time.sleep(min(1.0, self._retry_seconds) if self._closing.wait(self._retry_seconds) else 0.0)
            if away and not self._deleted:
                try:
                    resume_system_metrics(self._storage, self._run_id)
                except Exception as error:  # System metrics are not essential.
                    logger.warning("system metrics are no longer sent: %s", error)
                logger.info("the tracking server '%s' is available again: metrics are sent", self._shown)

    def _try(self, item: tuple[list[Metric], list[RunTag]], *, has_warned: bool) -> bool:
        try:
            try:
                log_metrics(self._storage, self._run_id, *item)
            except MlflowException as error:
                if not self._is_deleted(error):
                    raise
                self._deleted = True
        except (MlflowException, OSError) as error:  # Also from `_is_deleted`, if the outage begins there.
            if not has_warned:
                logger.warning(
                    "the tracking server '%s' does not accept metrics (%s): training continues, they are sent later",
                    self._shown,
                    type(error).__name__,
                )
            return False
        return True

    def _is_deleted(self, error: MlflowException) -> bool:
        return is_missing(error) and not has_run(self._storage, self._run_id)
