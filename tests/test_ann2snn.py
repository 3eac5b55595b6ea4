"""Nets that SpikingJelly's converter made of ANNs: what it puts between a convolution and its neuron scales drives."""

import pytest
import torch
from spikingjelly.activation_based import functional
from support import only_v2
from torch import nn

import sj_tac

pytestmark = [only_v2, pytest.mark.filterwarnings("ignore")]


def spiking(scale_by_channel):
    from spikingjelly.activation_based import ann2snn

    torch.manual_seed(0)
    ann = nn.Sequential(
        *[nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2)],
        *[nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10), nn.ReLU()],
    ).eval()
    recipe = ann2snn.RateCodingRecipe([(torch.rand(4, 2, 8, 8), torch.zeros(4))], channel_wise=scale_by_channel)
    net = ann2snn.Converter(recipe).convert(ann).double().eval()
    functional.set_step_mode(net, "m")
    return net


@pytest.mark.parametrize("scale_by_channel", [False, True])
def test_it_converts(scale_by_channel):
    net, x = spiking(scale_by_channel), torch.rand(5, 3, 2, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = net(x)
        assert expected.any()
        functional.reset_net(net)
        one = sj_tac.convert(net, k=1, example_input=x)(x)
        fused, unfused = (sj_tac.convert(net, k=2, example_input=x, fuse=fuse) for fuse in (True, False))
        assert len(sj_tac.report(fused).converted) == 2
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(fused(x), unfused(x), rtol=0, atol=1e-9)
