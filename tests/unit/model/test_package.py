"""A model package from a registry: what is no description or no weights is refused, and runs nothing."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from tasks.errors import WrongInput
from tasks.model import package
from tasks.model.classifier import DESCRIPTION_FILE, WEIGHTS_FILE, ImageClassifier, save_classifier
from tasks.model.network import build_classifier, copy_of_state
from tasks.model.weights import WithoutMemory

MODEL = "squeezenet1_1"
GOOD = {"model": MODEL, "classes": ["ant", "bee"], "image_size": 32}


class WriteFile:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        """Return what the unpickler calls."""
        return os.system, (f"touch '{self.file}'",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole package of an untrained model."""
    state = build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict()
    save_classifier(tmp_path / "package", MODEL, state, ("ant", "bee"), 32)
    assert ImageClassifier.load(tmp_path / "package").classes == ("ant", "bee")
    return tmp_path / "package"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "../../evil"}, r"model: '../../evil' is no classifier of the installed torchvision"),
        ({"model": "fcn_resnet50"}, "is no classifier"),
        ({"model": "r" * 101}, "model is .* at most 100"),
        ({"classes": ["ant"]}, "classes is .* at least 2"),
        ({"classes": ["ant", "ant"]}, "classes: 1 of 2 classes are there twice"),
        ({"classes": ["ant", 7]}, r"classes.1 is 7: input should be a valid string"),
        ({"classes": "ab"}, "classes is 'ab'"),
        ({"classes": ["ant", "x" * 1025]}, "classes.1 is .* at most 1024"),
        ({"image_size": 15}, "image_size is 15"),
        ({"image_size": 10**9}, "image_size is 1000000000"),
        ({"image_size": "32"}, "image_size is '32'"),
        ({"loader": "evil"}, "loader is not a setting"),
    ],
)
def test_a_description_that_cannot_be_is_refused(folder: Path, changes: dict[str, object], said: str) -> None:
    """With its field and its value, before a network is built."""
    (folder / DESCRIPTION_FILE).write_text(json.dumps(GOOD | changes))
    with pytest.raises(WrongInput, match=f"the model's model.json is none that this project wrote .*{said}"):
        ImageClassifier.load(folder)


def test_a_file_beyond_its_bound_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither description nor weights."""
    monkeypatch.setitem(package.FILE_LIMITS, DESCRIPTION_FILE, 10)
    with pytest.raises(WrongInput, match=r"the model's model.json has \d+ bytes, and 10 is the most"):
        ImageClassifier.load(folder)
    monkeypatch.undo()
    with (folder / WEIGHTS_FILE).open("ab") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(WrongInput, match=r"the model's weights.pt has 1073741824 bytes"):
        ImageClassifier.load(folder)


def test_weights_with_code_in_them_run_nothing(folder: Path, tmp_path: Path) -> None:
    """In torch's own archive, and as a plain pickle."""
    torch.save({"weights": WriteFile(tmp_path / "executed")}, folder / WEIGHTS_FILE)
    with pytest.raises(WrongInput, match=r"weights.pt holds no weights alone \(UnpicklingError\), and is not read"):
        ImageClassifier.load(folder)
    (folder / WEIGHTS_FILE).write_bytes(pickle.dumps(WriteFile(tmp_path / "executed")))
    with pytest.raises(WrongInput, match=r"weights.pt is no archive that torch.save wrote"):
        ImageClassifier.load(folder)
    assert not (tmp_path / "executed").exists()
    # The test can fail: unpickled, it does write.
    pickle.loads((folder / WEIGHTS_FILE).read_bytes())  # noqa: S301  # our own
    assert (tmp_path / "executed").exists()


def test_an_archive_that_unpacks_to_more_is_refused(folder: Path) -> None:
    """A compressed record of zeros has any size, and torch would unpack it."""
    with zipfile.ZipFile(folder / WEIGHTS_FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(100 << 20))
    assert (folder / WEIGHTS_FILE).stat().st_size < 1 << 20
    with pytest.raises(WrongInput, match=r"weights.pt unpacks to 104857600 bytes"):
        ImageClassifier.load(folder)


