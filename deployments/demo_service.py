"""The end of the demo: one test image predicted over HTTP, its heat map, and the command that starts the page."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request

from tasks.commands import flow_command
from tasks.config.serving import ServeRun
from tasks.config.storage import StorageConfig
from tasks.environment import api_key
from tasks.storage import Storage, resolve_storage
from tasks.system.listening import HOST, free_port

if TYPE_CHECKING:
    from tasks.serve.service import Service

HEAT_MAP = "heat-map.jpg"
"""File in the home with the heat map of the image."""


def ask_service(home: Path, tables: str, model: str) -> list[str]:
    """Start a service of the champion, ask it about a test image, end it, and return the lines of the summary.

    Args:
        home: Home of the demo.
        tables: Name of its tables.
        model: Name of the registered model.

    Raises:
        ServiceFailed: The service did not start.
    """
    # Imported here, after the environment was set to the demo's stack.
    from tasks.serve.service import running_service

    where = StorageConfig(home=str(home), tables=tables)
    # No user has asked: the tables get no row.
    serve = {"port": free_port(), "log_requests": False}
    run = ServeRun.model_validate({"storage": where, "promote": {"model_name": model}, "serve": serve})
    storage = resolve_storage(where)
    (row,) = images_of_test(storage, 1)
    image = row["content"]
    with running_service(run, storage) as service:
        ask(service, "/predict", image)  # The first request of a process takes longer.
        began = time.perf_counter()
        answer = json.loads(ask(service, "/predict", image))
        milliseconds = 1000 * (time.perf_counter() - began)
        (home / HEAT_MAP).write_bytes(ask(service, "/explain", image))
    (found,) = answer["predictions"]
    version = f"{answer['model']} version {found['model_version']}"
    about = f"a test image of '{row['label']}' is '{found['label']}', probability {found['probability']:.4f}"
    return [
        f"{'over HTTP':<13} {about}, by {version} in {milliseconds:.0f} ms",
        f"{'':<13} its heat map: {home / HEAT_MAP}",
        f"{'':<13} the page, to drop your own images on http://{HOST}:8000: "
        f"{flow_command('serve', *storage.options, '--model_name', model)}",
    ]


def images_of_test(storage: Storage, most: int) -> list[dict[str, Any]]:
    """Return the columns content and label of the first images of the split `test`, at most `most`."""
    import pyarrow as pa

    from tasks.refs import TEST
    from tasks.schema import IMAGES_ARROW
    from tasks.tables.snapshots import latest, read_batches

    schema = pa.schema([IMAGES_ARROW.field(name) for name in ("content", "label")])
    batches = read_batches(latest(None, storage.table("images")), schema, {"split": TEST}, most)
    return list(islice((row for batch in batches for row in batch.to_pylist()), most))


def ask(service: "Service", path: str, image: bytes) -> bytes:
    """Return the answer of a service for an image."""
    from tasks.serve.service import OPENER

    headers = {"Content-Type": "application/octet-stream", "Authorization": f"Bearer {api_key() or ''}"}
    request = Request(f"{service.url}{path}", data=image, headers=headers)  # noqa: S310  # the URL is built by the service
    with OPENER.open(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content
