"""Batches of images across requests: each lane, a thread, predicts what waits, and then what has come meanwhile."""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tasks.config.serving import ServeConfig
from tasks.serve.served import Lineup, Loaded

if TYPE_CHECKING:
    from tasks.model_package.classifier import Prediction

logger = logging.getLogger("lakevision.serve")

MAX_THREADS = 8
"""Threads of a lane that computes alone. OpenMP keeps those of each lane: without a bound, the square of the cores."""


class Overloaded(Exception):
    """More would wait than may; the message says what."""


@dataclass
class Answered:
    """The answer for an image of a request.

    Attributes:
        prediction: The prediction.
        by: Alias of the version that answers, `champion` or `challenger`.
        model: The version that answers.
        sha256: Digest of the image.
        other: Version and label of the version that did not answer, in a live test.
    """

    prediction: "Prediction"
    by: str
    model: Loaded
    sha256: str
    other: tuple[int, str | None] | None = None


@dataclass
class Waiting:
    """A request whose images wait.

    Attributes:
        images: The images.
        top_k: Number of classes in an answer.
        request_id: Its id.
        seconds: Time from here to the answers.
        future: Gets the answers, in the order of the images.
        answers: The answers so far.
        num_finished: Number of images of which nothing is left to predict.
    """

    images: Sequence[bytes]
    top_k: int
    request_id: str
    seconds: float = 0.0
    _began: float = field(default_factory=time.perf_counter)
    future: "Future[list[Answered]]" = field(default_factory=Future)
    answers: dict[int, Answered] = field(default_factory=dict)
    num_finished: int = 0


class Place(NamedTuple):
    """An image of a request."""

    request: Waiting
    number: int


