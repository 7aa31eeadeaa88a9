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
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from uvicorn import Config
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from tasks.config.serving import ServeRun
from tasks.environment import PROGRESS_BARS, worker_memory
from tasks.errors import WrongInput, explain
from tasks.serve.app import create_app
from tasks.serve.guard import Connection
from tasks.serve.journal import Journal
from tasks.serve.repeated import Repeated
from tasks.serve.request_log import journal_file, move_rows, remove_old_images
from tasks.serve.served import Served
from tasks.serve.service import check_settings
from tasks.serve.worker import WorkerSettings, start_logging
from tasks.storage import Storage, resolve_storage
from tasks.system.home import PRIVATE_FOLDER, check_home, make_home, make_private_folder
from tasks.system.listening import BACKLOG, allow_connections, listen
from tasks.system.signals import end_with_parent

if TYPE_CHECKING:
    from tasks.serve.registry import RegistryWatch

logger = logging.getLogger("lakevision.serve")

LOOK_SECONDS = 1.0
"""Interval of the looks at the registry: two small queries."""

MOVE_SECONDS = 60.0
"""Interval at which rows are moved from the journal to the tables: each commit is a file."""

OLD_IMAGES_SECONDS = 3600.0


class Supervisor(Multiprocess):
    """The workers of a service. A worker that ends is replaced, and a worker that cannot start ends the service."""

    def keep_subprocess_alive(self) -> None:
        """Replace the workers that have ended.

        uvicorn also asks each worker whether it answers, and would wait for a worker that is killed meanwhile until a
        time limit. That must be long: a worker that imports torch does not answer either.
        """
        for number, process in enumerate(self.processes):
            if self.should_exit.is_set() or process.process.is_alive():
                continue
            process.kill()  # It closes the pipe of a worker that has ended.
            process.join()
            if process.exitcode == STARTUP_FAILURE:
                self.should_exit.set()
                return
            logger.warning("a worker ended with %s, and is replaced", process.exitcode)
            self.processes[number] = Process(self.config, self.sockets)
            self.processes[number].start()

    def terminate_all(self) -> None:
        """End the workers; a connection that comes meanwhile is refused, and does not wait for nobody."""
        for listening in self.sockets:
            listening.close()
        super().terminate_all()


def service_folder(run: ServeRun, storage: Storage) -> Path:
    """Return the folder of a service in the home: of its port and model, so that it never begins with another's."""
    key = repr((run.promote.model_name, run.predict.alias, run.storage, storage.tracking))
    return Path(storage.home) / "serve" / f"{run.serve.port}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def serve(run: ServeRun, descriptor: int | None, parent: int | None) -> int:
    """Serve until a signal is received, and return the exit code.

    Args:
        run: Parameters.
        descriptor: Inherited socket that listens already; None to listen here.
        parent: Process id of the process with which the service ends; None: with none.

    Raises:
        WrongInput: As `check_settings`, or the port is in use, or the home cannot be written.
    """
    storage = resolve_storage(run.storage)
    check_settings(run, storage)
    check_home(Path(storage.home), (*storage.home_entries, "serve"))
    make_home(Path(storage.home))
    allow_connections()
    if descriptor is None:
        listening = listen(run.serve.port, "the service", "set serve.port to a free port", run.serve.host)
    else:
        listening = socket.socket(fileno=descriptor)
    folder = service_folder(run, storage)
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    served, figures = folder / "served.json", figures_folder(folder)
    settings = WorkerSettings(
        serve=run.serve, predict=run.predict, storage=storage, served=str(served), figures=str(figures)
    )
    # Read by prometheus-client and the C library when a worker starts, and by MLflow in this process.
    os.environ.update(worker_memory() | {"PROMETHEUS_MULTIPROC_DIR": str(figures), PROGRESS_BARS: "false"})
    beside = [Repeated("registry", LOOK_SECONDS, _look(run, served))]
    if run.serve.log_requests:
        days = run.serve.keep_image_days
        moving = partial(move_rows, open_journal(storage), storage)
        # Once more after the workers, which write to the journal until they end.
        beside.append(Repeated("request log", MOVE_SECONDS, moving, once_more=True))
        beside.append(Repeated("kept images", OLD_IMAGES_SECONDS, partial(_remove_old_images, served, storage, days)))
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
            http=Connection,
            timeout_graceful_shutdown=run.serve.request_seconds,
        ),
        [listening],
    )
    if parent is not None:
        end_with_parent(parent)
    for each in beside:
        each.start()
    logger.info("the service listens on http://%s:%d", run.serve.host, run.serve.port)
    supervisor.run()
    for each in beside:
        each.end()
    shutil.rmtree(figures, ignore_errors=True)
    return int(any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes))


def figures_folder(folder: Path) -> Path:
    """Return an empty folder in memory for the figures of a service's workers, who map its files.

    On a full disk, a worker would be killed by its first write to such a file.
    """
    memory = Path("/dev/shm")  # noqa: S108  # for its owner only, as `make_private_folder` checks
    found = memory / f"lakevision-{os.geteuid()}-{folder.name}" if memory.is_dir() else folder / "figures"
    make_private_folder(found)
    for file in found.iterdir():
        file.unlink()
    return found


def _remove_old_images(served: Path, storage: Storage, days: int) -> None:
    champion = Served.read(served).champion
    if champion is not None:
        remove_old_images(storage.model_copy(update={"tables": champion.tables}), days)


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
        is_damaged = not isinstance(error, sqlite3.OperationalError)
        way_out = "move it away; a new one is made" if is_damaged else "free space on the disk, or end what holds it"
        raise WrongInput(f"the journal '{file}' cannot be opened ({error})", way_out=way_out) from None


def _look(run: ServeRun, file: Path) -> Callable[[], None]:
    """Return a function that looks at the registry. The first call imports MLflow, while workers import torch."""

    @cache
    def watch() -> "RegistryWatch":
        from tasks.serve.registry import RegistryWatch

        return RegistryWatch(run, file)

    return lambda: watch().look()


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal is received, and return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("parameters", nargs="?", default="{}", help="parameters of the flow serve, as JSON")
    parser.add_argument("--fd", type=int, help="file descriptor of an inherited socket that already listens")
    parser.add_argument("--parent", type=int, help="id of the process that starts it, with which it ends")
    options = parser.parse_args(arguments)
    start_logging()
    try:
        run = ServeRun.model_validate_json(options.parameters)
        return serve(run, options.fd, options.parent)
    except (WrongInput, ValidationError) as error:
        print(f"serve: {explain(error) if isinstance(error, ValidationError) else error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
