"""Containers of a conv, a norm and a pool that learn: a norm in them sees each drive as often as it has frames."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import node
from torch import nn

import sj_tac

K = 4


def net(pool):
    torch.manual_seed(0)
    inside = [nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), *([pool] if pool is not None else [])]
    return nn.Sequential(layer.SeqToANNContainer(*inside), node("lif", v_threshold=0.3)).double().train()


def defined(net, steps):
    """The source, whose conv puts out the mean of each group, on all frames."""

    def share(module, args, output):
        frames = output.unflatten(0, (steps, -1))
        groups = [g.mean(0, keepdim=True).expand_as(g) for g in frames.split(K)]
        return torch.cat(groups).flatten(0, 1)

    made = copy.deepcopy(net)
    made[0][0].register_forward_hook(share)
    return made


def learnt(net, x):
    functional.reset_net(net)
    y = net(x)
    assert 0.05 < y.mean() < 0.6
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"y": y.detach()} | {n: p.grad for n, p in net.named_parameters()} | dict(net.named_buffers())


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("pool", [None, nn.AvgPool2d(2)], ids=["norm", "pool"])
@pytest.mark.parametrize("steps", [8, 9, 5])
def test_a_norm_in_a_container_weighs_drives_by_their_frames(steps, pool, fuse):
    generator = torch.Generator().manual_seed(1)
    louder = torch.linspace(0.2, 2, 9, dtype=torch.float64).view(9, 1, 1, 1, 1)
    x = torch.rand(9, 3, 2, 9, 8, generator=generator, dtype=torch.float64) * louder
    policy = {"default": {"mode": "preserve", "k": K, "weights": "uniform"}}
    source = net(pool)
    expected = learnt(defined(source, steps), x[:steps])
    found = learnt(sj_tac.convert(source, policy, example_input=x, fuse=fuse), x[:steps])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("fuse", [True, False])
def test_in_eval_mode_it_is_the_affine_map_that_it_was(fuse):
    x = torch.rand(9, 3, 2, 9, 8, dtype=torch.float64)
    source = net(None)
    learnt(source, x)
    functional.reset_net(source)
    made = sj_tac.convert(source.eval(), {"default": {"mode": "preserve", "k": K, "weights": "uniform"}}, fuse=fuse)
    wanted = defined(source, 9)
    for each in (made, wanted):
        functional.reset_net(each)
    with torch.no_grad():
        torch.testing.assert_close(made(x), wanted(x))
