"""Hooks of every kind see and change frames, as in the definition; values that are kept say what they said."""

import pairs
import pytest
import torch
from comparing import Way, agrees, nothing
from forwards import build

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")
MODES = {"mode": ["preserve", "collapse"], "k": [2, 3]}
GRADS = (Way(), Way(train=True))


def reading(net):
    for module in (net.b, net.b[0], net.c, net.d[3]):
        module.register_forward_hook(lambda m, a, o: m.__dict__.__setitem__("seen", a[0].sum() + o.sum()))


def seen(net, x):
    return (net(x), *(m.seen for m in (net.b, net.b[0], net.c, net.d[3]) if "seen" in m.__dict__))


def changing(net):
    net.b.register_forward_hook(lambda m, a, o: o * 0.5)
    net.c[0].register_forward_hook(lambda m, a, o: o * 2)
    net.c[1].register_forward_pre_hook(lambda m, a: (a[0] * 1.25,))


def shifting(net):
    net.b[0].register_forward_hook(lambda m, a, o: o.clone().index_add_(0, torch.tensor([1]), torch.ones_like(o[:1])))


def writing(net):
    net.b.register_forward_hook(lambda m, a, o: (o.mul_(0.5), None)[1])
    net.c[1].register_forward_hook(lambda m, a, o: o.add_(0.2))


@pairs.parametrize(edit=[reading, changing, shifting, writing], **MODES)
def test_forward_hooks(edit, mode, k):
    # Where a collapse ends is planned once: a hook that changes frames does not end it.
    mode = "preserve" if edit in (shifting, writing) else mode
    agrees(build(), mode, k, seen, edit)


MODULES = ("a", "b", "b.0", "b.1", "b.2", "d.3", "head")


def collecting(net):
    net.__dict__["seen"] = {}

    def note(name):
        return lambda m, inputs, outputs: net.seen.update({name: (inputs[0], outputs[0])})

    for name in MODULES:
        net.get_submodule(name).register_full_backward_hook(note(name))


def collected(net, x):
    out = net(x)
    out.square().sum().backward(retain_graph=True)
    net.zero_grad()
    return [out, *[g.clone() for name in MODULES for g in net.seen[name] if g is not None]]


def test_full_backward_hooks_see_gradients_of_frames_and_change_nothing_of_a_collapse():
    agrees(build(), "preserve", 2, collected, collecting, ways=GRADS)
    agrees(build(), "collapse", 3, edit=collecting, defined=nothing, ways=GRADS)
