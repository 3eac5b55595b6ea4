"""Converted nets that were edited since: what still works on them, and what says that it does not."""

import copy
import pickle

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import at_rest, conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError


def block(inputs):
    return nn.Sequential(conv(inputs, 6), norm(6), node("lif", v_threshold=0.3))


def build():
    torch.manual_seed(0)
    return (
        nn.Sequential(block(2), block(6), block(6), layer.Flatten(step_mode="m"), layer.Linear(384, 5, step_mode="m"))
        .eval()
        .double()
    )


@pytest.fixture
def x():
    return frames(6, 3, 2, 8, 8, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class Adapted(nn.Module):
    """A low-rank path beside a conv."""

    def __init__(self, base):
        super().__init__()
        self.base, self.beside = base, conv(base.in_channels, base.out_channels, kernel_size=1, padding=0)

    def forward(self, x):
        return self.base(x) + 0.1 * self.beside(x)


def adapt(net):
    net[1][0] = Adapted(net[1][0]).double()


def leave_out(net):
    net[1] = nn.Identity()


def replace(net):
    net[1][0] = conv(6, 6).double()


def fold(net):
    net[1][1] = nn.Identity()


def cut(net):
    del net[2:]


EDITS = [adapt, leave_out, fold, cut]


@pytest.mark.parametrize("edit", EDITS)
def test_set_k_match_and_schedules_say_what_was_replaced_and_change_nothing(edit, x):
    fast = sj_tac.convert(build(), k=2)
    edit(fast)
    before, verdicts = at_rest(fast, x), [(v.layer, v.k) for v in sj_tac.report(fast).verdicts]
    actions = [
        lambda: sj_tac.set_k(fast, 3),
        lambda: sj_tac.match(fast, [x], progress=False),
        lambda: sj_tac.KSchedule(fast, {0: 3}).step(0),
    ]
    for action in actions:
        with pytest.raises(
            ConversionError, match=r"module '[12]\.?\d?' was converted, and is (a \w+ now|gone); the model was left"
        ):
            action()
        close(at_rest(fast, x), before)
        assert [(v.layer, v.k) for v in sj_tac.report(fast).verdicts] == verdicts


@pytest.mark.parametrize("edit", [*EDITS, replace])
def test_restore_gives_the_edited_net_which_converts_again(edit, x):
    net = build()
    fast = sj_tac.convert(net, k=2)
    torch.manual_seed(1)
    edit(net)
    torch.manual_seed(1)
    edit(fast)
    if edit is replace:  # another conv in the place of one is converted by set_k
        sj_tac.set_k(fast, 3)
        close(at_rest(fast, x), at_rest(sj_tac.convert(net, k=3), x))
    back = sj_tac.restore(fast)
    expected = at_rest(net, x)
    close(at_rest(back, x), expected)
    assert list(back.state_dict()) == list(net.state_dict())
    again = sj_tac.convert(back, k=1)
    close(at_rest(again, x), expected)
    close(at_rest(sj_tac.convert(back, k=2), x), at_rest(sj_tac.convert(net, k=2), x))


@pytest.mark.captured
@pytest.mark.parametrize("fuse", [True, False])
def test_a_replaced_neuron_is_reset(fuse, x):
    """The host's reset_net looks again at a net's modules where one of them is gone."""
    net = sj_tac.convert(build(), "preserve", 2, example_input=x, fuse=fuse)
    expected = at_rest(net, x)
    functional.reset_net(net)
    net[1][2] = node("lif", v_threshold=0.3).eval()
    for _ in range(2):  # the conv in front knows the decay of the neuron that it was planned for
        close(net(x).detach(), expected)
        functional.reset_net(net)
        assert net[1][2].v == 0.0


@pytest.mark.parametrize("kind", ["lif", "plif"])
def test_a_copy_of_a_converted_net_follows_its_own_neurons(kind, x):
    net = nn.Sequential(conv(2, 6), node(kind, v_threshold=0.2), conv(6, 6), node(kind, v_threshold=0.1)).eval().double()
    net = sj_tac.convert(net, "preserve", 2, example_input=x)
    before = at_rest(net, x)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        close(at_rest(copied, x), before)
        for module in (copied[1], copied[3]):
            if kind == "plif":
                module.w.data.fill_(2.0)
            else:
                module.tau = 8.0
        assert not torch.equal(at_rest(copied, x), before)
        close(at_rest(net, x), before)
    alone = pickle.loads(pickle.dumps(net[0]))
    close(alone(x)[:], net[0](x)[:])
