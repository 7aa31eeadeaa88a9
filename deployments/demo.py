"""`make demo`: a local stack, the whole DAG and one batch of the stream on it, and a summary with links to results."""

import argparse
import hashlib
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from pydantic import ValidationError

from deployments.demo_service import ask_service, images_of_test
from deployments.stack.local_stack import PREFECT_PORT, local_stack, port_setting
from deployments.stack.login import auth_file, own_auth_string
from deployments.stack.processes import LocalStack, say
from tasks.commands import command_lines
from tasks.config.etl import BUILTIN_DIGITS
from tasks.config.storage import StorageConfig
from tasks.environment import DEFAULT_HOME, MLFLOW_PORT, lakevision_home
from tasks.errors import WrongInput, explain
from tasks.model.pretrained import check_model_name, load_weights, names_model
from tasks.paths import absolute_url, local_path, readable_name
from tasks.storage import Storage, resolve_storage
from tasks.system.listening import HOST
from tasks.system.signals import interrupt_on

if TYPE_CHECKING:
    from tasks.refs import StreamReport

DEPLOYMENT = "pipeline/pipeline"
STREAM = "predict-stream/predict-stream"

NUM_ARRIVALS = 16
"""Number of images that the stream predicts."""

ARRIVALS = "arrivals"
"""Name of the table to which new images are added, as another program would."""

LAST_LINES_SECONDS = 5.0
"""How long to wait for the rest of a run's log."""

DIGITS_IMAGE_SIZE, DIGITS_BATCH_SIZE = 16, 64
"""For the digits of 8 x 8 pixels: larger images and smaller batches take twice the time (tests/benchmarks/LOG.md)."""

PHOTOS_MODEL = "mobilenet_v2"
"""Model of the demo on the user's own images, with pretrained weights."""

OWN_IMAGE_SIZE = 64
"""Image size of the demo on the user's own images from scratch: photos need more than the digits, on a laptop, too."""

DIGITS_NAME = "demo-digits"
"""Name of the folder of the digits' tables, and of their model."""

MAX_FOLDER_CHARACTERS = 30
"""Maximum number of characters of the source's folder in the name of its tables."""

HIDDEN_LOG_PREFIXES = (
    *("Running 1 deployment pull step", "Executing deployment step", "Deployment step", "All deployment steps"),
    *("Worker ", "Flow run '", "Finished in state Completed"),
    "summary of the run",
)
"""First words of log lines that are not printed: Prefect's internal steps, and the summary, which is printed last."""


class DemoFailed(RuntimeError):
    """Raised where the run of the DAG did not complete."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the demo's options."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--source", default=BUILTIN_DIGITS, help="folder of class folders, a path or URL")
    parser.add_argument("--model", help="a torchvision classifier, or timm:NAME")
    own = "; for your own images DEFAULT, where they can be downloaded"
    parser.add_argument("--weights", help=f"none, DEFAULT (pretrained), champion, or a state dict{own}")
    parser.add_argument("--image-size", type=int, help="side of the images in pixels")
    port = f"port of the Prefect server; else $LAKEVISION_PORT, or {PREFECT_PORT}"
    parser.add_argument("--port", type=int, help=port)
    return parser.parse_args(arguments)


def tables_name(source: str) -> str:
    """Return the name of the demo's tables of a source, a folder in the home that no other source has."""
    if source == BUILTIN_DIGITS:
        return DIGITS_NAME
    location = absolute_url(source).rstrip("/")
    suffix = hashlib.sha256(location.encode()).hexdigest()[:6]
    return f"demo-{readable_name(location, MAX_FOLDER_CHARACTERS)}-{suffix}"


def parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the DAG's parameters: those for the digits, overridden by the options that the user gave."""
    own = options.source != BUILTIN_DIGITS
    weights = options.weights or ("DEFAULT" if own else "none")
    if weights not in {"none", "DEFAULT"} and not names_model(weights):
        weights = absolute_url(weights)
    frozen = weights != "none"
    return {
        "config": {
            "source": absolute_url(options.source),
            "model": options.model or (PHOTOS_MODEL if frozen else "resnet18"),
            "weights": weights,
            "image_size": options.image_size or (224 if frozen else OWN_IMAGE_SIZE if own else DIGITS_IMAGE_SIZE),
            **({} if own else {"max_epochs": 5}),
            "train_on": "single" if own else "both",
            "tables": tables_name(options.source),
            # All tables of the digits have the same default name; a folder has its own.
            **({} if own else {"model_name": DIGITS_NAME}),
            "train": {} if own else {"batch_size": DIGITS_BATCH_SIZE},
        }
    }


def without_download(options: argparse.Namespace) -> bool:
    """Return whether weights that the user did not choose cannot be downloaded, after a line that says so.

    Those that can be are in torch's or timm's cache afterwards.
    """
    if options.weights is not None or options.source == BUILTIN_DIGITS:
        return False
    try:
        load_weights(options.model or PHOTOS_MODEL, "DEFAULT")
    except WrongInput as error:
        say(f"{error.cause}: a network is trained from scratch, which learns less; WEIGHTS= takes a state dict")
        return True
    return False


def check_parameters(values: dict[str, Any], model: str | None) -> None:
    """Validate the parameters before anything starts.

    Args:
        values: The DAG's parameters.
        model: Model that the user asked for, or None.

    Raises:
        ValidationError: A setting has an invalid value.
        WrongInput: The source is missing or empty, or has only one class or too few images; or the model is unknown.
    """
    from tasks.config.pipeline import PipelineConfig
    from tasks.etl.gates import check_enough_images
    from tasks.etl.listing import check_source, class_sizes
    from tasks.spark.jvm import check_java

    config = PipelineConfig.model_validate(values["config"])
    check_java()
    if model is not None:
        # For a user's model only: torchvision takes seconds to load, and the demo's own models are known.
        check_model_name(model)
    folder = local_path(config.etl.source)  # None for the digits and for a URL, which the DAG's preflight checks
    if folder is not None:
        check_enough_images(class_sizes(check_source(folder)), str(folder), config.etl)


def follow_run(stack: LocalStack, deployment_name: str, values: dict[str, Any]) -> tuple[str, Any]:
    """Submit a run of a deployment, print its log while it runs, and return its id and the flow's result as JSON.

    Raises:
        DemoFailed: The run ended in a state other than completed.
    """
    # Imported here, after the environment was set to this stack's server.
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(deployment_name)
        run = client.create_flow_run_from_deployment(deployment.id, parameters=values)
        say(f"running the deployment {deployment_name}: {stack.url}/runs/flow-run/{run.id}")
        shown: set[UUID] = set()
        try:
            while run.state is None or not run.state.is_final():
                stack.check_alive()
                time.sleep(1.0)
                run = client.read_flow_run(run.id)
                _show_log(client, run.id, shown)
        except BaseException:
            # A run that is still scheduled would be picked up by the next stack, with the parameters of this one.
            with suppress(Exception):
                client.set_flow_run_state(run.id, Cancelled(message="the demo was stopped"), force=True)
            raise
        # The rest of the log arrives in batches, the final state's line last, and it may never arrive.
        deadline = time.monotonic() + LAST_LINES_SECONDS
        while not _show_log(client, run.id, shown) and time.monotonic() < deadline:
            time.sleep(0.2)
    if not run.state.is_completed():
        raise DemoFailed(sentence(run.state.message or str(run.state.name)))
    return str(run.id), run.state.result()


