"""Converted nets that were edited since: what still works on them, and what says that it does not."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError


def block(inputs):
    return nn.Sequential(conv(inputs, 6), norm(6), node("lif", v_threshold=0.3))


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        block(2), block(6), block(6), layer.Flatten(step_mode="m"), layer.Linear(384, 5, step_mode="m")
    ).eval()


@pytest.fixture
def x():
    return frames(6, 3, 2, 8, 8)


class Adapted(nn.Module):
    """A low-rank path beside a conv."""

    def __init__(self, base):
        super().__init__()
        self.base, self.beside = base, conv(base.in_channels, base.out_channels, kernel_size=1, padding=0)

    def forward(self, x):
        return self.base(x) + 0.1 * self.beside(x)


def adapt(net):
    net[1][0] = Adapted(net[1][0])


def leave_out(net):
    net[1] = nn.Identity()


def replace(net):
    net[1][0] = conv(6, 6)


def fold(net):
    net[1][1] = nn.Identity()


def cut(net):
    del net[2:]


EDITS = [adapt, leave_out, fold, cut]


def call(net, x):
    functional.reset_net(net)
    with torch.no_grad():
        return net(x)


@pytest.mark.parametrize("edit", EDITS)
def test_set_k_match_and_schedules_say_what_was_replaced_and_change_nothing(edit, x):
    fast = sj_tac.convert(build(), k=2)
    edit(fast)
    before, verdicts = call(fast, x), [(v.layer, v.k) for v in sj_tac.report(fast).verdicts]
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
        assert torch.equal(call(fast, x), before)
        assert [(v.layer, v.k) for v in sj_tac.report(fast).verdicts] == verdicts


@pytest.mark.parametrize("edit", [*EDITS, replace])
def test_restore_gives_the_edited_net_which_converts_again(edit, x):
    net = build()
    fast = sj_tac.convert(net, k=2)
    torch.manual_seed(1)
    edit(net)
    torch.manual_seed(1)
    edit(fast)
    back = sj_tac.restore(fast)
    expected = call(net, x)
    assert torch.equal(call(back, x), expected)
    assert list(back.state_dict()) == list(net.state_dict())
    again = sj_tac.convert(back, k=1)
    torch.testing.assert_close(call(again, x), expected)
    assert torch.equal(call(sj_tac.convert(back, k=2), x), call(sj_tac.convert(net, k=2), x))


def test_another_conv_in_the_place_of_one_is_converted_by_set_k(x):
    net = build()
    fast = sj_tac.convert(net, k=2)
    torch.manual_seed(1)
    replace(net)
    torch.manual_seed(1)
    replace(fast)
    sj_tac.set_k(fast, 3)
    assert torch.equal(call(fast, x), call(sj_tac.convert(net, k=3), x))


def test_a_head_that_was_never_converted_may_be_another(x):
    fast = sj_tac.convert(build(), k=2)
    fast[4] = layer.Linear(384, 3, step_mode="m")
    sj_tac.set_k(fast, 3)
    assert [v.k for v in sj_tac.report(fast).converted] == [3, 3, 3]
    assert call(fast, x).shape == (6, 3, 3)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_replaced_neuron_is_let_go_and_the_new_one_reset(fuse, x):
    """The host's reset_net looks again at a net's modules where one of them is gone."""
    net = sj_tac.convert(build(), "preserve", 2, example_input=x, fuse=fuse)
    expected = net(x).detach()
    functional.reset_net(net)
    old = weakref.ref(net[1][2])
    net[1][2] = node("lif", v_threshold=0.3).eval()
    gc.collect()
    assert old() is None
    for _ in range(2):  # the conv in front knows the decay of the neuron that it was planned for
        torch.testing.assert_close(net(x).detach(), expected)
        functional.reset_net(net)
        assert net[1][2].v == 0.0


@pytest.mark.parametrize("kind", ["lif", "plif"])
def test_a_copy_of_a_converted_net_follows_its_own_neurons(kind, x):
    net = nn.Sequential(conv(2, 6), node(kind, v_threshold=0.2), conv(6, 6), node(kind, v_threshold=0.1)).eval()
    net = sj_tac.convert(net, "preserve", 2, example_input=x)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        for each in (net, copied):
            functional.reset_net(each)
        assert copied[0]._tac.node is copied[1]
        before = net(x).detach()
        assert torch.equal(copied(x), before)
        for module in (copied[1], copied[3]):
            if kind == "plif":
                module.w.data.fill_(2.0)
            else:
                module.tau = 8.0
        functional.reset_net(copied)
        functional.reset_net(net)
        assert not torch.equal(copied(x), before)
        assert torch.equal(net(x), before)
        functional.reset_net(net)
    alone = pickle.loads(pickle.dumps(net[0]))
    assert torch.equal(alone(x), net[0](x))


def test_a_call_that_is_watched_leaves_nothing_to_the_next(x):
    """Sums that were made by the trace say, as others do, that no frames were merged: the next call takes the short way."""
    net = sj_tac.convert(build(), "preserve", 2, example_input=x)
    for watched in (True, False):
        handle = net[0][2].register_full_backward_hook(lambda m, i, o: None) if watched else None
        functional.reset_net(net)
        net(x)
        if handle is not None:
            handle.remove()
    assert sj_tac.report(net)["1.0"].last_read == "sums"
