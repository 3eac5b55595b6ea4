"""What a report says of the net as a whole: slower, other predictions, other rates, where time stands."""

import copy
import time

import torch
from spikingjelly.activation_based import functional
from support import conv, csnn, frames, node, norm
from torch import nn

import sj_tac
from rewrites import observe


class Slow(nn.Module):
    """A norm that takes its time once it is behind a converted conv."""

    def forward(self, x):
        return x


def test_a_net_that_is_no_faster_says_so(monkeypatch):
    net, x = csnn().eval(), frames(6, 2, 2, 8, 8)
    run = nn.Module.__call__

    def slowed(module, *args, **kwargs):
        if hasattr(module, "_sj_tac") or "_sj_tac" in module.__dict__:
            time.sleep(0.05)
        return run(module, *args, **kwargs)

    monkeypatch.setattr(observe, "SECONDS", 0.05)
    fast = sj_tac.convert(net, example_input=x)
    fast.__dict__["_sj_tac"] = fast._sj_tac
    monkeypatch.setattr(nn.Module, "__call__", slowed)
    (note,) = [n for n in observe.observe(net, fast, (x,), aggregates=False, timed=True) if "slower" in n]
    assert note.startswith("slower than its source on this sample: ")


def test_a_net_that_is_faster_says_nothing(monkeypatch):
    net, x = csnn().eval(), frames(6, 2, 2, 8, 8)
    monkeypatch.setattr(observe, "SLOWER", 100.0)
    assert observe.observe(net, copy.deepcopy(net), (x,), aggregates=True, timed=True) == []


class Voting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(2, 4), norm(4), node("lif", v_threshold=0.3), conv(4, 4), norm(4), node("lif"))

    def forward(self, x):
        return self.body(x).mean((3, 4)).mean(0)


def test_predictions_and_rates_that_move_are_told():
    x, told = frames(12, 8, 2, 8, 8), set()
    for seed in range(12):
        torch.manual_seed(seed)
        net = Voting().eval()
        with torch.no_grad():
            before = net(x).argmax(1)
            functional.reset_net(net)
            fast = sj_tac.convert(net, k=12, example_input=x)
            after = fast(x).argmax(1)
        moved = int((before != after).sum())
        notes = sj_tac.report(fast).notes
        told_of = [n for n in notes if f"{moved} of 8 samples get another prediction" in n]
        assert (len(told_of) > 0) == (moved > 0), notes
        assert all(n.startswith("ACCURACY_AT_RISK: ") and "sj_tac.match(net, batches)" in n for n in told_of)
        told |= {"prediction"} if moved else set()
        told |= (
            {"rate"}
            if any("neurons fire at another rate than in the source, most of all 'body." in n for n in notes)
            else set()
        )
    assert told == {"prediction", "rate"}, "no net among twelve moved a prediction, or none a rate"


def test_set_k_forgets_what_was_seen_of_another_k():
    net, x = Voting().eval(), frames(12, 8, 2, 8, 8)
    fast = sj_tac.convert(net, k=12, example_input=x)
    sj_tac.set_k(fast, 2)
    assert not [n for n in sj_tac.report(fast).notes if "predict" in n or "rate" in n]


def test_k_1_has_nothing_to_say_of_spikes():
    net, x = Voting().eval(), frames(12, 8, 2, 8, 8)
    assert not [n for n in sj_tac.report(sj_tac.convert(net, k=1, example_input=x)).notes if "predict" in n or "rate" in n]


def test_the_net_is_left_as_it_was():
    net, x = Voting().eval(), frames(12, 8, 2, 8, 8)
    fast = sj_tac.convert(net, k=2, example_input=x)
    assert all(not m._forward_hooks for m in [*net.modules(), *list(fast.modules())[1:]])
    assert all(isinstance(m.v, float) for m in net.modules() if hasattr(m, "v_threshold"))
