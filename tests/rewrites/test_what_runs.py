"""What a converted net did with each layer: a table that is kept, so that a layer which falls back to frames is noticed.

Falling back is right, and slow: values cannot show it. To write the table anew, and then look at each line that changes:
``PYTHONPATH=tests python tests/rewrites/test_what_runs.py``
"""

import json
from pathlib import Path

import pytest
import torch
from idioms.test_idioms import IDIOMS, make
from support import csnn, frames, no_collapse

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
