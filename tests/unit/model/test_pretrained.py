"""Preprocessing of pretrained weights, by their own metadata."""

import logging
import os
from pathlib import Path

import pytest
import torch
import torchvision

from tasks.checks.trainable import check_training
from tasks.config.cache import CacheConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.pretrained import RENORMALIZED, names_model, preprocessing, weights_identity
from tasks.model.training_network import build_classifier
from tasks.model_package.classifier import save_classifier
from tasks.model_package.description import IMAGENET_MEAN, IMAGENET_STD
from tasks.model_package.network import build_network
from tasks.model_package.serving import serving_network

NAMES = torchvision.models.list_models(module=torchvision.models)


def test_every_network_of_torchvision_has_its_own_preprocessing() -> None:
    """Mean, standard deviation and size are those of the transforms of its weights; 16 have another size than 224."""
    found = {name: preprocessing(name, "DEFAULT") for name in NAMES}

    for name, made_for in found.items():
        given = torchvision.models.get_model_weights(name)["DEFAULT"].transforms()
        assert list(made_for.mean) == list(given.mean), name
        assert list(made_for.std) == list(given.std), name
        assert [made_for.image_size] == list(given.crop_size), name
    assert len({name for name in NAMES if found[name].image_size != 224}) == 16
    assert found["efficientnet_v2_l"].mean == found["efficientnet_v2_l"].std == (0.5, 0.5, 0.5)
    assert "center crop of 0.938, bicubic" in found["efficientnet_b3"].difference(224)
    assert found["efficientnet_b3"].difference(300) == ""


def test_networks_that_older_releases_normalized_otherwise_get_other_keys() -> None:
    """These are the networks whose weights have another mean than ImageNet's; all others keep their keys."""
    others = {name for name in NAMES if preprocessing(name, "DEFAULT").mean != IMAGENET_MEAN}

    assert others == RENORMALIZED
    assert set(weights_identity("efficientnet_v2_l", "DEFAULT")) == {"weights", "normalization"}
    assert set(weights_identity("efficientnet_v2_l", "none")) == set(weights_identity("resnet18", "DEFAULT"))


def test_network_normalizes_as_its_weights_were_trained(tmp_path: Path) -> None:
    """The state dict of efficientnet_v2_l takes inputs from -1 to 1, in training and in the serving form."""
    torch.manual_seed(0)
    torch.save(torchvision.models.get_model("mobilenet_v3_small").state_dict(), tmp_path / "small.pt")
    scratch = build_classifier("mobilenet_v3_small", "none", 3, freeze_backbone=False)
    pretrained = build_classifier("mobilenet_v3_small", str(tmp_path / "small.pt"), 3, freeze_backbone=False)
    assert (scratch.mean, scratch.std) == (pretrained.mean, pretrained.std) == (IMAGENET_MEAN, IMAGENET_STD)

    network = build_network("squeezenet1_1", 3, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).eval()
    served = serving_network(network, "float32", temperature=1.0)
    seen: list[torch.Tensor] = []
    served.network.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        served(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 64, 64, 3))
    assert seen[0][0].unique().tolist() == [-1.0]
    assert seen[0][1].unique().tolist() == [1.0]


def test_vision_transformer_has_the_size_of_its_weights(tmp_path: Path) -> None:
    """Weights for 160 pixels make a network for them, in training and from a package; another size is refused."""
    torch.manual_seed(0)
    state = torchvision.models.vit_b_16(image_size=160).state_dict()
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "vit.pt")
    train = TrainConfig(model="vit_b_16", weights=str(tmp_path / "vit.pt"))
    classifier = build_classifier("vit_b_16", train.weights, 3, freeze_backbone=True)
    save_classifier(tmp_path / "package", "vit_b_16", classifier.state_dict(), ("a", "b", "c"), 160)
    rebuilt = build_network("vit_b_16", 3, 160).state_dict()

    assert torch.equal(classifier.network.state_dict()["encoder.pos_embedding"], state["encoder.pos_embedding"])
    assert {name: value.shape for name, value in rebuilt.items()} == {
        name: value.shape for name, value in classifier.state_dict().items()
    }
    sentence = "cache.image_size is 64, which train.model 'vit_b_16' does not accept .*: set cache.image_size to 160"
    with pytest.raises(WrongInput, match=sentence):
        check_training(train, CacheConfig(image_size=64))


def test_other_size_than_that_of_the_weights_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line says for what the weights were made; a network without weights is made for nothing."""
    torch.save(torchvision.models.get_model("efficientnet_b1").state_dict(), tmp_path / "own.pt")
    with caplog.at_level(logging.INFO, "lakevision.preflight"):
        check_training(
            TrainConfig(model="efficientnet_b1", weights=str(tmp_path / "own.pt")), CacheConfig(image_size=64)
        )
        check_training(
            TrainConfig(model="squeezenet1_1", weights="none", freeze_backbone=False), CacheConfig(image_size=64)
        )
    assert [record.getMessage() for record in caplog.records] == [
        "cache.image_size is 64; the weights are made for images of 240 pixels (center crop of 0.941, bilinear)"
    ]


@pytest.mark.parametrize("name", ["mobilenet_v2", "squeezenet1_0"])
def test_weights_of_others_start_a_network(name: str) -> None:
    """Files of torchvision, one of an old torch: a network from them learns a head."""
    data = os.environ.get("LAKEVISION_TEST_DATA")
    if not data:
        pytest.skip("LAKEVISION_TEST_DATA is not set")
    file = str(Path(data) / "weights" / f"{name}.pth")
    classifier = build_classifier(name, file, 3, freeze_backbone=True)
    state = torch.load(file, weights_only=True)
    own = classifier.network.state_dict()

    assert sum(torch.equal(own[key], value) for key, value in state.items() if key in own) >= len(state) - 2
    assert preprocessing(name, file).image_size == 224


def test_names_of_models_are_no_files() -> None:
    """The champion and the ids of runs are fetched by a flow; all other weights are given."""
    assert names_model("champion")
    assert names_model("0123456789abcdef0123456789abcdef")
    assert not any(
        map(names_model, ["none", "DEFAULT", "champion.pt", "0123456789ABCDEF0123456789abcdef", "./champion"])
    )
