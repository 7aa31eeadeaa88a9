"""The application of a service in this process, with a small model: each path, each refusal with its sentence."""

import asyncio
import io
import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from tasks.config.prediction import PredictConfig
from tasks.config.serving import ServeConfig
from tasks.environment import API_KEY
from tasks.model_package.classifier import ImageClassifier
from tasks.serve.app import create_app
from tasks.serve.journal import Journal
from tasks.serve.request_log import journal_file
from tasks.serve.worker import WorkerSettings
from tasks.storage import Storage
from tests.builders.image_bytes import encoded
from tests.builders.served_package import CLASSES, name_versions, version, write_package

URL = "http://127.0.0.1:8000"
READY_SECONDS = 60.0


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model package."""
    return write_package(tmp_path_factory.mktemp("package") / "model", 1)


@pytest.fixture
def start(storage: Storage, package: Path, tmp_path: Path) -> Iterator[Callable[..., TestClient]]:
    """Return a function that starts the application with settings of the service, and waits for its model."""
    clients = []

    def start_with(*, has_model: bool = True, predict: dict[str, Any] | None = None, **serve: Any) -> TestClient:
        journal_file(storage).parent.mkdir(parents=True, exist_ok=True)
        settings = WorkerSettings(
            serve=ServeConfig.model_validate(serve),
            predict=PredictConfig.model_validate(predict or {}),
            storage=storage,
            served=str(tmp_path / "service" / "served.json"),
        )
        name_versions(Path(settings.served), version(package, 4, storage.tables) if has_model else None)
        client = TestClient(create_app(settings), URL)
        client.__enter__()
        clients.append(client)
        latest = time.monotonic() + READY_SECONDS
        while has_model and client.get("/ready").status_code != 200:
            assert time.monotonic() < latest
            time.sleep(0.02)
        return client

    yield start_with
    for client in clients:
        client.__exit__(None, None, None)


def image(seed: int) -> bytes:
    """Return a PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), "PNG")


def post(client: TestClient, content: bytes, kind: str = "image/png", path: str = "/predict") -> httpx.Response:
    """Post raw bytes."""
    return client.post(path, content=content, headers={"Content-Type": kind})


def test_an_answer_is_that_of_the_model_package(start: Callable[..., TestClient], package: Path) -> None:
    """Raw bytes and forms alike, with model and version; no value is rounded."""
    client, images = start(), [image(1), image(2), image(3)]
    files = [("images", (f"{number}.png", content)) for number, content in enumerate(images)]
    answers = [client.post("/predict?top_k=2", files=files), post(client, images[0], "application/octet-stream")]

    expected = ImageClassifier.load(package).predict(images, 2)
    assert [answer.status_code for answer in answers] == [200, 200]
    found = answers[0].json()
    assert found["model"] == "photos"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[0-9a-f]{32}", found["request_id"])
    for number, (one, wanted) in enumerate(zip(found["predictions"], expected, strict=True)):
        assert (one["image"], one["name"], one["model_version"]) == (number, f"{number}.png", 4)
        assert one["label"] == wanted.label
        assert one["error"] is None
        assert one["unknown_score"] is None
        assert [entry["label"] for entry in one["top"]] == list(wanted.top_labels)
        assert [entry["probability"] for entry in one["top"]] == pytest.approx(wanted.top_probabilities, abs=1e-5)
    (alone,) = answers[1].json()["predictions"]
    assert alone["name"] == ""
    assert len(alone["top"]) == len(CLASSES)
    assert alone["probability"] == pytest.approx(expected[0].probability, abs=1e-5)


def test_a_broken_image_has_an_error_beside_the_answers_of_others(start: Callable[..., TestClient]) -> None:
    """The request succeeds with one answer or more."""
    answer = start().post("/predict", files=[("images", ("a.png", image(1))), ("images", ("b.png", image(2)[:200]))])

    assert answer.status_code == 200
    first, second = answer.json()["predictions"]
    assert (first["error"], second["label"], second["top"]) == (None, None, [])
    assert second["error"].startswith("truncated: ")


