"""What a report says of the net as a whole: slower, other predictions, other rates."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from spikingjelly.activation_based import functional, neuron
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.rewrites import observe


@pytest.mark.parametrize(
    ("seconds", "calls", "note"), [(2e-3, 6, "2 ms for 1 ms"), (1.2e-3, 14, "1.2 ms for 1 ms"), (1.04e-3, 14, "")]
)
def test_a_net_that_is_slower_says_so(monkeypatch, seconds, calls, note):
    """By a clock of the test's own; few rounds are enough where it is clear."""
    now, counted = [0.0], Counter()

    class Timed(nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.seconds = seconds

        def forward(self, x):
            now[0] += self.seconds
            counted[self.seconds] += 1
            return x

    monkeypatch.setattr(observe, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(observe, "ROUNDS", 7)
    found = observe.observe(Timed(1e-3), Timed(seconds), (torch.ones(1),), aggregates=False, timed=True)
    words = "slower than its source on this sample: {}; sj_tac.search finds layers that gain"
    assert found == ([words.format(note)] if note else [])
    assert set(counted.values()) == {calls}


class Voting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(2, 4), norm(4), node("lif", v_threshold=0.3), conv(4, 4), norm(4), node("lif"))

    def forward(self, x):
        return self.body(x).mean((3, 4)).mean(0)


X = frames(12, 8, 2, 8, 8)


def firing_rates(net):
    """Mean spikes of each neuron and frame, by a net's own modules in a call without a hook of ours."""
    functional.reset_net(net)
    rates = {}
    hooks = [
        module.register_forward_hook(lambda m, args, y, n=name: rates.update({n: float(y.mean())}))
        for name, module in net.named_modules()
        if isinstance(module, neuron.BaseNode)
    ]
    with torch.no_grad():
        net(X)
    for hook in hooks:
        hook.remove()
    return rates


def test_predictions_and_rates_that_move_are_told():
    told = set()
    for seed in (0, 7, 8, 9):
        torch.manual_seed(seed)
        net = Voting().eval()
        with torch.no_grad():
            before = net(X).argmax(1)
            functional.reset_net(net)
            fast = sj_tac.convert(net, k=12, example_input=X)
            after = fast(X).argmax(1)
        moved = int((before != after).sum())
        notes = sj_tac.report(fast).notes
        told_of = [n for n in notes if f"{moved} of 8 samples get another prediction" in n]
        assert (len(told_of) > 0) == (moved > 0), notes
        assert all(n.startswith("ACCURACY_AT_RISK: ") and "sj_tac.match(net, batches)" in n for n in told_of)
        told |= {"prediction"} if moved else {"none"}
        of_source, of_fast = firing_rates(net), firing_rates(fast)
        changes = {n: abs(of_fast[n] / rate - 1) for n, rate in of_source.items() if rate > 0.01}
        if max(changes.values()) > 0.25:
            most, count = max(changes, key=changes.get), sum(change > 0.25 for change in changes.values())
            note = (
                f"{count} of 2 neurons fire at another rate than in the source, most of all {most!r}: "
                f"{of_source[most]:.3f} -> {of_fast[most]:.3f}"
            )
            assert any(note in n for n in notes), notes
            told |= {"rate", f"{count} neurons"}
    assert told >= {"none", "prediction", "rate", "1 neurons"}
    # Another k is another net, and so is one that shares nothing; the source and the copy are left as they were.
    assert all(not m._forward_hooks for m in [*net.modules(), *list(fast.modules())[1:]])
    sj_tac.set_k(fast, 2)
    for other in (fast, sj_tac.convert(net, k=1, example_input=X)):
        assert not [n for n in sj_tac.report(other).notes if "predict" in n or "rate" in n]
