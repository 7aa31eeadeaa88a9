"""Weights of a network, loaded from a file, drawn from the seed, or rejected."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
import torchvision

from tasks.checks.trainable import check_training
from tasks.config.cache import CacheConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.pretrained import load_weights, weights_digest
from tasks.model.training_network import build_classifier
from tasks.model_package.network import IMAGENET_CLASSES
from tests.builders.small_network import SMALL


def test_weights_of_a_file_are_loaded(weights: Path) -> None:
    """All weights except those of the head come from the file."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)

    loaded = torch.load(weights, weights_only=True)
    for name, value in classifier.network.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(value, loaded[name]), name
    assert loaded["fc.weight"].shape[0] == IMAGENET_CLASSES


def test_weights_of_another_architecture_are_rejected(weights: Path) -> None:
    """The error names file and model, and counts the tensors that do not match."""
    with pytest.raises(
        WrongInput,
        match=r"small.pt', which does not fit train.model 'squeezenet1_1': of its tensors \d+ missing \(first: .*\), "
        r"\d+ unknown \(first: conv1\.0\.weight\)",
    ):
        build_classifier("squeezenet1_1", str(weights), num_classes=3, freeze_backbone=True)


State = dict[str, torch.Tensor]


def named(prefix: str, state: State) -> State:
    """Return a state dict with a prefix before each name."""
    return {prefix + key: value for key, value in state.items()}


def with_head(state: State, head: State) -> State:
    """Return a state dict with another head."""
    return {key: value for key, value in state.items() if not key.startswith("fc.")} | head


def with_first(state: State, name: str, value: float) -> State:
    """Return a state dict with another value in front of a tensor."""
    changed = state[name].clone()
    changed[0] = value
    return state | {name: changed}


HEADS: dict[str, Callable[[State], State]] = {
    "of another shape": lambda state: with_head(state, {"fc.weight": torch.ones(10, 1024), "fc.bias": torch.ones(10)}),
    "no head": lambda state: with_head(state, {}),
    "of another shape, with layers": lambda state: with_head(
        state, {"fc.1.weight": torch.ones(7, 1024), "fc.1.bias": torch.ones(7)}
    ),
}
WRAPPED: dict[str, Callable[[State], object]] = {
    "without module.": lambda state: named("module.", state),
    "without _orig_mod.": lambda state: named("_orig_mod.", state),
    "without _orig_mod. and module.": lambda state: named("module._orig_mod.", state),
    "without _orig_mod": lambda state: {
        key.replace("stage2.", "stage2._orig_mod."): value for key, value in state.items()
    },
    "not of shufflenet_v2_x0_5 are left out (first: n_averaged)": lambda state: {
        "n_averaged": torch.tensor(3),
        **named("module.", state),
    },
    "without model.": lambda state: {  # as Lightning writes it
        "epoch": 3,
        "state_dict": named("model.", state) | {"loss.weight": torch.ones(3)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}],
    },
    "entry 'model'": lambda state: {"model": state, "loss": torch.tensor(0.5), "args": ["--lr", 0.1]},
    "": lambda state: {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")},
}


@pytest.mark.parametrize(("said", "change"), [*HEADS.items(), *WRAPPED.items()])
def test_checkpoint_of_another_program_is_loaded(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str, change: Callable[[State], object]
) -> None:
    """The backbone is loaded whatever head, prefix or wrapper the file has, and the log says what was left out."""
    state = torch.load(weights, weights_only=True)
    torch.save(change(state), tmp_path / "own.pt")
    with caplog.at_level(logging.INFO, "lakevision.train"):
        classifier = build_classifier(SMALL, str(tmp_path / "own.pt"), num_classes=3, freeze_backbone=True)

    loaded = classifier.network.state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in state if not name.startswith("fc."))
    assert loaded["fc.weight"].shape == (3, 1024)
    assert said.partition(", with")[0] in caplog.text
    assert bool(caplog.text) == bool(said), "a file as torchvision's needs no note"


REFUSED: dict[str, Callable[[State], object]] = {
    "does not fit .* 1 missing .first: conv5.0.weight.": lambda state: with_head(
        {key: value for key, value in state.items() if key != "conv5.0.weight"}, {}
    ),
    "does not fit .* 1 of another shape .first: conv5.0.weight.": lambda state: (
        state | {"conv5.0.weight": torch.ones(2)}
    ),
    "does not fit .* 1 unknown .first: stage5.0.weight.": lambda state: named(
        "module.", state | {"stage5.0.weight": torch.ones(2)}
    ),
    "2 networks .first: 'student.', 'teacher.'.": lambda state: named("student.", state) | named("teacher.", state),
    r"2 state dicts \(model, model_ema\): save one": lambda state: {"model": state, "model_ema": state},
    "NaN, .* in 1 of its tensors .first: conv1.0.weight.": lambda state: with_first(
        state, "conv1.0.weight", float("nan")
    ),
    "infinite values .* .first: conv5.1.bias.": lambda state: with_first(state, "conv5.1.bias", float("-inf")),
    "negative variances .* .first: conv1.1.running_var.: give the weights of a training run": lambda state: with_first(
        state, "conv1.1.running_var", -1.0
    ),
}


@pytest.mark.parametrize(("why", "change"), REFUSED.items())
def test_checkpoint_with_an_unusable_backbone_is_rejected(
    weights: Path, tmp_path: Path, why: str, change: Callable[[State], object]
) -> None:
    """Tensors that stay must be those of one network, and finite: divergence at the first step would be blamed."""
    torch.save(change(torch.load(weights, weights_only=True)), tmp_path / "own.pt")
    with pytest.raises(WrongInput, match=f"own.pt'.* {why}"):
        build_classifier(SMALL, str(tmp_path / "own.pt"), num_classes=3, freeze_backbone=True)


