"""The network: new heads, frozen backbones, and names that are refused."""

from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from tasks.errors import WrongInput
from tasks.model.network import Classifier, build_classifier
from tasks.model.precision import computes_bf16
from tasks.model.pretrained import check_model_name
from tests.builders.small_network import SMALL

# googlenet says on every start that its way to draw weights will change.
pytestmark = pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet:FutureWarning")


def images(count: int = 2, side: int = 64) -> torch.Tensor:
    """Return uint8 images of noise (B, H, W, 3)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)


def copy_of(classifier: Classifier) -> dict[str, torch.Tensor]:
    """Return a copy of parameters and buffers."""
    return {name: value.clone() for name, value in classifier.state_dict().items()}


def changed(classifier: Classifier, before: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of the parameters and buffers that are not what they were."""
    return {name for name, value in classifier.state_dict().items() if not torch.equal(value, before[name])}


def train_a_step(classifier: Classifier) -> None:
    """Make one step of training with a large learning rate."""
    parameters = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    loss = nn.functional.cross_entropy(classifier.train()(images(4)), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v2", "googlenet"])
def test_head_is_replaced(name: str) -> None:
    """Whatever the last layer is and is called, logits have one column a class, in eval and in train mode."""
    classifier = build_classifier(name, "none", num_classes=5, freeze_backbone=False)

    with torch.no_grad():
        assert classifier.eval()(images()).shape == (2, 5)
        assert classifier.train()(images()).shape == (2, 5)
    assert any(module is classifier.head for module in classifier.network.modules())
    assert next(classifier.head.parameters()).shape[0] == 5


def test_frozen_backbone_trains_the_head_alone(weights: Path) -> None:
    """After a step the head has moved, and neither weights nor batch norm statistics of the backbone have."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
    before = copy_of(classifier)

    train_a_step(classifier)

    assert changed(classifier, before) == {"network.fc.weight", "network.fc.bias"}
    assert {name for name, value in classifier.named_parameters() if value.requires_grad} == changed(classifier, before)


def test_frozen_backbone_stays_in_eval_mode(weights: Path) -> None:
    """train() reaches the head and no batch norm layer."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True).train()

    assert classifier.head.training
    norms = [module for module in classifier.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.training for norm in norms)


def test_from_a_named_layer_on_all_learns_and_nothing_before_it(weights: Path) -> None:
    """Its batch norm takes statistics, that of the frozen part does not."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
    classifier.unfreeze_from("stage4.1")
    before = copy_of(classifier)

    train_a_step(classifier)

    moved = changed(classifier, before)
    allowed = ("network.stage4.1.", "network.stage4.2.", "network.stage4.3.", "network.conv5.", "network.fc.")
    assert all(name.startswith(allowed) for name in moved)
    assert {name for name, value in classifier.named_parameters() if value.requires_grad} <= moved
    assert "network.conv5.1.running_mean" in moved


def test_all_layers_can_be_unfrozen(weights: Path) -> None:
    """As if none had been frozen."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
    classifier.unfreeze_from("all")
    assert all(parameter.requires_grad for parameter in classifier.parameters())
    assert all(module.training for module in classifier.train().modules())


def test_a_layer_that_is_none_is_refused_with_those_there_are(weights: Path) -> None:
    """The names are those of the same depth."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
    with pytest.raises(WrongInput, match=r"unfreeze_from is 'layer4', which is no layer .* conv1, maxpool, stage2"):
        classifier.unfreeze_from("layer4")


@pytest.mark.skipif(not computes_bf16(torch.device("cpu")), reason="this CPU has no bfloat16")
def test_logits_of_bf16_are_float32_and_close(weights: Path) -> None:
    """Within the rounding of 8 bits over the depth of the network; weights stay float32."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=False).eval()
    with torch.no_grad():
        exact = classifier(images())
        classifier.precision = torch.bfloat16
        rounded = classifier(images())

    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, atol=3e-2 * float(exact.abs().max()))
    assert all(parameter.dtype == torch.float32 for parameter in classifier.parameters())


def test_unfrozen_backbone_trains_as_a_whole(weights: Path) -> None:
    """Without freezing every parameter can move, and batch norm takes statistics."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=False)
    before = copy_of(classifier)

    train_a_step(classifier)

    assert all(parameter.requires_grad for parameter in classifier.parameters())
    moved = changed(classifier, before)
    assert "network.conv1.0.weight" in moved
    assert "network.conv1.1.running_mean" in moved
    assert "network.fc.weight" in moved


def test_head_is_no_module_of_its_own(weights: Path) -> None:
    """Its parameters are the network's, and are neither saved nor trained twice."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=False)

    names = list(classifier.state_dict())
    assert all(name.startswith("network.") for name in names)
    assert len({id(parameter) for parameter in classifier.parameters()}) == len(list(classifier.parameters()))


def test_pixels_are_normalized_as_imagenet_s(weights: Path) -> None:
    """The network gets torchvision's preprocessing of the same images."""
    classifier = build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True).eval()
    images_BCHW = images().permute(0, 3, 1, 2).float() / 255
    normalized = torchvision.transforms.functional.normalize(images_BCHW, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    with torch.no_grad():
        assert torch.allclose(classifier(images()), classifier.network(normalized), atol=1e-5)


@pytest.mark.parametrize("name", ["resnet1", "fasterrcnn_resnet50_fpn", "quantized_mobilenet_v2", ""])
def test_unknown_model_is_refused(name: str) -> None:
    """What torchvision does not know, or knows as something else than a classifier, is named with a way out."""
    with pytest.raises(WrongInput, match=rf"train.model is '{name}', which is no torchvision classifier: choose one"):
        check_model_name(name)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_their_own_normalization_keep_it(name: str) -> None:
    """Torchvision sets transform_input where it loads pretrained weights of these two: they expect (x - 0.5) / 0.5."""
    assert build_classifier(name, "none", 3, freeze_backbone=False).network.transform_input


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_classifiers_are_left_out(name: str) -> None:
    """No loss of ours reaches them: every weight that is there gets a gradient."""
    torch.manual_seed(1)
    classifier = build_classifier(name, "none", 3, freeze_backbone=False).train()

    logits = classifier(torch.zeros(2, 80, 80, 3, dtype=torch.uint8))
    logits.sum().backward()

    assert logits.shape == (2, 3)
    assert not [key for key, value in classifier.named_parameters() if value.grad is None]
