"""Depthwise convolutions in bfloat16: another way to the same gradients, and only where it is the faster one."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from tasks.model import depthwise
from tasks.model.depthwise import speed_up_depthwise
from tasks.model.fold import fold_batch_norm
from tasks.model.network import build_classifier

CHANNELS = 8
ROUNDING = 2**-8
"""Of bfloat16, whose mantissa has 7 bits and a hidden one."""


def convolution(*, channels_last: bool = True, **geometry: Any) -> nn.Conv2d:
    """Return a depthwise convolution with weights drawn from a seed."""
    torch.manual_seed(1)
    made = nn.Conv2d(CHANNELS, CHANNELS, groups=CHANNELS, **geometry)
    return made.to(memory_format=torch.channels_last) if channels_last else made  # type: ignore[call-overload]


def forward(network: nn.Module, inputs: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    """Return the outputs, as a classifier computes them in training."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        outputs: torch.Tensor = network(inputs)
    return outputs


def run(
    network: nn.Module, sides: tuple[int, int] = (14, 14), *, bf16: bool, channels_last: bool = True
) -> tuple[torch.Tensor, ...]:
    """Return outputs, and the gradients of the inputs and of each parameter, float32."""
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(3, CHANNELS, *sides, generator=draw)
    if channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    inputs.requires_grad_()
    outputs = forward(network, inputs, bf16=bf16)
    (outputs.float() * torch.randn(outputs.shape, generator=draw)).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [value.grad for value in (inputs, *network.parameters()) if value.grad is not None]
    return outputs.detach().float(), *gradients


def other_way(made: nn.Conv2d) -> nn.Module:
    """Return a copy that takes the other way."""
    network = nn.Sequential(copy.deepcopy(made))
    assert speed_up_depthwise(network) == 1
    return network


def takes_other_way(network: nn.Module, *, bf16: bool = True) -> bool:
    """Say whether the outputs' gradient is ours to compute."""
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
def test_gradients_are_those_of_float32_up_to_rounding(
    geometry: dict[str, Any], sides: tuple[int, int], channels_last: bool
) -> None:
    """Of inputs, weights and bias; where the stride leaves pixels over at the edge, too."""
    made = convolution(channels_last=channels_last, **geometry)
    exact = run(copy.deepcopy(made), sides, bf16=False, channels_last=channels_last)
    network = other_way(made)
    found = run(network, sides, bf16=True, channels_last=channels_last)

    assert takes_other_way(network)
    assert len(found) == len(exact) == (3 if made.bias is None else 4)
    for mine, true in zip(found, exact, strict=True):
        assert float((mine - true).norm() / true.norm()) < 2 * ROUNDING


