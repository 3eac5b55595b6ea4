"""What a converted net did with each layer: a table that is kept, so that a layer which falls back to frames is noticed.

Falling back is right, and slow: values cannot show it. To write the table anew, and then look at each line that changes:
``PYTHONPATH=tests python tests/rewrites/test_what_runs.py``
"""

import json
from pathlib import Path

import pytest
import torch
from idioms.test_idioms import IDIOMS, make
from support import conv, csnn, frames, no_collapse, node
from torch import nn

import sj_tac
from sj_tac import host

TABLE = Path(__file__).resolve().parents[1] / "data" / "what_runs.json"
KEPT = {"version": 1, "default": {"mode": "preserve", "k": 2}, "rules": [{"match": "0", "mode": "keep"}]}
CHAINS = {
    "preserve": (csnn, "preserve", {}),
    "collapse": (csnn, "collapse", {}),
    "first kept": (csnn, KEPT, {}),
    "unfused": (csnn, "preserve", {"fuse": False}),
    "reference": (csnn, "preserve", {"backend": "reference"}),
    "no means": (no_collapse, "preserve", {}),
}


def case(name):
    if name in CHAINS:
        build, policy, more = CHAINS[name]
        return build(), frames(6, 2, 2, 8, 8), policy, more
    return *make(name), "preserve", {}


def rows_of(name):
    """Return a line for each layer: what the plan says, and what two calls did, without and with gradients."""
    net, x, policy, more = case(name)
    fast = sj_tac.convert(net, policy, 2, example_input=x, **more)
    rows = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            fast(x)
        for module in fast.modules():
            if hasattr(module, "reset"):
                module.reset()
        for v in sj_tac.report(fast).verdicts:
            kernel = (v.kernel or "").partition(",")[
                0
            ]  # behind it stands what is fused with a convolution on some processors
            said = [v.layer, v.status, v.mode, v.k, v.reason, kernel, v.reads, v.last_read, v.last_gave]
            rows.append(" ".join(map(str, [*said, v.macs_before, v.macs_after, sorted(v.frames_made)])))
    return rows


@pytest.mark.skipif(not host.IS_V2, reason="the table is of SpikingJelly 2.0")
@pytest.mark.parametrize("name", [*CHAINS, *IDIOMS])
def test_each_layer_did_what_it_did_before(name):
    assert rows_of(name) == json.loads(TABLE.read_text())[name]


if __name__ == "__main__":
    TABLE.write_text(json.dumps({name: rows_of(name) for name in [*CHAINS, *IDIOMS]}, indent=1) + "\n")


class Forked(nn.Module):
    """Spikes for two convolutions, and behind one of these another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([conv(2, 4), conv(4, 4), conv(4, 4), conv(4, 4)])
        self.lifs = nn.ModuleList([node("lif", v_threshold=0.3) for _ in self.convs])

    def forward(self, x):
        spikes = self.lifs[0](self.convs[0](x))
        a, b = (self.lifs[i](self.convs[i](spikes)) for i in (1, 2))
        return self.lifs[3](self.convs[3](a)), b


class Summed(Forked):
    """Spikes of two neurons, added, and behind them another convolution."""

    def forward(self, x):
        a, b = (self.lifs[i](self.convs[i](x)) for i in (0, 1))
        return self.lifs[3](self.convs[3](self.lifs[2](self.convs[2](a + b))))


def test_sums_are_made_behind_spikes_of_two_neurons_that_are_added():
    net = Summed()
    net.convs[1] = conv(2, 4)
    fast = sj_tac.convert(net.eval(), "preserve", 2, example_input=frames(6, 2, 2, 8, 8))
    assert [v.reads for v in sj_tac.report(fast).converted] == ["frames", "frames", "sums", "sums"]


def test_sums_are_made_behind_a_fork_whose_readers_want_different_ones():
    policy = {"default": {"mode": "preserve", "k": 2}, "rules": [{"match": "convs.2", "k": 3}]}
    fast = sj_tac.convert(Forked().eval(), policy, example_input=frames(6, 2, 2, 8, 8))
    assert [v.reads for v in sj_tac.report(fast).converted] == ["frames", "frames", "frames", "sums"]
