"""Prefect artifacts of a training run: tables, a link to MLflow, and the model card with its figures, scaled to fit."""

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

from PIL import Image
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from tasks.environment import mlflow_page
from tasks.refs import RunRef
from tasks.report import CLASSES_FILE, FIGURE_FILES, MODEL_CARD_FILE
from tasks.storage import Storage
from tasks.text.markup import in_cells, markdown_link

MAX_IMAGE_BYTES = 200_000
"""Maximum size of all images in a Prefect artifact, which is a row of the server's database."""

WIDTHS = (1600, 1200, 1000, 800, 640, 480, 320, 240)
"""Widths in pixels, tried in this order; a figure is never enlarged."""

QUALITIES = (85, 70)
"""JPEG qualities, tried at each width; lower ones blur letters more than fewer pixels do."""


def publish_run(run: RunRef, storage: Storage, key: str) -> None:
    """Publish the artifacts of a run: tables of metrics and classes, the model card, and a link to MLflow."""
    from tasks.tracking.runs import (  # Here: it loads MLflow, which a process that starts ranks needs only at the end.
        SYSTEM_METRICS,
        read_artifact,
        run_location,
        run_metrics,
    )

    metrics = run_metrics(storage, run)
    wanted = {name: value for name, value in metrics.items() if not name.startswith(SYSTEM_METRICS)}
    create_table_artifact(
        table=[_rounded({"metric": name, "value": value}) for name, value in sorted(wanted.items())],
        key=f"{key}-metrics",
        description=f"MLflow run {run.run_id}",
    )
    page = mlflow_page(storage.tracking, run_location(storage, run))
    if page is not None:
        create_link_artifact(
            link=page,
            link_text="MLflow run",
            key=f"{key}-run",
            description="The training run in MLflow: settings, metrics per epoch, figures, model card, and the model",
        )
    # Runs of older versions, which had no model cards, are reused as well.
    if (table := read_artifact(storage, run, CLASSES_FILE)) is not None:
        classes = json.loads(table)
        create_table_artifact(
            table=[_rounded(dict(zip(classes["columns"], row, strict=True))) for row in classes["data"]],
            key=f"{key}-classes",
            description=f"Precision, recall and F1 of each class on the split test, MLflow run {run.run_id}",
        )
    if (card := read_artifact(storage, run, MODEL_CARD_FILE)) is not None:
        create_markdown_artifact(
            f"{card.decode()}\n{_images(run, storage, page)}",
            key=f"{key}-model-card",
            description=f"MLflow run {run.run_id}",
        )


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return in_cells({name: four_digits(value) if isinstance(value, float) else value for name, value in row.items()})


def four_digits(value: float) -> float:
    """Return a metric rounded to four decimals, or to four significant digits if it is below 1."""
    return round(value, 4) if abs(value) >= 1 else float(f"{value:.4g}")


def _images(run: RunRef, storage: Storage, page: str | None) -> str:
    """Return the figures of a run as Markdown, scaled down to fit, with links to the full figures.

    They are embedded as data URIs. An image artifact would be only a URL, but MLflow may be a database without a
    server, or a server that the browser cannot reach. They come last, for UIs that do not render them.
    """
    from tasks.tracking.runs import read_artifact
    from tasks.tracking.server import runs_location

    contents = {name: read_artifact(storage, run, name) for name in FIGURE_FILES}
    figures = {name: content for name, content in contents.items() if content is not None}
    shown = [f"![{name}]({uri})" for name, uri in fit_images(figures, MAX_IMAGE_BYTES).items()]
    everything = markdown_link("all training runs", mlflow_page(storage.tracking, runs_location(storage)))
    where = (
        "The figures in full size, tables and event files are artifacts of "
        f"{markdown_link('the MLflow run', page)}; {everything} are listed with their metrics."
    )
    return "\n\n".join(["## Figures", *shown, where])


def fit_images(images: Mapping[str, bytes], max_bytes: int) -> dict[str, str]:
    """Return images as data URIs, of at most `max_bytes` together before the base64 encoding.

    Each image has an equal share, and larger images get what smaller ones do not need. An image is left out if no
    JPEG version of it fits.

    Args:
        images: Contents of PNG files, by name.
        max_bytes: Maximum size of all images together.
    """
    found: dict[str, str] = {}
    left = max_bytes
    smallest_first = sorted(images, key=lambda name: len(images[name]))
    for number, name in enumerate(smallest_first):
        share = left // (len(images) - number)
        if len(images[name]) <= share:
            kind, content = "png", images[name]
        elif (smaller := shrink(images[name], share)) is not None:
            kind, content = "jpeg", smaller
        else:
            continue
        left -= len(content)
        found[name] = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {name: found[name] for name in images if name in found}


def shrink(image: bytes, max_bytes: int) -> bytes | None:
    """Return the widest JPEG version of an image of at most `max_bytes`, or None if none fits or it is invalid."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            whole = opened.convert("RGB")  # Figures are opaque, and JPEG has no transparency.
    except OSError:  # Pillow's error for an invalid or truncated image.
        return None
    for width in (whole.width, *(width for width in WIDTHS if width < whole.width)):
        scaled = whole.resize((width, max(1, round(whole.height * width / whole.width))), Image.Resampling.LANCZOS)
        for quality in QUALITIES:
            buffer = io.BytesIO()
            scaled.save(buffer, "JPEG", quality=quality, optimize=True)
            if buffer.tell() <= max_bytes:
                return buffer.getvalue()
    return None
