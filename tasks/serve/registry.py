"""Champion and challenger of a service, looked up in the registry, and their packages in the home."""

import hashlib
import logging
import os
import shutil
import time
from pathlib import Path
from tempfile import mkdtemp

from tasks.config.promotion import PromoteConfig
from tasks.config.serving import ServeRun
from tasks.errors import UserError, WrongInput
from tasks.model_package.description import FILE_LIMITS, read_classes
from tasks.predict.champion import champion_of, translate_invalid
from tasks.predict.scoring import check_settings
from tasks.refs import ModelRef
from tasks.registry.aliases import CHALLENGER
from tasks.serve.served import Served, ServedVersion
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage, resolve_storage
from tasks.system.home import PRIVATE_FOLDER
from tasks.tables.chosen import chosen_tables
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.models import model_with_alias
from tasks.tracking.server import reachable

logger = logging.getLogger("lakevision.serve")

NUM_KEPT = 4
"""Packages that stay in the home: those of both aliases, and of both before a promotion, which a rollback needs."""


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
    if not folder.is_dir():
        partial = Path(mkdtemp(prefix=f"{digest}-", dir=parent))
        try:
            fetched = fetch_registered(storage, model, FILE_LIMITS, partial / "model")
            with translate_invalid():
                read_classes(fetched)
            os.replace(fetched, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    folder.touch()
    return ServedVersion(model=model, folder=str(folder))


class RegistryWatch:
    """The look at the registry, which is repeated while a service runs."""

    def __init__(self, run: ServeRun, file: Path) -> None:
        """Begin with the versions that an earlier service named.

        Args:
            run: Parameters of the service.
            file: File of `Served`.
        """
        self._run, self._file = run, file
        self._name = run.promote.model_name
        self._served = Served.read(file)

    def look(self) -> None:
        """Name the versions that have the aliases now. If the registry is away, those of before stay."""
        before = self._served
        try:
            found = self._find()
        except UserError as error:
            found = before.model_copy(update={"problem": str(error)})
        if found != before:
            found.write(self._file)
            self._served = found
            (logger.warning if found.problem else logger.info)("%s", found.problem or _about(found))

    def _find(self) -> Served:
        run = self._run
        if self._name is None:
            storage = chosen_tables(run.storage)
            try:
                champion = champion_of(run.promote, run.predict.alias, storage)
            except NeedsSpark:
                raise WrongInput(
                    f"only Spark can read '{storage.tables}', and a service does not start it",
                    setting="promote.model_name",
                    way_out="set promote.model_name, or start it by the flow serve",
                ) from None
            self._name = champion.name  # The model stays, whatever tables are the newest later.
        else:
            storage = resolve_storage(run.storage)
            champion = champion_of(PromoteConfig(model_name=self._name), run.predict.alias, storage)
        challenger = None
        if run.serve.challenger != "off":
            with reachable(storage):
                challenger = model_with_alias(storage, champion.name, CHALLENGER)
        served = Served(
            champion=self._version(champion, self._served.champion, storage),
            challenger=self._version(challenger, self._served.challenger, storage)
            if challenger is not None and challenger != champion
            else None,
        )
        remove_packages(storage)
        return served

    @staticmethod
    def _version(model: ModelRef, before: ServedVersion | None, storage: Storage) -> ServedVersion:
        is_same = before is not None and before.model == model and Path(before.folder).is_dir()
        return before if is_same and before is not None else fetch_package(model, storage)


def remove_packages(storage: Storage) -> None:
    """Remove the packages that were used the longest time ago, but NUM_KEPT of them."""
    folders = (Path(storage.home) / "serve" / "models").iterdir()
    used = sorted((folder.stat().st_mtime, folder) for folder in folders if "-" not in folder.name)
    for at, folder in used[:-NUM_KEPT]:
        if time.time() - at > 60:  # A worker may still be loading it.
            shutil.rmtree(folder, ignore_errors=True)


def _about(served: Served) -> str:
    versions = [
        f"{alias} {version.model.name} version {version.model.version}"
        for alias, version in (("champion", served.champion), ("challenger", served.challenger))
        if version is not None
    ]
    return ", ".join(versions)
