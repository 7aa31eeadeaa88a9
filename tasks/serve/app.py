"""The application of a service: predictions, explanations and feedback over HTTP, its page, health and figures."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as BadForm
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from tasks.config.serving import ServeConfig
from tasks.environment import api_key
from tasks.errors import loggable
from tasks.model_package.reasons import BadImage, Reason
from tasks.serve.batches import Answered, Overloaded
from tasks.serve.guard import FEWER, Guard, TooLarge, TooMuchAtOnce, refusal
from tasks.serve.served import NotReady, exclude_imports
from tasks.serve.worker import NotStored, Worker, WorkerSettings, start_logging
from tasks.system.signals import end_with_parent

router = APIRouter()

PAGE = Path(__file__).with_name("page")
"""Folder of the page's files."""

RAW = "application/octet-stream"
MULTIPART = "multipart/form-data"

NOT_IMAGES = frozenset({Reason.NOT_AN_IMAGE, Reason.UNSUPPORTED_FORMAT, Reason.ZERO_BYTES})
"""Reasons for which an answer has status 415; for others, such as a damaged image, 400."""


class Probability(BaseModel):
    """A class and its probability."""

    label: str
    probability: float = Field(description="0-1, calibrated")


class ImageAnswer(BaseModel):
    """The answer for an image."""

    image: int = Field(description="Number of the image in the request, from 0")
    name: str = Field(description="Name of the file in a form; else empty")
    model_version: int
    label: str | None = Field(description="Most probable class, `unknown` or `unsure`; null for an error")
    probability: float | None = Field(description="Probability of the most probable class, 0-1; null for an error")
    top: list[Probability]
    unknown_score: float | None
    error: str | None = Field(description="Reason why the image cannot be decoded, else null")


class RequestAnswer(BaseModel):
    """The answer to a request."""

    request_id: str = Field(description="Id for feedback")
    model: str
    predictions: list[ImageAnswer]


class Problem(BaseModel):
    """Why a request was refused, in a sentence."""

    detail: str


class Feedback(BaseModel):
    """The right class of an image."""

    request_id: str = Field(min_length=11, max_length=100, pattern=r"^\d{4}-\d{2}-\d{2}-[0-9a-f]+$")
    image: int = Field(0, ge=0, le=10_000)
    label: str = Field(min_length=1, max_length=1024)


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "A parameter, the form or an image is damaged"},
    408: {"model": Problem, "description": "The request did not arrive in time"},
    413: {"model": Problem, "description": "Too many images, or too many bytes"},
    415: {"model": Problem, "description": "The request, or all of its images, have a type that is not supported"},
    429: {"model": Problem, "description": "Too many images wait: try again"},
    503: {"model": Problem, "description": "No model is loaded, or the answer took too long"},
}
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            MULTIPART: {
                "schema": {"type": "object", "additionalProperties": {"type": "string", "format": "binary"}},
                "example": {"images": "@photo.jpg"},
            },
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            RAW: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def worker_of(request: Request) -> Worker:
    """Return the worker that answers a request."""
    worker: Worker = request.app.state.worker
    return worker


@asynccontextmanager
async def in_time(serve: ServeConfig) -> AsyncIterator[None]:
    """Receive a body, or a form, in the block.

    Raises:
        HTTPException: It does not arrive within `serve.request_seconds`.
    """
    try:
        async with asyncio.timeout(serve.request_seconds):
            yield
    except TimeoutError:
        late = f"the request did not arrive within {serve.request_seconds} s: send it again"
        raise HTTPException(408, late) from None


