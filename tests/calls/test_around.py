"""What is done around a converted net: interrupts, threads, fake tensors, copies, parametrizations, transforms, calls."""

import copy
import pickle

import pairs
import pytest
import torch
from comparing import Way, agrees, definitions, nothing, policy_of, run, same, same_as_one
from definition import unmark
from forwards import build, lif, spikes_in, straight
from spikingjelly.activation_based import functional, layer
from support import at_rest, frames, only_v2
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import sj_tac

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
BOTH = pytest.mark.parametrize("mode", ["preserve", "collapse"])


def pair(mode="preserve", k=2, **more):
    """A converted net and what it may compute."""
    source = build(**more)
    fast = sj_tac.convert(source, policy_of(mode, k))
    return fast, definitions(source, fast, nothing)


@BOTH
def test_an_interrupted_call_leaves_nothing_behind(mode):
    fast, others = pair(mode)
    x, z = spikes_in(), spikes_in(9, 5)

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = fast.c.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        at_rest(fast, x)
    handle.remove()

    def call(net, x):
        return net.b(net.a(x)).mul(1.0).sum((3, 4)), net.c[0](net.a(x))

    same_as_one(run(fast, z, call=call), [run(n, z, call=call) for n in others], "a part after an interrupt")
    same_as_one(run(fast, x), [run(n, x) for n in others], "the net after an interrupt")


@BOTH
def test_a_call_under_fake_tensors_leaves_no_fake_behind(mode):
    from torch._subclasses.fake_tensor import FakeTensorMode

    source = build()
    fast = sj_tac.convert(source, policy_of(mode, 5))  # groups and weights that no call has made before
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        out = fast(fake.from_tensor(spikes_in()))
    assert out.shape == (7, 2, 5)
    functional.reset_net(fast)
    for net in (fast, sj_tac.convert(source, policy_of(mode, 5))):
        same_as_one(run(net, spikes_in()), [run(n, spikes_in()) for n in definitions(source, fast, nothing)], "")


def weight_norm(net):
    parametrizations.weight_norm(net.b[0])


def pruned(net):
    prune.l1_unstructured(net.b[0], "weight", 0.5)


@pytest.mark.parametrize(("change", "mode"), [(weight_norm, "collapse"), (pruned, "preserve")])
def test_a_weight_that_is_computed_after_convert(change, mode):
    source = build()
    fast = sj_tac.convert(source, policy_of(mode, 2))
    others = definitions(source, fast, change)
    change(fast)
    changed = copy.deepcopy(source)
    change(changed)
    x = spikes_in()
    same_as_one(run(fast, x), [run(n, x) for n in others], "converted")
    back = sj_tac.restore(fast, inplace=True)
    same(run(back, x), run(changed, x), "restored")


def by_pickle(net):
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, sj_tac.restore])
def test_copies_of_a_deep_net(copied):
    """No copy goes from module to module by recursion."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(200) for m in (layer.Conv2d(1, 1, 3, padding=1), lif()))).double().eval()
    for conv in net[::2]:
        nn.init.constant_(conv.bias, 2.3)
    functional.set_step_mode(net, "m")
    fast, x = sj_tac.convert(net, "preserve", 2), frames(3, 1, 1, 3, 3, dtype=torch.float64)
    other = copied(fast)
    expected = at_rest(net if copied is sj_tac.restore else fast, x)
    assert 0.02 < expected.mean() < 0.98
    torch.testing.assert_close(at_rest(other, x), expected, **CLOSE)


def compiled_whole(net, x):
    return torch.compile(net, backend="eager", fullgraph=True)(x)


def exported(net, x):
    return torch.export.export(net, (x,), strict=False).module()(x)


def symbolic(net, x):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: net(x))(x)(x)


def functionally(net, x):
    return functional_call(net, {n: p.detach().clone() for n, p in net.named_parameters()}, (x,))


def mapped(net, x):
    return torch.vmap(lambda x: net(x), randomness="different")(x[None])[0]


def partly_compiled(net, x):
    whole = copy.deepcopy(net)
    whole.b = torch.compile(whole.b, backend="eager")
    return whole(x)


@only_v2
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The tensor attributes",
    "ignore:There is a performance drop",
)
@pytest.mark.parametrize(
    ("call", "mode"),
    [
        (functionally, "preserve"), (mapped, "collapse"), (symbolic, "collapse"),
        *(
            pytest.param(call, mode, marks=pytest.mark.exhaustive)
            for call in (compiled_whole, partly_compiled, exported)
            for mode in ("preserve", "collapse")
        ),
    ],
)  # fmt: skip
def test_a_transform_gives_the_same(call, mode):
    torch.compiler.reset()
    fast, others = pair(mode, 3)
    x = spikes_in()
    expected = [unmark(at_rest(n, x)) for n in others]
    functional.reset_net(fast)
    with torch.no_grad():
        out = call(fast, x)
    assert any(torch.allclose(out, e, **CLOSE) for e in expected), call.__name__
    assert any(torch.allclose(at_rest(fast, x), e, **CLOSE) for e in expected), f"a plain call after {call.__name__}"


FEW = (Way(), Way(train=True), Way("no_grad"))
MODES = {"mode": ["preserve", "collapse"], "k": [2, 3, 1]}


CALLS = {
    "two blocks": lambda net, x: nn.Sequential(*net.a, *net.b)(x) * 1,
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


@pairs.parametrize(name=CALLS, **MODES)
def test_a_call(name, mode, k):
    # Frames that are cut away between a convolution and its neuron do not end a collapse.
    mode = "preserve" if name == "the first frames of a drive" else mode
    agrees(build(), mode, k, CALLS[name], ways=FEW)
