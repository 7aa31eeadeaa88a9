"""A worker of a service: versions, batches, request log and explanations, which the application's paths use."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tasks.config.prediction import PredictConfig
from tasks.config.serving import ServeConfig
from tasks.errors import loggable
from tasks.refs import Ref
from tasks.serve.batches import Answered, Batches, Overloaded, Waiting, use_threads
from tasks.serve.journal import FLUSH_SECONDS, Journal, JournalWriter, NewRow
from tasks.serve.metrics import Metrics
from tasks.serve.request_log import has_request, journal_file
from tasks.serve.served import Loaded, ServedModels
from tasks.storage import Storage
from tasks.system.cores import gpu_names, num_cores

if TYPE_CHECKING:
    from tasks.explain.explainer import Explainer, Explanation

MAX_EXPLAINING = 8
"""Requests that may wait for an explanation, which takes as long as several predictions."""


class NotStored(Exception):
    """Feedback cannot be stored now; the message says why."""


class WorkerSettings(Ref):
    """Settings that a worker is started with."""

    serve: ServeConfig
    predict: PredictConfig
    storage: Storage
    served: str
    """File of the served versions."""
    figures: str | None = None
    """Folder of the figures of all workers; None for those of this one."""


class Worker:
    """The state of a worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Prepare; nothing is opened or started before `start`."""
        self.settings, serve = settings, settings.serve
        self.metrics = Metrics()
        self.models = ServedModels(
            Path(settings.served),
            settings.predict,
            lambda alias, version: self.metrics.version.labels(alias).set(version),
        )
        # On a GPU, one lane computes while another one decodes.
        num_lanes = 2 if gpu_names() else max(1, num_cores() // serve.num_workers)
        self.batches = Batches(
            serve,
            num_lanes,
            lambda: self.models.lineup,
            settings.predict.min_probability,
            self.metrics.batch.observe,
            self._log,
        )
        self._writer: JournalWriter | None = None
        self._explaining = ThreadPoolExecutor(1, "lakevision-explain", use_threads, (1,))
        self._num_explaining = 0

    def start(self) -> None:
        """Open the journal, load the versions, and start the threads."""
        if self.settings.serve.log_requests:
            self._writer = JournalWriter(Journal(journal_file(self.settings.storage)), self.metrics.lost.inc)
            self._writer.start()
        self.models.start()
        self.batches.start()

    def end(self) -> None:
        """Answer the images that wait, write the rest of the log, and end the threads."""
        self.batches.close()
        self.models.end()
        self._explaining.shutdown()
        if self._writer is not None:
            self._writer.end()
            self._writer.journal.close()

    async def predict(self, images: Sequence[bytes], top_k: int) -> tuple[str, list[Answered]]:
        """Return the id of a request, and the answers for its images.

        Raises:
            Overloaded: Too many images wait.
            NotReady: No version is loaded.
            TimeoutError: The answers took longer than `serve.request_seconds`.
        """
        # The id begins with the day, by which the log's tables are partitioned.
        request = Waiting(images, top_k, f"{datetime.now(UTC):%Y-%m-%d}-{uuid4().hex}")
        self.batches.add(request)
        async with asyncio.timeout(self.settings.serve.request_seconds):
            answers = await asyncio.wrap_future(request.future)
        return request.request_id, answers

    def _log(self, request: Waiting) -> None:
        """Have the answers for a request written to the journal."""
        for number, answer in request.answers.items():
            outcome = "error" if answer.prediction.error else answer.prediction.label
            known = outcome if outcome in {"error", "unknown", "unsure"} else "label"
            self.metrics.images.labels(answer.model.version.model.version, known).inc()
            if self._writer is None:
                continue
            row, tables = answer_row(request, number, answer), answer.model.version.tables
            if self.settings.serve.keep_images and not answer.prediction.error:
                kept = {"day": row["day"], "sha256": answer.sha256}
                key, content = f"{row['day']} {answer.sha256}", request.images[number]
                self._writer.put("request_images", NewRow(tables, key, kept, content))
            self._writer.put("requests", NewRow(tables, f"{request.request_id} {number}", row))

    async def add_feedback(self, request_id: str, image: int, label: str) -> str:
        """Add the right label of an image; return `added`, `known` if it has one already, or `unknown` for no image.

        Raises:
            NotReady: No version is loaded, whose tables have the answers.
            NotStored: The table of the answers cannot be read.
        """
        assert self._writer is not None, "a service without a log has no feedback"
        champion, journal = self.models.lineup.loaded_champion(), self._writer.journal
        storage = self.settings.storage.model_copy(update={"tables": champion.version.tables})
        key = f"{request_id} {image}"

        def has_answer() -> bool:
            try:
                return journal.has("requests", key) or has_request(storage, request_id, image)
            except Exception as error:  # Each store's package has its own exceptions.
                raise NotStored(loggable(error)) from error

        # The worker that answered may not have written it yet.
        until = time.monotonic() + 4 * FLUSH_SECONDS
        while not await asyncio.to_thread(has_answer):
            if time.monotonic() > until:
                return "unknown"
            await asyncio.sleep(FLUSH_SECONDS)
        given_at = datetime.now(UTC).isoformat()
        row = {"day": request_id[:10], "request_id": request_id, "image": image, "label": label, "given_at": given_at}
        return "added" if await asyncio.to_thread(journal.add_feedback, NewRow(storage.tables, key, row)) else "known"

    async def explain(self, content: bytes, label: str | None) -> "tuple[Loaded, Explanation]":
        """Return the champion, and its explanation of an image.

        Raises:
            BadImage: The image cannot be decoded.
            NotReady: No version is loaded.
            Overloaded: Too many requests wait for an explanation.
            ValueError: The model has no such class, or no layer with places.
        """
        model = self.models.lineup.loaded_champion()
        if self._num_explaining >= MAX_EXPLAINING:
            raise Overloaded(f"more than {MAX_EXPLAINING} images would wait for a heat map: try again in a second")
        self._num_explaining += 1
        try:
            async with asyncio.timeout(self.settings.serve.request_seconds):
                return model, await asyncio.get_running_loop().run_in_executor(
                    self._explaining, lambda: explainer_of(model.version.folder).explain(content, label)
                )
        finally:
            self._num_explaining -= 1


@lru_cache(maxsize=1)  # That of the champion, in the memory of a service that is asked for explanations.
def explainer_of(folder: str) -> "Explainer":
    """Return the explainer of a model package, loaded at the first call."""
    from tasks.explain.explainer import Explainer

    return Explainer(Path(folder))


def answer_row(request: Waiting, number: int, answer: Answered) -> dict[str, Any]:
    """Return the row of `requests` for an image, with times as text."""
    prediction, version, now = answer.prediction, answer.model.version.model, datetime.now(UTC)
    other_version, other_label = answer.other or (None, None)
    return {
        "day": request.request_id[:10],
        "request_id": request.request_id,
        "image": number,
        "answered_at": now.isoformat(),
        "model_name": version.name,
        "model_version": version.version,
        "answered_by": answer.by,
        "label": prediction.label,
        "probability": prediction.probability,
        "top_labels": list(prediction.top_labels[: request.top_k]),
        "top_probabilities": list(prediction.top_probabilities[: request.top_k]),
        "unknown_score": prediction.unknown_score,
        "error": prediction.error,
        "seconds": round(request.seconds, 6),
        "sha256": answer.sha256,
        "other_version": other_version,
        "other_label": other_label,
    }


def start_logging() -> None:
    """Let this process log the service's lines to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("lakevision.serve").setLevel(logging.INFO)
