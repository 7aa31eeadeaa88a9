"""Depthwise convolutions in bfloat16: the fast gradients equal torch's, and are used only where they are faster."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from tasks.model import depthwise
from tasks.model.depthwise import speed_up_depthwise
from tasks.model.training_network import build_classifier
from tasks.model_package.serving import fold_batch_norm

CHANNELS = 8
ROUNDING = 2**-8
"""Relative rounding error of bfloat16, whose mantissa has 7 explicit bits."""


def convolution(*, channels_last: bool = True, **geometry: Any) -> nn.Conv2d:
    """Return a depthwise convolution with seeded random weights."""
    torch.manual_seed(1)
    layer = nn.Conv2d(CHANNELS, CHANNELS, groups=CHANNELS, **geometry)
    return layer.to(memory_format=torch.channels_last) if channels_last else layer  # type: ignore[call-overload]  # torch's overloads lack memory_format


def forward(network: nn.Module, inputs: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    """Return the outputs, computed as in a training step."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        outputs: torch.Tensor = network(inputs)
    return outputs


def run(
    network: nn.Module, sides: tuple[int, int] = (14, 14), *, bf16: bool, channels_last: bool = True
) -> tuple[torch.Tensor, ...]:
    """Return the outputs and the gradients of the inputs and of each parameter."""
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(3, CHANNELS, *sides, generator=draw)
    if channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    inputs.requires_grad_()
    outputs = forward(network, inputs, bf16=bf16)
    (outputs.float() * torch.randn(outputs.shape, generator=draw)).sum().backward()  # type: ignore[no-untyped-call]  # torch does not type backward
    gradients = [value.grad for value in (inputs, *network.parameters()) if value.grad is not None]
    return outputs.detach().float(), *gradients


def sped_up(layer: nn.Conv2d) -> nn.Module:
    """Return a network of a copy of the layer, with the fast gradients."""
    network = nn.Sequential(copy.deepcopy(layer))
    assert speed_up_depthwise(network) == 1
    return network


