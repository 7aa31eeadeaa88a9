"""Networks of timm: heads, training, serving form, model packages, and refused ones."""

import io
import json
import re
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import yaml
from PIL import Image
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.proxy import TraceError

from tasks.checks.trainable import check_training
from tasks.config.cache import CacheConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.pretrained import check_model_name, classifier_names, load_weights, preprocessing, weights_digest
from tasks.model.training_network import Classifier, build_classifier
from tasks.model_package.classifier import ImageClassifier, save_classifier
from tasks.model_package.description import DESCRIPTION_FILE, InvalidPackage
from tasks.model_package.pyfunc import ImageModel
from tasks.model_package.serving import serving_network
from tasks.storage import resolve_storage
from tasks.tracking.server import client_of
from tasks.tracking.tracked_run import tracked_run
from tasks.train.features import ends_in_head, sample_images
from tests.builders.image_classifier import image_classifier

CLASSES = ("ant", "bee", "cat")

NETWORKS = {
    "timm:resnet10t": 64,
    "timm:mobilenetv3_small_050": 64,
    "timm:convnext_atto": 64,
    "timm:test_vit": 160,
}
"""A network of each kind of block, and a side of its images: batch norm, one with activation, layer norm, tokens."""


def images() -> list[bytes]:
    """Return encoded images of noise of different sizes."""
    contents = []
    for number in range(3):
        samples = np.random.default_rng(number).integers(0, 256, (40 + number, 50, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(samples).save(buffer, format="PNG")
        contents.append(buffer.getvalue())
    return contents


def trained(name: str, side: int) -> Classifier:
    """Return a classifier of random weights after a step, whose predictions differ between images of noise."""
    torch.manual_seed(4)
    classifier = build_classifier(name, "none", len(CLASSES), freeze_backbone=False).train()
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.01)
    nn.functional.cross_entropy(classifier(sample_images(side)), torch.tensor([0, 2])).backward()
    optimizer.step()
    with torch.no_grad():
        classifier.head.weight.normal_()
    return classifier.eval()


def test_names_are_those_of_timm() -> None:
    """The names are read from timm's sources, without its import."""
    assert classifier_names("timm") == set(timm.list_models())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "timm:resnet10",
            "train.model is 'timm:resnet10', which is not a timm classifier: did you mean timm:resnet10t",
        ),
        ("timm:hf-hub:owner/name", "which is not a timm classifier: choose one of timm.list_models"),
        ("timm:../net", "which is not a timm classifier"),
    ],
)
def test_unknown_name_is_refused(name: str, sentence: str) -> None:
    """A name that timm would look up in a hub or a folder is none of its own."""
    with pytest.raises(WrongInput, match=sentence):
        check_model_name(name)


@pytest.mark.parametrize(("name", "side"), NETWORKS.items())
def test_network_is_trained_and_served_as_torchvisions(name: str, side: int) -> None:
    """A step reaches the first layer, or the head alone; the serving form has the same logits, folded or not."""
    torch.manual_seed(4)
    before = build_classifier(name, "none", len(CLASSES), freeze_backbone=False).state_dict()
    classifier = trained(name, side)
    served = serving_network(classifier, "float32", temperature=1.0)

    first = next(key for key, _value in classifier.named_parameters())
    assert not torch.equal(classifier.state_dict()[first], before[first])
    frozen = build_classifier(name, "none", 5, freeze_backbone=True)
    assert {id(value) for value in frozen.parameters() if value.requires_grad} == set(map(id, frozen.head.parameters()))
    assert ends_in_head(classifier, sample_images(side))
    with torch.inference_mode():
        logits_BK = classifier(sample_images(side))
        assert logits_BK.shape == (2, 3)
        assert torch.allclose(served(sample_images(side)), logits_BK, atol=1e-4)
    assert (served.mean, served.std) == (classifier.mean, classifier.std)


@pytest.mark.parametrize(("name", "side"), NETWORKS.items())
def test_model_package_gives_the_same_answers(name: str, side: int, tmp_path: Path) -> None:
    """Labels and probabilities are those of the trained network, from the package and through MLflow's flavor."""
    classifier = trained(name, side)
    classifier.mean, classifier.std = (0.5, 0.4, 0.3), (0.3, 0.2, 0.1)
    expected = image_classifier(classifier, CLASSES, side).predict(images())
    state = classifier.state_dict()
    save_classifier(tmp_path, name, state, CLASSES, side, mean=classifier.mean, std=classifier.std)
    loaded = ImageClassifier.load(tmp_path, torch.device("cpu")).predict(images())
    rows = ImageModel(tmp_path).predict(pd.DataFrame({"content": images()}))

    assert [found.label for found in loaded] == [found.label for found in expected] == list(rows["label"])
    for found, wanted, row in zip(loaded, expected, rows["probability"], strict=True):
        assert found.probability == pytest.approx(wanted.probability, abs=1e-6)
        assert row == pytest.approx(wanted.probability, abs=1e-6)


def test_network_that_cannot_be_traced_is_served_as_it_is() -> None:
    """A branch on values stops the tracing by which batch norms are folded; the logits are those of the network."""
    classifier = trained("timm:efficientvit_m0", 224)
    served = serving_network(classifier, "float32", temperature=2.0)

    assert any(type(module) is nn.BatchNorm2d for module in classifier.network.modules())
    with pytest.raises(TraceError):
        symbolic_trace(classifier.network)
    assert served.network is classifier.network
    with torch.inference_mode():
        assert torch.equal(served(sample_images(224)), classifier(sample_images(224)) / 2)


