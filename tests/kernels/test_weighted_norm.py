"""BatchNorm of drives that count several times each, against torch's own on the drives repeated."""

import copy

import pairs
import pytest
import torch
from definition import define, planned_neurons, settings_of
from support import csnn, frames
from torch import nn

import sj_tac
from sj_tac.kernels import reference
from sj_tac.kernels.weighted_norm import shared_batch_norm
from sj_tac.kernels.weights import group_lengths

K = 4


def repeated(norm, x, steps):
    frames = reference.repeat(x, group_lengths(steps, K))
    return norm(frames.flatten(0, 1)).view_as(frames)[::K]


def shared(norm, x, steps):
    running, affine = (norm.running_mean, norm.running_var), (norm.weight, norm.bias)
    return shared_batch_norm(x.flatten(0, 1), running, affine, norm.momentum, norm.eps, K, steps).view_as(x)


@pairs.parametrize(shape=[(3, 2, 4, 5), (3, 2, 4, 5, 6), (1, 2, 4, 3, 3)], affine=[True, False], ragged=[True, False])
def test_values_statistics_and_gradients_are_those_of_repeated_drives(shape, affine, ragged):
    steps = K * shape[0] - (3 if ragged else 0)
    kind = {4: nn.BatchNorm1d, 5: nn.BatchNorm2d}[len(shape)]
    ours = kind(4, affine=affine, momentum=0.3, dtype=torch.float64)
    if affine:
        nn.init.uniform_(ours.weight, 0.5, 2)
        nn.init.uniform_(ours.bias, -1, 1)
    theirs = copy.deepcopy(ours)
    for seed in range(2):
        data = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 3
        towards = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        inputs, outputs = [], []
        for norm, run in ((ours, shared), (theirs, repeated)):
            x = data.clone().requires_grad_()
            norm.zero_grad()
            y = run(norm, x, steps)
            (y * towards).sum().backward()
            inputs.append(x)
            outputs.append(y)
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        for name, buffer in theirs.state_dict().items():
            if name == "num_batches_tracked":  # who calls counts
                continue
            torch.testing.assert_close(ours.state_dict()[name], buffer)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_a_net_with_a_ragged_tail_learns_as_its_definition_with_repeated_frames(policy):
    """T = 6 in groups of 4: the net's gradients and running statistics, in training mode."""
    net, x = csnn().double().train(), frames(6, 2, 2, 8, 8).double()
    fast = sj_tac.convert(net, policy, 4, backend="reference")
    settings = settings_of(net, sj_tac.report(fast))
    defined = define(net, settings, planned_neurons(settings, sj_tac.report(fast)))
    for some in (fast, defined):
        torch.manual_seed(0)
        some(x).mean(0).square().sum().backward()
    gradients = [p.grad for p in fast.parameters()]
    torch.testing.assert_close(gradients, [p.grad for p in defined.parameters()])
    torch.testing.assert_close(dict(fast.named_buffers()), dict(defined.named_buffers()))
    assert sum(g.abs().sum() for g in gradients) > 0
