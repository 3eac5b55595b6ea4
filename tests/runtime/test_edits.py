"""Edits and calls from outside after convert: the result is that of the definition with the same edit."""

import pytest
import torch
from comparing import POLICIES, Situation, Way, agrees, agrees_at_one, nothing
from forwards import C, block, build, lif, spikes_in, straight
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")


def made(*modules):
    """A new part, the same at every call, in the nets' dtype and step mode."""
    torch.manual_seed(2)
    part = modules[0]() if len(modules) == 1 else nn.Sequential(*(m() for m in modules))
    functional.set_step_mode(part, "m")
    return part.double().eval()


def new_conv():
    return layer.Conv2d(C, C, 3, padding=1)


def new_norm():
    norm = layer.BatchNorm2d(C)
    nn.init.constant_(norm.weight, 2.0)
    norm.running_mean.fill_(-0.3)
    return norm


def new_if():
    return neuron.IFNode(v_threshold=1.5, surrogate_function=surrogate.ATan(), detach_reset=True)


def put(path, part):
    def edit(net):
        parent, _, name = path.rpartition(".")
        setattr(net.get_submodule(parent), name, made(part))

    return edit


def freeze(net):
    net.b.requires_grad_(False)


def other_tau(net):
    net.c[2].tau = 3.5
    net.c[2].v_threshold *= 0.8


def new_last_block(net):
    torch.manual_seed(4)
    net.d = block(C, C, layer.MaxPool2d(2, 2)).double().eval()
    functional.set_step_mode(net.d, "m")


def swapped_blocks(net):
    net.b, net.c = net.c, net.b


def shared_neuron(net):
    net.c[2] = net.b[2]


EDITS = {
    "another norm": put("b.1", new_norm),
    "another neuron": put("b.2", new_if),
    "another neuron of the same kind": put("b.2", lif),
    "another conv": put("c.0", new_conv),
    "no norm": put("b.1", nn.Identity),
    "no neuron": put("b.2", nn.Identity),
    "no conv": put("c.0", nn.Identity),
    "an average pool for a MaxPool": put("d.3", lambda: layer.AvgPool2d(2, 2)),
    "no block": put("c", nn.Identity),
    "another last block": new_last_block,
    "blocks in another order": swapped_blocks,
    "frozen": freeze,
    "another tau": other_tau,
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_an_edit(name, mode, k):
    agrees(Situation(build(), spikes_in(), edit=EDITS[name]), mode, k)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_at_one(name):
    agrees_at_one(Situation(build(), spikes_in(), edit=EDITS[name]))


@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_one_neuron_at_two_places(mode, k):
    """The neuron of another block once more: it goes on from the voltage that its first call left."""
    agrees(Situation(build(), spikes_in(), edit=shared_neuron), mode, k)


def outside(net, x):
    return nn.Sequential(*net.a, *net.b)(x) * 1


CALLS = {
    "two blocks": outside,
    "conv and norm": lambda net, x: nn.Sequential(*net.a[:2])(x) * 1,
    "a conv": lambda net, x: net.a[0](x),
    "norm and neuron": lambda net, x: net.b[2](net.b[1](net.a(x).mul(3.0))),
    "a conv skipped": lambda net, x: net.head(net.d(net.c[2](net.c[1](net.b(net.a(x)))))),
    "the first frames of a drive": lambda net, x: net.a[2](net.a[1](net.a[0](x))[:4]),
    "block after block": lambda net, x: straight(net, x),
    "a call, then a part": lambda net, x: (net(x), net.a(x[:5]).mean((1, 3, 4))),
    "two calls": lambda net, x: (net(x[:4]), net(x[4:])),
    "two calls of other T": lambda net, x: (net(x), net(x[:3]), net(x[:1])),
    "other N": lambda net, x: (net(x), functional.reset_net(net), net(x[:, :1])),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_a_call(name, mode, k):
    agrees(Situation(build(), spikes_in(), call=CALLS[name]), mode, k)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_at_one(name):
    agrees_at_one(Situation(build(), spikes_in(), call=CALLS[name]))


# ---- checkpoint --------------------------------------------------------------------------------------------------------


def maybe(n, function, x):
    if n.flag is False or not (torch.is_grad_enabled() and x.requires_grad):
        return function(x)
    return checkpoint(function, x, use_reentrant=n.flag == "reentrant")


def conv_and_norm(n, x):
    return n.head(n.d(n.c(n.b[2](maybe(n, lambda t: n.b[1](n.b[0](t)), n.a(x))))))


def operation(n, x):
    return n.head(n.d(n.c(maybe(n, lambda t: t * 1.5, n.b(n.a(x))))))


def head_and_pool(n, x):
    return maybe(n, n.head, n.d(n.c(n.b(n.a(x)))))


@pytest.mark.parametrize("steps", [conv_and_norm, operation, head_and_pool])
@pytest.mark.parametrize(
    ("flag", "mode"), [("reentrant", "preserve"), ("not reentrant", "preserve"), ("not reentrant", "collapse")]
)
def test_checkpoint(steps, flag, mode):
    def edit(net):
        net.flag = flag

    # Statistics of a norm that runs twice are the source's own affair; the definition needs no checkpoint.
    ways = (Way(), Way("input"), Way(train=True))[: 2 if steps is conv_and_norm else 3]
    agrees(Situation(build(steps), spikes_in(), edit=edit, defined=nothing, ways=ways), mode, 2)
