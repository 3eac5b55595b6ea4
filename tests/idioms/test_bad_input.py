"""Folded nets, repeated images and registered classes where the call is not what the sample was."""

import pytest
import torch
from idioms.miniatures import IMAGE, SIZE, N, Private, StaticLayers, T, Transformer, conv, lif
from idioms.test_idioms import CLOSE, convert, make, oracle, run, same
from spikingjelly.activation_based import functional, layer, neuron
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError, InputError

FOLDED = (T, N, 2, SIZE, SIZE)


def test_without_a_sample_a_folded_net_says_what_it_needs():
    class Net(FixedT):
        def forward(self, x):
            return self.lif(self.bn(self.conv(x.flatten(0, 1))).unflatten(0, (self.T, -1)))

    with pytest.raises(sj_tac.errors.ConversionError, match=r"FOLD_UNSEEN: it is a torch.*Conv2d.*pass example_input="):
        sj_tac.convert(Net())
    with pytest.raises(sj_tac.errors.TraceError, match="pass example_input="):
        sj_tac.convert(FixedT())


def test_a_sample_that_cannot_tell_a_fold_says_so():
    net = Private()
    with pytest.raises(sj_tac.errors.ConversionError, match=r"FOLD_AMBIGUOUS.*N >= 2 samples and N other than T"):
        sj_tac.convert(net, example_input=torch.rand(4, 4, 2, SIZE, SIZE))
    assert type(net.features[0].module[0]) is nn.Conv2d


def test_an_input_of_another_rank_is_one_clear_error():
    class Either(Transformer):
        def forward(self, x):
            return super().forward(x.unsqueeze(0).repeat(T, 1, 1, 1, 1) if x.dim() < 5 else x)

    net = Either().eval()
    fast = sj_tac.convert(net, example_input=torch.rand(FOLDED))
    with pytest.raises(InputError, match=r"converted for inputs of \[5\] dimensions, got \[4\].*convert it with such"):
        fast(torch.rand(N, 2, SIZE, SIZE))
    fast(torch.rand(FOLDED))


class FixedT(nn.Module):
    """T is an attribute, and the forward unfolds by it."""

    def __init__(self):
        super().__init__()
        self.T, self.conv, self.bn, self.lif = T, conv(2), nn.BatchNorm2d(6), lif()

    def forward(self, x):
        y = self.bn(self.conv(x.flatten(0, 1)))
        return self.lif(y.reshape(self.T, -1, *y.shape[1:])).mean((-1, -2)).mean(0)


def test_a_t_that_was_edited_is_one_clear_error():
    fast = sj_tac.convert(FixedT().eval(), example_input=torch.rand(FOLDED))
    fast.T = 3
    with pytest.raises(InputError, match="unfolded as 3 steps of 7: the model's own T is not that of its input"):
        fast(torch.rand(FOLDED))
    fast.T = T
    functional.reset_net(fast)
    fast(torch.rand(FOLDED))


def test_a_part_that_is_called_alone_does_not_know_t():
    net, x = make("folded", torch.float64)
    fast = convert("folded", net, x, 2)
    fast(x)
    functional.reset_net(fast)
    with torch.no_grad():
        for part in (lambda: fast.stem(x), lambda: fast.forward(x), lambda: fast.stem.conv1(x.flatten(0, 1))):
            with pytest.raises(InputError, match=r"layer 'stem.conv1' is handed \[21, 2, 8, 8\], and nobody says how time"):
                part()
        sj_tac.set_k(fast, 1)
        y = fast.stem.conv1(x.flatten(0, 1))
    torch.testing.assert_close(y, net.stem.conv1(x.flatten(0, 1)), **CLOSE)
    assert type(y) is torch.Tensor


def test_a_call_that_fails_leaves_nothing_for_the_next_one_and_arguments_by_name_say_t_too():
    net, x = make("folded", torch.float64)
    fast = convert("folded", net, x, 2)
    with torch.no_grad():
        expected = fast(x)
        functional.reset_net(fast)
        with pytest.raises(
            InputError, match=r"layer 'stem.conv1' takes frames .* C=2, got a tensor of shape \[7, 4, 3, 8, 8\]"
        ):
            fast(torch.rand(T, 4, 3, SIZE, SIZE, dtype=torch.float64))
        functional.reset_net(fast)
        assert torch.equal(fast(x=x), expected)