@pytest.mark.parametrize(
    ("content", "status", "detail"),
    [
        (b"", 415, "zero_bytes: the file is empty"),
        (b"a text of some words", 415, "not_an_image: no image format starts with b'a text o'"),
        (image(1)[:200], 400, "truncated: the PNG ends after 200 bytes, before its image does"),
    ],
)
def test_broken_images_alone_are_refused(
    start: Callable[..., TestClient], content: bytes, status: int, detail: str
) -> None:
    """With the sentence of batch inference, and the id of the request."""
    answer = post(start(), content)

    assert answer.status_code == status
    assert answer.json()["detail"] == detail
    assert answer.json()["predictions"][0]["error"] == detail


@pytest.mark.parametrize(
    ("request_of", "status", "detail"),
    [
        (
            {"content": b"x", "headers": {"Content-Type": "application/x-www-form-urlencoded"}},
            415,
            "the content type is application/x-www-form-urlencoded: give multipart/form-data, image/jpeg or",
        ),
        ({"content": b"x"}, 415, "the content type is missing"),
        ({"data": {"images": "a text"}, "files": []}, 415, "the content type is application/x-www-form-urlencoded"),
        (
            {"content": b"no form", "headers": {"Content-Type": "multipart/form-data; boundary=b"}},
            400,
            "the form cannot be read",
        ),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "the form cannot be read"),
        (
            {
                "content": b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\ntext\r\n--b--\r\n',
                "headers": {"Content-Type": "multipart/form-data; boundary=b"},
            },
            400,
            "the form has no file: give one image or more, each as a file",
        ),
    ],
)
def test_a_request_without_an_image_is_refused(
    start: Callable[..., TestClient], request_of: dict[str, Any], status: int, detail: str
) -> None:
    """With one sentence that says what to give."""
    answer = start().post("/predict", **request_of)

    assert answer.status_code == status
    assert answer.json()["detail"].startswith(detail), answer.json()
    assert "\n" not in answer.json()["detail"]


@pytest.mark.parametrize("given", ["0", "1001", "many", "-3"])
def test_a_wrong_parameter_is_named(start: Callable[..., TestClient], given: str) -> None:
    """With its limits."""
    answer = post(start(), image(1), path=f"/predict?top_k={given}")

    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("top_k: input should be ")


def test_too_many_images_are_refused(start: Callable[..., TestClient]) -> None:
    """Before they are read."""
    client = start(max_images=2)
    files = [("images", (f"{number}.png", image(number))) for number in range(3)]

    refused, taken = client.post("/predict", files=files), client.post("/predict", files=files[:2])
    assert refused.status_code == 413
    assert refused.json()["detail"] == "the form has more than 2 images: send fewer"
    assert taken.status_code == 200


def test_too_many_bytes_are_refused_by_the_header_and_as_they_come(start: Callable[..., TestClient]) -> None:
    """A client that does not give a length sends no more than the limit."""
    client, sent = start(max_megabytes=1), []

    def parts() -> Iterator[bytes]:
        for number in range(30):
            sent.append(number)
            yield bytes(100_000)

    by_header = post(client, bytes(2_000_000))
    by_part = client.post("/predict", content=parts(), headers={"Content-Type": "image/png"})
    assert by_header.status_code == 413
    assert (
        by_header.json()["detail"] == "the request has 2000000 bytes, more than 1000000: send fewer or smaller images"
    )
    assert by_part.status_code == 413
    assert by_part.json()["detail"] == "the request has more than 1 MB: send fewer or smaller images"