def _show_log(client: Any, flow_run_id: UUID, shown: set[UUID]) -> bool:
    """Print new log lines of a run and of the runs it submitted, and return whether the run has ended.

    Lines are tracked by id: they arrive in batches from several processes, and not in order of time.
    """
    from prefect.client.schemas.filters import FlowRunFilter, LogFilter
    from prefect.client.schemas.sorting import LogSort

    children = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [flow_run_id]}})
    runs = [flow_run_id, *(run.id for run in client.read_flow_runs(flow_run_filter=children))]
    wanted = LogFilter.model_validate({"flow_run_id": {"any_": runs}})
    # Only the newest page: it holds far more lines than arrive within a second.
    newest = client.read_logs(wanted, limit=200, sort=LogSort.TIMESTAMP_DESC)
    # Prefect logs failed and cancelled states with the same words.
    # The lines of its stages have the run's id as well.
    own = [line for line in newest if line.flow_run_id == flow_run_id and line.task_run_id is None]
    has_ended = any(line.message.startswith("Finished in state") for line in own)
    for record in reversed(newest):
        if record.id in shown:
            continue
        shown.add(record.id)
        if record.message.startswith(HIDDEN_LOG_PREFIXES):
            continue
        # Tracebacks stay in the log; the user gets the error's sentence at the end.
        first = record.message.splitlines()[0] if record.message else ""
        print(f"{record.timestamp:%H:%M:%S}  {first}", flush=True)
    return has_ended


def sentence(message: str) -> str:
    """Return a state's message without the kind of the error at its end."""
    return message.removesuffix("(WrongInput)").strip()


def add_arrivals(storage: Storage) -> str:
    """Write mirrored test images to a table of their own, unless it exists; return its path.

    The champion has predicted none of them: the stream has images to predict.
    """
    # Imported here, as in the other functions: wrong options are refused before seconds of imports.
    import pyarrow as pa

    from tasks.schema import CHANGE_FEED, IMAGES_ARROW
    from tasks.tables.direct_commits import append_rows
    from tasks.tables.snapshots import newest_snapshot

    path = storage.table(ARRIVALS)
    if newest_snapshot(None, path) is not None:
        return path
    schema = pa.schema([IMAGES_ARROW.field(name) for name in ("sha256", "content")])
    contents = [mirrored(row["content"]) for row in images_of_test(storage, NUM_ARRIVALS)]
    keys = [hashlib.sha256(content).hexdigest() for content in contents]
    append_rows(path, pa.table([keys, contents], schema=schema), {CHANGE_FEED: "true"})
    return path