async def read_images(request: Request, serve: ServeConfig) -> list[tuple[str, bytes]]:
    """Return the images of a request, each with the name of its file.

    Raises:
        HTTPException: The request has no image, too many, or another type, or it does not arrive in time.
        TooLarge: It has too many bytes.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in {MULTIPART, RAW} and not kind.startswith("image/"):
        named = loggable(kind[:100]) or "missing"
        raise HTTPException(415, f"the content type is {named}: give {MULTIPART}, image/jpeg or {RAW}")
    async with in_time(serve):
        if kind != MULTIPART:
            return [("", await request.body())]
        try:
            async with request.form(max_files=serve.max_images, max_fields=100) as form:
                files = [value for _name, value in form.multi_items() if isinstance(value, UploadFile)]
                images = [(file.filename or "", await file.read()) for file in files]
        except BadForm as error:
            if "Too many files" in str(error.detail):
                raise HTTPException(413, f"the form has more than {serve.max_images} images: send fewer") from None
            raise HTTPException(400, f"the form cannot be read: {loggable(error.detail)}") from None
    if not images:
        raise HTTPException(400, "the form has no file: give one image or more, each as a file")
    return images


@router.post("/predict", response_model=RequestAnswer, responses=PROBLEMS, openapi_extra=BODY)
async def predict(request: Request, top_k: Annotated[int | None, Query(ge=1, le=1000)] = None) -> Response:
    """Predict the class of one image, or of each image in a form."""
    worker = worker_of(request)
    with worker.batches.arriving():
        images = await read_images(request, worker.settings.serve)
    num_classes = top_k or worker.settings.predict.top_k
    request_id, answers = await worker.predict([content for _name, content in images], num_classes)
    named = zip((name for name, _content in images), answers, strict=True)
    found = {
        "request_id": request_id,
        "model": answers[0].model.version.model.name,
        "predictions": [_as_json(number, name, answer, num_classes) for number, (name, answer) in enumerate(named)],
    }
    errors = [answer.prediction.error for answer in answers if answer.prediction.error]
    if len(errors) < len(answers):
        return JSONResponse(found)
    not_images = all(error.partition(":")[0] in NOT_IMAGES for error in errors)
    return JSONResponse({"detail": errors[0], **found}, 415 if not_images else 400)


def _as_json(number: int, name: str, answer: Answered, top_k: int) -> dict[str, Any]:
    """Return an `ImageAnswer` as JSON values: the model itself would take longer than a request."""
    prediction = answer.prediction
    top = zip(prediction.top_labels[:top_k], prediction.top_probabilities, strict=False)
    return {
        "image": number,
        "name": name,
        "model_version": answer.model.version.model.version,
        "label": prediction.label,
        "probability": prediction.probability,
        "top": [{"label": label, "probability": probability} for label, probability in top],
        "unknown_score": prediction.unknown_score,
        "error": prediction.error,
    }


@router.post("/explain", response_class=Response, responses=PROBLEMS, openapi_extra=BODY)
async def explain(request: Request, label: Annotated[str | None, Query(max_length=1024)] = None) -> Response:
    """Return an image under the heat map of its most probable class, or of another one, as a JPEG."""
    worker = worker_of(request)
    (_name, content), *_others = await read_images(request, worker.settings.serve)
    try:
        model, explanation = await worker.explain(content, label)
    except BadImage as bad:
        raise HTTPException(415 if bad.reason in NOT_IMAGES else 400, str(bad)) from None
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    headers = {"X-Model-Version": str(model.version.model.version)}
    return Response(explanation.jpeg, media_type="image/jpeg", headers=headers)


@router.post(
    "/feedback",
    responses=PROBLEMS | {404: {"model": Problem}, 409: {"model": Problem}},
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": Feedback.model_json_schema()}}}},
)
async def add_feedback(request: Request) -> dict[str, str]:
    """Add the right class of an image that was predicted; an image has one."""
    worker = worker_of(request)
    if not worker.settings.serve.log_requests:
        raise HTTPException(409, "the answers of this service are not logged (serve.log_requests is false)")
    # Not by FastAPI, which waits for a slow client without an end.
    async with in_time(worker.settings.serve):
        content = await request.body()
    feedback = Feedback.model_validate_json(content)
    found = await worker.add_feedback(feedback.request_id, feedback.image, feedback.label)
    about = f"image {feedback.image} of request {feedback.request_id}"
    if found == "unknown":
        raise HTTPException(404, f"{about} is unknown: give the request_id of an answer of this service")
    if found == "known":
        raise HTTPException(409, f"{about} has feedback already, which stays")
    return {"status": "added"}


@router.get("/model")
async def model(request: Request) -> dict[str, Any]:
    """Return name, version and classes of the champion."""
    champion = worker_of(request).models.lineup.loaded_champion()
    named = champion.version.model
    return {"model": named.name, "model_version": named.version, "classes": list(champion.classifier.classes)}


@router.get("/health")
async def health() -> dict[str, str]:
    """Return that the process answers."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"model": Problem}})
