"""Every reason code: a net that earns it, and its place in the documentation."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError
from sj_tac.verdicts import REASONS, Reason

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reasons.md"


class Around(nn.Module):
    """A net with one good chain behind what a case puts in front, so that convert has something to do."""

    def __init__(self, *front, forward=None):
        super().__init__()
        self.front = nn.Sequential(*front)
        self.good = nn.Sequential(conv(3, 3), norm(3), node("lif"))
        self.custom = forward

    def forward(self, x):
        return self.good(self.custom(self.front, x) if self.custom else self.front(x))


class Slow(neuron.LIFNode):
    """A subclass with other dynamics."""

    def multi_step_forward(self, x_seq):
        return super().multi_step_forward(x_seq * 0.5)


class OwnLeak(neuron.LIFNode):
    """Not registered in either host: a subclass with a method of its own, which is vouched for."""

    def multi_step_forward(self, x_seq):
        return super().multi_step_forward(x_seq)


HOSTS_OWN = sj_tac.register_neuron(OwnLeak, decay=0.5)


class OwnConv(layer.Conv2d):
    """A subclass that computes something else."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight * 0.5, bias)


class OwnNorm(layer.BatchNorm2d):
    """A subclass that computes something else."""

    def forward(self, x):
        return super().forward(x).abs()


@sj_tac.register_neuron(decay=0.5)
class LooksAhead(nn.Module):
    """A registered neuron that breaks its promise."""

    def forward(self, x):
        return (x > x.mean(0)).to(x)


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), node("lif"))
        self.good = nn.Sequential(conv(3, 3), norm(3), node("lif"))

    def forward(self, x):
        return self.good(self.front[2](self.front[1](self.front[0](x)).unsqueeze(0).repeat(4, 1, 1, 1, 1)))


def parametrized(made):
    torch.nn.utils.parametrize.register_parametrization(made, "weight", nn.Softplus())
    return made


def twice(front, x):
    return front[2](front[1](front[0](front[0](x))))


def step_by_step(front, x):
    return torch.stack([front(x[t]) for t in range(x.shape[0])])


def fan_out(front, x):
    y = front[0](x)
    return front[2](front[1](y)) + y.abs()


def residual(front, x):
    return front[2](front[1](front[0](x)) + x)


def sum_that_is_no_drive(front, x):
    return front[2](torch.relu(front[1](front[0](x)) + x))


def unread(front, x):
    front[0](x)
    return x


def by_weight(front, x):
    return front[1](F.conv2d(x.flatten(0, 1), front[0].weight, padding=1).unflatten(0, (-1, 2)))


def folded(front, x):
    return front[2](front[1](front[0](x.flatten(0, 1))).reshape(x.shape[0], x.shape[1], 3, 8, 8))


def half(front, x):
    y = front[1](front[0](torch.cat([x["a"], x["b"]], 1).flatten(0, 1)))
    return front[2](y.reshape(4, -1, 3, 8, 8))


def folded_at_the_neuron(front, x):
    return front[2](front[1](front[0](x.flatten(0, 1)))).reshape(x.shape[0], x.shape[1], 3, 8, 8)


def folding():
    return nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), node("lif")


