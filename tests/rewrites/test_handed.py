"""What is said of convolutions of torch's that are handed no folded frames."""

import torch
from spikingjelly.activation_based import layer
from support import frames, node
from torch import nn

import sj_tac


class Looping(nn.Conv2d):
    """Runs frames [T, N, ...] one after the other, and writes them into a buffer."""

    def forward(self, x):
        y = x.new_zeros(*x.shape[:2], self.out_channels, *x.shape[3:])
        for t in range(len(x)):
            y[t] = nn.functional.conv2d(x[t], self.weight, self.bias, padding=1)
        return y


class LoopingLayer(layer.Conv2d):
    forward = Looping.forward


def test_a_forward_of_its_own_for_unfolded_frames_is_told_which_class_takes_them():
    """Where N is the number of channels, too, by which frames [T, N, ...] passed for images."""
    x = frames(6, 2, 2, 8, 8)
    (verdict,) = sj_tac.plan(nn.Sequential(Looping(2, 4, 3), node("lif")).eval(), k=2, example_input=x).verdicts
    assert verdict.reason == "UNSUPPORTED_CONV"
    assert "unfolded frames [T, N, ...], which torch's nn.Conv2d does not take" in verdict.detail
    assert "derive its class from SpikingJelly's layer.Conv2d" in verdict.detail
    net = nn.Sequential(LoopingLayer(2, 4, 3, step_mode="m"), node("lif")).eval()
    assert len(sj_tac.plan(net, k=2, example_input=x).converted) == 1


def test_the_shape_that_is_told_is_what_the_conv_is_handed():
    class OverTime(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = nn.Conv1d(5, 7, 3, padding=1), node("lif")

        def forward(self, x):
            return self.lif(self.conv(x).permute(2, 0, 1))

    (verdict,) = sj_tac.plan(OverTime().eval(), k=2, example_input=torch.rand(3, 5, 6)).verdicts
    assert "on [3, 5, 6] and no folded frames" in verdict.detail