async def ready(request: Request) -> dict[str, Any]:
    """Return the versions in memory, or 503 if there is none."""
    lineup = worker_of(request).models.lineup
    named = lineup.loaded_champion().version.model
    return {
        "model": named.name,
        "model_version": named.version,
        "challenger_version": None if lineup.challenger is None else lineup.challenger.version.model.version,
        "problem": lineup.problem,
    }


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the figures of all workers for Prometheus."""
    worker = worker_of(request)
    text, kind = await asyncio.to_thread(worker.metrics.text, worker.settings.figures)
    return Response(text, media_type=kind)


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """Return the page."""
    return FileResponse(PAGE / "page.html", media_type="text/html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> FileResponse:
    """Return a file of the page."""
    kinds = {"page.js": "text/javascript", "page.css": "text/css"}
    if name not in kinds:
        raise HTTPException(404, "the page has no such file")
    return FileResponse(PAGE / name, media_type=kinds[name])


def _first_problem(error: RequestValidationError | ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in {"query", "path"})
    return loggable(f"{place or 'the request'}: {first['msg'][:1].lower()}{first['msg'][1:]}")


def create_app(settings: WorkerSettings) -> ASGIApp:
    """Return the application of a worker, behind its guard."""
    start_logging()
    worker, serve = Worker(settings), settings.serve

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        supervisor = parent_process()
        if supervisor is not None and supervisor.pid is not None:
            end_with_parent(supervisor.pid)  # Otherwise it would keep the port of a supervisor that was killed.
            await asyncio.to_thread(exclude_imports)
        await asyncio.to_thread(worker.start)
        try:
            yield
        finally:
            await asyncio.to_thread(worker.end)

    # The images of a form stay in memory, as the guard allows: writes to files would stop all other requests.
    MultiPartParser.spool_max_size = serve.max_megabytes * 10**6
    app = FastAPI(title="lakevision", docs_url=None, redoc_url=None, lifespan=running)
    app.state.worker = worker
    app.include_router(router)

    def not_stored(error: Exception) -> str:
        return f"the feedback cannot be stored now ({error}): try again"

    sentences: dict[type[Exception], tuple[int, Callable[[Any], str]]] = {
        RequestValidationError: (400, _first_problem),
        ValidationError: (400, _first_problem),
        ClientDisconnect: (400, lambda _error: "the client has gone"),
        TooLarge: (413, lambda _error: f"the request has more than {serve.max_megabytes} MB: {FEWER}"),
        TooMuchAtOnce: (429, lambda _error: "too many bytes arrive at once: try again in a second"),
        Overloaded: (429, str),
        NotReady: (503, lambda error: f"no prediction now: {error}"),
        TimeoutError: (503, lambda _error: f"no answer within {serve.request_seconds} s: too many images wait"),
        sqlite3.OperationalError: (503, not_stored),
        NotStored: (503, not_stored),
        Exception: (500, lambda _error: "the request failed: the log of the service says why"),
    }

    async def refuse(_request: Request, error: Exception) -> JSONResponse:
        status, sentence = next(sentences[kind] for kind in type(error).__mro__ if kind in sentences)
        return refusal(status, sentence(error))

    for kind in sentences:
        app.add_exception_handler(kind, refuse)
    hosts = {"127.0.0.1", "localhost", "[::1]", serve.host, *serve.allowed_hosts}
    paths = {route.path for route in router.routes if isinstance(route, APIRoute)}

    def note(path: str, status: int, seconds: float) -> None:
        # Of any path that a client makes up, one figure.
        worker.metrics.requests.labels(path if path in paths else "other", str(status)).inc()
        if path == "/predict":
            worker.metrics.seconds.observe(seconds)

    return Guard(app, hosts, api_key(), serve.max_megabytes * 10**6, note)
