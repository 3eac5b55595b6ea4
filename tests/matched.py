"""What tests of match share: small nets, the definition by hooks, and what is seen at every norm and neuron."""

import copy

import torch
from idioms.miniatures import by_hand
from spikingjelly.activation_based import layer, neuron
from support import at_rest, awake, conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.tuning import matching

X = frames(8, 12, 2, 8, 8)
K = 4


def narrow(make=None, size=8, channels=6):
    """Three chains whose drives have moments and rates that sharing changes a lot, and a readout."""
    make = make or (lambda: node("lif"))
    torch.manual_seed(1)
    modules = []
    for inputs in (2, channels, channels):
        modules += [conv(inputs, channels, bias=False), norm(channels), make()]
    pool = layer.AdaptiveAvgPool2d(1, step_mode="m")
    net = nn.Sequential(*modules, pool, layer.Flatten(step_mode="m"), layer.Linear(channels, 5, step_mode="m"))
    return awake(net.eval(), frames(6, 2, 2, size, size))


def shared(net, k, beta):
    """The definition, by hooks on a plain net: every convolution reads its group's weighted mean, for each of its frames."""
    return by_hand(net, k, {n: None for n, m in net.named_modules() if isinstance(m, nn.Conv2d)}, beta=beta)


def matched(method="moments", make=None, k=K):
    """A net, and it converted by preserve and matched by a method."""
    source = (make or narrow)()
    fast = sj_tac.convert(source, "preserve", k)
    fitted(fast, method)
    return source, fast


def watched(net, x):
    """Moments of what norms give, and rates of what neurons give, by name, channel by channel, in float64."""
    found = {}

    def look(name, kind):
        def hook(module, args, out):
            out = out if out.dim() == 5 else out[None]
            dims = (0, 1, 3, 4)
            if kind == "norm":
                found[name] = out.double().mean(dims), out.double().std(dims, correction=0)
            else:
                found[name] = out.double().mean(dims)

        return hook

    handles = [
        m.register_forward_hook(look(n, "norm" if isinstance(m, nn.BatchNorm2d) else "neuron"))
        for n, m in net.named_modules()
        if isinstance(m, (nn.BatchNorm2d, neuron.BaseNode))
    ]
    at_rest(net, x)
    for handle in handles:
        handle.remove()
    return found


def with_statistics_of(source, fast):
    """The source's class with the statistics of a corrected net."""
    net = copy.deepcopy(source)
    net.load_state_dict(fast.state_dict())
    return net


def fitted(fast, method, x=X, **more):
    """The net after this method, whether or not it is the best on held out samples."""
    usual = matching.Comparison.__call__

    def prefer(self, name, converted):
        found, rates = usual(self, name, converted)
        return matching.Candidate(name, found.agreement, float(name != method)), rates

    matching.Comparison.__call__ = prefer
    try:
        done = sj_tac.match(fast, x, method=method, progress=False, **more)
    finally:
        matching.Comparison.__call__ = usual
    assert done.method == method
    return done
