"""Weights of a network: loaded from a file, drawn from the seed, or refused."""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
import torchvision

from tasks.errors import WrongInput
from tasks.model.network import IMAGENET_CLASSES, build_classifier, load_weights
from tasks.model.pretrained import weights_digest
from tests.builders.small_network import SMALL


def test_weights_of_a_file_are_loaded(weights: Path) -> None:
    """All but the head is what the file says."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)

    given = torch.load(weights, weights_only=True)
    for name, value in classifier.network.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(value, given[name]), name
    assert given["fc.weight"].shape[0] == IMAGENET_CLASSES


def test_weights_of_another_architecture_are_refused(weights: Path) -> None:
    """The sentence names file and model, and counts what does not fit."""
    with pytest.raises(
        WrongInput,
        match=r"small.pt', which does not fit train.model 'squeezenet1_1': of its tensors \d+ missing \(first: .*\), "
        r"\d+ unknown \(first: conv1\.0\.weight\)",
    ):
        build_classifier("squeezenet1_1", str(weights), num_classes=3, freeze_backbone=True)


def test_weights_of_another_head_are_refused(weights: Path, tmp_path: Path) -> None:
    """A state dict of an already fine-tuned network has a head of another shape."""
    state = torch.load(weights, weights_only=True)
    state["fc.weight"] = state["fc.weight"][:10]
    torch.save(state, tmp_path / "tuned.pt")

    with pytest.raises(WrongInput, match=r"1 of another shape \(first: fc\.weight\)"):
        build_classifier(SMALL, str(tmp_path / "tuned.pt"), num_classes=3, freeze_backbone=True)


def test_missing_file_of_weights_is_refused(tmp_path: Path) -> None:
    """A path without a file, a folder, and a misspelled word are all told what is possible."""
    for given in (str(tmp_path / "gone.pt"), str(tmp_path), "default"):
        with pytest.raises(WrongInput, match="which is no file: give none, DEFAULT, or the path of a state dict"):
            load_weights(SMALL, given)


def no_network(_request: Request) -> object:
    """Fail as a machine without a network does."""
    raise URLError("no route to host")


def another_page(_request: Request) -> object:
    """Answer as a proxy does that wants a login."""
    return urlopen("data:text/html,log in")  # noqa: S310  # the address is ours


@pytest.mark.parametrize(("answer", "why"), [(no_network, "no route to host"), (another_page, "invalid hash value")])
def test_default_weights_that_do_not_come_are_told_with_two_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Callable[[Request], object], why: str
) -> None:
    """Without a network, or with something else in their place, of which nothing is kept."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", answer)
    with pytest.raises(
        WrongInput,
        match=rf"train.weights is DEFAULT and the weights of {SMALL} could not be downloaded \(.*{why}.*\): set "
        r"train.weights to the path of a state dict, or to none with train.freeze_backbone false",
    ):
        load_weights(SMALL, "DEFAULT")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_default_weights_that_lie_here_are_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What somebody put in their place is not executed, and what is damaged is named, with the way out."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / weights_digest(SMALL, "DEFAULT")
    file.parent.mkdir(parents=True)
    good = torchvision.models.get_model(SMALL, weights=None).state_dict()
    torch.save(Payload(), file)
    replaced = file.read_bytes()
    torch.save(good, file)
    whole = file.read_bytes()

    for content in (replaced, whole[: len(whole) // 2], b"", b"half a download"):
        file.write_bytes(content)
        with pytest.raises(
            WrongInput, match=rf"is DEFAULT, and what lies in '{file}' is no state dict .*: remove that"
        ):
            load_weights(SMALL, "DEFAULT")
    assert not (tmp_path / "executed").exists()
    file.write_bytes(whole)
    found = load_weights(SMALL, "DEFAULT")
    assert found is not None
    assert all(torch.equal(found[name], good[name]) for name in good)


def test_file_that_holds_no_state_dict_is_refused(tmp_path: Path) -> None:
    """Text, and a saved object that is no dict of tensors, are told how to save one."""
    (tmp_path / "text.pt").write_text("no weights")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    torch.save({"epoch": 3, "model": {}}, tmp_path / "checkpoint.pt")

    for name in ("text.pt", "list.pt", "checkpoint.pt"):
        with pytest.raises(WrongInput, match=rf"{name}', which (is|holds) no state dict .*save"):
            load_weights(SMALL, str(tmp_path / name))


def test_pickled_model_is_refused_and_not_executed(tmp_path: Path) -> None:
    """A file that would run code when it is unpickled is no state dict."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save(Payload(), tmp_path / "model.pt")

    with pytest.raises(WrongInput, match="which is no state dict"):
        load_weights(SMALL, str(tmp_path / "model.pt"))
    assert not (tmp_path / "executed").exists()


def test_no_weights_are_drawn_from_the_seed() -> None:
    """With weights none, the same seed draws the same network."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(build_classifier(SMALL, "none", num_classes=3, freeze_backbone=False).state_dict())

    assert load_weights(SMALL, "none") is None
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


def test_default_weights_are_told_by_their_file() -> None:
    """In its name is the beginning of the sha256 that its content must have, for every classifier there is."""
    assert weights_digest("mobilenet_v2", "DEFAULT") == "mobilenet_v2-7ebf99e0.pth"
    for name in torchvision.models.list_models(module=torchvision.models):
        assert re.fullmatch(r"[\w.-]+-[0-9a-f]{8,}\.pth", weights_digest(name, "DEFAULT")), name


def test_default_weights_of_no_model_are_refused() -> None:
    """Where a training is named, which is before its network is built."""
    with pytest.raises(WrongInput, match="train.model is 'resnet19', which is no torchvision classifier"):
        weights_digest("resnet19", "DEFAULT")
