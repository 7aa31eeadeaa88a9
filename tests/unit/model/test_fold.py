"""A network with its batch norms and activations folded gives the logits of the network."""

import pytest
import torch
from torch import nn

from tasks.model.fold import ActivatedConv2d, fold_batch_norm
from tasks.model.network import Classifier, build_classifier
from tasks.model.precision import computes_bf16
from tasks.train.features import ends_in_head


def trained(name: str) -> Classifier:
    """Return a classifier whose batch norms have seen something."""
    torch.manual_seed(5)
    classifier = build_classifier(name, "none", num_classes=3, freeze_backbone=False)
    for module in classifier.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias, std=0.1)
    return classifier.train()


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("mobilenet_v2", 64),
        ("resnet18", 64),
        ("densenet121", 64),
        ("efficientnet_b0", 64),
        ("shufflenet_v2_x0_5", 64),
        ("googlenet", 64),
        ("inception_v3", 96),
        ("regnet_y_400mf", 64),
    ],
)
def test_logits_are_the_same(name: str, side: int) -> None:
    """Within a thousandth of their spread; the given network is as it was, in its mode and its weights."""
    classifier = trained(name)
    before = {key: value.clone() for key, value in classifier.state_dict().items()}
    images = torch.randint(0, 256, (4, side, side, 3), dtype=torch.uint8)

    folded = fold_batch_norm(classifier)

    assert classifier.training
    assert all(torch.equal(before[key], value) for key, value in classifier.state_dict().items())
    with torch.no_grad():
        expected, found = classifier.eval()(images), folded(images)
    assert (found - expected).abs().max() < 1e-3 * expected.std()
    norms = [sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) for net in (classifier, folded)]
    assert norms[1] < norms[0]
    if name != "densenet121":  # it normalises before it convolves: most of its norms have no convolution to go into
        assert norms[1] == 0
    assert ends_in_head(folded, images)


@pytest.mark.parametrize("name", ["squeezenet1_1", "vit_b_32"])
def test_a_network_without_batch_norms_stays_as_it_is(name: str) -> None:
    """In eval mode."""
    classifier = build_classifier(name, "none", num_classes=3, freeze_backbone=False)
    assert fold_batch_norm(classifier) is classifier
    assert not classifier.training


def activated(network: nn.Module) -> list[ActivatedConv2d]:
    """Return the convolutions that activate."""
    return [module for module in network.modules() if isinstance(module, ActivatedConv2d)]


@pytest.mark.parametrize(("name", "layers"), [("mobilenet_v2", 35), ("resnet18", 9), ("regnet_y_400mf", 49)])
@pytest.mark.parametrize(("precision", "rounding"), [(None, 1e-5), (torch.bfloat16, 2**-7)])
def test_activations_in_convolutions_change_nothing_but_the_order_of_sums(
    name: str, layers: int, precision: torch.dtype | None, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed at once they give what one after the other does."""
    if precision is not None and not computes_bf16(torch.device("cpu")):
        pytest.skip("needs a CPU with instructions for bfloat16")
    folded = fold_batch_norm(trained(name).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    folded.precision = precision
    images = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8)
    assert len(activated(folded)) == layers

    with torch.inference_mode():
        found = folded(images)
        monkeypatch.setattr("tasks.model.fold.FUSED_TYPES", ())
        expected = folded(images)

    assert float((found - expected).norm() / expected.norm()) < rounding


def test_fused_activations_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients on a CPU; with gradients one follows the other."""
    folded = fold_batch_norm(trained("resnet18"))
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    calls: list[int] = []
    for layer in activated(folded):
        monkeypatch.setattr(layer.activation, "forward", lambda value: (calls.append(1), value.relu())[1])

    with torch.no_grad():
        folded(images)
    alone = len(calls)
    folded(images)

    assert alone == 8  # Behind the sums of resnet's blocks, where no convolution is.
    assert len(calls) - alone == alone + len(activated(folded))


class Made(nn.Module):
    """A network with a batch norm and a head, and what the test is about between them."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.between, self.head = between, nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 2) of (B, 3, H, W)."""
        logits: torch.Tensor = self.head(self.between(self.norm(self.first(inputs))).mean((2, 3)))
        return logits


class TwoTake(nn.Module):
    """The outputs before the activation are needed, too."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.relu = nn.Conv2d(4, 4, 1), nn.ReLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (B, 4, H, W)."""
        outputs = self.convolution(inputs)
        activated: torch.Tensor = self.relu(input=outputs)
        return activated - outputs


def spoilt() -> nn.Sequential:
    """Return a convolution that gives NaN, and what would bound it to 0."""
    layers = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU6())
    nn.init.constant_(layers.get_parameter("0.bias"), float("nan"))
    return layers


TWICE = nn.Conv2d(4, 4, 1)


@pytest.mark.parametrize(
    ("between", "layers"),
    [
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU6(), nn.ReLU()), 1),
        (TwoTake(), 0),
        (nn.Sequential(TWICE, nn.ReLU(), TWICE, nn.ReLU()), 0),
        (nn.Sequential(nn.Conv2d(4, 4, 3, padding="same"), nn.ReLU()), 0),
        (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU()), 0),
        (spoilt(), 0),
    ],
    ids=["two activations", "two take it", "twice the same", "padding by name", "padded by pixels", "no number"],
)
def test_only_what_stays_the_same_is_activated(between: nn.Module, layers: int) -> None:
    """NaN stays NaN, and the network may be folded again."""
    torch.manual_seed(3)
    network = Made(between)
    classifier = Classifier(network, network.head, freeze_backbone=False)
    folded = fold_batch_norm(classifier)
    images = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)

    assert len(activated(folded)) == layers
    assert layers == 0 or fold_batch_norm(folded) is folded
    with torch.no_grad():
        assert torch.allclose(folded(images), classifier.eval()(images), atol=1e-5, equal_nan=True)