CASES = {
    Reason.POLICY_KEEP: Around(conv(), norm(), node("lif")),
    Reason.INSIDE_LEAF: Around(layer.SeqToANNContainer(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU()), node("lif")),
    Reason.NEVER_CALLED: Around(conv(), node("lif"), forward=by_weight),
    Reason.CALLED_TWICE: Around(conv(3, 3), norm(), node("lif"), forward=twice),
    Reason.TIME_LOOP: Around(conv(step_mode="s"), layer.BatchNorm2d(3), node("lif", step_mode="s"), forward=step_by_step),
    Reason.FAN_OUT: Around(conv(), norm(), node("lif"), forward=fan_out),
    Reason.NOT_MULTI_STEP: Around(conv(step_mode="s"), norm(), node("lif")),
    Reason.PARAMETRIZED: Around(parametrized(conv()), norm(), node("lif")),
    Reason.UNSUPPORTED_CONV: Around(OwnConv(2, 3, 3, padding=1, step_mode="m"), norm(), node("lif")),
    Reason.UNSUPPORTED_NORM: Around(conv(), layer.GroupNorm(1, 3, step_mode="m"), node("lif")),
    Reason.BATCH_STATS: Around(conv(), layer.BatchNorm2d(3, track_running_stats=False, step_mode="m"), node("lif")),
    Reason.UNSUPPORTED_NEURON: Around(conv(), norm(), Slow(step_mode="m")),
    Reason.POOL_BEFORE_NEURON: Around(conv(), norm(), layer.MaxPool2d(3, 1, 1, step_mode="m"), node("lif")),
    Reason.ADD_BEFORE_NEURON: Around(conv(3, 3), norm(), node("lif"), forward=sum_that_is_no_drive),
    Reason.NOT_LINEAR: Around(conv(), norm(), nn.ReLU(), node("lif")),
    Reason.NO_NEURON: Around(conv(3, 3), norm(), forward=unread),
    Reason.COLLAPSE_BRANCHED: Around(conv(3, 3), norm(), node("lif"), forward=residual),
    Reason.COLLAPSE_POOL: Around(
        conv(), norm(), node("lif"), layer.MaxPool2d(3, 1, 1, step_mode="m"),
        forward=lambda front, x: front[3](front(x)),
    ),
    Reason.K_NOT_WHOLE: Around(conv(), norm(), node("lif"), layer.Dropout(0.1, step_mode="m")),
    Reason.FOLD_UNSEEN: Around(*folding(), forward=folded),
    Reason.FOLD_AMBIGUOUS: Around(*folding(), forward=folded),
    Reason.TIME_UNKNOWN: Around(*folding(), forward=half),
    Reason.NEURON_FOLDED: Around(*folding(), forward=folded_at_the_neuron),
    Reason.COLLAPSE_FOLDED: Around(*folding(), forward=folded),
    Reason.COLLAPSE_REGISTERED: Around(conv(), norm(), HOSTS_OWN(step_mode="m", tau=2.0)),
    Reason.ONCE_ALREADY: Once(),
    Reason.PROMISE_UNTRIED: Around(conv(), norm(), LooksAhead()),
    Reason.PROMISE_BROKEN: Around(conv(), norm(), LooksAhead()),
}  # fmt: skip
POLICIES = {
    Reason.POLICY_KEEP: {"rules": [{"match": "front.*", "mode": "keep"}]},
    Reason.COLLAPSE_BRANCHED: {"rules": [{"match": "front.*", "mode": "collapse", "spikes": "binary"}]},
    Reason.COLLAPSE_POOL: {"rules": [{"match": "front.*", "mode": "collapse"}]},
    Reason.COLLAPSE_REGISTERED: {"rules": [{"match": "front.*", "mode": "collapse"}]},
    Reason.COLLAPSE_FOLDED: {"rules": [{"match": "front.*", "mode": "collapse"}]},
}
# T and N of the sample, where one is needed.
SAMPLES = {
    Reason.FOLD_AMBIGUOUS: (4, 1), Reason.NEURON_FOLDED: (4, 2), Reason.COLLAPSE_FOLDED: (4, 2), Reason.ONCE_ALREADY: (2,),
    Reason.PROMISE_BROKEN: (4, 2), Reason.COLLAPSE_REGISTERED: (4, 2), Reason.TIME_LOOP: (4, 2),
}  # fmt: skip


def sample_for(reason):
    if reason is Reason.TIME_UNKNOWN:
        return {"a": torch.rand(4, 2, 2, 8, 8), "b": torch.rand(4, 1, 2, 8, 8)}
    return torch.rand(*SAMPLES[reason], 2, 8, 8) if reason in SAMPLES else None


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_earned(reason):
    net = CASES[reason].eval()
    policy, layer_name = POLICIES.get(reason, "preserve"), "front.0"
    if reason is Reason.K_NOT_WHOLE:
        policy = {"rules": [{"match": "front.*", "mode": "collapse", "k": 2}, {"match": "good.*", "k": 3}]}
        layer_name = "good.0"
    if reason is Reason.INSIDE_LEAF:
        layer_name = "front.0.0"
    report = sj_tac.plan(net, policy, example_input=sample_for(reason))
    verdict = report[layer_name]
    assert verdict.reason == reason.value
    assert verdict.status == ("kept" if reason is Reason.POLICY_KEEP else "refused")
    assert verdict.detail
    assert verdict.hint == REASONS[reason][1]
    other = next(v for v in report.verdicts if v.layer != layer_name)
    assert other.status == "converted"
    assert f"`{reason.value}`" in DOCS.read_text(), f"{reason.value} is not in docs/reasons.md"


