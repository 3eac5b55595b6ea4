"""Folded nets, repeated images and registered classes where the call is not what the sample was."""

import pytest
import torch
from idioms.miniatures import IMAGE, SIZE, N, Private, StaticLayers, T, Transformer, conv, lif
from idioms.test_idioms import BITS, CLOSE, convert, make, oracle, run, same
from spikingjelly.activation_based import functional, layer, neuron
from torch import nn
from torch.nn import functional as F

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


@pytest.mark.parametrize("shape", [(T, 1, 2, SIZE, SIZE), (4, 4, 2, SIZE, SIZE)], ids=["one sample", "N is T"])
def test_a_sample_that_cannot_tell_a_fold_says_so(shape):
    net = Private()
    with pytest.raises(sj_tac.errors.ConversionError, match=r"FOLD_AMBIGUOUS.*N >= 2 samples and N other than T"):
        sj_tac.convert(net, example_input=torch.rand(shape))
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


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
def test_a_t_that_was_edited_is_one_clear_error(fuse):
    fast = sj_tac.convert(FixedT().eval(), example_input=torch.rand(FOLDED), fuse=fuse)
    fast.T = 3
    with pytest.raises(InputError, match=r"(unfolded as 3 steps|runs 7 samples, but the net's input has 3)"):
        fast(torch.rand(FOLDED))
    fast.T = T
    functional.reset_net(fast)
    fast(torch.rand(FOLDED))


def test_another_batch_for_a_net_of_fixed_t_is_fine():
    net = FixedT().double().eval()
    fast = sj_tac.convert(net, k=1, example_input=torch.rand(FOLDED, dtype=torch.float64))
    x = torch.rand(T, 5, 2, SIZE, SIZE, dtype=torch.float64)
    torch.testing.assert_close(fast(x), net(x), **CLOSE)


def test_keyword_arguments_say_t_too():
    net, x = make("folded", torch.float64)
    fast = convert("folded", net, x, 2)
    with torch.no_grad():
        expected = fast(x)
        functional.reset_net(fast)
        assert torch.equal(fast(x=x), expected)


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
def test_a_part_that_is_called_alone_does_not_know_t(fuse):
    net, x = make("folded", torch.float64)
    fast = convert("folded", net, x, 2, fuse=fuse)
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


def test_a_call_that_fails_leaves_nothing_for_the_next_one():
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
        assert torch.equal(fast(x), expected)


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
def test_frames_that_are_not_alike_after_all_are_single_ones(fuse):
    """A MaxPool in front of the neuron allows nothing but single frames there."""
    source, x = make("static layers", torch.float64)
    net = Encoded().double().eval()
    net.load_state_dict(source.state_dict())
    for own, other in zip((net.lif0, net.lif1), (source.lif0, source.lif1), strict=True):
        own.v_threshold = other.v_threshold
        own.train(other.training)
    fast = convert("static layers", net, x, 2, fuse=fuse)
    noise = torch.randn(T, 1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    reference = oracle("static layers", net, 2)
    for changed in (fast, reference):
        changed.noise = noise
    same(run(fast, x), run(reference, x), **CLOSE)
    assert not torch.equal(run(fast, x)[0], run(source, x)[0])


def test_frames_whose_gradients_are_wanted_are_single_ones():
    source, _ = make("static layers", torch.float64)
    net = Encoded().double().eval()
    net.load_state_dict(source.state_dict())
    fast = sj_tac.convert(net, "exact", example_input=inputs_of(IMAGE))
    added = torch.zeros(T, 1, 3, SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    for m in (*net.modules(), *fast.modules()):
        m.train(type(m).__name__.endswith("LIFNode"))
    x = inputs_of(IMAGE)
    found = []
    for each in (fast, net):
        each.noise = added
        (gradient,) = torch.autograd.grad(each(x).sum(), added)
        found.append(gradient)
    torch.testing.assert_close(*found, **CLOSE)


def inputs_of(shape):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["static", "static layers"])
@pytest.mark.parametrize(
    "policy", ["exact", "keep", {"default": {"mode": "preserve", "k": 3}}], ids=["exact", "keep", "k=3"]
)
def test_what_is_alike_runs_once_under_any_policy(name, policy):
    net, x = make(name)
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
            assert torch.equal(found, net(x))
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


def test_a_stem_in_front_of_the_repeat_is_told_so():
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm, self.lif0 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), lif()
            self.conv, self.lif1 = layer.Conv2d(6, 6, 3, padding=1, step_mode="m"), lif()

        def forward(self, x):
            x = self.norm(self.stem(x))
            x.unsqueeze_(0)
            x = x.repeat(T, 1, 1, 1, 1)
            return self.lif1(self.conv(self.lif0(x)))

    report = sj_tac.plan(Stem().eval(), example_input=torch.rand(IMAGE))
    assert report["stem"].reason == "ONCE_ALREADY"
    assert report["conv"].status == "converted"


def test_bits_are_compared_where_they_can_be():
    assert BITS == {"rtol": 0, "atol": 0}


