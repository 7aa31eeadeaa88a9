"""The look of a supervisor at the registry: what it names to the workers, and what it keeps where the look fails."""

import os
from pathlib import Path
from typing import Any

import pytest

from tasks.config.serving import ServeRun
from tasks.errors import TrackingUnavailable, WrongInput
from tasks.refs import ModelRef
from tasks.serve import registry
from tasks.serve.registry import NUM_KEPT, UNUSED, RegistryWatch, fetch_package, remove_packages
from tasks.serve.served import Served, ServedVersion
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tests.builders.served_package import write_package

FIRST, SECOND = (ModelRef(name="photos", version=number, run_id=f"run{number}") for number in (1, 2))


class Registry:
    """A registry in memory.

    Attributes:
        champion: The version with the alias, or the error of the look-up.
        challenger: Likewise.
        fetched: Versions whose packages were fetched.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.champion: ModelRef | Exception = FIRST
        self.challenger: ModelRef | Exception | None = None
        self.fetched: list[int] = []
        self.asked: list[str | None] = []
        monkeypatch.setattr(registry, "champion_of", self.find_champion)
        monkeypatch.setattr(registry, "model_with_alias", lambda *_names: self._or_raise(self.challenger))
        monkeypatch.setattr(registry, "fetch_registered", self.fetch)

    def find_champion(self, promote: Any, _alias: str, _storage: Storage) -> Any:
        """Return the champion."""
        self.asked.append(promote.model_name)
        return self._or_raise(self.champion)

    def fetch(self, _storage: Storage, model: ModelRef, folder: Path) -> Path:
        """Write a package."""
        self.fetched.append(model.version)
        return write_package(folder, model.version)

    @staticmethod
    def _or_raise(found: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Return the registry."""
    return Registry(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file that names the versions."""
    return tmp_path / "served.json"


def watch(storage: Storage, file: Path, **serve: Any) -> RegistryWatch:
    """Return a look at the registry."""
    return RegistryWatch(ServeRun.model_validate({"storage": storage.as_config(), "serve": serve}), file)


def versions(file: Path) -> tuple[int | None, int | None]:
    """Return the numbers of champion and challenger that are named."""
    served = Served.read(file)
    return tuple(None if one is None else one.model.version for one in (served.champion, served.challenger))  # type: ignore[return-value]  # of two


def test_a_moved_alias_is_named_with_its_package(known: Registry, storage: Storage, file: Path) -> None:
    """A package is fetched once; model and tables are chosen at the first look."""
    looking = watch(storage, file)
    looking.look()
    looking.look()
    first = Served.read(file)
    known.champion = SECOND
    looking.look()

    assert first.champion is not None
    assert (first.champion.model, first.champion.tables, first.problem) == (FIRST, storage.tables, "")
    assert Path(first.champion.folder, "model.json").exists()
    assert versions(file) == (2, None)
    assert known.fetched == [1, 2]
    assert known.asked == [None, "photos", "photos"]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (TrackingUnavailable("the tracking server does not answer"), "the tracking server does not answer"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (NeedsSpark(), "only Spark can read the tables, and a service does not start it: set promote.model_name"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_look_that_fails_keeps_what_was_named(
    known: Registry, storage: Storage, file: Path, error: Exception, problem: str
) -> None:
    """With its reason, until the next one; a service that has just started says it, too."""
    known.champion = error
    looking = watch(storage, file)
    looking.look()
    at_start = Served.read(file)
    known.champion = FIRST
    looking.look()
    named = versions(file)
    known.champion = error
    looking.look()
    later = Served.read(file)

    assert (at_start.champion, at_start.problem.startswith(problem)) == (None, True)
    assert named == versions(file) == (1, None)
    assert later.problem.startswith(problem)


def test_a_broken_challenger_does_not_keep_the_champion_from_being_served(
    known: Registry, storage: Storage, file: Path
) -> None:
    """It is left out, and the problem says why."""
    looking = watch(storage, file, challenger="shadow")
    known.challenger = WrongInput("version 9 has no digests")
    looking.look()
    known.champion = SECOND
    looking.look()
    broken = Served.read(file)
    known.challenger = FIRST
    looking.look()

    assert broken.champion is not None
    assert (broken.champion.model, broken.challenger, broken.problem) == (SECOND, None, "version 9 has no digests")
    assert versions(file) == (2, 1)
    assert Served.read(file).problem == ""


def test_a_challenger_that_is_promoted_is_not_read_again(
    known: Registry, storage: Storage, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the champion whose place it takes: their weights were digested when they were fetched."""
    known.challenger = SECOND
    looking = watch(storage, file, challenger="shadow")
    looking.look()
    before = Served.read(file)
    digested: list[Path] = []
    monkeypatch.setattr(registry, "file_sha256", digested.append)
    known.champion, known.challenger = SECOND, FIRST
    looking.look()
    after = Served.read(file)

    assert before.champion is not None
    assert (after.champion, after.challenger) == (before.challenger, before.champion)
    assert (known.fetched, digested) == ([2, 1], [])


def test_a_champion_is_not_its_own_challenger(known: Registry, storage: Storage, file: Path) -> None:
    """As after its promotion, before the alias is removed."""
    known.challenger = FIRST
    watch(storage, file, challenger="shadow").look()

    assert versions(file) == (1, None)


def test_a_package_that_was_cut_is_fetched_again(known: Registry, storage: Storage) -> None:
    """As after a loss of power."""
    folder = Path(fetch_package(FIRST, storage).folder)
    fetch_package(FIRST, storage)
    with (folder / "weights.safetensors").open("r+b") as weights:
        weights.truncate(1000)
    fetch_package(FIRST, storage)
    (folder / "model.json").unlink()
    again = fetch_package(FIRST, storage)

    assert known.fetched == [1, 1, 1]
    assert isinstance(again, ServedVersion)
    assert len(list(folder.iterdir())) == 2


def test_two_services_that_fetch_the_same_package_share_it(
    known: Registry, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one finds the folder of the other one in its place."""

    def fetch(given: Storage, model: ModelRef, folder: Path) -> Path:
        monkeypatch.setattr(registry, "fetch_registered", known.fetch)
        fetch_package(model, given)
        return known.fetch(given, model, folder)

    monkeypatch.setattr(registry, "fetch_registered", fetch)
    folder = Path(fetch_package(FIRST, storage).folder)

    assert known.fetched == [1, 1]
    assert [found.name for found in folder.parent.iterdir()] == [folder.name]
    assert len(list(folder.iterdir())) == 2


def test_packages_that_nobody_has_used_for_long_are_removed(storage: Storage) -> None:
    """Not the last ones, and none of another service; those of killed fetches are, too."""
    parent = Path(storage.home) / "serve" / "models"
    for number in range(NUM_KEPT + 2):
        (parent / f"old{number}").mkdir(parents=True)
        os.utime(parent / f"old{number}", (number, number))
    for name in ("old9-partial", "new-partial", "used"):
        (parent / name).mkdir()
    os.utime(parent / "old9-partial", (0, 0))
    remove_packages(storage)

    left = {folder.name for folder in parent.iterdir()}
    assert left == {*(f"old{number}" for number in range(3, NUM_KEPT + 2)), "new-partial", "used"}
    assert UNUSED >= 3600