@pytest.mark.parametrize(
    ("reason", "front"),
    [
        (Reason.UNSUPPORTED_NORM, (conv(), OwnNorm(3, step_mode="m"), node("lif"))),
        (Reason.UNSUPPORTED_NORM, (conv(), parametrized(norm()), node("lif"))),
        (Reason.NOT_MULTI_STEP, (conv(), layer.BatchNorm2d(3, step_mode="s"), node("lif"))),
        (Reason.NOT_MULTI_STEP, (conv(), norm(), node("lif", step_mode="s"))),
        (Reason.NOT_LINEAR, (conv(), norm(), nn.Sigmoid(), node("lif"))),
    ],
)
def test_other_nets_that_earn_a_reason(reason, front):
    verdict = sj_tac.plan(Around(*front).eval(), "preserve")["front.0"]
    assert (verdict.status, verdict.reason) == ("refused", reason.value)


@pytest.mark.parametrize("reason", [Reason.FAN_OUT, Reason.UNSUPPORTED_NEURON, Reason.ONCE_ALREADY, Reason.FOLD_AMBIGUOUS])
def test_what_is_refused_is_left_exactly_alone(reason):
    net = CASES[reason].eval()
    fast = sj_tac.convert(net, example_input=sample_for(reason))
    assert [type(m) for m in fast.front.modules()] == [type(m) for m in net.front.modules()]


class Detector(nn.Sequential):
    """Every block runs folded, its neuron in it, as published detectors have them: no neuron shows what T is."""

    def forward(self, x):
        for block in self:
            x = functional.seq_to_ann_forward(x, block)
        return x


def test_where_all_neurons_step_through_the_samples_the_reason_says_so():
    net = Detector(*(nn.Sequential(nn.BatchNorm2d(c), nn.Conv2d(c, 4, 3, padding=1), node("plif")) for c in (2, 4)))
    verdicts = sj_tac.plan(net.eval(), example_input=torch.rand(5, 2, 2, 8, 8)).verdicts
    assert [(v.layer, v.reason) for v in verdicts] == [("0.1", "NEURON_FOLDED"), ("1.1", "NEURON_FOLDED")]
    assert "are handed 10 frames" in verdicts[0].detail


class WrittenOut(nn.Module):
    """A neuron over [N, T, ...] in plain torch, as TET has it."""

    def forward(self, x):
        membrane, spikes = 0, []
        for t in range(x.shape[1]):
            membrane = 0.5 * membrane + x[:, t]
            spikes.append((membrane > 1).float())
            membrane = (1 - spikes[-1]) * membrane
        return torch.stack(spikes, 1)


def test_a_neuron_that_is_written_out_is_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.front = nn.ModuleList([*folding()[:2], WrittenOut()])

        def forward(self, x):
            return folded(self.front, x)

    refused = sj_tac.plan(Net().eval(), "preserve", 2, example_input=torch.rand(2, 5, 2, 8, 8)).refused
    assert [v.reason for v in refused] == ["NO_NEURON"]
    assert "gt() in 'front.2' (WrittenOut) compares" in refused[0].detail
    assert "sj_tac.register_neuron" in refused[0].hint
    (verdict,) = sj_tac.plan(nn.Sequential(conv(), norm(), WrittenOut()).eval(), example_input=torch.rand(3, 2, 2, 8, 8))
    assert verdict.reason == "NOT_LINEAR"
    assert "compares, as one's own neuron would" in " ".join((verdict.detail, *verdict.obstacles))


def test_an_exact_rule_over_a_refused_conv_is_an_error_and_a_glob_is_a_report():
    net = CASES[Reason.POOL_BEFORE_NEURON]
    with pytest.raises(
        sj_tac.errors.PolicyError, match=r"rule for 'front.0': mode 'preserve' is impossible.*POOL_BEFORE_NEURON.*keep"
    ):
        sj_tac.plan(net, {"rules": [{"match": "front.0", "k": 4}]})
    assert sj_tac.plan(net, {"rules": [{"match": "front.*", "k": 4}]})["front.0"].status == "refused"
    assert sj_tac.plan(net, {"rules": [{"match": "front.0", "mode": "keep"}]})["good.0"].status == "converted"


def test_aliases_and_identities_do_not_hide_a_chain():
    net = Around(conv(), nn.Identity(), norm(), node("lif"))
    net.first = net.front[0]
    report = sj_tac.plan(net)
    assert [v.layer for v in report.verdicts] == ["front.0", "good.0"]
    assert len(report.converted) == 2
    fast = sj_tac.convert(net)
    assert fast.first is fast.front[0]


