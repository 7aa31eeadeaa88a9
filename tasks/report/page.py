"""The parts of a result page that come from a training run: its figures, scaled to fit, and its mistakes as a table."""

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

from PIL import Image

from tasks.environment import mlflow_page
from tasks.refs import ModelRef, RunRef
from tasks.report import CAPTIONS, MISTAKES_FILE, MISTAKES_TABLE
from tasks.storage import Storage
from tasks.text.markup import markdown_fence, markdown_link, markdown_table, markdown_text

MAX_IMAGE_BYTES = 200_000
"""Maximum size of all images in a Prefect artifact, which is a row of the server's database."""

WIDTHS = (1600, 1200, 1000, 800, 640, 480, 320, 240)
"""Widths in pixels, tried in this order; a figure is never enlarged."""

QUALITIES = (85, 70)
"""JPEG qualities, tried at each width; lower ones blur letters more than fewer pixels do."""


def run_figures(run: RunRef, storage: Storage) -> str:
    """Return the figures of a training run as Markdown, the mistakes first, with links to the full figures.

    They are embedded as data URIs. An image artifact would be only a URL, but MLflow may be a database without a
    server, or a server that the browser cannot reach.
    """
    # Here: it loads MLflow, which a process that starts ranks needs only at the end.
    from tasks.tracking.runs import read_artifact, run_location
    from tasks.tracking.server import runs_location

    contents = {name: read_artifact(storage, run, name) for name in CAPTIONS}
    figures = {name: content for name, content in contents.items() if content is not None}
    parts = [] if MISTAKES_FILE in figures else [f"## {CAPTIONS[MISTAKES_FILE]}", "None of the test images."]
    for name, uri in fit_images(figures, MAX_IMAGE_BYTES).items():
        parts += [f"## {CAPTIONS[name]}", f"![{name}]({uri})"]
        if name == MISTAKES_FILE and (table := read_artifact(storage, run, MISTAKES_TABLE)) is not None:
            parts.append(mistakes_markdown(json.loads(table)))
    everything = markdown_link("all training runs", mlflow_page(storage.tracking, runs_location(storage)))
    own = markdown_link("the MLflow run", mlflow_page(storage.tracking, run_location(storage, run)))
    where = (
        f"The figures in full size, tables and event files are artifacts of {own}; {everything} are listed with their "
        "metrics."
    )
    return "\n\n".join([*parts, where])


def mistakes_markdown(table: Mapping[str, Any]) -> str:
    """Return the logged table of the mistakes as Markdown: file, true class, predicted class and its probability."""
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    shown = [
        [
            *(markdown_text(row[name]) for name in ("true", "predicted")),
            f"{float(row['probability']):.2f}",
            markdown_text(row["image"]),  # last: it may be wider than the page
        ]
        for row in rows
    ]
    return markdown_table(["true class", "predicted", "probability", "image"], shown)


def card_with_figures(card: str, figures: str, commands: Mapping[str, str] | None = None) -> str:
    """Return a model card with the figures after its results, and before them the commands."""
    results, mark, rest = card.partition("\n## Weakest classes")
    return "\n".join([results, *([commands_markdown(commands), ""] if commands else []), figures, mark + rest])


def named_card(card: str, model: ModelRef) -> str:
    """Return a model card whose title begins with the name and the version of the registered model."""
    return card.replace("# ", f"# {markdown_text(model.name)} version {model.version}: ", 1)


def commands_markdown(commands: Mapping[str, str]) -> str:
    """Return the section with the next commands."""
    lines = [line for goal, command in commands.items() for line in (f"# {goal}", command)]
    return f"## Next commands\n\nIn the folder of the checkout:\n\n{markdown_fence(chr(10).join(lines), 'sh')}"


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
