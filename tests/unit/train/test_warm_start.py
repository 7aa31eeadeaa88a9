"""Training that starts from a model package: rows of the head by class, preprocessing, and refused packages."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.checks.trainable import check_training
from tasks.config.cache import CacheConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.pretrained import preprocessing, weights_identity
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import save_classifier
from tasks.model_package.description import DESCRIPTION_FILE, IMAGENET_MEAN, IMAGENET_STD, WEIGHTS_FILE
from tests.builders.small_network import SMALL

CLASSES = ("ant", "bee", "cafe\u0301")
MEAN, STD = (0.5, 0.4, 0.3), (0.3, 0.2, 0.1)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return the weights of a model package."""
    torch.manual_seed(3)
    state = build_classifier(SMALL, "none", len(CLASSES), freeze_backbone=False).state_dict()
    save_classifier(tmp_path / "package", SMALL, state, CLASSES, 32, mean=MEAN, std=STD)
    return tmp_path / "package" / WEIGHTS_FILE


def started(package: Path, classes: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the state dict of a network that starts from the package."""
    torch.manual_seed(9)
    return build_classifier(SMALL, str(package), len(classes), freeze_backbone=True, classes=classes).state_dict()


@pytest.mark.parametrize(
    ("classes", "kept", "said"),
    [
        (("ant", "bee", "café"), {0: 0, 1: 1, 2: 2}, "the head keeps all 3 classes from the initial model"),
        (
            ("bee", "dog", "ant"),
            {0: 1, 2: 0},
            "the head keeps 2 classes of the initial model, and has new rows for dog",
        ),
        (("dog", "elk"), {}, "the head of the initial model has none of the classes, and a new one is trained"),
    ],
)
def test_head_keeps_the_rows_of_its_classes(
    package: Path, caplog: pytest.LogCaptureFixture, classes: tuple[str, ...], kept: dict[int, int], said: str
) -> None:
    """Rows follow their class by name, in any form of Unicode; other classes get new rows, and the log says so."""
    before = load_file(package)
    with caplog.at_level(logging.INFO, "lakevision.train"):
        state = started(package, classes)
    torch.manual_seed(9)
    new = build_classifier(SMALL, "none", len(classes), freeze_backbone=False).state_dict()

    assert all(torch.equal(state[name], before[name]) for name in before if not name.startswith("network.fc."))
    for row in range(len(classes)):
        expected, source = (before, kept[row]) if row in kept else (new, row)
        assert torch.equal(state["network.fc.weight"][row], expected["network.fc.weight"][source]), classes[row]
        assert torch.equal(state["network.fc.bias"][row], expected["network.fc.bias"][source])
    assert [record.getMessage() for record in caplog.records] == [said]


def test_start_has_the_answers_of_its_model(package: Path) -> None:
    """With the same classes, the network before its first step gives the logits of the model."""
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    torch.manual_seed(3)
    model = build_classifier(SMALL, "none", len(CLASSES), freeze_backbone=False).eval()
    model.mean, model.std = MEAN, STD
    classifier = build_classifier(SMALL, str(package), len(CLASSES), freeze_backbone=False, classes=CLASSES).eval()

    with torch.no_grad():
        assert torch.equal(classifier(images), model(images))
    assert preprocessing(SMALL, str(package)).image_size == 32
    state = load_file(package)
    save_file(state, package.with_name("other.safetensors"))
    alone = build_classifier(SMALL, str(package.with_name("other.safetensors")), 3, freeze_backbone=False)
    assert (alone.mean, alone.std) == (IMAGENET_MEAN, IMAGENET_STD), "without its description, it is a state dict"
    assert torch.equal(alone.state_dict()["network.conv1.0.weight"], state["network.conv1.0.weight"])


def test_model_of_another_network_is_refused(package: Path) -> None:
    """The error names both networks."""
    with pytest.raises(WrongInput, match=f"a model of '{SMALL}', and train.model is 'resnet18': set train.model to"):
        build_classifier("resnet18", str(package), 3, freeze_backbone=True)


def test_changed_package_is_refused(package: Path) -> None:
    """Other weights than those described, and a damaged description, are refused."""
    train = TrainConfig(model=SMALL, weights=str(package))
    state = load_file(package)
    save_file(state | {"network.conv1.0.weight": 2 * state["network.conv1.0.weight"]}, package)
    with pytest.raises(WrongInput, match="whose sha256 is not that in the model.json beside it"):
        check_training(train, CacheConfig(image_size=32))
    package.with_name(DESCRIPTION_FILE).write_text("{}")
    with pytest.raises(WrongInput, match="was not written by this version of the project"):
        check_training(train, CacheConfig(image_size=32))


def test_run_is_identified_by_weights_and_description(package: Path) -> None:
    """A training run starts from another head if the classes of the description change."""
    first = weights_identity(SMALL, str(package))
    text = json.loads(package.with_name(DESCRIPTION_FILE).read_text())
    package.with_name(DESCRIPTION_FILE).write_text(json.dumps(text | {"classes": ["x", "y", "z"]}))
    second = weights_identity(SMALL, str(package))

    assert first["weights"] == second["weights"]
    assert first["description"] != second["description"]
    package.with_name(DESCRIPTION_FILE).unlink()
    assert weights_identity(SMALL, str(package)) == {"weights": first["weights"]}


def test_safetensors_are_loaded(weights: Path, tmp_path: Path) -> None:
    """A file of safetensors is one by its content, with prefixes and another head as in a state dict."""
    state = torch.load(weights, weights_only=True)
    changed = {f"module.{name}": value for name, value in state.items()} | {"module.fc.bias": torch.ones(7)}
    save_file(changed, tmp_path / "own.bin")
    classifier = build_classifier(SMALL, str(tmp_path / "own.bin"), 3, freeze_backbone=True)

    loaded = classifier.network.state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in state if not name.startswith("fc."))


def test_cut_safetensors_are_refused(weights: Path, tmp_path: Path) -> None:
    """A file that was not copied whole is refused as what it is."""
    save_file(torch.load(weights, weights_only=True), tmp_path / "own.safetensors")
    content = (tmp_path / "own.safetensors").read_bytes()
    (tmp_path / "own.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(
        WrongInput, match=r"own.safetensors', which is not a whole file of safetensors .*: copy it again"
    ):
        build_classifier(SMALL, str(tmp_path / "own.safetensors"), 3, freeze_backbone=True)