def test_the_bytes_that_arrive_at_once_are_bounded(
    start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all requests; those of a request that has ended, or was refused, count no longer."""
    client = start(max_megabytes=1)
    answers = [
        post(client, image(1)),
        post(client, b"broken"),
        client.post("/predict", content=iter([bytes(2_000_000)])),
    ]
    left = client.app._num_bytes
    monkeypatch.setattr("tasks.serve.guard.MAX_AT_ONCE", 0)
    refused, healthy = post(client, image(1)), client.get("/health")

    assert [answer.status_code for answer in answers] == [200, 415, 415]
    assert left == 0
    assert refused.status_code == 429
    assert refused.json()["detail"] == "too many bytes arrive at once: try again in a second"
    assert healthy.status_code == 200


def test_an_error_of_the_service_is_a_sentence(
    start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without details, which are in the log."""
    client = start()
    monkeypatch.setattr("tasks.model_package.classifier.ImageClassifier.predict", _out_of_memory)
    client._transport.raise_server_exceptions = False  # as a server has it
    failed = post(client, image(1))
    monkeypatch.undo()

    assert failed.status_code == 500
    assert failed.json() == {"detail": "the request failed: the log of the service says why"}
    assert post(client, image(1)).status_code == 200


def _out_of_memory(*_arguments: object) -> None:
    raise MemoryError("secret details")


def test_feedback_waits_for_space_on_a_full_disk(
    start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with status 503, and may be given again."""
    client = start()
    feedback = {"request_id": post(client, image(1)).json()["request_id"], "label": "ant"}
    with monkeypatch.context() as full:
        full.setattr(Journal, "add_feedback", _disk_full)
        refused = client.post("/feedback", json=feedback)

    assert refused.status_code == 503
    assert refused.json()["detail"].startswith("the feedback cannot be stored now (database or disk is full)")
    assert client.post("/feedback", json=feedback).status_code == 200


def _disk_full(*_arguments: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_an_overloaded_service_says_so(start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """With status 429, and when to try again; once it has time, it answers."""
    client = start(max_waiting=2, max_images=2)
    with monkeypatch.context() as busy:
        busy.setattr("tasks.serve.batches.Batches.add", _overloaded)
        refused = post(client, image(1))

    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["detail"] == "more than 2 images would wait: try again in a second"
    assert post(client, image(1)).status_code == 200


def _overloaded(*_arguments: object) -> None:
    from tasks.serve.batches import Overloaded

    raise Overloaded("more than 2 images would wait: try again in a second")


def test_without_a_model_the_service_is_healthy_and_not_ready(start: Callable[..., TestClient]) -> None:
    """With the reason, until there is one."""
    client = start(has_model=False)
    answers = [client.get("/health"), client.get("/ready"), client.get("/model"), post(client, image(1))]

    assert [answer.status_code for answer in answers] == [200, 503, 503, 503]
    assert {answer.json()["detail"] for answer in answers[1:]} == {"no prediction now: no champion yet"}


def test_an_answer_that_takes_too_long_is_refused(
    start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 503: the client may try again, and the images wait no longer."""
    client = start(request_seconds=1)
    monkeypatch.setattr("tasks.serve.batches.Batches.add", lambda _self, _request: None)

    answer = post(client, image(1))
    assert answer.status_code == 503
    assert answer.json()["detail"].startswith("no answer within 1 s")


@pytest.mark.parametrize("path", ["/predict", "/explain", "/feedback"])
def test_a_request_that_does_not_arrive_is_refused(start: Callable[..., TestClient], path: str) -> None:
    """A slow client holds no batch."""
    app, answers = start(request_seconds=1).app, []

    async def ask() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(30)
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            answers.append(message)

        headers = [(b"host", b"127.0.0.1:8000"), (b"content-type", b"image/png")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await app(scope | {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 8000)}, receive, send)

    asyncio.run(ask())
    assert answers[0]["status"] == 408
    assert b"did not arrive within 1 s" in answers[1]["body"]


def test_feedback_is_added_once_for_an_image_that_was_predicted(
    start: Callable[..., TestClient], storage: Storage
) -> None:
    """At once after the answer; it becomes a row for the table."""
    client = start()
    answer = client.post("/predict", files=[("a", ("a.png", image(1))), ("b", ("b.png", image(2)))]).json()
    feedback = {"request_id": answer["request_id"], "image": 1, "label": "a new class"}
    added, again = client.post("/feedback", json=feedback), client.post("/feedback", json=feedback)
    unknown = client.post("/feedback", json=feedback | {"image": 2})
    wrong = client.post("/feedback", json=feedback | {"request_id": "../../etc/passwd"})

    assert (added.status_code, added.json()) == (200, {"status": "added"})
    assert again.status_code == 409
    assert again.json()["detail"].endswith("has feedback already, which stays")
    assert unknown.status_code == 404
    assert wrong.status_code == 400
    assert wrong.json()["detail"].startswith("request_id: string should match pattern")
    (row,) = Journal(journal_file(storage)).pending("feedback", storage.tables, 2**62)
    assert row.row["label"] == "a new class"
    assert row.row["day"] == answer["request_id"][:10]


def test_images_of_a_form_stay_in_memory(start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file would be on the disk of the machine for a while, and its writes would stop the other requests."""
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    pixels = np.random.default_rng(3).integers(0, 256, (1200, 1200, 3), dtype=np.uint8)
    large = encoded(Image.fromarray(pixels), "PNG")
    answer = start().post("/predict", files=[("a", ("a.png", large)), ("b", ("b.png", image(1)))])

    assert len(large) > 4 << 20
    assert [one["error"] for one in answer.json()["predictions"]] == [None, None]


def test_answers_are_logged_without_images(start: Callable[..., TestClient], storage: Storage) -> None:
    """Unless the service keeps them; a broken one is not kept."""
    for keeps in (False, True):
        client = start(keep_images=keeps)
        client.post("/predict?top_k=1", files=[("a", ("a.png", image(1))), ("b", ("b.png", b"broken"))])
        client.__exit__(None, None, None)
    journal = Journal(journal_file(storage))
    rows = [pending.row for pending in journal.pending("requests", storage.tables, 2**62)]
    images = journal.pending("request_images", storage.tables, 2**62)

    assert [row["image"] for row in rows] == [0, 1, 0, 1]
    assert rows[0]["label"] in CLASSES
    assert rows[0]["top_labels"] == [rows[0]["label"]]
    assert rows[0]["answered_by"] == "champion"
    assert rows[0]["seconds"] > 0
    assert rows[1]["error"].startswith("not_an_image")
    assert [pending.content for pending in images] == [image(1)]
    assert images[0].row["sha256"] == rows[0]["sha256"]


def test_without_a_log_there_is_no_feedback(start: Callable[..., TestClient], storage: Storage) -> None:
    """And no journal."""
    client = start(log_requests=False)
    request_id = post(client, image(1)).json()["request_id"]
    refused = client.post("/feedback", json={"request_id": request_id, "label": "ant"})

    assert refused.status_code == 409
    assert "serve.log_requests is false" in refused.json()["detail"]
    assert not journal_file(storage).exists()


def test_an_explanation_is_a_picture_of_the_class(start: Callable[..., TestClient]) -> None:
    """Of the most probable one, or of another; an unknown class and a broken image are refused."""
    client = start()
    maps = [post(client, image(1), path=f"/explain{query}") for query in ("", "?label=ant", "?label=bee")]

    assert [found.status_code for found in maps] == [200] * 3
    assert {found.headers["x-model-version"] for found in maps} == {"4"}
    for found in maps:
        with Image.open(io.BytesIO(found.content)) as shown:
            assert (shown.format, shown.size) == ("JPEG", (336, 448))
    assert maps[1].content != maps[2].content
    unknown = post(client, image(1), path="/explain?label=owl")
    assert (unknown.status_code, unknown.json()["detail"]) == (400, "'owl' is not a class of the model")
    assert post(client, b"broken", path="/explain").status_code == 415


def test_figures_count_what_was_answered(start: Callable[..., TestClient]) -> None:
    """By path and status, and images by version and outcome; a path that a client makes up is one figure."""
    client = start()
    client.post("/predict", files=[("a", ("a.png", image(1))), ("b", ("b.png", b"broken"))])
    post(client, b"", "text/plain")
    for path in ("/made-up", "/made-up-2"):
        assert client.get(path).status_code == 404
    text = client.get("/metrics").text

    assert 'lakevision_serve_requests_total{path="/predict",status="200"} 1.0' in text
    assert 'lakevision_serve_requests_total{path="/predict",status="415"} 1.0' in text
    assert 'lakevision_serve_requests_total{path="other",status="404"} 2.0' in text
    assert 'lakevision_serve_images_total{outcome="label",version="4"} 1.0' in text
    assert 'lakevision_serve_images_total{outcome="error",version="4"} 1.0' in text
    assert 'lakevision_serve_version{alias="champion"} 4.0' in text
    assert "lakevision_serve_seconds_count 2.0" in text
    assert "lakevision_serve_batch_images_sum 2.0" in text


def test_labels_of_few_probability_are_those_of_batch_inference(start: Callable[..., TestClient]) -> None:
    """`unsure` below the minimum, with the classes all the same."""
    client = start(predict={"min_probability": 1.0})
    (found,) = post(client, image(1)).json()["predictions"]

    assert found["label"] == "unsure"
    assert found["top"][0]["label"] in CLASSES


def test_a_foreign_page_or_name_is_refused(start: Callable[..., TestClient]) -> None:
    """A form needs no permission of the browser, and a foreign name may lead to this machine."""
    client = start(allowed_hosts=["Images.Example", "fd00::1"])
    files = [("images", ("a.png", image(1)))]
    answers = [
        client.post("/predict", files=files, headers=headers)
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Host": "evil.example"},
            {"Origin": URL},
            {"Host": "images.example:443", "Origin": "https://images.example:443"},
            {"Host": "[fd00::1]:8000"},
        )
    ]

    assert [answer.status_code for answer in answers] == [403, 403, 403, 200, 200, 200]
    assert answers[0].json()["detail"] == "requests of pages from other origins are refused"
    assert "serve.allowed_hosts" in answers[2].json()["detail"]


def test_a_key_is_required_where_it_is_set(start: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that has data in it; not for health checks and the empty page."""
    monkeypatch.setenv(API_KEY, "a long random text")
    client = start()
    given = [{}, {"Authorization": "Bearer another"}, {"Authorization": "Bearer a long random text"}]
    statuses = [
        [client.get(path, headers=headers).status_code for headers in given]
        for path in ("/model", "/metrics", "/openapi.json", "/health", "/ready", "/", "/page/page.js")
    ]

    assert statuses == [[401, 401, 200]] * 3 + [[200, 200, 200]] * 4
    refused = post(client, image(1))
    assert refused.status_code == 401
    assert "long random" not in refused.text


def test_the_page_loads_only_its_own_files(start: Callable[..., TestClient]) -> None:
    """Its policy permits no code in it, and no file beside its own is served."""
    client = start()
    shown = client.get("/")

    assert shown.status_code == 200
    assert "script-src 'self'" in shown.headers["content-security-policy"]
    assert shown.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script>|style=|onclick|https?://", shown.text)
    named = re.findall(r'(?:src|href)="(/page/[^"]+)"', shown.text)
    assert sorted(named) == ["/page/page.css", "/page/page.js"]
    assert [client.get(path).status_code for path in named] == [200, 200]
    for path in ("/page/page.html", "/page/..%2fapp.py", "/page/%2e%2e/app.py"):
        assert client.get(path).status_code == 404
    assert "innerHTML" not in client.get("/page/page.js").text


def test_the_description_of_the_interface_has_examples(start: Callable[..., TestClient]) -> None:
    """Each path with its answers and refusals."""
    described = start().get("/openapi.json").json()

    assert set(described["paths"]) == {
        "/predict", "/explain", "/feedback", "/model", "/health", "/ready", "/metrics",
    }  # fmt: skip
    ask = described["paths"]["/predict"]["post"]
    assert {"multipart/form-data", "image/*", "application/octet-stream"} == set(ask["requestBody"]["content"])
    assert ask["requestBody"]["content"]["multipart/form-data"]["example"]
    assert {"200", "400", "408", "413", "415", "429", "503"} <= set(ask["responses"])
    assert json.dumps(described).count("ImageAnswer") > 1
