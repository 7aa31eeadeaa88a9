"""A service without Prefect: a supervisor and its workers.

Run: `python -m tasks.serve.server '{"serve": {"port": 8000}}'`, with parameters of the flow serve. The supervisor
listens, starts the workers, looks at the registry, and moves the journal's rows to the Delta tables.
"""

import argparse
import hashlib
import logging
import os
import shutil
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError
from uvicorn import Config
from uvicorn.supervisors import Multiprocess

from tasks.config.serving import ServeRun
from tasks.environment import worker_memory
from tasks.errors import UserError, WrongInput, explain
from tasks.serve.app import create_app
from tasks.serve.journal import Journal
from tasks.serve.request_log import journal_file, move_rows, remove_old_images
from tasks.serve.service import check_settings
from tasks.serve.worker import WorkerSettings
from tasks.storage import Storage, resolve_storage
from tasks.system.home import PRIVATE_FOLDER, check_home, make_home
from tasks.system.listening import BACKLOG, listen
from tasks.system.signals import end_with_parent
from tasks.tables.chosen import chosen_tables

if TYPE_CHECKING:
    from tasks.serve.registry import RegistryWatch

logger = logging.getLogger("lakevision.serve")

LOOK_SECONDS = 1.0
"""Interval of the looks at the registry: two small queries."""

MOVE_SECONDS = 60.0
"""Interval at which rows are moved from the journal to the tables: each commit is a file."""

OLD_IMAGES_SECONDS = 3600.0

HUNG_SECONDS = 120
"""Time without an answer from a worker's process after which it is replaced; imports on a busy machine take long."""


class Supervisor(Multiprocess):
    """The workers of a service. A worker that ends is replaced, and a worker that cannot start ends the service.

    Attributes:
        has_failed: Whether a worker could not start.
    """

    has_failed = False

    def keep_subprocess_alive(self) -> None:
        """Replace workers that have ended, except where one could not start."""
        super().keep_subprocess_alive()
        self.has_failed |= self.should_exit.is_set() and any(process.exitcode for process in self.processes)


class Repeated(threading.Thread):
    """Work that is repeated beside the workers; a failure is logged, and the work is tried again."""

    def __init__(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._seconds, self._work, self._ended = seconds, work, threading.Event()

    def run(self) -> None:
        """Work until `end`, first at once."""
        said = ""
        while True:
            try:
                self._work()
                said = ""
            except Exception as error:
                # A registry or disk that is away fails each time: said once, and with the next other reason.
                if (text := f"{type(error).__name__}: {error}") != said:
                    logger.warning("%s: %s", self.name, text, exc_info=not isinstance(error, UserError))
                    said = text
            if self._ended.wait(self._seconds):
                return

    def end(self) -> None:
        """End the thread after the work that it does now."""
        self._ended.set()
        self.join()


def service_folder(run: ServeRun, storage: Storage) -> Path:
    """Return the folder of a service in the home: of its port and model, so that it never begins with another's."""
    key = repr((run.promote.model_name, run.predict.alias, run.storage, storage.tracking))
    return Path(storage.home) / "serve" / f"{run.serve.port}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def serve(run: ServeRun, descriptor: int | None, *, with_parent: bool) -> int:
    """Serve until a signal is received, and return the exit code.

    Args:
        run: Parameters.
        descriptor: Inherited socket that listens already; None to listen here.
        with_parent: Whether the service ends when the process that started it has ended.

    Raises:
        WrongInput: As `check_settings`, or the port is in use, or the home cannot be written.
    """
    storage = resolve_storage(run.storage)
    check_settings(run, storage)
    check_home(Path(storage.home), (*storage.home_entries, "serve"))
    make_home(Path(storage.home))
    if descriptor is None:
        listening = listen(run.serve.port, "the service", "set serve.port to a free port", run.serve.host)
    else:
        listening = socket.socket(fileno=descriptor)
    folder = service_folder(run, storage)
    settings = WorkerSettings(serve=run.serve, predict=run.predict, storage=storage, folder=str(folder))
    shutil.rmtree(settings.metrics_folder, ignore_errors=True)
    settings.metrics_folder.mkdir(mode=PRIVATE_FOLDER, parents=True)
    # Read by prometheus-client, and by the C library, when a worker starts.
    os.environ.update(worker_memory() | {"PROMETHEUS_MULTIPROC_DIR": str(settings.metrics_folder)})
    beside = [Repeated("registry", LOOK_SECONDS, _look(run, settings.served_file))]
    log = RequestLog(run, open_journal(storage)) if run.serve.log_requests else None
    if log is not None:
        beside.append(Repeated("request log", MOVE_SECONDS, log.move))
        beside.append(Repeated("kept images", OLD_IMAGES_SECONDS, log.remove_old_images))
    supervisor = Supervisor(
        Config(
            partial(create_app, settings),
            factory=True,
            workers=run.serve.num_workers,
            backlog=BACKLOG,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=run.serve.request_seconds,
            timeout_worker_healthcheck=HUNG_SECONDS,
        ),
        [listening],
    )
    if with_parent:
        end_with_parent()
    for each in beside:
        each.start()
    logger.info("the service listens on http://%s:%d", run.serve.host, run.serve.port)
    supervisor.run()
    for each in beside:
        each.end()
    if log is not None:
        log.move()
    return int(supervisor.has_failed)


class RequestLog(NamedTuple):
    """The request log of a service, with the tables of each move: `make up` may start before the first tables."""

    run: ServeRun
    journal: Journal

    def move(self) -> None:
        """Move the journal's rows to the tables."""
        move_rows(self.journal, chosen_tables(self.run.storage))

    def remove_old_images(self) -> None:
        """Remove the images that are kept no longer."""
        remove_old_images(chosen_tables(self.run.storage), self.run.serve.keep_image_days)


def open_journal(storage: Storage) -> Journal:
    """Open the journal of a home.

    Raises:
        WrongInput: The file is damaged.
    """
    file = journal_file(storage)
    file.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    try:
        return Journal(file)
    except sqlite3.DatabaseError as error:
        raise WrongInput(
            f"the journal '{file}' cannot be opened ({error})", way_out="move it away; a new one is made"
        ) from None


def _look(run: ServeRun, file: Path) -> Callable[[], None]:
    """Return a function that looks at the registry. The first call imports MLflow, while workers import torch."""
    watch: list[RegistryWatch] = []

    def look() -> None:
        from tasks.serve.registry import RegistryWatch

        if not watch:
            watch.append(RegistryWatch(run, file))
        watch[0].look()

    return look


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal is received, and return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("parameters", nargs="?", default="{}", help="parameters of the flow serve, as JSON")
    parser.add_argument("--fd", type=int, help="file descriptor of an inherited socket that already listens")
    parser.add_argument("--with-parent", action="store_true", help="end when the process that started it has ended")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("lakevision").setLevel(logging.INFO)
    try:
        run = ServeRun.model_validate_json(options.parameters)
        return serve(run, options.fd, with_parent=options.with_parent)
    except (WrongInput, ValidationError) as error:
        print(f"serve: {explain(error) if isinstance(error, ValidationError) else error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