@pytest.mark.parametrize("kernel", [3, 5])
def test_the_other_way_gives_the_usual_outputs_and_gradients(kernel: int) -> None:
    """Outputs to the last digit, gradients up to the order of their sums."""
    made = convolution(kernel_size=kernel, stride=2, padding=kernel // 2)
    usual, other = run(copy.deepcopy(made), bf16=True), run(other_way(made), bf16=True)

    assert torch.equal(usual[0], other[0])
    for theirs, mine in zip(usual[1:], other[1:], strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 2 * ROUNDING


def test_the_gradient_of_a_bias_counts_every_image() -> None:
    """A sum in bfloat16 stands still when its terms are below half a unit of its last place."""
    network = other_way(convolution(kernel_size=3, stride=2, padding=1, channels_last=False))
    forward(network, torch.ones(600, CHANNELS, 2, 2), bf16=True).float().sum().backward()  # type: ignore[no-untyped-call]

    assert network.get_parameter("0.bias").grad == pytest.approx(600, rel=2 * ROUNDING)


def test_what_is_not_in_bfloat16_with_gradients_is_computed_as_ever() -> None:
    """In float32 bit for bit."""
    made = convolution(kernel_size=3, stride=2, padding=1)
    network = other_way(made)

    assert takes_other_way(network)
    assert not takes_other_way(network, bf16=False)
    with torch.no_grad():
        assert not takes_other_way(network)
    usual, other = run(copy.deepcopy(made), bf16=False), run(network, bf16=False)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(usual, other, strict=True))


@pytest.mark.parametrize(
    ("learns", "computed"), [(True, {"inputs", "weight"}), (False, {"inputs"})], ids=["learning", "frozen"]
)
def test_of_frozen_weights_no_gradient_is_computed(
    learns: bool, computed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be thrown away."""
    network, asked = other_way(convolution(kernel_size=3, stride=2, padding=1)), set()

    def note(name: str) -> None:
        real = getattr(depthwise, f"_gradient_of_{name}")
        monkeypatch.setattr(depthwise, f"_gradient_of_{name}", lambda *given: (asked.add(name), real(*given))[1])

    note("inputs")
    note("weight")
    network.requires_grad_(learns)
    run(network, bf16=True)

    assert asked == computed


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (nn.Conv2d(8, 8, 3, 1, 1, groups=8), "a fast one"),
        (nn.Conv2d(8, 8, 3, 2, 1, groups=2), "not depthwise"),
        (nn.Conv2d(8, 16, 3, 2, 1, groups=8), "two outputs a channel"),
        (nn.Conv2d(1, 1, 3, 2, 1), "one channel"),
        (nn.Conv2d(8, 8, 5, 1, "same", groups=8), "padding by name"),
        (nn.Conv2d(8, 8, 3, 2, 1, groups=8, padding_mode="reflect"), "padded by other pixels"),
    ],
)
def test_other_convolutions_stay_as_they_are(made: nn.Conv2d, why: str) -> None:
    """What has fast gradients, or another shape."""
    assert speed_up_depthwise(nn.Sequential(made)) == 0, why


@pytest.mark.parametrize(
    ("model", "layers"),
    [("mobilenet_v2", 4), ("shufflenet_v2_x0_5", 6), ("efficientnet_b0", 11), ("convnext_tiny", 18), ("resnet18", 0)],
)
def test_models_of_torchvision_have_so_many(model: str, layers: int) -> None:
    """Counted in the network that is built."""
    classifier = build_classifier(model, "none", 3, freeze_backbone=False)

    assert sum("_conv_forward" in vars(module) for module in classifier.modules()) == layers


def test_a_copy_and_what_was_pickled_take_the_other_way_with_weights_of_their_own() -> None:
    """As one that was built does."""
    network = other_way(convolution(kernel_size=3, stride=2, padding=1))
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    for made in (copy.deepcopy(network), torch.load(file, weights_only=False)):
        assert takes_other_way(made)
        with torch.no_grad():
            made.get_parameter("0.weight").zero_()
            made.get_parameter("0.bias").zero_()
        assert not forward(made, torch.ones(1, CHANNELS, 14, 14), bf16=True).any()
    assert forward(network, torch.ones(1, CHANNELS, 14, 14), bf16=True).any()


def test_a_folded_copy_gives_the_same_logits() -> None:
    """It is taken apart by torch.fx, which has to know the layers."""
    classifier = build_classifier("mobilenet_v2", "none", 3, freeze_backbone=False).eval()
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)

    with torch.no_grad():
        assert torch.allclose(fold_batch_norm(classifier)(images), classifier(images), atol=1e-4)


def test_compiled_it_gives_the_same_gradients() -> None:
    """Traced forward and backward; the code is not made, which takes a C++ compiler and a minute."""
    network = other_way(convolution(kernel_size=5, stride=2, padding=2))
    plain = run(network, bf16=True)
    network.zero_grad()
    network.compile(backend="aot_eager", fullgraph=True)

    for mine, theirs in zip(run(network, bf16=True), plain, strict=True):
        assert torch.allclose(mine, theirs, rtol=2 * ROUNDING, atol=1e-3)
