"""What a report says of the net as a whole: slower, other predictions, other rates, where time stands."""

import pytest
import torch
from spikingjelly.activation_based import functional
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from rewrites import observe


class Clock:
    def __init__(self):
        self.now, self.calls = 0.0, {"source": 0, "converted": 0}

    def perf_counter(self):
        return self.now


class Timed(nn.Module):
    """A net whose calls take what they are said to, by a clock that no look puts back."""

    def __init__(self, name, clock, seconds):
        super().__init__()
        self.name, self.clock, self.seconds = name, clock, seconds

    def forward(self, x):
        calls = self.clock.calls
        self.clock.now += self.seconds[calls[self.name] % len(self.seconds)]
        calls[self.name] += 1
        return x


@pytest.mark.parametrize(
    ("before", "after", "calls", "note"),
    [
        ([1e-3], [2e-3], 6, ["2 ms for 1 ms"]),
        ([1e-3], [5e-4], 6, []),
        ([1e-3], [1.2e-3], 14, ["1.2 ms for 1 ms"]),
        ([1e-3], [1.04e-3], 14, []),
        # The second call of a round counts, which follows one of the same net; and of rounds the median.
        ([1e-3], [9e-3, 1e-3], 14, []),
        ([1e-3], [1e-3, 1e-3, 1e-3, 9e-3], 14, []),
        # Half a second is enough, but one round is run of any net.
        ([1.0], [1.1], 2, ["1.1e+03 ms for 1e+03 ms"]),
    ],
)
def test_a_net_that_is_slower_says_so(monkeypatch, before, after, calls, note):
    clock = Clock()
    monkeypatch.setattr(observe, "time", clock)
    monkeypatch.setattr(observe, "ROUNDS", 7)
    source, fast = Timed("source", clock, before), Timed("converted", clock, after)
    found = observe.observe(source, fast, (torch.ones(1),), aggregates=False, timed=True)
    words = "slower than its source on this sample: {}; sj_tac.search finds layers that gain"
    assert found == [words.format(times) for times in note]
    assert clock.calls == {"source": calls, "converted": calls}
    assert observe.observe(source, fast, (torch.ones(1),), aggregates=False, timed=False) == []


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