def mirrored(content: bytes) -> bytes:
    """Return an encoded image, mirrored, as PNG."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content)) as image, io.BytesIO() as file:
        ImageOps.mirror(image.convert("RGB")).save(file, "PNG")
        return file.getvalue()


def stream_parameters(table: str, tables: str, model: str) -> dict[str, Any]:
    """Return the parameters of a run that predicts the new rows of a table.

    Args:
        table: Path of the table.
        tables: Name of the demo's tables, beside which the predictions are.
        model: Name of the registered model: the table was not made by the flow etl, which would give it one.
    """
    return {"config": {"model_name": model, "tables": tables, "predict": {"table": table}}}


def run_stream(stack: LocalStack, tables: str, model: str) -> "StreamReport":
    """Add images to a table, and run the stream that predicts them; return its report.

    Args:
        stack: The stack that ran the DAG.
        tables: Name of the demo's tables.
        model: Name of the registered model.

    Raises:
        DemoFailed: The run did not complete.
    """
    from tasks.refs import StreamReport

    table = add_arrivals(resolve_storage(StorageConfig(home=str(stack.home), tables=tables)))
    return StreamReport.model_validate(follow_run(stack, STREAM, stream_parameters(table, tables, model))[1])


def show_summary(
    stack: LocalStack, tables: str, flow_run_id: str, stream: "StreamReport | None", own_tracking: str | None
) -> None:
    """Print the summary, and the commands and URLs that show the run in the UIs.

    Args:
        stack: The stack that ran the DAG.
        tables: Name of the demo's tables.
        flow_run_id: Id of the run.
        stream: Report of the stream; None if it did not run.
        own_tracking: Tracking URI in the user's environment; the demo tracked into its own home instead.
    """
    from tasks.refs import RunRef
    from tasks.summary import SUMMARY_FILE
    from tasks.summary.summary import PipelineSummary, summary_lines
    from tasks.tracking.runs import run_location
    from tasks.tracking.server import runs_location

    file = stack.home / SUMMARY_FILE
    summary = PipelineSummary.model_validate_json(file.read_text())
    storage = resolve_storage(StorageConfig(home=str(stack.home)))
    print("\n" + "\n".join(summary_lines(summary)))
    if stream is not None:
        print(f"{'stream':<13} {stream.predicted} new images predicted, {stream.errors} errors")
        print(
            f"{'':<13} (test images, mirrored, which the demo added to the table `{ARRIVALS}` as another program would)"
        )
    home = "" if stack.home == Path(DEFAULT_HOME).absolute() else f"LAKEVISION_HOME={stack.home} "
    unset = "LAKEVISION_TRACKING_URI= " if own_tracking else ""
    home += "" if stack.port == PREFECT_PORT else f"LAKEVISION_PORT={stack.port} "
    home += "" if stack.mlflow_port == MLFLOW_PORT else f"LAKEVISION_MLFLOW_PORT={stack.mlflow_port} "
    print(f"\nas JSON       {file}")
    print(f"in the UIs    {home}make up   (server, workers and MLflow UI until Ctrl-C; it prints the login), then")
    print(f"  Prefect UI  {stack.url}/runs/flow-run/{flow_run_id}")
    assert summary.single is not None, "the demo trains in one process, on the digits with ranks as well"
    page = run_location(storage, RunRef(run_id=summary.single.run_id))
    print(f"  MLflow UI   http://{HOST}:{stack.mlflow_port}{page}")
    print(f"  all runs    http://{HOST}:{stack.mlflow_port}{runs_location(storage)}")
    command = f"{home}{unset}.venv/bin/python -m deployments.stack.mlflow_ui --port {stack.mlflow_port}"
    print(f"  MLflow UI only: {command}   (the same login)")
    print(f"\ntables        {stack.home / tables}, which the next commands name, with their model; FOLDER is yours")
    later = {goal: unset + command.replace(" && ", f" && {unset}") for goal, command in summary.next.items()}
    print("\n".join(command_lines(later)))


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 0 if the DAG completed."""
    options = parse_arguments(arguments)
    began = time.monotonic()
    interrupt_on(signal.SIGTERM, signal.SIGHUP)
    try:
        values = parameters(options)
        check_parameters(values, options.model)
        if without_download(options):
            options.weights = "none"
            values = parameters(options)
        port = options.port or port_setting("LAKEVISION_PORT", PREFECT_PORT)
        with local_stack(lakevision_home(), port) as stack:
            if own_auth_string() is None:  # before the stack's login is added to the environment
                say(f"login for its page: the content of {auth_file(stack.home)}")
            own_tracking = os.environ.get("LAKEVISION_TRACKING_URI")
            os.environ.update(stack.environment)
            flow_run_id, summary = follow_run(stack, DEPLOYMENT, values)
            tables = values["config"]["tables"]
            # New images of a user are for the user to add: the printed command predicts them.
            stream = run_stream(stack, tables, summary["model"]) if options.source == BUILTIN_DIGITS else None
            show_summary(stack, tables, flow_run_id, stream, own_tracking)
            print("\n".join(["", *ask_service(stack.home, tables, summary["model"])]))
    except (ValidationError, WrongInput) as error:
        print(f"make demo: {explain(error) if isinstance(error, ValidationError) else error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError, httpx.HTTPError) as error:
        print(f"make demo: {error} (logs: {lakevision_home()}/logs)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make demo: stopped", file=sys.stderr)
        return 130
    print(f"\ntotal time: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
