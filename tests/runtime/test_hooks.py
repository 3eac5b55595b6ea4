"""Hooks of every kind see and change frames, as in the definition; values that are kept say what they said."""

import copy

import pytest
import torch
from comparing import POLICIES, Situation, Way, agrees, definitions, nothing, policy_of, read, run, same
from forwards import build, spikes_in
from spikingjelly.activation_based import functional
from torch import nn

import sj_tac
from sj_tac.errors import StaleValueError

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")
GRADS = (Way(), Way(train=True))
# Full backward hooks of the first module warn where the input has no gradient.
INPUT_GRADS = (Way("input"), Way("input", train=True))


def reading(net):
    for module in (net.b, net.b[0], net.c, net.d[3]):
        module.register_forward_hook(lambda m, a, o: m.__dict__.__setitem__("seen", a[0].sum() + o.sum()))


def seen(net, x):
    return (net(x), *(m.seen for m in (net.b, net.b[0], net.c, net.d[3])))


def changing(net):
    net.b.register_forward_hook(lambda m, a, o: o * 0.5)
    net.c[0].register_forward_hook(lambda m, a, o: o * 2)
    net.c[1].register_forward_pre_hook(lambda m, a: (a[0] * 1.25,))


def shifting(net):
    net.b[0].register_forward_hook(lambda m, a, o: o.clone().index_add_(0, torch.tensor([1]), torch.ones_like(o[:1])))


def writing(net):
    net.b.register_forward_hook(lambda m, a, o: (o.mul_(0.5), None)[1])
    net.c[1].register_forward_hook(lambda m, a, o: o.add_(0.2))


FORWARD_HOOKS = {
    "read": (reading, seen),
    "change": (changing, lambda net, x: net(x)),
    "change one frame": (shifting, lambda net, x: net(x)),
    "write": (writing, lambda net, x: net(x)),
}


@pytest.mark.parametrize("name", FORWARD_HOOKS)
@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_forward_hooks(name, mode, k):
    edit, call = FORWARD_HOOKS[name]
    agrees(Situation(build(), spikes_in(), call=call, edit=edit), mode, k)


@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_a_global_forward_hook(mode, k):
    shapes, handles = [], []

    def note(module, args, out):
        if isinstance(out, torch.Tensor) and out.dim() == 5:
            shapes.append(len(out))

    def edit(net):
        if not handles:
            handles.append(nn.modules.module.register_module_forward_hook(note))

    net = build()
    try:
        agrees(Situation(net, spikes_in(), edit=edit), mode, k)
    finally:
        handles[0].remove()
    assert set(shapes) == {7}, "hooks see T frames"


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


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("way", INPUT_GRADS, ids=str)
def test_full_backward_hooks_see_gradients_of_frames(k, way):
    agrees(Situation(build(), spikes_in(), call=collected, edit=collecting, ways=(way,)), "preserve", k)


@pytest.mark.parametrize("k", [2, 3])
def test_full_backward_hooks_that_only_look_change_nothing_of_a_collapse(k):
    agrees(Situation(build(), spikes_in(), edit=collecting, defined=nothing, ways=INPUT_GRADS), "collapse", k)


def halving(net):
    net.b.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    net.c[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
    net.d.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.25,))


def tensor_hooks(net):
    def hook(module, args, out):
        if out.requires_grad:
            out.register_hook(lambda g: g * 0.5)

    for module in (net.b, net.c[0], net.d[1]):
        module.register_forward_hook(hook)


@pytest.mark.parametrize("edit", [halving, tensor_hooks])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_hooks_that_change_gradients(edit, k):
    agrees(Situation(build(), spikes_in(), edit=edit, ways=GRADS), "preserve", k)


def test_global_backward_hooks():
    seen, handles = [], []

    def edit(net):
        if not handles:
            hook = nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: seen.append(m))
            handles.append(hook)

    net = build()
    try:
        agrees(Situation(net, spikes_in(), edit=edit, ways=INPUT_GRADS), "preserve", 2)
    finally:
        handles[0].remove()
    assert seen


