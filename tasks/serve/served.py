"""The versions that a service predicts with: what its supervisor found in the registry, and what a worker has loaded.

The supervisor alone asks the registry. It puts the packages into the home, and names them in a file that all workers
read: a worker starts without MLflow, and a registry that is away stops no worker.
"""

import gc
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from tasks.config.prediction import PredictConfig
from tasks.model_package.description import check_unknown, check_unsure
from tasks.refs import ModelRef, Ref
from tasks.serve.repeated import Repeated

if TYPE_CHECKING:
    from tasks.model_package.classifier import ImageClassifier

logger = logging.getLogger("lakevision.serve")

JUST_STARTED = "the service has just started"

START_SECONDS = 120.0
"""Longest time in which a worker accepts no request, since it has no version yet."""

LOOK_SECONDS = 0.3
"""Interval at which a worker looks at the file of the supervisor."""


class ServedVersion(Ref):
    """A registered version, and the folder with its package."""

    model: ModelRef
    folder: str
    tables: str
    """Folder or URL of the tables that its answers are logged in."""


class Served(Ref):
    """The versions that a service predicts with."""

    champion: ServedVersion | None = None
    challenger: ServedVersion | None = None
    problem: str = ""
    """Why the registry was not read, or has no champion; empty if it was read."""

    def write(self, file: Path) -> None:
        """Replace the file, which workers read at any time."""
        partial = file.with_name(f"{file.name}.new")
        partial.write_text(self.model_dump_json())
        os.replace(partial, file)

    @classmethod
    def read(cls, file: Path) -> "Served":
        """Return the content of the file; nothing is served without one."""
        try:
            return cls.model_validate_json(file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return cls(problem=JUST_STARTED)


class NotReady(Exception):
    """No version is loaded; the message says why."""


class Loaded(NamedTuple):
    """A version in the memory of a worker.

    Attributes:
        version: The version.
        classifier: Its classifier.
        unknown_rate: Rate of the label `unknown`; 0 for a version without thresholds.
    """

    version: ServedVersion
    classifier: "ImageClassifier"
    unknown_rate: float


class Lineup(NamedTuple):
    """The versions that a batch is predicted with."""

    champion: Loaded | None = None
    challenger: Loaded | None = None
    problem: str = ""

    def loaded_champion(self) -> Loaded:
        """Return the champion.

        Raises:
            NotReady: No version is loaded.
        """
        if self.champion is None:
            raise NotReady(self.problem)
        return self.champion


def exclude_imports() -> None:
    """Exclude all objects of this process from later collections, after the imports that a version needs.

    A collection that looks at them stops all lanes for a quarter of a second (LOG.md). It is not for a process with a
    version: a network has cycles, and would stay in memory when the next one has replaced it.
    """
    import tasks.model_package.classifier  # noqa: F401  # Here: seconds.

    gc.freeze()


class ServedModels(Repeated):
    """The versions of a worker, which a thread keeps up to date; a batch keeps the lineup that it began with.

    Attributes:
        lineup: The versions that the next batch is predicted with.
    """

    def __init__(self, file: Path, predict: PredictConfig, on_loaded: Callable[[str, int], None]) -> None:
        """Prepare; nothing is loaded before `start`.

        Args:
            file: File of `Served`.
            predict: Settings of inference, which a version must be able to predict with.
            on_loaded: Called with the alias and the number of a version that was loaded.
        """
        super().__init__("lakevision-models", LOOK_SECONDS, self.refresh)
        self.lineup = Lineup(problem=JUST_STARTED)
        self._file, self._predict, self._on_loaded = file, predict, on_loaded
        self._failed: dict[str, str] = {}
        self._is_settled = threading.Event()

    def start(self) -> None:
        """Load the versions, and again whenever the supervisor names others; return when the first are loaded.

        Until then another worker, which is ready, accepts the requests. Without a champion, all of them refuse.
        """
        super().start()
        self._is_settled.wait(START_SECONDS)

    def end(self) -> None:
        """End the thread after the load that it does now: at the end of the process it would be in C++ code."""
        self._is_settled.set()
        super().end()

    def refresh(self) -> None:
        """Load what the supervisor names now. A version that cannot be loaded changes nothing but the problem."""
        served, now = Served.read(self._file), self.lineup
        champion, problem = self._loaded("champion", served.champion, now.champion, now.challenger)
        challenger, of_challenger = self._loaded("challenger", served.challenger, now.challenger, now.champion)
        if served.challenger is None:
            challenger = None
        found = Lineup(champion, challenger, "; ".join(filter(None, (served.problem, problem, of_challenger))))
        if found != now:
            self.lineup = found
        if champion is not None or JUST_STARTED not in found.problem:
            self._is_settled.set()

    def _loaded(
        self, alias: str, wanted: ServedVersion | None, now: Loaded | None, other: Loaded | None
    ) -> tuple[Loaded | None, str]:
        """Return a version in memory, and why it is not the wanted one.

        The version of the other alias is not loaded again: that is a challenger that was promoted.
        """
        if wanted is None or (now is not None and now.version == wanted):
            return now, ""
        if (problem := self._failed.get(wanted.folder)) is None:
            try:
                loaded = other if other is not None and other.version == wanted else self._load(wanted)
            except Exception as error:  # Also of a device. The version of the other alias is served all the same.
                problem = f"version {wanted.model.version} is not used: {error}"
                logger.error("%s", problem)  # noqa: TRY400  # the sentence says it all
                if isinstance(error, ValueError):  # Other errors may pass, as of a disk: it is tried again.
                    self._failed[wanted.folder] = problem
            else:
                self._on_loaded(alias, wanted.model.version)
                logger.info("%s: %s version %d", alias, wanted.model.name, wanted.model.version)
                return loaded, ""
        return now, problem

    def _load(self, wanted: ServedVersion) -> Loaded:
        """Load a version, and predict an image once, which the first request would otherwise wait for."""
        import torch

        from tasks.model_package.classifier import ImageClassifier

        classifier = ImageClassifier.load(Path(wanted.folder))
        check_unsure(self._predict.min_probability, classifier.classes)
        rate = 0.0 if classifier.unknown_thresholds is None else self._predict.unknown_rate
        check_unknown(rate, classifier.classes, classifier.unknown_thresholds)
        classifier.logits(torch.zeros((1, classifier.image_size, classifier.image_size, 3), dtype=torch.uint8))
        return Loaded(wanted, classifier, rate)
