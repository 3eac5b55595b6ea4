"""The definition's modules where no public call reaches: refused parts of a plan, weights that are no parameters."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import conv, csnn, frames, node
from torch import nn

from sj_tac.definition import convs, neurons


def several_decays():
    made = node("lif")
    made.tau = torch.full((4, 1, 1), 3.0)
    return made


OTHERS = {
    "folded frames without rules": (lambda: nn.Conv2d(2, 4, 3), "0", r"its Sharing needs Frames\(folded=True"),
    "no module": (lambda: layer.Conv2d(2, 4, 3, step_mode="m"), "9", "the net has no module '9'"),
    "several decays": (
        lambda: conv(2, 4),
        "0",
        r"'0' drives a neuron with several decays: its tau is a tensor of \[4, 1, 1\]",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_convolutions_that_cannot_share_are_refused_and_the_net_is_left_alone(case):
    make, name, message = OTHERS[case]
    net = nn.Sequential(make(), several_decays() if case == "several decays" else node("lif"), conv(4, 4), node("lif"))
    before = [type(m) for m in net.modules()]
    with pytest.raises(ValueError, match=message):
        convs.share(net, {"2": convs.Sharing(2, net[3]), name: convs.Sharing(2, net[1])})
    assert [type(m) for m in net.modules()] == before


def test_weights_that_are_no_parameters():
    """A parametrized w, learned weights as a buffer, and learned weights that are not there."""
    x = frames(6, 2, 2, 8, 8, dtype=torch.float64)

    def converted(kind, **sharing):
        net = copy.deepcopy(csnn(make=lambda: node(kind, v_threshold=0.3)).double())
        neurons.swap(net)
        convs.share(net, {"0": convs.Sharing(2, net[2], **sharing)})
        return net

    net = converted("plif")
    expected = net(x)
    nn.utils.parametrize.register_parametrization(net[2], "w", nn.Identity())
    functional.reset_net(net)
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)
    net = converted("lif", weights="learned")
    del net[0].tac_logits
    with pytest.raises(ValueError, match=r"weights='learned', and the convolution has no tac_logits \[k=2\]"):
        net(x)
    net[0].register_buffer("tac_logits", torch.zeros(2, dtype=torch.float64))
    functional.reset_net(net)
    torch.testing.assert_close(net(x), converted("lif", weights="uniform")(x), rtol=1e-12, atol=1e-12)