class Batches:
    """The queue of a worker, and its lanes.

    One lane per core. Where all are busy, each has one thread of computation: one decodes while another computes, and
    no batch waits at the end of each layer for the slowest thread. Alone, a lane has the threads of all.
    """

    def __init__(
        self,
        serve: ServeConfig,
        num_lanes: int,
        lineup: Callable[[], Lineup],
        min_probability: float,
        on_batch: Callable[[int], None],
        on_finished: Callable[[Waiting], None],
    ) -> None:
        """Prepare the lanes.

        Args:
            serve: Settings.
            num_lanes: Number of lanes.
            lineup: Returns the versions for the next batch.
            min_probability: As in `ImageClassifier.predict`.
            on_batch: Called with the size of each batch.
            on_finished: Called with each request of which nothing is left to predict.
        """
        self._serve, self._lineup, self._min_probability = serve, lineup, min_probability
        self._on_batch, self._on_finished = on_batch, on_finished
        self._changed = threading.Condition()
        self._places: deque[Place] = deque()
        self._num_arriving = 0
        self._num_busy = 0
        self._oldest = 0.0
        self._is_closed = False
        self._counting = threading.Lock()
        self._lanes = [
            threading.Thread(target=self._run, args=(num_lanes,), name=f"lakevision-lane-{number}", daemon=True)
            for number in range(num_lanes)
        ]

    def start(self) -> None:
        """Start the lanes."""
        for lane in self._lanes:
            lane.start()

    def close(self) -> None:
        """Predict the images that wait, and end the lanes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Mark a request whose images are still being received: a batch waits a moment for them."""
        self._num_arriving += 1  # Only the thread of the event loop counts.
        try:
            yield
        finally:
            self._num_arriving -= 1

    def add(self, request: Waiting) -> None:
        """Let the images of a request wait for their predictions.

        Raises:
            Overloaded: Too many images wait.
            NotReady: No version is loaded.
        """
        self._lineup().loaded_champion()  # Without one, the request is refused at once.
        with self._changed:
            if len(self._places) + len(request.images) > self._serve.max_waiting:
                raise Overloaded(f"more than {self._serve.max_waiting} images would wait: try again in a second")
            if not self._places:
                self._oldest = time.monotonic()
            self._places.extend(Place(request, number) for number in range(len(request.images)))
            self._changed.notify_all()  # A request may be larger than a batch.

    def _run(self, num_lanes: int) -> None:
        num_threads = 0
        while batch := self._take():
            if (share := min(MAX_THREADS, max(1, num_lanes // self._num_busy))) != num_threads:
                use_threads(share)
                num_threads = share
            self._on_batch(len(batch))
            try:
                try:
                    self._predict(batch)
                finally:  # Also if one of two versions failed: the answers of the other one were given.
                    self._finish(batch)
            except Exception as error:  # Of one batch: the requests of others are answered.
                logger.exception("a batch of %d images failed", len(batch))
                for request in requests_of(batch):
                    with suppress(InvalidStateError):  # It has an answer, or its client has gone.
                        request.future.set_exception(error)
            with self._changed:
                self._num_busy -= 1

    def _take(self) -> list[Place]:
        """Wait for images, and return those of the next batch; none once the queue is closed and empty."""
        with self._changed:
            while True:
                while not self._places and not self._is_closed:
                    self._changed.wait()
                latest = self._oldest + self._serve.max_wait_milliseconds / 1000
                while 0 < len(self._places) < self._serve.max_batch and self._num_arriving and not self._is_closed:
                    if (left := latest - time.monotonic()) <= 0:
                        break
                    self._changed.wait(left)
                batch: list[Place] = []
                while self._places and len(batch) < self._serve.max_batch:
                    place = self._places.popleft()
                    if not place.request.future.cancelled():  # Its client has gone, or its time is over.
                        batch.append(place)
                self._oldest = time.monotonic()
                self._num_busy += bool(batch)
                if batch or (self._is_closed and not self._places):
                    return batch

    def _predict(self, batch: Sequence[Place]) -> None:
        lineup = self._lineup()
        champion = lineup.loaded_champion()
        digests = [hashlib.sha256(place.request.images[place.number]).hexdigest() for place in batch]
        sides = [self._side(digest, lineup) for digest in digests]
        for side, own, other in (
            ("champion", champion, lineup.challenger),
            ("challenger", lineup.challenger, champion),
        ):
            chosen = [number for number, found in enumerate(sides) if found == side]
            if not chosen or own is None:
                continue
            places = [batch[number] for number in chosen]
            for place, number, prediction in zip(places, chosen, self._predictions(own, places), strict=True):
                place.request.answers[place.number] = Answered(prediction, side, own, digests[number])
            self._answer(places)
            if other is not None and (self._serve.challenger == "shadow" or side == "challenger"):
                self._add_others(places, other)

    def _finish(self, batch: Sequence[Place]) -> None:
        """Report the requests of which nothing is left to predict, and which have all answers."""
        for request in requests_of(batch):
            with self._counting:  # Another lane may have other images of the request.
                request.num_finished += sum(place.request is request for place in batch)
                is_finished = request.num_finished == len(request.images) == len(request.answers)
            if is_finished and not request.future.cancelled():
                self._on_finished(request)

    def _add_others(self, places: Sequence[Place], other: Loaded) -> None:
        """Add what the other version would have answered, after the answers: nobody waits for it."""
        try:
            predictions = self._predictions(other, places)
        except Exception:  # The answers are logged without it.
            logger.exception("version %d failed in a live test", other.version.model.version)
            return
        for place, prediction in zip(places, predictions, strict=True):
            place.request.answers[place.number].other = other.version.model.version, prediction.label

    def _side(self, digest: str, lineup: Lineup) -> str:
        """Return the alias of the version that answers for an image: the same one each time that it comes."""
        if self._serve.challenger != "answers" or lineup.challenger is None:
            return "champion"
        return "challenger" if int(digest[:8], 16) / 2**32 < self._serve.challenger_share else "champion"

    def _predictions(self, model: Loaded, places: Sequence[Place]) -> "list[Prediction]":
        contents = [place.request.images[place.number] for place in places]
        top_k = max(place.request.top_k for place in places)
        return model.classifier.predict(contents, top_k, self._min_probability, model.unknown_rate)

    def _answer(self, places: Sequence[Place]) -> None:
        """Give the requests whose images have all been predicted their answers."""
        for request in requests_of(places):
            if len(request.answers) == len(request.images):
                request.seconds = time.perf_counter() - request._began
                with suppress(InvalidStateError):  # Another lane was faster, or the client has gone.
                    request.future.set_result([request.answers[number] for number in range(len(request.images))])


def use_threads(num: int) -> None:
    """Let torch compute with so many threads what this thread calls."""
    import torch

    torch.get_num_threads()  # The first call in a thread initializes it, and would undo what was set before.
    torch.set_num_threads(num)


def requests_of(places: Sequence[Place]) -> list[Waiting]:
    """Return the requests of images, each once."""
    return list({id(place.request): place.request for place in places}.values())
