"""Loading of an untrusted model package: invalid descriptions and weights are refused, and no code of them runs."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.model.training_network import build_classifier, copy_of_state
from tasks.model_package import description
from tasks.model_package.classifier import ImageClassifier, save_classifier, save_weights
from tasks.model_package.description import DESCRIPTION_FILE, WEIGHTS_FILE, InvalidPackage
from tasks.model_package.network import ImageNetwork, WithoutMemory, build_network

MODEL = "squeezenet1_1"
GOOD = {
    "format": 2,
    "model": MODEL,
    "classes": ["ant", "bee"],
    "image_size": 32,
    "precision": "float32",
    "temperature": 1.5,
    "weights_sha256": "0" * 64,
}
NOT_LOADED = "weights.safetensors is not a file of safetensors"
OTHER = "weights.safetensors does not match the network in its description"


class WriteFile:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        """Return the call that the unpickler makes."""
        return os.system, (f"touch '{self.file}'",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a valid package of an untrained model."""
    state = build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict()
    save_classifier(tmp_path / "package", MODEL, state, ("ant", "bee"), 32)
    assert ImageClassifier.load(tmp_path / "package").classes == ("ant", "bee")
    return tmp_path / "package"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "../../evil"}, r"model is '../../evil': .* is not a classifier of the installed torchvision"),
        ({"model": "fcn_resnet50"}, "is not a classifier"),
        ({"model": "r" * 101}, "model is .* at most 100"),
        ({"classes": ["ant"]}, "classes is .* at least 2"),
        ({"classes": ["ant", "ant"]}, "classes is .*: 1 of 2 classes are duplicates"),
        ({"classes": ["ant", 7]}, r"classes.1 is 7: Input should be a valid string"),
        ({"classes": "ab"}, "classes is 'ab'"),
        ({"classes": ["ant", "x" * 1025]}, "classes.1 is .* at most 1024"),
        ({"image_size": 15}, "image_size is 15"),
        ({"image_size": 10**9}, "image_size is 1000000000"),
        ({"image_size": "32"}, "image_size is '32'"),
        ({"loader": "evil"}, "loader is 'evil': Extra inputs are not permitted"),
        ({"format": 3}, "format is 3"),
        ({"mean": [0.5, 0.5]}, "mean.2: Field required"),
        ({"mean": [0.5, float("nan"), 0.5]}, "mean.1 is nan: Input should be a finite number"),
        ({"std": [0.5, 0, 0.5]}, "std.1 is 0: Input should be greater than 0"),
        ({"model": "vit_b_16", "image_size": 100}, "cannot be built .Input shape indivisible by patch size"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"weights_sha256": "../../x"}, "weights_sha256 is '../../x'"),
        ({"unknown_thresholds": [0.5]}, r"unknown_thresholds is \[0.5\]: .* at least 14"),
        ({"unknown_thresholds": [*13 * [0.5], 1.1]}, r"unknown_thresholds.13 is 1.1"),
        ({"unknown_thresholds": [*13 * [0.5], float("nan")]}, r"unknown_thresholds.13 is nan"),
    ],
)
def test_invalid_description_is_refused(folder: Path, changes: dict[str, object], reason: str) -> None:
    """An invalid description is refused with its field and value before a network is built."""
    (folder / DESCRIPTION_FILE).write_text(json.dumps(GOOD | changes))
    with pytest.raises(InvalidPackage, match=f"model.json .*{reason}"):
        ImageClassifier.load(folder)


def test_model_of_an_earlier_release_keeps_its_normalization(folder: Path) -> None:
    """A description without mean and standard deviation has ImageNet's; a new one has its own."""
    text = json.loads((folder / DESCRIPTION_FILE).read_text())
    assert (text.pop("mean"), text.pop("std")) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    (folder / DESCRIPTION_FILE).write_text(json.dumps(text))
    assert ImageClassifier.load(folder)._network.mean == (0.485, 0.456, 0.406)
    (folder / DESCRIPTION_FILE).write_text(json.dumps(text | {"mean": [0, 0.5, 1], "std": [1, 0.5, 0.25]}))
    network = ImageClassifier.load(folder)._network
    assert (network.mean, network.std) == ((0.0, 0.5, 1.0), (1.0, 0.5, 0.25))


