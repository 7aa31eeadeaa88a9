"""Loading of an untrusted model package: invalid descriptions and weights are refused, and no code of them runs."""

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
NOT_LOADED = r"weights.pt is not a plain state dict \(UnpicklingError\) and was not loaded"


class WriteFile:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        """Return the call that the unpickler makes."""
        return os.system, (f"touch '{self.file}'",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid package of an untrained model."""
    state = build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict()
    save_classifier(tmp_path / "package", MODEL, state, ("ant", "bee"), 32)
    assert ImageClassifier.load(tmp_path / "package").classes == ("ant", "bee")
    return tmp_path / "package"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "../../evil"}, r"model: '../../evil' is not a classifier of the installed torchvision"),
        ({"model": "fcn_resnet50"}, "is not a classifier"),
        ({"model": "r" * 101}, "model is .* at most 100"),
        ({"classes": ["ant"]}, "classes is .* at least 2"),
        ({"classes": ["ant", "ant"]}, "classes: 1 of 2 classes are duplicates"),
        ({"classes": ["ant", 7]}, r"classes.1 is 7: input should be a valid string"),
        ({"classes": "ab"}, "classes is 'ab'"),
        ({"classes": ["ant", "x" * 1025]}, "classes.1 is .* at most 1024"),
        ({"image_size": 15}, "image_size is 15"),
        ({"image_size": 10**9}, "image_size is 1000000000"),
        ({"image_size": "32"}, "image_size is '32'"),
        ({"loader": "evil"}, "loader is not a setting"),
    ],
)
def test_invalid_description_is_refused(folder: Path, changes: dict[str, object], reason: str) -> None:
    """An invalid description is refused with its field and value before a network is built."""
    (folder / DESCRIPTION_FILE).write_text(json.dumps(GOOD | changes))
    with pytest.raises(WrongInput, match=f"the model's model.json was not written by this project .*{reason}"):
        ImageClassifier.load(folder)


def test_file_larger_than_its_limit_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a description nor weights are read if their file is larger than its limit."""
    monkeypatch.setitem(package.FILE_LIMITS, DESCRIPTION_FILE, 10)
    with pytest.raises(WrongInput, match=r"the model's model.json has \d+ bytes, more than the limit of 10"):
        ImageClassifier.load(folder)
    monkeypatch.undo()
    with (folder / WEIGHTS_FILE).open("ab") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(WrongInput, match=r"the model's weights.pt has 1073741824 bytes"):
        ImageClassifier.load(folder)


def test_code_in_weights_is_not_executed(folder: Path, tmp_path: Path) -> None:
    """Code in the weights does not run, in an archive of torch.save or in a plain pickle."""
    torch.save({"weights": WriteFile(tmp_path / "executed")}, folder / WEIGHTS_FILE)
    with pytest.raises(WrongInput, match=NOT_LOADED):
        ImageClassifier.load(folder)
    (folder / WEIGHTS_FILE).write_bytes(pickle.dumps(WriteFile(tmp_path / "executed")))
    with pytest.raises(WrongInput, match=r"weights.pt is not an archive written by torch.save"):
        ImageClassifier.load(folder)
    assert not (tmp_path / "executed").exists()
    # Proof that the test can fail: unpickled, it does write.
    pickle.loads((folder / WEIGHTS_FILE).read_bytes())  # noqa: S301  # our own
    assert (tmp_path / "executed").exists()


def test_archive_with_compressed_records_is_refused(folder: Path) -> None:
    """A small archive that unpacks to 100 MB is refused, which torch would unpack."""
    with zipfile.ZipFile(folder / WEIGHTS_FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(100 << 20))
    assert (folder / WEIGHTS_FILE).stat().st_size < 1 << 20
    with pytest.raises(WrongInput, match=r"weights.pt unpacks to 104857600 bytes"):
        ImageClassifier.load(folder)


@pytest.mark.parametrize("other", [{"a": torch.zeros(1)}, {}, [torch.zeros(1)]], ids=["names", "empty", "list"])
def test_weights_of_another_network_are_refused(folder: Path, other: object) -> None:
    """Weights that do not match the network of the description are refused."""
    torch.save(other, folder / WEIGHTS_FILE)
    with pytest.raises(WrongInput, match="weights.pt does not match the network in its model.json"):
        ImageClassifier.load(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    """Weights of the same architecture for another number of classes are refused."""
    state = build_classifier(MODEL, "none", 3, freeze_backbone=False).state_dict()
    torch.save(state, folder / WEIGHTS_FILE)
    with pytest.raises(WrongInput, match="weights.pt does not match the network in its model.json"):
        ImageClassifier.load(folder)


def rewrite_pickle(file: Path, pickled: bytes) -> None:
    """Replace the pickle in an archive written by torch.save."""
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
def test_pickle_with_other_opcodes_or_globals_is_not_loaded(
    folder: Path, pickled: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle that does more than describe tensors, as allocate a gigabyte, is not passed to torch."""
    monkeypatch.setattr(torch, "load", lambda *_args, **_options: pytest.fail("it was read"))
    rewrite_pickle(folder / WEIGHTS_FILE, pickled)
    with pytest.raises(WrongInput, match=NOT_LOADED):
        ImageClassifier.load(folder)


def test_description_of_many_classes_takes_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 2 GB is built on the meta device only, as the file does not have its weights."""
    built: list[str] = []

    def build(*args: object, **options: object) -> object:
        classifier = build_classifier(*args, **options)  # type: ignore[arg-type]  # a stand-in with the attributes that are used
        built.append(next(classifier.parameters()).device.type)
        return classifier

    monkeypatch.setattr("tasks.model.classifier.build_classifier", build)
    classes = [str(number) for number in range(120_000)]
    (folder / DESCRIPTION_FILE).write_text(json.dumps(GOOD | {"model": "alexnet", "classes": classes}))
    with pytest.raises(WrongInput, match="weights.pt does not match the network in its model.json"):
        ImageClassifier.load(folder)
    assert built == ["meta"]


def test_expanded_tensors_are_refused(folder: Path) -> None:
    """Weights that repeat a single stored value are refused, as they could have any size in memory."""
    state = build_classifier(MODEL, "none", 2, freeze_backbone=False).state_dict()
    torch.save({name: torch.zeros(()).expand(value.shape) for name, value in state.items()}, folder / WEIGHTS_FILE)
    assert (folder / WEIGHTS_FILE).stat().st_size < 1 << 20
    with pytest.raises(WrongInput, match="weights.pt does not match the network in its model.json"):
        ImageClassifier.load(folder)


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


@pytest.mark.parametrize("kind", ["meta", "complex", "half", "sparse", "quantized"])
def test_weights_of_another_kind_are_refused(folder: Path, kind: str) -> None:
    """Weights on another device, or of another data type or layout than the network's, are refused."""
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
        match=r"weights.pt (does not match the network|is not a plain state dict|unpacks to|has [0-9]+ bytes)",
    ):
        ImageClassifier.load(folder)


def test_copied_state_keeps_module_versions(tmp_path: Path) -> None:
    """A copied state dict of MNASNet can be loaded, which fails without the module versions."""
    trained = build_classifier("mnasnet0_5", "none", 2, freeze_backbone=False)
    best = copy_of_state(trained)
    trained.load_state_dict(best)
    save_classifier(tmp_path, "mnasnet0_5", best, ("ant", "bee"), 32)
    ImageClassifier.load(tmp_path)