def retaining(net):
    def hook(module, args, out):
        out.retain_grad()
        module.__dict__["kept"] = out

    net.b.register_forward_hook(hook)
    net.c[0].register_forward_hook(hook)


def retained(net, x):
    out = net(x)
    out.square().sum().backward(retain_graph=True)
    grads = [net.b.kept.grad, net.c[0].kept.grad]
    net.zero_grad()
    return [out, *[g.clone() for g in grads]]


def keeping(net):
    net.b.register_forward_hook(lambda m, a, o: m.__dict__.__setitem__("kept", o))


def asked(net, x):
    out = net(x)
    return [out, *torch.autograd.grad(out.square().sum(), net.b.kept, retain_graph=True)]


def retained_in_all(net, x):
    out, *grads = retained(net, x)
    return [out, *[g.sum(0) for g in grads]]


@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_gradients_of_values_inside(mode, k):
    """In a collapse the frames of a group are one value: which of them its gradient is booked on is not defined."""
    call = retained if mode == "preserve" else retained_in_all
    agrees(Situation(build(), spikes_in(), call=call, edit=retaining, ways=GRADS), mode, k)


@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_a_gradient_that_nobody_knows_any_more_is_a_clear_error(mode, k):
    fast = sj_tac.convert(build(), policy_of(mode, k))
    keeping(fast)
    with pytest.raises(StaleValueError, match="ask for it before that layer is called"):
        asked(fast, spikes_in())


# ---- values that outlive their call ------------------------------------------------------------------------------------


def keeps(n, x):
    n.feat = n.a(x)
    n.drive = n.b[1](n.b[0](n.feat))
    return n.head(n.d(n.c(n.b[2](n.drive))))


def read_after(net, x):
    return net(x), net.feat * 1, net.drive * 1


def read_after_another(net, x):
    net(x)
    feat, drive = net.feat, net.drive
    return net(x.flip(0)[:5]), feat * 1, drive * 1


def read_after_reset(net, x):
    net(x)
    functional.reset_net(net)
    return net.feat * 1, net.drive * 1


@pytest.mark.parametrize("call", [read_after, read_after_another, read_after_reset])
@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_kept_values(call, mode, k):
    agrees(Situation(build(keeps), spikes_in(), call=call), mode, k)


@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_kept_values_after_a_step_are_right_or_an_error(mode, k):
    source = build(keeps)
    fast = sj_tac.convert(source, policy_of(mode, k))
    nets = [fast, *definitions(source, fast, nothing)]
    found = []
    for net in nets:
        functional.reset_net(net)
        net(spikes_in()).square().sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
        try:
            found.append([read(net.feat), read(net.drive)])
        except RuntimeError:
            if net is not fast:
                raise
            return  # a clear error is as good; which one is for the tests of values
    assert any(all(torch.allclose(a, b) for a, b in zip(found[0], other, strict=True)) for other in found[1:])


def test_convert_leaves_nothing_of_its_trace():
    net = build(keeps)
    net.feat = net.drive = None
    fast = sj_tac.convert(net, "preserve", 2)
    assert fast.feat is None
    assert fast.drive is None
    assert net.feat is None


@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_gradients_through_two_calls(mode, k):
    agrees(Situation(build(), spikes_in(), call=lambda net, x: (net(x[:5]), net(x[5:]) * 2)), mode, k)


def test_a_hook_that_comes_and_goes():
    """What a call does is decided in that call."""
    net = build()
    fast = sj_tac.convert(net, "preserve", 2)
    defined = definitions(net, fast, nothing)[0]
    expected = run(copy.deepcopy(defined), spikes_in(), marks=True)
    same(run(fast, spikes_in()), expected)
    handle = fast.b.register_forward_hook(lambda m, a, o: o * 0)
    assert not torch.equal(run(fast, spikes_in()).values[0], expected.values[0])
    handle.remove()
    same(run(fast, spikes_in()), expected)
