"""Champion and challenger of a service, looked up in the registry, and their packages in the home."""

import hashlib
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.config.serving import ServeRun
from tasks.errors import WrongInput, loggable
from tasks.model_package.description import WEIGHTS_FILE, InvalidPackage, file_sha256, read_classes
from tasks.predict.champion import champion_of, translate_invalid
from tasks.predict.scoring import check_settings
from tasks.refs import ModelRef
from tasks.registry.aliases import CHALLENGER
from tasks.serve.served import Served, ServedVersion
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage
from tasks.system.home import PRIVATE_FOLDER
from tasks.tables.chosen import chosen_tables
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.models import model_with_alias
from tasks.tracking.server import reachable

logger = logging.getLogger("lakevision.serve")

ONLY_SPARK = (
    "only Spark can read the tables, and a service does not start it: set promote.model_name, or start it by the flow "
    "serve"
)

NUM_KEPT = 4
"""Packages that stay in the home: those of both aliases, and of both before a promotion, which a rollback needs."""

UNUSED = 3600.0
"""Seconds after its last use from which on a package may be removed."""


def check_servable(run: ServeRun, storage: Storage) -> ModelRef:
    """Check that a service can start with these settings, and return the version that it begins with.

    Raises:
        WrongInput: The champion is missing, or cannot predict with the settings.
        TrackingUnavailable: The tracking server does not answer.
    """
    alias = run.predict.alias
    model = try_without_spark(lambda spark: champion_of(run.promote, alias, storage, spark), run.spark, storage)
    described = read_classes(Path(fetch_package(model, storage).folder))
    check_settings(run.predict, described.classes, described.unknown_thresholds)
    return model


def fetch_package(model: ModelRef, storage: Storage) -> ServedVersion:
    """Return a version and the folder of its package in the home, which is fetched if it is missing.

    Raises:
        WrongInput: As `fetch_registered`, or the package is invalid.
        TrackingUnavailable: The tracking server does not answer.
    """
    parent = Path(storage.home) / "serve" / "models"
    parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    # The number of a version is used again after its model was deleted.
    digest = hashlib.sha256(f"{model.name}|{model.version}|{model.run_id}".encode()).hexdigest()[:16]
    folder = parent / digest
    if folder.is_dir() and not _is_whole(folder):
        shutil.rmtree(folder)
    if not folder.is_dir():
        with TemporaryDirectory(prefix=f"{digest}-", dir=parent, ignore_cleanup_errors=True) as partial:
            fetched = fetch_registered(storage, model, Path(partial) / "model")
            with translate_invalid():
                read_classes(fetched)
            try:
                os.replace(fetched, folder)
            except OSError:
                if not _is_whole(folder):  # Otherwise another service was faster.
                    raise
    folder.touch()
    return ServedVersion(model=model, folder=str(folder), tables=storage.tables)


def _is_whole(folder: Path) -> bool:
    """Return whether the weights in a folder are those of its description; a loss of power may have cut them."""
    try:
        return file_sha256(folder / WEIGHTS_FILE) == read_classes(folder).weights_sha256
    except (InvalidPackage, OSError):
        return False


class RegistryWatch:
    """The look at the registry, which is repeated while a service runs."""

    def __init__(self, run: ServeRun, file: Path) -> None:
        """Begin with the versions that an earlier service named.

        Args:
            run: Parameters of the service.
            file: File of `Served`.
        """
        self._run, self._file, self._served = run, file, Served.read(file)
        self._chosen: tuple[str, Storage] | None = None

    def look(self) -> None:
        """Name the versions that have the aliases now. If the registry is away, those of before stay."""
        before = self._served
        try:
            found = self._find()
        except NeedsSpark:
            found = before.model_copy(update={"problem": ONLY_SPARK})
        except Exception as error:  # Whatever it is, workers answer with what they have, and say the problem.
            found = before.model_copy(update={"problem": loggable(error) or type(error).__name__})
        if found != before:
            found.write(self._file)
            self._served = found
            (logger.warning if found.problem else logger.info)("%s", found.problem or _about(found))

    def _find(self) -> Served:
        run, problem, challenger = self._run, "", None
        # Once: model and tables stay, whatever tables are the newest in the home later.
        name, storage = self._chosen or (run.promote.model_name, chosen_tables(run.storage))
        champion = champion_of(run.promote.model_copy(update={"model_name": name}), run.predict.alias, storage)
        self._chosen = champion.name, storage
        if run.serve.challenger != "off":
            try:
                with reachable(storage):
                    found = model_with_alias(storage, champion.name, CHALLENGER)
                if found is not None and found != champion:
                    challenger = self._version(found, storage)
            except WrongInput as error:
                problem = str(error)
        served = Served(champion=self._version(champion, storage), challenger=challenger, problem=problem)
        remove_packages(storage)
        return served

    def _version(self, model: ModelRef, storage: Storage) -> ServedVersion:
        for before in (self._served.champion, self._served.challenger):  # A promotion names the challenger again.
            if before is not None and (before.model, before.tables) == (model, storage.tables):
                with suppress(FileNotFoundError):
                    os.utime(before.folder)
                    return before
        return fetch_package(model, storage)


def remove_packages(storage: Storage) -> None:
    """Remove the packages that no service has used for an hour, but the last NUM_KEPT of them, and partial ones."""
    found = sorted((folder.stat().st_mtime, folder) for folder in (Path(storage.home) / "serve" / "models").iterdir())
    whole = [(at, folder) for at, folder in found if "-" not in folder.name]
    partial = [(at, folder) for at, folder in found if "-" in folder.name]
    for at, folder in [*partial, *whole[:-NUM_KEPT]]:
        if time.time() - at > UNUSED:
            shutil.rmtree(folder, ignore_errors=True)


def _about(served: Served) -> str:
    versions = [
        f"{alias} {version.model.name} version {version.model.version}"
        for alias, version in (("champion", served.champion), ("challenger", served.challenger))
        if version is not None
    ]
    return ", ".join(versions)