def test_file_larger_than_its_limit_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a description nor weights are read if their file is larger than its limit."""
    monkeypatch.setitem(description.FILE_LIMITS, DESCRIPTION_FILE, 10)
    with pytest.raises(InvalidPackage, match=r"model.json has \d+ bytes, .* 10"):
        ImageClassifier.load(folder)
    monkeypatch.undo()
    with (folder / WEIGHTS_FILE).open("ab") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(InvalidPackage, match="weights.safetensors has 1073741824 bytes"):
        ImageClassifier.load(folder)


def test_code_in_weights_is_not_executed(folder: Path, tmp_path: Path) -> None:
    """Code in the weights does not run, in an archive of torch.save or in a plain pickle."""
    torch.save({"weights": WriteFile(tmp_path / "executed")}, folder / WEIGHTS_FILE)
    with pytest.raises(InvalidPackage, match=NOT_LOADED):
        ImageClassifier.load(folder)
    (folder / WEIGHTS_FILE).write_bytes(pickle.dumps(WriteFile(tmp_path / "executed")))
    with pytest.raises(InvalidPackage, match=NOT_LOADED):
        ImageClassifier.load(folder)
    assert not (tmp_path / "executed").exists()
    # Proof that the test can fail: unpickled, it does write.
    pickle.loads((folder / WEIGHTS_FILE).read_bytes())  # noqa: S301  # our own
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "swapped"])
def test_damaged_or_swapped_weights_are_refused(folder: Path, damage: str) -> None:
    """Weights that are cut, have a changed bit, or are of another model of the same architecture are not loaded."""
    file = folder / WEIGHTS_FILE
    content = bytearray(file.read_bytes())
    if damage == "swapped":
        torch.manual_seed(77)
        save_weights(build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict(), file)
    else:
        content[-1] ^= 1
        file.write_bytes({"cut": content[:-5], "empty": b"", "bit": content}[damage])
    reason = r"has the sha256 \w+, and its model.json names \w+" if damage in {"bit", "swapped"} else "is not a file of"
    with pytest.raises(InvalidPackage, match=f"the model's weights.safetensors {reason}"):
        ImageClassifier.load(folder)


@pytest.mark.parametrize("other", [{"a": torch.zeros(1)}, {}], ids=["names", "empty"])
def test_weights_of_another_network_are_refused(folder: Path, other: dict[str, torch.Tensor]) -> None:
    """Weights that do not match the network of the description are refused."""
    save_weights(other, folder / WEIGHTS_FILE)
    with pytest.raises(InvalidPackage, match=OTHER):
        ImageClassifier.load(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    """Weights of the same architecture for another number of classes are refused."""
    save_weights(build_classifier(MODEL, "none", 3, freeze_backbone=False).state_dict(), folder / WEIGHTS_FILE)
    with pytest.raises(InvalidPackage, match=OTHER):
        ImageClassifier.load(folder)


def test_package_of_an_older_release_is_refused(folder: Path) -> None:
    """The description of release 0.1.0 has no format, and the message says what to do."""
    (folder / DESCRIPTION_FILE).write_text(json.dumps({"model": MODEL, "classes": ["ant", "bee"], "image_size": 32}))
    with pytest.raises(InvalidPackage, match="model.json .*format: Field required"):
        ImageClassifier.load(folder)


def test_description_of_many_classes_takes_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 2 GB is built on the meta device only, as the file does not have its weights."""
    built: list[str] = []

    def build(*given: Any) -> ImageNetwork:
        network = build_network(*given)
        built.append(next(network.parameters()).device.type)
        return network

    monkeypatch.setattr("tasks.model_package.classifier.build_network", build)
    classes = [str(number) for number in range(120_000)]
    (folder / DESCRIPTION_FILE).write_text(json.dumps(GOOD | {"model": "alexnet", "classes": classes}))
    with pytest.raises(InvalidPackage, match=OTHER):
        ImageClassifier.load(folder)
    assert built == ["meta"]


@pytest.mark.parametrize("name", ["regnet_y_400mf", "swin_t", "mobilenet_v3_small", "maxvit_t", "vit_b_16"])
def test_network_on_meta_device_has_the_same_names_shapes_and_types(name: str) -> None:
    """A network without memory has the state dict of a real one, even if tensors are computed to build it."""
    with WithoutMemory():
        meta = build_classifier(name, "none", 3, freeze_backbone=False).state_dict()
    real = build_classifier(name, "none", 3, freeze_backbone=False).state_dict()
    assert {key: (value.shape, value.dtype) for key, value in meta.items()} == {
        key: (value.shape, value.dtype) for key, value in real.items()
    }
    assert sum(value.nbytes for value in meta.values() if value.device.type == "meta") > 0.9 * sum(
        value.nbytes for value in real.values()
    )


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16, torch.float64])
def test_weights_of_another_type_are_refused(folder: Path, dtype: torch.dtype) -> None:
    """Weights of another data type than the network's are refused."""
    state = build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict()
    save_weights({name: value.to(dtype) for name, value in state.items()}, folder / WEIGHTS_FILE)
    with pytest.raises(InvalidPackage, match=OTHER):
        ImageClassifier.load(folder)


def test_copied_state_keeps_module_versions(tmp_path: Path) -> None:
    """A copied state dict of MNASNet can be loaded, which fails without the module versions."""
    trained = build_classifier("mnasnet0_5", "none", 2, freeze_backbone=False)
    best = copy_of_state(trained)
    trained.load_state_dict(best)
    save_classifier(tmp_path, "mnasnet0_5", best, ("ant", "bee"), 32)
    ImageClassifier.load(tmp_path)
