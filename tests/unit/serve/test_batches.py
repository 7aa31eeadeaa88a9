"""Batches across requests: their images, refusals, and predictions of a live test beside the answers."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tasks.config.serving import ServeConfig
from tasks.model_package.classifier import Prediction
from tasks.serve.batches import MAX_THREADS, Batches, Overloaded, Waiting
from tasks.serve.served import Lineup, Loaded, NotReady
from tests.builders.served_package import version

WAIT = 20.0


@dataclass
class Recorder:
    """A classifier that notes its batches, and labels each image with its name and the image's bytes.

    Attributes:
        open: Batches wait for it.
        broken: Content on which a batch fails.
        threads: Number of threads that torch computes each batch with.
    """

    name: str
    open: threading.Event = field(default_factory=threading.Event)
    broken: bytes = b"-"
    batches: list[list[bytes]] = field(default_factory=list)
    top: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def predict(self, contents: Sequence[bytes], top_k: int, _min_probability: float, _rate: float) -> list[Prediction]:
        """Return the predictions once `open` is set."""
        self.batches.append(list(contents))
        self.top.append(top_k)
        self.threads.append(torch.get_num_threads())
        assert self.open.wait(WAIT)
        if self.broken in contents:
            raise MemoryError("no memory")
        return [Prediction(label=f"{self.name} {content.decode()}", probability=1.0) for content in contents]


def loaded(recorder: Recorder, number: int) -> Loaded:
    """Return a recorder as a version."""
    return Loaded(version(Path("none"), number), recorder, 0.0)  # type: ignore[arg-type]  # it has the method


class Queue:
    """A queue with its versions.

    Attributes:
        lineup: The versions of the next batch.
        finished: Requests of which nothing is left to predict.
    """

    def __init__(self, settings: dict[str, object], lanes: int = 1) -> None:
        self.champion, self.challenger = Recorder("champion"), Recorder("challenger")
        self.lineup = Lineup(loaded(self.champion, 1), loaded(self.challenger, 2))
        self.finished: list[Waiting] = []
        serve = ServeConfig.model_validate(settings)
        self.batches = Batches(serve, lanes, lambda: self.lineup, 0.0, lambda _size: None, self.finished.append)
        self.batches.start()

    def ask(self, *images: bytes, top_k: int = 5) -> Waiting:
        """Add a request."""
        request = Waiting(images, top_k, "id")
        self.batches.add(request)
        return request

    def labels(self, request: Waiting) -> list[str | None]:
        """Wait for the labels of a request."""
        return [answer.prediction.label for answer in request.future.result(WAIT)]


@pytest.fixture
def make_queue() -> Iterator[Callable[..., Queue]]:
    """Return a function that starts a queue; all lanes end with the test."""
    made: list[Queue] = []

    def make(lanes: int = 1, **settings: object) -> Queue:
        made.append(Queue(settings, lanes))
        return made[-1]

    yield make
    for queue in made:
        queue.champion.open.set()
        queue.challenger.open.set()
        queue.batches.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    latest = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < latest, "the condition does not hold"
        time.sleep(0.005)


def test_images_that_come_while_a_batch_is_computed_are_the_next_batch(make_queue: Callable[..., Queue]) -> None:
    """Of whatever request they are."""
    queue = make_queue()
    requests = [queue.ask(b"a")]
    until(lambda: len(queue.champion.batches) == 1)
    requests += [queue.ask(b"b", b"c"), queue.ask(b"d")]
    queue.champion.open.set()

    assert [queue.labels(request) for request in requests] == [
        ["champion a"], ["champion b", "champion c"], ["champion d"],
    ]  # fmt: skip
    assert queue.champion.batches == [[b"a"], [b"b", b"c", b"d"]]


def test_a_request_may_be_larger_than_a_batch(make_queue: Callable[..., Queue]) -> None:
    """Its answers are in the order of its images, also if two lanes have computed them."""
    queue = make_queue(lanes=2, max_batch=2)
    request = queue.ask(*(str(number).encode() for number in range(7)))
    queue.champion.open.set()

    assert queue.labels(request) == [f"champion {number}" for number in range(7)]
    assert max(map(len, queue.champion.batches)) == 2
    until(lambda: queue.finished == [request])


def test_a_batch_waits_for_images_that_are_arriving(make_queue: Callable[..., Queue]) -> None:
    """But not where nobody sends: the first image of a lone client is computed at once."""
    queue = make_queue(max_wait_milliseconds=1000)
    queue.champion.open.set()
    given = queue.batches._serve
    queue.batches._serve = given.model_copy(update={"max_wait_milliseconds": 1000 * WAIT})
    began = time.monotonic()
    queue.labels(queue.ask(b"alone"))
    alone = time.monotonic() - began
    queue.batches._serve = given
    with queue.batches.arriving():
        first = queue.ask(b"a")
        time.sleep(0.1)
        second = queue.ask(b"b")
        queue.labels(first)
        queue.labels(second)

    assert queue.champion.batches == [[b"alone"], [b"a", b"b"]]
    assert alone < WAIT / 2


def test_more_images_than_may_wait_are_refused(make_queue: Callable[..., Queue]) -> None:
    """The others are answered, and later ones are taken again."""
    queue = make_queue(max_waiting=3, max_images=3)
    computed = queue.ask(b"a")
    until(lambda: len(queue.champion.batches) == 1)
    waiting = [queue.ask(b"b", b"c")]
    with pytest.raises(Overloaded, match="more than 3 images would wait: try again in a second"):
        queue.ask(b"d", b"e")
    waiting.append(queue.ask(b"f"))
    with pytest.raises(Overloaded):
        queue.ask(b"g")
    queue.champion.open.set()

    assert queue.labels(computed) == ["champion a"]
    assert [queue.labels(request) for request in waiting] == [["champion b", "champion c"], ["champion f"]]
    assert queue.labels(queue.ask(b"h")) == ["champion h"]


def test_images_of_a_client_that_has_gone_are_not_computed(make_queue: Callable[..., Queue]) -> None:
    """And are not in the log."""
    queue = make_queue()
    queue.ask(b"a")
    until(lambda: len(queue.champion.batches) == 1)
    gone, other = queue.ask(b"gone"), queue.ask(b"b")
    assert gone.future.cancel()
    queue.champion.open.set()

    assert queue.labels(other) == ["champion b"]
    assert queue.champion.batches == [[b"a"], [b"b"]]
    with pytest.raises(CancelledError):
        gone.future.result(WAIT)
    until(lambda: len(queue.finished) == 2)
    assert gone not in queue.finished


def test_a_batch_that_fails_fails_alone(make_queue: Callable[..., Queue]) -> None:
    """Its requests get the error, and the lane continues."""
    queue = make_queue()
    queue.champion.broken = b"broken"
    queue.champion.open.set()
    request = queue.ask(b"broken")

    with pytest.raises(MemoryError):
        request.future.result(WAIT)
    assert queue.labels(queue.ask(b"b")) == ["champion b"]


def test_without_a_version_a_request_is_refused_with_the_reason(make_queue: Callable[..., Queue]) -> None:
    """No request waits for a model."""
    queue = make_queue()
    queue.lineup = Lineup(problem="no champion yet")

    with pytest.raises(NotReady, match="no champion yet"):
        queue.ask(b"a")


def test_an_answer_names_the_version_that_gave_it(make_queue: Callable[..., Queue]) -> None:
    """A batch keeps the version that it began with."""
    queue = make_queue()
    first = queue.ask(b"a")
    until(lambda: len(queue.champion.batches) == 1)
    queue.lineup = Lineup(loaded(queue.challenger, 3))
    second = queue.ask(b"b")
    queue.champion.open.set()
    queue.challenger.open.set()

    versions = [request.future.result(WAIT)[0].model.version.model.version for request in (first, second)]
    assert versions == [1, 3]
    assert queue.labels(second) == ["challenger b"]


def test_the_challenger_in_the_shadow_never_answers(make_queue: Callable[..., Queue]) -> None:
    """It predicts after the answer was given."""
    queue = make_queue(challenger="shadow")
    queue.champion.open.set()
    request = queue.ask(b"a", b"b")
    answered = queue.labels(request)
    until(lambda: len(queue.challenger.batches) == 1)
    before = list(queue.finished)
    queue.challenger.open.set()
    until(lambda: queue.finished == [request])

    assert answered == ["champion a", "champion b"]
    assert before == []
    assert [(answer.by, answer.other) for answer in request.answers.values()] == [
        ("champion", (2, "challenger a")), ("champion", (2, "challenger b")),
    ]  # fmt: skip


def test_a_challenger_that_fails_costs_no_answer_and_no_row(make_queue: Callable[..., Queue]) -> None:
    """The row is without what it would have answered."""
    queue = make_queue(challenger="shadow")
    queue.champion.open.set()
    queue.challenger.open.set()
    queue.challenger.broken = b"a"
    first, second = queue.ask(b"a"), queue.ask(b"b")

    assert queue.labels(first) == ["champion a"]
    assert queue.labels(second) == ["champion b"]
    until(lambda: len(queue.finished) == 2)
    assert first.answers[0].other is None


def test_answers_that_were_given_are_logged_though_the_other_version_fails(make_queue: Callable[..., Queue]) -> None:
    """In the same batch; the request of the version that failed has no answer, and no row."""
    queue = make_queue(challenger="answers", challenger_share=0.5)
    contents = [str(number).encode() for number in range(20)]
    sides = [queue.batches._side(hashlib.sha256(content).hexdigest(), queue.lineup) for content in contents]
    mine, broken = contents[sides.index("champion")], contents[sides.index("challenger")]
    queue.challenger.broken = broken
    queue.challenger.open.set()
    first = queue.ask(mine)
    until(lambda: len(queue.champion.batches) == 1)
    given, failed = queue.ask(mine), queue.ask(broken)  # one batch
    queue.champion.open.set()

    assert queue.labels(given) == [f"champion {mine.decode()}"]
    with pytest.raises(MemoryError):
        queue.labels(failed)
    until(lambda: len(queue.finished) == 2)
    assert queue.finished == [first, given]


def test_a_lane_that_computes_alone_has_the_cores_of_the_others(make_queue: Callable[..., Queue]) -> None:
    """Not for ever: a lane beside another one has its own share, and there is a bound."""
    queue = make_queue(lanes=2, max_batch=1)
    requests = [queue.ask(b"a")]
    until(lambda: len(queue.champion.batches) == 1)
    requests.append(queue.ask(b"b"))
    until(lambda: len(queue.champion.batches) == 2)
    queue.champion.open.set()
    for request in requests:
        queue.labels(request)
    until(lambda: len(queue.finished) == 2)
    queue.labels(queue.ask(b"c"))
    many = make_queue(lanes=3 * MAX_THREADS)
    many.champion.open.set()
    many.labels(many.ask(b"a"))

    assert queue.champion.threads == [2, 1, 2]
    assert many.champion.threads == [MAX_THREADS]


def test_the_challenger_answers_its_share(make_queue: Callable[..., Queue]) -> None:
    """The same images each time, on which the champion predicts as well; on the others the challenger does not."""
    queue = make_queue(challenger="answers", challenger_share=0.3, max_waiting=2000, max_images=1000)
    queue.champion.open.set()
    queue.challenger.open.set()
    images = [str(number).encode() for number in range(500)]
    first, again = queue.ask(*images), queue.ask(*images)
    sides = [[answer.by for answer in request.future.result(WAIT)] for request in (first, again)]
    until(lambda: len(queue.finished) == 2)

    assert sides[0] == sides[1]
    assert 0.24 < sides[0].count("challenger") / 500 < 0.36
    for number, answer in first.answers.items():
        name = images[number].decode()
        if answer.by == "challenger":
            assert (answer.prediction.label, answer.other) == (f"challenger {name}", (1, f"champion {name}"))
        else:
            assert (answer.prediction.label, answer.other) == (f"champion {name}", None)


def test_without_a_challenger_the_champion_answers_all(make_queue: Callable[..., Queue]) -> None:
    """As before the alias was given."""
    queue = make_queue(challenger="answers", challenger_share=1.0)
    queue.lineup = Lineup(queue.lineup.champion)
    queue.champion.open.set()
    request = queue.ask(b"a")

    assert queue.labels(request) == ["champion a"]
    assert request.answers[0].other is None


def test_a_batch_has_the_largest_top_k_of_its_requests(make_queue: Callable[..., Queue]) -> None:
    """Each request takes its part."""
    queue = make_queue()
    queue.ask(b"a", top_k=1)
    until(lambda: len(queue.champion.batches) == 1)
    others = [queue.ask(b"b", top_k=2), queue.ask(b"c", top_k=7)]
    queue.champion.open.set()
    for request in others:
        queue.labels(request)

    assert queue.champion.top == [1, 7]


def test_what_waits_is_answered_at_the_end(make_queue: Callable[..., Queue]) -> None:
    """A service that is ended leaves no request without an answer."""
    queue = make_queue(lanes=2)
    requests = [queue.ask(str(number).encode()) for number in range(20)]
    queue.champion.open.set()
    queue.batches.close()

    assert [queue.labels(request) for request in requests] == [[f"champion {number}"] for number in range(20)]
    assert not queue.batches._places
    assert len(queue.finished) == 20
