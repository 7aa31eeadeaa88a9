"""Buckets of gradients: their contents, the moment at which they are sent, and their memory."""

from typing import Any

import pytest
import torch
from torch import nn

from tasks.collectives import buckets as gradient_buckets
from tasks.collectives.buckets import GradientBuckets


class Sent:
    """Records the buckets that are sent."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, memory: torch.Tensor, number: int) -> Any:
        """Halve the gradients in place, as an average with a rank of zeros does; return a handle."""
        assert memory.is_contiguous()
        self.numbers.append(number)
        memory /= 2
        return f"handle {number}"


@pytest.fixture
def network() -> nn.Sequential:
    """Return two convolutions in channels-last format, and a linear layer."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(2 * 4 * 4, 3))
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads lack memory_format


def test_gradients_are_averaged_in_the_format_of_the_weights(network: nn.Sequential) -> None:
    """After a backward pass each gradient is a part of a bucket, with the strides of its parameter."""
    images = torch.randn(2, 3, 8, 8)
    expected = torch.autograd.grad(network(images).square().sum(), list(network.parameters()))
    sent = Sent()
    buckets = GradientBuckets(network.parameters(), sent)

    network(images).square().sum().backward()
    buckets.complete()

    (memory, handle) = next(iter(buckets.sent()))
    assert (sent.numbers, handle) == ([0], "handle 0")
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, gradient / 2)


def test_bucket_is_sent_during_the_backward_pass(network: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers' gradients are sent first, before those of the first ones are computed."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 1)
    sent, computed = Sent(), []
    buckets = GradientBuckets(network.parameters(), sent)
    network[0].weight.register_hook(lambda _gradient: computed.append(list(sent.numbers)))

    network(torch.randn(1, 3, 8, 8)).sum().backward()

    assert len(computed) == 1
    assert set(computed[0]) >= {0, 1, 2, 3}
    assert sorted(sent.numbers) == [0, 1, 2, 3, 4, 5]
    buckets.complete()
    assert len(sent.numbers) == 6


def test_rank_without_images_sends_zeros_or_what_earlier_parts_gave(network: nn.Sequential) -> None:
    """Without a backward pass all buckets are sent, and gradients that were accumulated before count."""
    sent = Sent()
    buckets = GradientBuckets(network.parameters(), sent)
    first, *others = network.parameters()
    first.grad = torch.ones_like(first)

    buckets.complete()

    assert sent.numbers == [0]
    assert torch.equal(first.grad, torch.full_like(first, 0.5))
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in others)


def test_next_step_sends_its_own_gradients_and_a_released_model_none(network: nn.Sequential) -> None:
    """Gradients of the step before are not added, and hooks that are removed send nothing."""
    sent = Sent()
    buckets = GradientBuckets(network.parameters(), sent)
    found = []
    for _ in range(2):
        network.zero_grad()
        network(torch.ones(1, 3, 8, 8)).sum().backward()
        buckets.complete()
        assert len(list(buckets.sent())) == 1
        found.append([parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None])
    assert all(torch.equal(before, after) for before, after in zip(*found, strict=True))

    buckets.release()
    network(torch.ones(1, 3, 8, 8)).sum().backward()
    assert sent.numbers == [0, 0]


def test_buckets_have_one_data_type(network: nn.Sequential) -> None:
    """Parameters of another type, such as float64, have buckets of their own."""
    network[3].double()
    sent = Sent()
    buckets = GradientBuckets(network.parameters(), sent)
    buckets.complete()
    assert [memory.dtype for memory, _handle in buckets.sent()] == [torch.float64, torch.float32]