def has_fast_gradient(network: nn.Module, *, bf16: bool = True) -> bool:
    """Return whether the fast gradients are used."""
    outputs = forward(network, torch.ones(1, CHANNELS, 14, 14, requires_grad=True), bf16=bf16)
    return outputs.grad_fn is not None and "Depthwise" in outputs.grad_fn.name()


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("sides", [(14, 14), (13, 16)])
@pytest.mark.parametrize(
    "geometry",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2, "bias": False},
        {"kernel_size": 5, "stride": 2, "padding": 2, "bias": False},
        {"kernel_size": 5, "stride": 1, "padding": 2},
        {"kernel_size": 7, "stride": 3, "padding": 3, "bias": False},
        {"kernel_size": (3, 5), "stride": (1, 2), "padding": (0, 2)},
        {"kernel_size": 1, "stride": 2},
    ],
    ids=str,
)
def test_gradients_equal_those_of_float32_up_to_rounding(
    geometry: dict[str, Any], sides: tuple[int, int], channels_last: bool
) -> None:
    """The gradients of inputs, weights and bias are right up to rounding, even where the stride skips edge pixels."""
    layer = convolution(channels_last=channels_last, **geometry)
    exact = run(copy.deepcopy(layer), sides, bf16=False, channels_last=channels_last)
    network = sped_up(layer)
    fast = run(network, sides, bf16=True, channels_last=channels_last)

    assert has_fast_gradient(network)
    assert len(fast) == len(exact) == (3 if layer.bias is None else 4)
    for found, expected in zip(fast, exact, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 2 * ROUNDING


@pytest.mark.parametrize("kernel", [3, 5])
def test_outputs_and_gradients_equal_those_of_torch(kernel: int) -> None:
    """Outputs equal torch's exactly, gradients up to the order of their sums."""
    layer = convolution(kernel_size=kernel, stride=2, padding=kernel // 2)
    default, fast = run(copy.deepcopy(layer), bf16=True), run(sped_up(layer), bf16=True)

    assert torch.equal(default[0], fast[0])
    for expected, found in zip(default[1:], fast[1:], strict=True):
        assert float((found - expected).norm() / expected.norm()) < 2 * ROUNDING


def test_bias_gradient_includes_every_image() -> None:
    """The bias gradient is summed in float32: a bfloat16 sum stops growing when terms are below its resolution."""
    network = sped_up(convolution(kernel_size=3, stride=2, padding=1, channels_last=False))
    forward(network, torch.ones(600, CHANNELS, 2, 2), bf16=True).float().sum().backward()  # type: ignore[no-untyped-call]  # torch does not type backward

    assert network.get_parameter("0.bias").grad == pytest.approx(600, rel=2 * ROUNDING)


def test_fast_gradients_are_used_in_bfloat16_training_only() -> None:
    """In float32 or without gradients the fast gradients are not used, and float32 results are bitwise equal."""
    layer = convolution(kernel_size=3, stride=2, padding=1)
    network = sped_up(layer)

    assert has_fast_gradient(network)
    assert not has_fast_gradient(network, bf16=False)
    with torch.no_grad():
        assert not has_fast_gradient(network)
    default, fast = run(copy.deepcopy(layer), bf16=False), run(network, bf16=False)
    assert all(torch.equal(expected, found) for expected, found in zip(default, fast, strict=True))


@pytest.mark.parametrize(
    ("trainable", "computed"), [(True, {"inputs", "weight"}), (False, {"inputs"})], ids=["trainable", "frozen"]
)
def test_gradient_of_frozen_weights_is_not_computed(
    trainable: bool, computed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the weights is computed only if they are trainable."""
    network, calls = sped_up(convolution(kernel_size=3, stride=2, padding=1)), set()

    def record(name: str) -> None:
        real = getattr(depthwise, f"_gradient_of_{name}")
        monkeypatch.setattr(depthwise, f"_gradient_of_{name}", lambda *args: (calls.add(name), real(*args))[1])

    record("inputs")
    record("weight")
    network.requires_grad_(trainable)
    run(network, bf16=True)

    assert calls == computed


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(8, 8, 3, 1, 1, groups=8), "has fast gradients"),
        (nn.Conv2d(8, 8, 3, 2, 1, groups=2), "not depthwise"),
        (nn.Conv2d(8, 16, 3, 2, 1, groups=8), "two outputs per channel"),
        (nn.Conv2d(1, 1, 3, 2, 1), "one channel"),
        (nn.Conv2d(8, 8, 5, 1, "same", groups=8), "named padding"),
        (nn.Conv2d(8, 8, 3, 2, 1, groups=8, padding_mode="reflect"), "reflection padding"),
    ],
)
def test_other_convolutions_are_unchanged(layer: nn.Conv2d, reason: str) -> None:
    """Convolutions that have fast gradients or are not depthwise are not replaced."""
    assert speed_up_depthwise(nn.Sequential(layer)) == 0, reason


@pytest.mark.parametrize(
    ("model", "layers"),
    [("mobilenet_v2", 4), ("shufflenet_v2_x0_5", 6), ("efficientnet_b0", 11), ("convnext_tiny", 18), ("resnet18", 0)],
)
def test_number_of_replaced_layers_in_torchvision_models(model: str, layers: int) -> None:
    """A built classifier has the expected number of replaced layers."""
    classifier = build_classifier(model, "none", 3, freeze_backbone=False)

    assert sum("_conv_forward" in vars(module) for module in classifier.modules()) == layers


def test_copied_and_unpickled_networks_have_fast_gradients_and_own_weights() -> None:
    """A copied or unpickled network uses the fast gradients with its own weights."""
    network = sped_up(convolution(kernel_size=3, stride=2, padding=1))
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    for copied in (copy.deepcopy(network), torch.load(file, weights_only=False)):
        assert has_fast_gradient(copied)
        with torch.no_grad():
            copied.get_parameter("0.weight").zero_()
            copied.get_parameter("0.bias").zero_()
        assert not forward(copied, torch.ones(1, CHANNELS, 14, 14), bf16=True).any()
    assert forward(network, torch.ones(1, CHANNELS, 14, 14), bf16=True).any()


def test_folded_network_gives_the_same_logits() -> None:
    """A network with replaced layers can be folded by torch.fx, which identifies layers by their class."""
    classifier = build_classifier("mobilenet_v2", "none", 3, freeze_backbone=False).eval()
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)

    with torch.no_grad():
        assert torch.allclose(fold_batch_norm(classifier)(images), classifier(images), atol=1e-4)


def test_compiled_network_gives_the_same_gradients() -> None:
    """A network that is traced forward and backward gives the same gradients (no code generation, which is slow)."""
    network = sped_up(convolution(kernel_size=5, stride=2, padding=2))
    eager = run(network, bf16=True)
    network.zero_grad()
    network.compile(backend="aot_eager", fullgraph=True)

    for found, expected in zip(run(network, bf16=True), eager, strict=True):
        assert torch.allclose(found, expected, rtol=2 * ROUNDING, atol=1e-3)
