"""Folding of batch norms and activations: the logits of the folded network equal those of the original."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tasks.model.training_network import Classifier, build_classifier
from tasks.model_package.serving import PackedConv2d, computes_bf16, fold_batch_norm
from tasks.train.features import ends_in_head


def trained(name: str) -> Classifier:
    """Return a classifier with random batch norm statistics and parameters, in training mode."""
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
    """Logits are equal within a thousandth of their standard deviation, and the given network is unchanged."""
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
    if name != "densenet121":  # It normalises before it convolves: most of its norms follow no convolution.
        assert norms[1] == 0
    assert ends_in_head(folded, images)


@pytest.mark.parametrize("name", ["squeezenet1_1", "vit_b_32"])
def test_network_without_batch_norms_is_returned_unchanged(name: str) -> None:
    """A network without batch norms is returned itself, in eval mode."""
    classifier = build_classifier(name, "none", num_classes=3, freeze_backbone=False)
    assert fold_batch_norm(classifier) is classifier
    assert not classifier.training


def test_other_threads_compute_during_traces() -> None:
    """A service loads a version in one thread while others predict: fx replaces the calls of all modules meanwhile."""
    folded = fold_batch_norm(trained("resnet18"))
    images = torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8)
    others = [trained("mobilenet_v2") for _number in range(2)]
    with torch.inference_mode():
        expected = folded(images)

    def compute() -> int:
        num = 0
        with torch.inference_mode():
            while num == 0 or not all(fold.done() for fold in folds):
                assert torch.equal(folded(images), expected)
                num += 1
        return num

    with ThreadPoolExecutor() as threads:
        folds = [threads.submit(lambda one: [fold_batch_norm(one) for _number in range(3)], one) for one in others]
        assert threads.submit(compute).result() > 0
    for fold in folds:
        for network in fold.result():
            assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
            with torch.inference_mode():
                assert network(images).shape == (1, 3)


def packed(network: nn.Module) -> list[PackedConv2d]:
    """Return the convolutions with packed weights."""
    return [module for module in network.modules() if isinstance(module, PackedConv2d)]


def activated(network: nn.Module) -> list[PackedConv2d]:
    """Return the convolutions with fused activations."""
    return [layer for layer in packed(network) if layer.activation is not None]


@pytest.mark.parametrize(
    ("name", "layers", "convolutions"), [("mobilenet_v2", 35, 52), ("resnet18", 9, 20), ("regnet_y_400mf", 49, 85)]
)
@pytest.mark.parametrize(("precision", "rounding"), [(None, 1e-5), (torch.bfloat16, 2**-7)])
def test_packed_convolutions_change_logits_by_rounding_only(
    name: str,
    layers: int,
    convolutions: int,
    precision: torch.dtype | None,
    rounding: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed convolutions with their activations give the logits of separate layers, up to the order of sums."""
    if precision is not None and not computes_bf16(torch.device("cpu")):
        pytest.skip("needs a CPU with instructions for bfloat16")
    folded = fold_batch_norm(trained(name).to(memory_format=torch.channels_last))  # type: ignore[call-overload]  # torch's overloads lack memory_format
    folded.precision = precision
    images = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8)
    assert len(activated(folded)) == layers
    assert len(packed(folded)) == convolutions

    with torch.inference_mode():
        found = folded(images)
        assert torch.equal(copy.deepcopy(folded)(images), found)
        monkeypatch.setattr("tasks.model_package.serving.PACKED_TYPES", ())
        expected = folded(images)

    assert float((found - expected).norm() / expected.norm()) < rounding


def test_fused_activations_are_not_computed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without gradients fused activations are not called; with gradients they are."""
    folded = fold_batch_norm(trained("resnet18"))
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    calls: list[int] = []
    for layer in activated(folded):
        assert layer.activation is not None
        monkeypatch.setattr(layer.activation, "forward", lambda value: (calls.append(1), value.relu())[1])

    with torch.no_grad():
        folded(images)
    not_fused = len(calls)
    folded(images)

    assert not_fused == 8  # After the sums of resnet's blocks, which follow no convolution directly.
    assert len(calls) - not_fused == not_fused + len(activated(folded))


class SmallNetwork(nn.Module):
    """A convolution with batch norm, the module under test, and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.body, self.head = body, nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 2) of inputs (B, 3, H, W)."""
        logits: torch.Tensor = self.head(self.body(self.norm(self.first(inputs))).mean((2, 3)))
        return logits


class TwoConsumers(nn.Module):
    """A convolution whose outputs are also used without the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.relu = nn.Conv2d(4, 4, 1), nn.ReLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the difference of the outputs with and without activation, (B, 4, H, W)."""
        outputs = self.convolution(inputs)
        activated: torch.Tensor = self.relu(input=outputs)
        return activated - outputs


def nan_convolution() -> nn.Sequential:
    """Return a convolution whose outputs are NaN, and an activation that would clamp NaN to 0 if fused."""
    layers = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU6())
    nn.init.constant_(layers.get_parameter("0.bias"), float("nan"))
    return layers


SHARED = nn.Conv2d(4, 4, 1)


@pytest.mark.parametrize(
    ("body", "layers", "convolutions"),
    [
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU6(), nn.ReLU()), 1, 1),
        (TwoConsumers(), 0, 1),
        (nn.Sequential(SHARED, nn.ReLU(), SHARED, nn.ReLU()), 0, 0),
        (nn.Sequential(nn.Conv2d(4, 4, 3, padding="same"), nn.ReLU()), 0, 0),
        (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU()), 0, 0),
        (nan_convolution(), 0, 0),
    ],
    ids=["two activations", "two consumers", "shared layer", "named padding", "reflection padding", "NaN weights"],
)
def test_activations_are_fused_only_where_logits_stay_equal(body: nn.Module, layers: int, convolutions: int) -> None:
    """Fusion keeps the logits, including NaN, and a folded network is not folded again."""
    torch.manual_seed(3)
    network = SmallNetwork(body)
    classifier = Classifier(network, network.head, freeze_backbone=False)
    folded = fold_batch_norm(classifier)
    images = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)

    assert len(activated(folded)) == layers
    assert len(packed(folded)) == 1 + convolutions, "with the first convolution"
    assert fold_batch_norm(folded) is folded
    with torch.no_grad():
        assert torch.allclose(folded(images), classifier.eval()(images), atol=1e-5, equal_nan=True)
