"""Depthwise convolutions in bfloat16: another way to the same gradients, and only where it is the faster one."""

import copy

import pytest
import torch
from torch import nn

from tasks.train.depthwise import speed_up_depthwise
from tasks.train.fold import fold_batch_norm
from tasks.train.model import build_classifier

CHANNELS = 8
ROUNDING = 2**-8
"""Of bfloat16, whose mantissa has 7 bits and a hidden one."""

Gradients = tuple[torch.Tensor, ...]


def convolution(
    kernel: int, stride: int = 1, dilation: int = 1, *, bias: bool = False, channels_last: bool = True
) -> nn.Conv2d:
    """Return a depthwise convolution with weights drawn from a seed."""
    torch.manual_seed(1)
    made = nn.Conv2d(
        CHANNELS, CHANNELS, kernel, stride, kernel // 2 * dilation, dilation, groups=CHANNELS, bias=bias
    )  # fmt: skip
    return made.to(memory_format=torch.channels_last) if channels_last else made


def run(network: nn.Module, sides: tuple[int, int], *, bf16: bool) -> Gradients:
    """Return outputs, and the gradients of the inputs and of each parameter, float32."""
    draw = torch.Generator().manual_seed(2)
    memory = (
        torch.channels_last if next(network.parameters()).is_contiguous(memory_format=torch.channels_last) else None
    )
    inputs = torch.randn(3, CHANNELS, *sides, generator=draw)
    inputs = (inputs if memory is None else inputs.to(memory_format=memory)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        outputs = network(inputs)
    (outputs.float() * torch.randn(outputs.shape, generator=draw)).sum().backward()
    assert inputs.grad is not None
    return outputs.detach().float(), inputs.grad, *(p.grad for p in network.parameters() if p.grad is not None)


def other_way(made: nn.Conv2d) -> nn.Module:
    """Return a copy that takes the other way."""
    network = nn.Sequential(copy.deepcopy(made))
    assert speed_up_depthwise(network) == 1
    return network


@pytest.mark.parametrize("sides", [(14, 14), (13, 16)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 2, 1), (3, 2, 2), (5, 2, 1), (5, 1, 1), (7, 3, 1)])
def test_gradients_are_those_of_float32_up_to_rounding(kernel, stride, dilation, bias, sides):
    """Of inputs, weights and bias; where the stride leaves pixels over at the edge, too."""
    made = convolution(kernel, stride, dilation, bias=bias)

    exact = run(copy.deepcopy(made), sides, bf16=False)
    found = run(other_way(made), sides, bf16=True)

    assert len(found) == len(exact) == 3 + bias
    for mine, true in zip(found, exact, strict=True):
        assert float((mine - true).norm() / true.norm()) < 2 * ROUNDING


def test_the_other_way_gives_the_usual_outputs_and_gradients():
    """Outputs to the last digit, gradients up to the order of their sums."""
    made = convolution(3, 2)
    usual, other = run(copy.deepcopy(made), (14, 14), bf16=True), run(other_way(made), (14, 14), bf16=True)

    assert torch.equal(usual[0], other[0])
    assert torch.allclose(usual[1], other[1], rtol=2 * ROUNDING, atol=1e-6)


@pytest.mark.parametrize("channels_last", [False, True])
def test_in_float32_nothing_changes(channels_last):
    """Bit for bit."""
    made = convolution(3, 2, bias=True, channels_last=channels_last)
    usual, other = (run(one, (14, 14), bf16=False) for one in (copy.deepcopy(made), other_way(made)))

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(usual, other, strict=True))


def test_frozen_weights_and_inputs_get_no_gradient():
    """Of what is not asked for nothing is computed."""
    network = other_way(convolution(3, 2))
    network.requires_grad_(False)
    outputs, of_inputs = run(network, (14, 14), bf16=True)
    assert of_inputs.abs().sum() > 0
    network.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.ones(3, CHANNELS, 14, 14)).float().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert outputs.shape == (3, CHANNELS, 7, 7)


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
def test_other_convolutions_stay_as_they_are(made, why):
    """What has fast gradients, or another shape."""
    assert speed_up_depthwise(nn.Sequential(made)) == 0, why


@pytest.mark.parametrize(
    ("model", "layers"),
    [("mobilenet_v2", 4), ("shufflenet_v2_x0_5", 6), ("efficientnet_b0", 11), ("convnext_tiny", 18), ("resnet18", 0)],
)
def test_models_of_torchvision_have_so_many(model, layers):
    """Counted in the network that is built; a folded copy of it is for inference."""
    classifier = build_classifier(model, "none", 3, freeze_backbone=False)

    assert sum("_conv_forward" in vars(module) for module in classifier.modules()) == layers


def test_a_folded_copy_gives_the_same_logits():
    """It is taken apart by torch.fx, which has to know the layers."""
    classifier = build_classifier("mobilenet_v2", "none", 3, freeze_backbone=False).eval()
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)

    with torch.no_grad():
        assert torch.allclose(fold_batch_norm(classifier)(images), classifier(images), atol=1e-4)
