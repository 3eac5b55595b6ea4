"""BatchNorm of drives that count several times each, against torch's own on the drives repeated."""

import copy

import pytest
import torch
from support import csnn, frames
from torch import nn

import sj_tac
from sj_tac.kernels import reference
from sj_tac.kernels.weighted_norm import weighted_batch_norm


def repeated(norm, x, lengths):
    steps = reference.repeat(x, lengths)
    return reference.first(norm(steps.flatten(0, 1)).view_as(steps), lengths)


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 2, 4, 5), (3, 2, 4, 5, 6), (1, 2, 4, 3, 3)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_values_statistics_and_gradients_are_those_of_repeated_drives(shape, affine, momentum):
    lengths = [4] * (shape[0] - 1) + [1 if shape[0] > 1 else 4]
    kind = {3: nn.BatchNorm1d, 4: nn.BatchNorm1d, 5: nn.BatchNorm2d}[len(shape)]
    ours = kind(4, affine=affine, momentum=momentum, dtype=torch.float64)
    if affine:
        nn.init.uniform_(ours.weight, 0.5, 2)
        nn.init.uniform_(ours.bias, -1, 1)
    theirs = copy.deepcopy(ours)
    for seed in range(2):
        data = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 3
        towards = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        inputs, outputs = [], []
        for norm, run in ((ours, weighted_batch_norm), (theirs, repeated)):
            x = data.clone().requires_grad_()
            norm.zero_grad()
            y = run(norm, x, lengths)
            (y * towards).sum().backward()
            inputs.append(x)
            outputs.append(y)
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        for name, buffer in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], buffer)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_finite_differences():
    norm = nn.BatchNorm2d(3, dtype=torch.float64)
    weight, bias = torch.rand(3, dtype=torch.float64) + 0.5, torch.rand(3, dtype=torch.float64)

    def run(x, weight, bias):
        made = copy.deepcopy(norm)
        del made.weight, made.bias
        made.weight, made.bias = weight, bias
        return weighted_batch_norm(made, x, [3, 3, 1])

    x = torch.randn(3, 2, 3, 2, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(run, [v.requires_grad_() for v in (x, weight, bias)])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_a_net_with_a_ragged_tail_learns_as_unfused_with_repeated_frames(policy, memory_format, monkeypatch):
    """T = 6 in groups of 4: the net's gradients and running statistics are those of the definition."""
    net = csnn().double().to(memory_format=memory_format).train()
    x = frames(6, 2, 2, 8, 8).double()
    found = []
    for repeat in (False, True):
        if repeat:
            monkeypatch.setattr("sj_tac.runtime.layers.NormModule._is_plain_norm", False)
        fast = sj_tac.convert(net, policy, 4)
        torch.manual_seed(0)
        fast(x).mean(0).square().sum().backward()
        found.append((fast, [p.grad for p in fast.parameters()]))
    (ours, grads), (theirs, expected) = found
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert sum(g.abs().sum() for g in grads) > 0