# ---- repeated images --------------------------------------------------------------------------------------------------
class Encoded(StaticLayers):
    """The trace sees an image that is expanded; a call may add to each frame what it likes."""

    noise = None

    def forward(self, x):
        x = x.unsqueeze(0).expand(T, -1, -1, -1, -1)
        if self.noise is not None:
            x = x + self.noise.to(x)
        x = self.lif0(self.pool(self.bn0(self.conv0(x))))
        return self.lif1(self.bn1(self.conv1(x))).mean((-2, -1)).mean(0)


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
def test_frames_that_are_not_alike_after_all_are_single_ones_and_have_gradients(fuse):
    """A MaxPool in front of the neuron allows nothing but single frames there."""
    source, x = make("static layers", torch.float64)
    net = Encoded().double().eval()
    net.load_state_dict(source.state_dict())
    for own, other in zip((net.lif0, net.lif1), (source.lif0, source.lif1), strict=True):
        own.v_threshold = other.v_threshold
        own.train(other.training)
    fast = convert("static layers", net, x, 2, fuse=fuse)
    noise = torch.randn(T, 1, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference = oracle("static layers", net, 2)
    for changed in (fast, reference):
        changed.noise = noise.clone().requires_grad_()
    same(run(fast, x), run(reference, x), **CLOSE)
    torch.testing.assert_close(fast.noise.grad, reference.noise.grad, **CLOSE)
    assert not torch.equal(run(fast, x)[0], run(source, x)[0])


@pytest.mark.parametrize(
    ("name", "policy"), [("static", "exact"), ("static layers", "keep"), ("static layers", {"default": {"k": 3}})], ids=str
)
def test_what_is_alike_runs_once_under_any_policy(name, policy):
    net, x = make(name, torch.float64)
    fast = sj_tac.convert(net, policy, example_input=x)
    report = sj_tac.report(fast)
    (exact,) = [v for v in report.verdicts if v.exact]
    assert exact.macs_after * T == exact.macs_before
    calls = []
    layer_ = fast.get_submodule(exact.layer)
    layer_.register_forward_hook(lambda m, a, out: calls.append(m._tac.ran))
    with torch.no_grad():
        found = fast(x)
        if policy in ("exact", "keep"):
            torch.testing.assert_close(found, net(x), **CLOSE)
    assert calls == ["one frame"]


def test_exact_false_runs_every_frame():
    net, x = make("static layers")
    report = sj_tac.plan(
        net, {"default": {"mode": "preserve", "k": 2, "exact": False, "approximate": True}}, example_input=x
    )
    assert not any(v.exact for v in report.verdicts)
    assert report["conv0"].macs_after * 2 > report["conv0"].macs_before


@pytest.mark.parametrize("settings", [{"normalize": False}, {"weights": "learned"}, {"mode": "collapse"}])
def test_exact_is_for_weights_that_sum_to_one_and_for_preserve(settings):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = layer.Conv2d(3, 4, 3, step_mode="m"), lif()

        def forward(self, x):
            return self.lif(self.conv(x.unsqueeze(0).repeat(T, 1, 1, 1, 1)))

    report = sj_tac.plan(Plain(), {"default": {"k": 7} | settings}, example_input=torch.rand(IMAGE))
    assert not report["conv"].exact


def test_exact_takes_no_k():
    with pytest.raises(sj_tac.errors.PolicyError, match=r'policy="exact" aggregates nothing, so that k=4'):
        sj_tac.plan(Private(), "exact", 4)


@pytest.mark.parametrize("slices", [True, False])
def test_a_net_that_has_just_run_another_batch(slices):
    """Voltages of 8 samples are in it; the sample has 2, and is run beside the symbols where they do not get through."""

    class Unpacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = nn.Conv2d(2, 4, 3, padding=1), neuron.LIFNode(step_mode="m")

        def forward(self, x):
            t, n, _, h, w = x.shape
            y = self.conv(x.flatten(0, 1))
            return self.lif(y.unflatten(0, (t, n)) if slices else y.reshape(t, n, 4, int(h / 1), int(w / 1)))

    net = Unpacked().eval()
    with torch.no_grad():
        net(torch.rand(3, 8, 2, 6, 6))
    kept = net.lif.v
    assert sj_tac.plan(net, example_input=torch.rand(3, 2, 2, 6, 6)).converted
    assert net.lif.v is kept


CONSTANTS = {
    "each sample's": lambda net, y: y * net.sample,
    "each frame's": lambda net, y: y * net.step,
    "each frame's, of one": lambda net, y: y + net.step[: len(y)],
    "the frames' divisor": lambda net, y: net.gain / (y + 3),
    "in place": lambda net, y: y.mul_(net.gain),
}


@pytest.mark.parametrize("constant", CONSTANTS)
def test_what_is_no_constant_of_all_frames_is_refused_or_written(constant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = layer.Conv2d(2, 4, 3, padding=1, step_mode="m"), lif()
            for name, size in (("sample", (3, 1, 1, 1)), ("step", (8, 1, 1, 1, 1)), ("gain", (4, 1, 1))):
                self.register_parameter(name, nn.Parameter(torch.rand(size) + 0.5))

        def forward(self, x):
            return self.lif(CONSTANTS[constant](self, self.conv(x)))

    x = torch.rand(1 if constant == "each frame's, of one" else 8, 3, 2, 8, 8)
    (verdict,) = sj_tac.plan(Net().eval(), example_input=x).verdicts
    assert verdict.reason == (None if constant == "in place" else "NOT_LINEAR")


def test_an_error_that_nothing_converts_says_that_linear_layers_were_not_looked_at():
    net = nn.Sequential(
        layer.Conv2d(2, 4, 3, step_mode="m"), layer.Flatten(step_mode="m"), layer.Linear(144, 5, step_mode="m")
    )
    with pytest.raises(ConversionError, match=r"layers: \[conv, linear\] converts"):
        sj_tac.convert(net.eval(), example_input=torch.rand(3, 2, 2, 8, 8))
