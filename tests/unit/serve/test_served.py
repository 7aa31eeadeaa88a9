"""The versions in the memory of a worker: what a supervisor names, unless it cannot be used."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tasks.config.prediction import PredictConfig
from tasks.model_package.description import RATES, UNSURE
from tasks.serve.served import LOOK_SECONDS, Served, ServedModels
from tests.builders.served_package import name_versions, version, write_package

MakeModels = Callable[..., ServedModels]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of the supervisor."""
    return tmp_path / "served.json"


@pytest.fixture
def loads() -> list[tuple[str, int]]:
    """Return the list of the versions that were loaded."""
    return []


@pytest.fixture
def make_models(file: Path, loads: list[tuple[str, int]]) -> MakeModels:
    """Return a function that makes the models of a worker."""

    def make(min_probability: float = 0.0, unknown_rate: float = 0.0) -> ServedModels:
        predict = PredictConfig(min_probability=min_probability, unknown_rate=unknown_rate)
        return ServedModels(file, predict, lambda alias, number: loads.append((alias, number)))

    return make


def test_versions_are_loaded_once_and_replaced(
    make_models: MakeModels, file: Path, tmp_path: Path, loads: list[tuple[str, int]]
) -> None:
    """A batch that began keeps the lineup that it has."""
    first, second = (version(write_package(tmp_path / str(number), number), number) for number in (1, 2))
    models = make_models()
    models.refresh()
    empty = models.lineup
    name_versions(file, first)
    models.refresh()
    before = models.lineup
    models.refresh()
    name_versions(file, second, first)
    models.refresh()
    after = models.lineup
    name_versions(file, first)
    models.refresh()
    promoted = models.lineup
    name_versions(file, second)
    models.refresh()

    assert (empty.champion, empty.problem) == (None, "the service has just started")
    assert before.champion is not None
    assert after.champion is not None
    assert after.challenger is not None
    assert before.champion.version == first
    assert (after.champion.version, after.challenger.version) == (second, first)
    assert promoted.champion is after.challenger  # It is not loaded again.
    assert models.lineup.challenger is None
    assert models.lineup.champion is not None
    assert models.lineup.champion.version == second
    assert loads == [("champion", 1), ("champion", 2), ("challenger", 1), ("champion", 1), ("champion", 2)]
    assert before.champion.classifier.predict([b""])[0].error


def test_a_damaged_version_changes_nothing(
    make_models: MakeModels, file: Path, tmp_path: Path, loads: list[tuple[str, int]]
) -> None:
    """The one before answers, and the problem is said until another is named."""
    first, second = (version(write_package(tmp_path / str(number), number), number) for number in (1, 2))
    weights = tmp_path / "2" / "weights.safetensors"
    tensors = load_file(weights)
    save_file({name: value + 1 for name, value in tensors.items()}, weights)
    models = make_models()
    name_versions(file, first)
    models.refresh()
    name_versions(file, second)
    for _look in range(3):
        models.refresh()
    damaged = models.lineup
    name_versions(file, first)
    models.refresh()

    assert damaged.champion is not None
    assert damaged.champion.version == first
    assert damaged.problem.startswith("version 2 is not used: the model's weights.safetensors has the sha256")
    assert models.lineup.problem == ""
    assert loads == [("champion", 1)]


def test_a_file_that_is_not_whole_changes_nothing(make_models: MakeModels, file: Path, tmp_path: Path) -> None:
    """As one of another release."""
    models = make_models()
    name_versions(file, version(write_package(tmp_path / "1", 1), 1))
    models.refresh()
    file.write_text('{"champion": {"model"')
    models.refresh()

    assert models.lineup.champion is not None
    assert models.lineup.problem


def test_a_version_without_thresholds_answers_without_the_label(
    make_models: MakeModels, file: Path, tmp_path: Path
) -> None:
    """As the promotion gate compares it."""
    models = make_models(unknown_rate=0.05)
    name_versions(file, version(write_package(tmp_path / "1", 1), 1))
    models.refresh()
    without = models.lineup.champion
    name_versions(file, version(write_package(tmp_path / "2", 2, tuple([0.5] * len(RATES))), 2))
    models.refresh()

    assert without is not None
    assert models.lineup.champion is not None
    assert (without.unknown_rate, models.lineup.champion.unknown_rate) == (0.0, 0.05)


def test_a_version_whose_classes_are_labels_is_not_used(
    make_models: MakeModels, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class `unsure` beside a minimum of the probability would have two meanings."""
    monkeypatch.setattr("tests.builders.served_package.CLASSES", ("ant", "bee", UNSURE))
    models = make_models(min_probability=0.5)
    name_versions(file, version(write_package(tmp_path / "1", 1), 1))
    models.refresh()

    assert models.lineup.champion is None
    assert models.lineup.problem.startswith("version 1 is not used: ")


def test_a_thread_keeps_up(make_models: MakeModels, file: Path, tmp_path: Path) -> None:
    """It returns from its start with the first version, and the next one is there within a look and a load."""
    first, second = (version(write_package(tmp_path / str(number), number), number) for number in (1, 2))
    models = make_models()
    naming = threading.Timer(2 * LOOK_SECONDS, lambda: name_versions(file, first))
    naming.start()
    models.start()
    at_start = models.lineup.champion
    name_versions(file, second)
    latest = time.monotonic() + 100 * LOOK_SECONDS
    while models.lineup.champion is at_start and time.monotonic() < latest:
        time.sleep(0.05)
    models.end()

    assert at_start is not None
    assert models.lineup.champion is not None
    assert (at_start.version, models.lineup.champion.version) == (first, second)


def test_a_start_without_a_champion_ends(make_models: MakeModels, file: Path) -> None:
    """So that the worker can say why it refuses."""
    models = make_models()
    name_versions(file, None)
    models.start()
    models.end()

    assert models.lineup == (None, None, "no champion yet")


def test_the_file_is_replaced_at_once(file: Path) -> None:
    """A reader finds the old or the new versions, and nothing in between."""
    Served(problem="one").write(file)
    with file.open() as reader:
        Served(problem="two").write(file)
        old = reader.read()

    assert '"one"' in old
    assert Served.read(file).problem == "two"
    assert [each.name for each in file.parent.iterdir()] == [file.name]
