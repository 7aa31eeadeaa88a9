"""The network: new heads, frozen backbones, and invalid names."""

import re
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from tasks.errors import WrongInput
from tasks.model.pretrained import check_model_name
from tasks.model.training_network import Classifier, build_classifier
from tasks.model_package.serving import computes_bf16
from tests.builders.small_network import SMALL

# googlenet warns on every start that its weight initialization will change.
pytestmark = pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet:FutureWarning")


def images(count: int = 2, side: int = 64) -> torch.Tensor:
    """Return images of noise, uint8 (B, H, W, 3)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)


def copy_of(classifier: Classifier) -> dict[str, torch.Tensor]:
    """Return a copy of parameters and buffers."""
    return {name: value.clone() for name, value in classifier.state_dict().items()}


def changed(classifier: Classifier, before: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of the parameters and buffers that changed."""
    return {name for name, value in classifier.state_dict().items() if not torch.equal(value, before[name])}


def train_a_step(classifier: Classifier) -> None:
    """Train one step with a large learning rate."""
    parameters = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    loss = nn.functional.cross_entropy(classifier.train()(images(4)), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v2", "googlenet"])
def test_head_is_replaced(name: str) -> None:
    """Logits have one column per class in eval and train mode, for any type and name of the last layer."""
    classifier = build_classifier(name, "none", num_classes=5, freeze_backbone=False)

    with torch.no_grad():
        assert classifier.eval()(images()).shape == (2, 5)
        assert classifier.train()(images()).shape == (2, 5)
    assert any(module is classifier.head for module in classifier.network.modules())
    assert next(classifier.head.parameters()).shape[0] == 5


def test_frozen_backbone_trains_the_head_alone(weights: Path) -> None:
    """A step changes the head, and neither weights nor batch norm statistics of the backbone."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
    before = copy_of(classifier)

    train_a_step(classifier)

    assert changed(classifier, before) == {"network.fc.weight", "network.fc.bias"}
    assert {name for name, value in classifier.named_parameters() if value.requires_grad} == changed(classifier, before)


def test_frozen_backbone_stays_in_eval_mode(weights: Path) -> None:
    """The method train() sets the mode of the head, and of no frozen batch norm layer."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True).train()

    assert classifier.head.training
    norms = [module for module in classifier.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.training for norm in norms)


def test_unfreeze_from_unfreezes_the_named_and_all_later_layers(weights: Path) -> None:
    """Weights and batch norm statistics change from the named layer to the head, and in no earlier layer."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
    classifier.unfreeze_from("stage4.1")
    before = copy_of(classifier)

    train_a_step(classifier)

    updated = changed(classifier, before)
    unfrozen = ("network.stage4.1.", "network.stage4.2.", "network.stage4.3.", "network.conv5.", "network.fc.")
    assert all(name.startswith(unfrozen) for name in updated)
    assert {name for name, value in classifier.named_parameters() if value.requires_grad} <= updated
    assert "network.conv5.1.running_mean" in updated


def test_all_layers_can_be_unfrozen(weights: Path) -> None:
    """With `all`, every parameter is trainable and every layer is in train mode."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
    classifier.unfreeze_from("all")
    assert all(parameter.requires_grad for parameter in classifier.parameters())
    assert all(module.training for module in classifier.train().modules())


def test_unknown_layer_is_refused_with_the_existing_names(weights: Path) -> None:
    """The error for an unknown layer lists the layers of the same depth."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
    with pytest.raises(WrongInput, match="'layer4'.* conv1, maxpool, stage2") as refused:
        classifier.unfreeze_from("layer4")
    assert refused.value.setting == "train.fine_tune.unfreeze_from"


@pytest.mark.skipif(not computes_bf16(torch.device("cpu")), reason="this CPU has no bfloat16")
def test_bf16_logits_are_float32_and_close_to_exact(weights: Path) -> None:
    """Logits in bfloat16 differ from those in float32 by rounding only, and weights stay float32."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=False).eval()
    with torch.no_grad():
        exact = classifier(images())
        classifier.precision = torch.bfloat16
        rounded = classifier(images())

    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, atol=3e-2 * float(exact.abs().max()))
    assert all(parameter.dtype == torch.float32 for parameter in classifier.parameters())


def test_unfrozen_backbone_is_trained(weights: Path) -> None:
    """Without freezing, every parameter is trainable, and batch norm statistics are updated."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=False)
    before = copy_of(classifier)

    train_a_step(classifier)

    assert all(parameter.requires_grad for parameter in classifier.parameters())
    updated = changed(classifier, before)
    assert "network.conv1.0.weight" in updated
    assert "network.conv1.1.running_mean" in updated
    assert "network.fc.weight" in updated


def test_head_is_registered_once(weights: Path) -> None:
    """The head's parameters belong to the network, and are neither saved nor trained twice."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=False)

    names = list(classifier.state_dict())
    assert all(name.startswith("network.") for name in names)
    assert len({id(parameter) for parameter in classifier.parameters()}) == len(list(classifier.parameters()))


def test_inputs_are_normalized_as_by_torchvision(weights: Path) -> None:
    """The network's inputs equal torchvision's preprocessing of the same images."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True).eval()
    images_BCHW = images().permute(0, 3, 1, 2).float() / 255
    normalized = torchvision.transforms.functional.normalize(images_BCHW, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    with torch.no_grad():
        assert torch.allclose(classifier(images()), classifier.network(normalized), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("resnet1", "did you mean resnet18 or "),
        ("fasterrcnn_resnet50_fpn", "choose one"),
        ("quantized_mobilenet_v2", "did you mean mobilenet_v2?"),
        ("", "choose one"),
    ],
)
def test_unknown_model_is_refused(name: str, way_out: str) -> None:
    """A name that is not a torchvision classifier is refused with similar ones, or a way to list the classifiers."""
    with pytest.raises(WrongInput, match=rf"^train.model is '{name}'.*: {re.escape(way_out)}") as refused:
        check_model_name(name)
    assert refused.value.setting == "train.model"


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_their_own_normalization_keep_it(name: str) -> None:
    """These networks expect (x - 0.5) / 0.5: transform_input is set, as by torchvision for their pretrained weights."""
    assert build_classifier(name, "none", 3, freeze_backbone=False).network.transform_input


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_classifiers_are_removed(name: str) -> None:
    """Without the auxiliary classifiers, every remaining weight gets a gradient."""
    torch.manual_seed(1)
    classifier = build_classifier(name, "none", 3, freeze_backbone=False).train()

    logits = classifier(torch.zeros(2, 80, 80, 3, dtype=torch.uint8))
    logits.sum().backward()

    assert logits.shape == (2, 3)
    assert not [key for key, value in classifier.named_parameters() if value.grad is None]