def test_a_module_shared_by_two_chains_refuses_both():
    shared = node("lif")
    net = nn.Sequential(conv(3, 3), norm(3), shared, conv(3, 3), norm(3), shared)
    report = sj_tac.plan(net)
    assert [v.reason for v in report.verdicts] == ["CALLED_TWICE"] * 2
    assert "2 times" in report["0"].detail
    with pytest.raises(ConversionError, match="CALLED_TWICE"):
        sj_tac.convert(net)


def test_a_pool_that_cannot_take_the_mean_is_named():
    single = layer.MaxPool2d(2)
    indices = layer.MaxPool2d(2, return_indices=True, step_mode="m")
    for pool, words in ((single, "step_mode 's'"), (indices, "returns indices")):
        net = nn.Sequential(conv(), norm(), node("lif"), layer.Dropout(0.1, step_mode="m"), pool)
        verdict = sj_tac.plan(net, "collapse")["0"]
        assert verdict.reason == "COLLAPSE_POOL"
        assert words in verdict.detail
        assert len(sj_tac.plan(net, "preserve").converted) == 1


def test_a_container_that_calls_its_neuron_once_a_step_says_what_to_put_there():
    container = layer.MultiStepContainer(neuron.LIFNode())
    net = nn.Sequential(
        layer.SeqToANNContainer(nn.Conv2d(2, 4, 3)), container, layer.SeqToANNContainer(nn.Conv2d(4, 4, 3)), node("lif")
    )
    for example in (None, frames(4, 2, 2, 8, 8)):
        first, second = sj_tac.plan(net.eval(), k=2, example_input=example).verdicts
        assert first.reason == "NOT_MULTI_STEP"
        assert "(MultiStepContainer) calls its LIFNode once a step; put the LIFNode there by itself" in first.detail
        assert second.status == "converted"
    net[1] = node("lif")
    assert all(v.status == "converted" for v in sj_tac.plan(net.eval(), k=2).verdicts)


class OneFrame(nn.Module):
    """A stem on frames of one step [1, N, ...], which are repeated behind it."""

    def __init__(self, repeated):
        super().__init__()
        self.stem, self.chain, self.repeated = (
            nn.Sequential(conv(1, 4), norm(4)),
            nn.Sequential(node("lif"), conv(4, 4), node("lif")),
            repeated,
        )

    def forward(self, x):
        return self.chain(self.repeated(self.stem(x.unsqueeze(0))))


REPEATED = {"expand": lambda y: y.expand(6, -1, -1, -1, -1), "cat": lambda y: torch.cat([y] * 6)}


@pytest.mark.parametrize(("how", "batch"), [("expand", 3), ("cat", 3), ("cat", 1)])
def test_a_stem_on_one_frame_runs_once_already(how, batch):
    plan = sj_tac.plan(OneFrame(REPEATED[how]).eval(), k=2, example_input=torch.rand(batch, 1, 8, 8))
    assert [(v.layer, v.reason) for v in plan.verdicts] == [("stem.0", "ONCE_ALREADY"), ("chain.1", None)]


# ---- torch's own convolutions that are handed no folded frames ----------------------------------------------------------


class Looping(nn.Conv2d):
    """Runs frames [T, N, ...] one after the other, and writes them into a buffer."""

    def forward(self, x):
        y = x.new_zeros(*x.shape[:2], self.out_channels, *x.shape[3:])
        for t in range(len(x)):
            y[t] = F.conv2d(x[t], self.weight, self.bias, padding=1)
        return y


class LoopingLayer(layer.Conv2d):
    forward = Looping.forward


def test_a_forward_of_its_own_for_unfolded_frames_is_told_which_class_takes_them():
    """Where N is the number of channels, too, by which frames [T, N, ...] passed for images."""
    x = frames(6, 2, 2, 8, 8)
    (verdict,) = sj_tac.plan(nn.Sequential(Looping(2, 4, 3), node("lif")).eval(), k=2, example_input=x).verdicts
    assert verdict.reason == "UNSUPPORTED_CONV"
    assert "derive its class from SpikingJelly's layer.Conv2d" in verdict.detail
    net = nn.Sequential(LoopingLayer(2, 4, 3, step_mode="m"), node("lif")).eval()
    assert len(sj_tac.plan(net, k=2, example_input=x).converted) == 1


def test_the_shape_that_is_told_is_what_the_conv_is_handed():
    class OverTime(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = nn.Conv1d(5, 7, 3, padding=1), node("lif")

        def forward(self, x):
            return self.lif(self.conv(x).permute(2, 0, 1))

    (verdict,) = sj_tac.plan(OverTime().eval(), k=2, example_input=torch.rand(3, 5, 6)).verdicts
    assert "on [3, 5, 6] and no folded frames" in verdict.detail