def test_network_whose_code_reads_weights_is_served_as_it_is() -> None:
    """A folded layer has no weights of its own; a pass in float32 gives the logits of the network."""
    classifier = trained("timm:xcit_nano_12_p16_224", 224)
    served = serving_network(classifier, "float32", temperature=1.0)

    with torch.inference_mode():
        assert torch.allclose(served(sample_images(224)), classifier(sample_images(224)), atol=1e-4)


def test_weights_of_a_file_keep_their_own_preprocessing(tmp_path: Path) -> None:
    """The backbone is loaded from a state dict with timm's head, and normalizes as timm's configuration says."""
    torch.manual_seed(1)
    state = timm.create_model("test_vit", num_classes=10).state_dict()
    torch.save(state, tmp_path / "own.pt")
    config = timm.get_pretrained_cfg("test_vit")
    classifier = build_classifier("timm:test_vit", str(tmp_path / "own.pt"), 3, freeze_backbone=True)

    loaded = classifier.network.state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in state if not key.startswith("head."))
    assert (classifier.mean, classifier.std) == (config.mean, config.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert preprocessing("timm:test_vit", str(tmp_path / "own.pt")).image_size == 160


@pytest.mark.parametrize(
    ("train", "side", "sentence"),
    [
        (
            {"model": "timm:vit_tiny_patch16_224"},
            64,
            "cache.image_size is 64, which .*_patch16_224' does not accept .*: set cache.image_size to 224",
        ),
        (
            {"model": "timm:levit_128s"},
            224,
            "train.model is 'timm:levit_128s', whose head cannot be replaced .*tuple.*: choose a",
        ),
        ({"model": "timm:coat_lite_tiny"}, 224, "'timm:coat_lite_tiny', whose weights a model package cannot hold"),
        ({"model": "timm:vit_tiny_r_s16_p8_224"}, 224, "whose weights a model package cannot hold"),
        ({"model": "timm:resnet10t.no_tag"}, 64, "'timm:resnet10t.no_tag', which timm does not know .*no_tag"),
    ],
)
def test_network_that_cannot_be_trained_is_refused(
    train: dict[str, str], side: int, sentence: str, tmp_path: Path
) -> None:
    """A fixed size that the cache does not have, several heads, and weights that do not exist each get a sentence."""
    name = train["model"].removeprefix("timm:").partition(".")[0]
    torch.save(timm.create_model(name).state_dict(), tmp_path / "own.pt")
    given = TrainConfig.model_validate(train | {"weights": str(tmp_path / "own.pt")})
    with pytest.raises(WrongInput, match=sentence):
        check_training(given, CacheConfig(image_size=side))


def test_weights_that_cannot_be_downloaded_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A download by timm fails without a network, and some networks have no weights; their digest is their name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(WrongInput, match="DEFAULT and the weights of timm:resnet10t could not be downloaded"):
        load_weights("timm:resnet10t", "DEFAULT")
    without = next(name for name in timm.list_models("vit_*") if not timm.get_pretrained_cfg(name).has_weights)
    with pytest.raises(WrongInput, match=f"timm has no pretrained weights of 'timm:{without}'"):
        load_weights(f"timm:{without}", "DEFAULT")
    assert weights_digest("timm:resnet10t", "DEFAULT") == "timm:resnet10t.c3_in1k"


@pytest.mark.parametrize("name", ["timm:hf-hub:owner/name", "timm:local-dir:/tmp", "timm:no", "timm:resnet10t.no"])
def test_description_with_another_name_is_refused(name: str, tmp_path: Path) -> None:
    """A name in an untrusted description is one of timm's registered networks, or none is built."""
    save_classifier(tmp_path, "timm:resnet10t", trained("timm:resnet10t", 64).state_dict(), CLASSES, 64)
    text = json.loads((tmp_path / DESCRIPTION_FILE).read_text())
    (tmp_path / DESCRIPTION_FILE).write_text(json.dumps(text | {"model": name}))
    with pytest.raises(InvalidPackage, match=f"model is '{re.escape(name)}': .* is not a classifier of the installed"):
        ImageClassifier.load(tmp_path)


def test_model_that_needs_timm_requires_it(tmp_path: Path) -> None:
    """MLflow's environment of a model has timm only for its networks."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    required = {}
    for name in ("timm:resnet10t", "squeezenet1_1"):
        state = build_classifier(name, "none", 3, freeze_backbone=False).state_dict()
        save_classifier(tmp_path / name, name, state, CLASSES, 64)
        with tracked_run(storage, "test", name, {}, {}, None) as run:
            run.log_model(tmp_path / name)
        client = client_of(storage)
        [output] = client.get_run(run.run_id).outputs.model_outputs
        location = str(client.get_logged_model(output.model_id).artifact_location).removeprefix("file://")
        text = (Path(location) / "requirements.txt").read_text()
        assert "torchvision==" in text
        required[name] = f"timm=={version('timm')}" in text
        assert yaml.safe_load((Path(location) / "MLmodel").read_text())["flavors"]

    assert required == {"timm:resnet10t": True, "squeezenet1_1": False}