class SingleStep(nn.Module):
    """Time is a loop of whoever calls it, and convolutions are torch's own."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.lif = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), neuron.LIFNode()

    def forward(self, x):
        return self.lif(self.bn(self.conv(x)))


def test_a_net_that_steps_one_frame_at_a_time_is_told_so():
    (verdict,) = sj_tac.plan(SingleStep().eval(), example_input=torch.rand(3, 2, 8, 8)).verdicts
    assert verdict.reason == "NOT_MULTI_STEP"
    assert "'lif' is in step_mode 's'" in verdict.detail


class OwnLoop(nn.Module):
    def forward(self, x):
        v, spikes = 0.0, []
        for t in range(x.shape[0]):
            v = 0.5 * v + x[t]
            spikes.append((v > 0.5).to(x))
            v = v * (1 - spikes[-1])
        return torch.stack(spikes)


def test_a_neuron_of_ones_own_is_named_where_its_loop_is_in_the_way():
    net = nn.Sequential(layer.Conv2d(2, 4, 3, step_mode="m"), layer.BatchNorm2d(4, step_mode="m"), OwnLoop()).eval()
    (verdict,) = sj_tac.plan(net, example_input=torch.rand(3, 2, 2, 8, 8)).verdicts
    assert verdict.reason == "NOT_LINEAR"
    assert "compares, as one's own neuron would" in " ".join((verdict.detail, *verdict.obstacles))
    assert "sj_tac.register_neuron" in str(sj_tac.plan(net, example_input=torch.rand(3, 2, 2, 8, 8)))


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


@pytest.mark.parametrize("constant", ["each sample's", "each frame's", "in place", "the frames' divisor"])
def test_what_is_no_constant_of_all_frames_is_refused_or_written(constant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = layer.Conv2d(2, 4, 3, padding=1, step_mode="m"), neuron.LIFNode(step_mode="m")
            self.each = nn.Parameter(torch.rand(3, 1, 1, 1) if constant == "each sample's" else torch.rand(5, 1, 1, 1, 1))
            self.gain = nn.Parameter(torch.rand(4, 1, 1) + 0.5)

        def forward(self, x):
            y = self.conv(x)
            if constant == "in place":
                y *= self.gain
            else:
                y = self.gain / (y + 3) if constant == "the frames' divisor" else y * self.each
            return self.lif(y)

    x = torch.rand(5, 3, 2, 8, 8)
    (verdict,) = sj_tac.plan(Net().eval(), example_input=x).verdicts
    assert (verdict.reason or "") == ("" if constant == "in place" else "NOT_LINEAR")


def test_an_error_that_nothing_converts_says_that_linear_layers_were_not_looked_at():
    net = nn.Sequential(
        layer.Conv2d(2, 4, 3, step_mode="m"), layer.Flatten(step_mode="m"), layer.Linear(144, 5, step_mode="m")
    )
    with pytest.raises(ConversionError, match=r"layers: \[conv, linear\] converts"):
        sj_tac.convert(net.eval(), example_input=torch.rand(3, 2, 2, 8, 8))


CHANGES_TIME = {
    "pad of time": lambda net, y: F.pad(y, (0, 0, 0, 0, 0, 0, 0, 0, 1, -1)),
    "pad of samples": lambda net, y: F.pad(y, (0, 0, 0, 0, 0, 0, 1, -1)),
    "folded pad of samples": lambda net, y: F.pad(y.flatten(0, 1), (0, 0, 0, 0, 0, 0, 3, -3)).unflatten(0, y.shape[:2]),
    "steps of a sample of one": lambda net, y: y + net.steps[: y.shape[0]],
    "whole numbers": lambda net, y: y.to(torch.uint8).to(torch.float32),
}


@pytest.mark.parametrize("between", CHANGES_TIME)
def test_what_moves_frames_or_rounds_them_is_no_affine_map(between):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lif = layer.Conv2d(2, 4, 3, padding=1, step_mode="m"), neuron.LIFNode(step_mode="m")
            self.steps = nn.Parameter(torch.rand(8, 1, 1, 1, 1))

        def forward(self, x):
            return self.lif(CHANGES_TIME[between](self, self.conv(x)))

    x = torch.rand(1 if between == "steps of a sample of one" else 5, 3, 2, 8, 8)
    (verdict,) = sj_tac.plan(Net().eval(), example_input=x).verdicts
    assert verdict.reason == "NOT_LINEAR"


@pytest.mark.parametrize("pad", [nn.ZeroPad3d((0, 0, 0, 0, 1, -1)), nn.ZeroPad2d((0, 0, 1, -1))], ids=repr)
def test_a_pad_that_reaches_time_or_samples_is_no_affine_map(pad):
    net = nn.Sequential(layer.Linear(4, 6, step_mode="m"), pad, neuron.LIFNode(step_mode="m")).eval()
    policy = {"layers": ["linear"], "default": {"mode": "preserve", "k": 2}}
    (verdict,) = sj_tac.plan(net, policy, example_input=torch.rand(5, 3, 4)).verdicts
    assert verdict.reason == "NOT_LINEAR"