@pytest.mark.parametrize("other", [{"a": torch.zeros(1)}, {}, [torch.zeros(1)]], ids=["names", "empty", "list"])
def test_the_weights_of_another_network_are_refused(folder: Path, other: object) -> None:
    """What the description says and what the weights are must agree."""
    torch.save(other, folder / WEIGHTS_FILE)
    with pytest.raises(WrongInput, match="has the weights of another network than it says"):
        ImageClassifier.load(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    """Of the same architecture for three classes."""
    state = build_classifier(MODEL, "none", 3, freeze_backbone=False).state_dict()
    torch.save(state, folder / WEIGHTS_FILE)
    with pytest.raises(WrongInput, match="has the weights of another network than it says"):
        ImageClassifier.load(folder)


def rewrite_pickle(file: Path, pickled: bytes) -> None:
    """Put another pickle into an archive that torch.save wrote."""
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, pickled if name.endswith("/data.pkl") else content)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02cbuiltins\nbytearray\n" + pickle.dumps(1 << 30, 2)[2:-1] + b"\x85R.",
        b"\x80\x02c__builtin__\nbytearray\n" + pickle.dumps(1 << 30, 2)[2:-1] + b"\x85R.",
        b"\x80\x02ctorch._utils\n_rebuild_meta_tensor_no_storage\n).",
        b"\x80\x02]" + b"N" * 100 + b"e.",
        b"\x80\x02" + b"}" * (3 << 20) + b".",
    ],
    ids=["bytearray", "python2", "other-tensors", "list", "long"],
)
def test_a_pickle_that_does_more_than_name_tensors_is_not_read(
    folder: Path, pickled: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as allocate a gigabyte: torch is not asked to read it."""
    monkeypatch.setattr(torch, "load", lambda *_args, **_options: pytest.fail("it was read"))
    rewrite_pickle(folder / WEIGHTS_FILE, pickled)
    with pytest.raises(WrongInput, match=r"weights.pt holds no weights alone \(UnpicklingError\), and is not read"):
        ImageClassifier.load(folder)


def test_a_description_of_many_classes_takes_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is built when the file is known to have its weights: here 2 GB, of which it has none."""
    built: list[str] = []

    def build(*args: object, **options: object) -> object:
        classifier = build_classifier(*args, **options)  # type: ignore[arg-type]
        built.append(next(classifier.parameters()).device.type)
        return classifier

    monkeypatch.setattr("tasks.model.classifier.build_classifier", build)
    classes = [str(number) for number in range(120_000)]
    (folder / DESCRIPTION_FILE).write_text(json.dumps(GOOD | {"model": "alexnet", "classes": classes}))
    with pytest.raises(WrongInput, match="has the weights of another network than it says"):
        ImageClassifier.load(folder)
    assert built == ["meta"]


def test_weights_that_are_one_number_in_the_file_are_refused(folder: Path) -> None:
    """A tensor that repeats it may have any shape."""
    state = build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict()
    torch.save({name: torch.zeros(()).expand(value.shape) for name, value in state.items()}, folder / WEIGHTS_FILE)
    assert (folder / WEIGHTS_FILE).stat().st_size < 1 << 20
    with pytest.raises(WrongInput, match="has the weights of another network than it says"):
        ImageClassifier.load(folder)


@pytest.mark.parametrize("name", ["regnet_y_400mf", "swin_t", "mobilenet_v3_small", "maxvit_t", "vit_b_16"])
def test_a_network_without_memory_has_the_names_shapes_and_types_of_a_whole_one(name: str) -> None:
    """Also where building it computes with tensors."""
    with WithoutMemory():
        bare = build_classifier(name, "none", 3, freeze_backbone=False).state_dict()
    whole = build_classifier(name, "none", 3, freeze_backbone=False).state_dict()
    assert {key: (value.shape, value.dtype) for key, value in bare.items()} == {
        key: (value.shape, value.dtype) for key, value in whole.items()
    }
    assert sum(value.nbytes for value in bare.values() if value.device.type == "meta") > 0.9 * sum(
        value.nbytes for value in whole.values()
    )


@pytest.mark.parametrize("kind", ["meta", "complex", "half", "sparse", "quantized"])
def test_weights_of_another_kind_are_refused(folder: Path, kind: str) -> None:
    """Of another device, type or layout than the network's."""
    change = {
        "meta": lambda value: value.to("meta"),
        "complex": lambda value: value.to(torch.complex64),
        "half": lambda value: value.half(),
        "sparse": lambda value: value.to_sparse(),
        "quantized": lambda value: torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8),
    }[kind]
    state = build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict()
    torch.save({name: change(value) for name, value in state.items()}, folder / WEIGHTS_FILE)
    with pytest.raises(
        WrongInput,
        match=r"weights.pt (has the weights of another network|holds no weights|unpacks to|has [0-9]+ bytes)",
    ):
        ImageClassifier.load(folder)


def test_weights_with_versions_of_their_modules_are_loaded(tmp_path: Path) -> None:
    """MNASNet loads no weights that do not say in which version of it they were made; copies of it say so, too."""
    trained = build_classifier("mnasnet0_5", "none", 2, freeze_backbone=False)
    best = copy_of_state(trained)
    trained.load_state_dict(best)
    save_classifier(tmp_path, "mnasnet0_5", best, ("ant", "bee"), 32)
    ImageClassifier.load(tmp_path)