def test_weights_with_invalid_values_are_refused_before_training(weights: Path, tmp_path: Path) -> None:
    """The check before a cache is built refuses them; a head with such values is replaced, and accepted."""
    state = torch.load(weights, weights_only=True)
    train = TrainConfig(model=SMALL, weights=str(tmp_path / "own.pt"), device="cpu")
    torch.save(with_first(state, "fc.bias", float("nan")), tmp_path / "own.pt")
    check_training(train, CacheConfig(image_size=32))
    torch.save(with_first(state, "conv5.1.running_var", -1e-3), tmp_path / "own.pt")
    with pytest.raises(WrongInput, match="negative variances"):
        check_training(train, CacheConfig(image_size=32))


@pytest.mark.parametrize("model", ["densenet121", "mnasnet0_5"])
def test_names_of_torchvisions_files_and_versions_of_layers_are_known(model: str, tmp_path: Path) -> None:
    """DenseNets in torchvision's files have older names, and MNASNet needs the version that a wrapper hides."""
    network = torchvision.models.get_model(model, weights=None)
    state = {re.sub(r"(denselayer\d+\.(?:norm|conv))(?=[12]\.)", r"\1.", k): v for k, v in network.state_dict().items()}
    torch.save(named("module.", state), tmp_path / "own.pt")
    loaded = build_classifier(model, str(tmp_path / "own.pt"), num_classes=3, freeze_backbone=True).network.state_dict()
    kept = {key: value for key, value in network.state_dict().items() if not key.startswith("classifier.")}
    assert all(torch.equal(loaded[key], value) for key, value in kept.items())


def test_missing_weights_file_is_rejected(tmp_path: Path) -> None:
    """The error for a missing file, a folder or a misspelled word has the valid values."""
    for path in (str(tmp_path / "missing.pt"), str(tmp_path), "default"):
        with pytest.raises(
            WrongInput, match="which is not a file: give none, DEFAULT, champion, the id of an MLflow run, or"
        ):
            load_weights(SMALL, path)


def no_network(_request: Request) -> object:
    """Raise the error of a machine without a network."""
    raise URLError("no route to host")


def login_page(_request: Request) -> object:
    """Return a login page, as a proxy may."""
    return urlopen("data:text/html,log in")  # noqa: S310  # a fixed address


@pytest.mark.parametrize(("answer", "why"), [(no_network, "no route to host"), (login_page, "invalid hash value")])
def test_failed_download_of_default_weights_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Callable[[Request], object], why: str
) -> None:
    """The error has the cause and two alternatives, and no downloaded file is kept."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", answer)
    with pytest.raises(
        WrongInput,
        match=rf"train.weights is DEFAULT and the weights of {SMALL} could not be downloaded \(.*{why}.*\): set "
        r"train.weights to the path of a state dict, or to none with train.freeze_backbone false",
    ):
        load_weights(SMALL, "DEFAULT")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_downloaded_default_weights_are_loaded_without_executing_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A replaced file is not executed, and the error for a damaged one says to remove it."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / weights_digest(SMALL, "DEFAULT")
    file.parent.mkdir(parents=True)
    state = torchvision.models.get_model(SMALL, weights=None).state_dict()
    torch.save(Payload(), file)
    replaced = file.read_bytes()
    torch.save(state, file)
    complete = file.read_bytes()

    for content in (replaced, complete[: len(complete) // 2], b"", b"half a download"):
        file.write_bytes(content)
        with pytest.raises(WrongInput, match=rf"is DEFAULT, and the file '{file}' is not a state dict .*: remove it"):
            load_weights(SMALL, "DEFAULT")
    assert not (tmp_path / "executed").exists()
    file.write_bytes(complete)
    found = load_weights(SMALL, "DEFAULT")
    assert found is not None
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_file_without_a_state_dict_is_rejected(tmp_path: Path) -> None:
    """The error for a text file, or an object other than a dict of tensors, says how to save a state dict."""
    (tmp_path / "text.pt").write_text("no weights")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    torch.save({"epoch": 3, "model": {}}, tmp_path / "checkpoint.pt")

    for name in ("text.pt", "list.pt", "checkpoint.pt"):
        with pytest.raises(WrongInput, match=rf"{name}', which is not a state dict .*save"):
            load_weights(SMALL, str(tmp_path / name))


def test_pickled_model_is_rejected_and_not_executed(tmp_path: Path) -> None:
    """A file that would execute code when unpickled is rejected."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save(Payload(), tmp_path / "model.pt")

    with pytest.raises(WrongInput, match="which is not a state dict"):
        load_weights(SMALL, str(tmp_path / "model.pt"))
    assert not (tmp_path / "executed").exists()


def test_weights_none_are_drawn_from_the_seed() -> None:
    """With weights none, the same seed gives the same network."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(build_classifier(SMALL, "none", num_classes=3, freeze_backbone=False).state_dict())

    assert load_weights(SMALL, "none") is None
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


def test_digest_of_default_weights_is_their_file_name() -> None:
    """For each torchvision classifier, the file name has the beginning of the sha256 of its content."""
    assert weights_digest("mobilenet_v2", "DEFAULT") == "mobilenet_v2-7ebf99e0.pth"
    for name in torchvision.models.list_models(module=torchvision.models):
        assert re.fullmatch(r"[\w.-]+-[0-9a-f]{8,}\.pth", weights_digest(name, "DEFAULT")), name


def test_default_weights_of_an_unknown_model_are_rejected() -> None:
    """The digest for the key of a run is rejected before the network is built."""
    with pytest.raises(WrongInput, match="train.model is 'resnet19', which is not a torchvision classifier"):
        weights_digest("resnet19", "DEFAULT")
