"""Batch norm over the batches of all ranks, with ranks as threads."""

import copy

import pytest
import torch
from torch import nn

from tasks.collectives.reducer import Reducer
from tasks.model.sync_batch_norm import SyncBatchNorm
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer

SHARES = [[5, 1, 2], [0, 4, 3], [0, 0, 1], [0, 2, 0]]
"""Rows of three ranks in each of several batches."""


def network(dtype: torch.dtype) -> nn.Sequential:
    """Return layers whose batch norms are trained, frozen, without weights, and with an average as momentum."""
    torch.manual_seed(2)
    layers = nn.Sequential(
        nn.Conv2d(2, 3, 2),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.BatchNorm2d(3, affine=False, momentum=None),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.BatchNorm1d(4),
    ).to(dtype)
    with torch.no_grad():
        layers[1].weight.uniform_(0.5, 2)
        layers[6].bias.uniform_(-1, 1)
    layers[6].eval()
    return layers


def pass_shares(layers: nn.Sequential, reducer: ThreadReducer | Reducer, dtype: torch.dtype) -> torch.Tensor:
    """Pass a rank's rows of all batches forward and backward, or those of all ranks; return the gradient of the inputs.

    A rank without rows passes padding, as a training step does.
    """
    rows = torch.randn(sum(map(sum, SHARES)), 2, 3, 3, generator=torch.Generator().manual_seed(3)).to(dtype)
    gradients, begin = [], 0
    for share in SHARES:
        batch = rows[begin : begin + sum(share)]
        begin += sum(share)
        if reducer.num_ranks > 1:
            batch = batch.split(share)[reducer.rank]
        inputs = batch.clone().requires_grad_()
        padded = torch.cat([inputs, inputs[:1] if len(inputs) else inputs.new_ones(2, 2, 3, 3)])
        with SyncBatchNorm(reducer, len(inputs)):
            outputs = layers(padded)[: len(inputs)]
        # A loss that differs by row.
        (outputs.square() * batch.sum((1, 2, 3))[:, None]).sum().backward()
        gradients.append(inputs.grad)
    return torch.cat(gradients)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_ranks_with_unequal_and_empty_batches_equal_one_process(dtype: torch.dtype, tolerance: float) -> None:
    """Outputs, gradients and running statistics are those of torch's batch norm on the rows of all ranks."""
    alone = network(dtype)
    rows = torch.randn(sum(map(sum, SHARES)), 2, 3, 3, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected, begin = [], 0
    for share in SHARES:
        inputs = rows[begin : begin + sum(share)].clone().requires_grad_()
        begin += sum(share)
        # As in a training step: batch norm takes no single row.
        outputs = alone(torch.cat([inputs, inputs]) if len(inputs) == 1 else inputs)[: len(inputs)]
        (outputs.square() * inputs.detach().sum((1, 2, 3))[:, None]).sum().backward()
        expected.append(inputs.grad.split(share))
    copies = [copy.deepcopy(network(dtype)) for _ in SHARES[0]]

    found = ThreadRanks(3).run(lambda reducer: pass_shares(copies[reducer.rank], reducer, dtype))

    for rank, gradient in enumerate(found):
        of_rank = torch.cat([shares[rank] for shares in expected])
        torch.testing.assert_close(gradient, of_rank, rtol=tolerance, atol=tolerance)
        for name, value in alone.named_buffers():
            torch.testing.assert_close(copies[rank].get_buffer(name), value, rtol=tolerance, atol=tolerance)
            assert torch.equal(copies[rank].get_buffer(name), copies[0].get_buffer(name))
    for name, parameter in alone.named_parameters():
        summed = sum(each.get_parameter(name).grad for each in copies)
        torch.testing.assert_close(summed, parameter.grad, rtol=tolerance, atol=tolerance)


def test_layers_keep_their_types_and_are_unchanged_outside_of_the_context() -> None:
    """Folding and the model package recognise batch norms by their types."""
    layers = nn.Sequential(nn.BatchNorm2d(2))
    batch = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(1))

    with SyncBatchNorm(Reducer(), 4):
        synchronized = layers(batch)

    assert type(layers[0]) is nn.BatchNorm2d
    torch.testing.assert_close(synchronized, nn.BatchNorm2d(2)(batch))
    layers.eval()
    with SyncBatchNorm(Reducer(), 4):
        assert torch.equal(layers(batch), layers.eval()(batch))
