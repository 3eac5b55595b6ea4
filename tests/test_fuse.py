"""A fused net is its unfused self: on real data, in training, watched or cut, and what it no longer writes."""

import copy

import pytest
import quickstart
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import ZOO, awake, conv, csnn, frames, node, norm, only_v2, recorded, zoo
from torch import nn

import sj_tac
from sj_tac.kernels import fire_op
from sj_tac.kernels.cpu.launches import Launch
from sj_tac.runtime import deferred
from sj_tac.runtime.convs import DriveModule
from sj_tac.runtime.neurons import UnitModule


def both(net, policy, k, **options):
    return sj_tac.convert(net, policy, k, fuse=False, **options), sj_tac.convert(net, policy, k, **options)


def heads(net):
    """How many neurons of Linear layers run their steps as one operator, without being converted."""
    return sum(isinstance(m, UnitModule) and m._tac.head for m in net.modules())


@pytest.fixture(scope="module")
def tasks():
    made = [quickstart.digits(), quickstart.events()]
    return [(t.net, t.frames[:, :50]) for t in made]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("policy", "k"), [("preserve", 1), ("preserve", 2), ("preserve", 5), ("collapse", 4)])
def test_real_data_spike_for_spike(tasks, which, policy, k, monkeypatch):
    net, x = tasks[which]
    unfused, fused = both(net, policy, k)
    with torch.no_grad():
        in_parts = fused(x)
        functional.reset_net(fused)
        monkeypatch.setattr(deferred, "LARGE", 1 << 60)  # each neuron once
        before = fire_op.RUNS["fire", "numba"] + fire_op.RUNS["conv_fire", "numba"]
        expected, got = unfused(x), fused(x)
    assert torch.equal(in_parts, got)
    report = sj_tac.report(fused)
    runs = fire_op.RUNS["fire", "numba"] + fire_op.RUNS["conv_fire", "numba"] - before
    assert runs == len(report.converted) + len(report.stretched) + heads(fused)
    assert expected.mean() > 0.01
    # The folded BatchNorm changes last bits of the drive: a spike may tip over at the threshold, one in a million.
    assert (expected != got).float().mean() <= 1e-6 * x.shape[0]
    # A first layer runs with its convolution where torch's own adds in an order that the kernel has: not on every processor.
    kernels = [v.kernel for v in report.verdicts]
    assert kernels[0] in ("numba, fused", "numba, fused with its convolution")
    assert set(kernels[1:]) == {"numba, fused"}
    assert {v.kernel for v in sj_tac.report(unfused).verdicts} == {"reference"}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("size", [28, 29])
def test_a_net_in_channels_last_stays_in_it(tasks, size, k):
    """Between the chains nothing is copied into the other format, and the spikes are those of the unfused net in it."""
    net, x = tasks[0]  # its first pool cuts a row off a map of 29 x 29; behind it is the same
    x = nn.functional.pad(x, (0, size - 28, 0, size - 28))
    unfused, fused = both(copy.deepcopy(net).to(memory_format=torch.channels_last), "preserve", k)
    seen = []
    original = Launch.__call__

    def fire(self, y, *arguments):
        out, v = original(self, y, *arguments)
        seen.append([t.flatten(0, 1).is_contiguous(memory_format=torch.channels_last) for t in (y, out)])
        return out, v

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", fire)
        patch.setattr(deferred, "LARGE", 1 << 60)  # each neuron once, on drives in memory
        patch.setattr(deferred, "LARGE_FOR_ONE", 1 << 60)
        expected, got = unfused(x), fused(x)
    assert seen == [[True, True]] * (len(sj_tac.report(fused).converted) + heads(fused))
    assert expected.mean() > 0.01
    assert (expected != got).float().mean() <= 1e-6 * x.shape[0]


@pytest.mark.parametrize("which", [0, 1])
def test_flips_at_the_threshold_are_counted_layer_by_layer(tasks, which):
    """Each fused chain on the unfused chain's own input: at most one spike in a million differs."""
    net, x = tasks[which]
    unfused, fused = both(net, "preserve", 1)
    functional.reset_net(net)
    with torch.no_grad(), recorded(net, (layer.Conv2d, layer.MaxPool2d)) as host:
        net(x)
    for name, child in unfused.named_modules():
        if not isinstance(child, DriveModule):
            continue
        head, position = name.rsplit(".", 1)
        chain = fused.get_submodule(head)[int(position) : int(position) + 4]
        first, second = copy.deepcopy(chain), sj_tac.restore(fused).get_submodule(head)[int(position) : int(position) + 4]
        source = second(x) if int(position) == 0 else second(host[f"{head}.{int(position) - 1}"][0])
        got = first(x if int(position) == 0 else host[f"{head}.{int(position) - 1}"][0])
        assert first[2]._tac.ran == "numba"
        assert source.mean() > 0.005
        assert (got != source).float().mean() <= 1e-6


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
@pytest.mark.parametrize("steps", [8, 7])
def test_training_gives_the_same_spikes_gradients_and_statistics(frozen, policy, steps):
    net = csnn(make=lambda: node("plif", v_threshold=0.3))
    for module in net:
        if isinstance(module, layer.Dropout):
            module.p = 0.0
    x = frames(steps, 3, 2, 8, 8)
    results = []
    for fast in both(net, policy, 2):
        fast.train()
        if frozen:
            sj_tac.freeze_bn(fast)
        y = fast(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results.append((y.detach(), [p.grad for p in fast.parameters()], fast[1].running_mean, fast[1].running_var))
    (y, grads, mean, var), (z, fused_grads, fused_mean, fused_var) = results
    assert torch.equal(y, z)
    for a, b in zip(grads, fused_grads, strict=True):
        assert (a - b).abs().max() <= 1e-4 * a.abs().max().clamp_min(1e-2)
    torch.testing.assert_close(mean, fused_mean, rtol=1e-5, atol=1e-6)
    # torch corrects the variance by n / (n - 1) with n the frames it sees: groups here, all frames there.
    torch.testing.assert_close(var, fused_var, rtol=2e-2, atol=1e-6)


def test_groups_travel_and_nothing_of_t_frames_is_written(monkeypatch):
    net = csnn()
    fast = sj_tac.convert(net, "preserve", 4)
    seen = []
    plain = layer.Conv2d.forward

    def watch(self, x):
        seen.append((x.shape[0], self._tac.ran))
        return plain(self, x)

    monkeypatch.setattr(layer.Conv2d, "forward", watch)
    with torch.no_grad():
        fast(frames(10, 2, 2, 8, 8))
    # The second conv is handed sums through pool and all; so is the third.
    assert seen == [(3, "frames"), (3, "sums"), (3, "sums")]
    assert [v.frames_made for v in sj_tac.report(fast).verdicts] == [{}, {}, {}]


def saved_bytes(net, x):
    """Bytes that autograd keeps for the backward of one call, parameters aside, and their shapes."""
    own = {p.data_ptr() for p in net.parameters()} | {b.data_ptr() for b in net.buffers()}
    kept = {}

    def pack(t):
        if t.data_ptr() not in own:
            kept[(t.data_ptr(), t.shape)] = t.numel() * t.element_size()
        return t

    functional.reset_net(net)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x)
    return sum(kept.values()), [shape for _, shape in kept]


def test_the_backward_keeps_less_than_half_and_nothing_of_t_frames():
    modules, channels = [], 2
    for _ in range(3):
        modules += [
            conv(channels, 16, bias=False),
            norm(16),
            node("lif", v_threshold=0.4),
            layer.MaxPool2d(2, step_mode="m"),
        ]
        channels = 16
    net, steps = nn.Sequential(*modules).train(), 16
    x = frames(steps, 4, 2, 16, 16)
    fast = sj_tac.convert(net, "preserve", 2).train()
    sj_tac.freeze_bn(fast)
    host_bytes, _ = saved_bytes(net, x)
    fused_bytes, shapes = saved_bytes(fast, x)
    assert fused_bytes <= 0.45 * host_bytes, (fused_bytes, host_bytes)
    own = [s for s in shapes if s[0] in (steps, steps * 4) and len(s) >= 4 and tuple(s) != tuple(x.shape)]
    assert own == []


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_hook_on_an_absorbed_module_sees_frames_and_changes_nothing(index):
    net = csnn()
    unfused, fused = both(net, "preserve", 2)
    x = frames(7, 2, 2, 8, 8)
    shown = []
    handles = [n[index].register_forward_hook(lambda m, a, out: shown.append(out[:] * 1)) for n in (unfused, fused)]
    with torch.no_grad():
        expected, got = unfused(x), fused(x)
    assert torch.equal(expected, got)
    assert type(shown[1]) is torch.Tensor
    torch.testing.assert_close(shown[1], shown[0], rtol=1e-6, atol=1e-6)
    assert sj_tac.report(fused)["0"].kernel == "numba, fused"
    functional.reset_net(fused)
    assert torch.equal(fused(x), expected)
    # While autograd records, backward hooks on modules inside get ordinary tensors, and gradients as in the source.
    handles.append(fused[index].register_full_backward_hook(lambda m, gi, go: None))
    functional.reset_net(fused)
    assert torch.equal(fused(x), expected)
    verdict = sj_tac.report(fused)["0"]
    assert (verdict.kernel, verdict.last_read, verdict.last_gave) == ("reference", "plain", "plain")
    assert "frames were ordinary at every module's border" in verdict.detail
    for handle in handles[1:]:
        handle.remove()
    functional.reset_net(fused)
    assert torch.equal(fused(x), expected)
    assert sj_tac.report(fused)["0"].kernel == "numba, fused"


def test_a_hook_on_the_reader_makes_its_writer_hand_out_frames():
    unfused, fused = both(csnn(), "preserve", 2)
    x = frames(7, 2, 2, 8, 8)
    inputs = []
    fused[4].register_forward_pre_hook(lambda m, a: inputs.append(a[0].shape[0]))
    with torch.no_grad():
        assert torch.equal(unfused(x), fused(x))
    assert inputs == [7]
    assert sj_tac.report(fused)["0"].kernel == "numba, fused"


def test_a_failed_call_hands_nothing_to_the_next(monkeypatch):
    """The first chain has announced groups when the call fails; in the next call it hands out frames."""
    torch.manual_seed(0)
    modules = []
    for inputs in (2, 4):
        modules += [conv(inputs, 4), norm(4), node("lif", v_threshold=0.3), layer.Dropout(0.3, step_mode="m")]
    x = frames(7, 2, 2, 8, 8)
    unfused, fused = both(awake(nn.Sequential(*modules).eval(), x), "preserve", 2)

    def fail(self, *args, **kwargs):
        raise RuntimeError("planned")

    with torch.no_grad():
        with monkeypatch.context() as patched:
            patched.setattr(layer.Dropout, "forward", fail)
            with pytest.raises(RuntimeError, match="planned"):
                fused(x)
        functional.reset_net(fused)
        fused[0].register_forward_hook(lambda m, a, out: None)  # unfuses the first chain
        assert torch.equal(fused(x), unfused(x))


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_cut_nets_and_monitors_see_what_the_unfused_net_shows(policy):
    net = csnn()
    unfused, fused = both(net, policy, 3)
    x = frames(7, 2, 2, 8, 8)
    with torch.no_grad():
        for stop in range(1, len(net)):
            for fast in (unfused, fused):
                functional.reset_net(fast)
            expected, got = unfused[:stop](x), fused[:stop](x)
            assert expected.shape == got.shape
            if stop == 3 and policy == "collapse":
                # Without the MaxPool that the trace saw behind it, a neuron in a collapse emits the mean itself.
                expected = torch.cat([g.mean(0, keepdim=True).expand_as(g) for g in expected.split(3)])
            torch.testing.assert_close(got + 0, expected, rtol=1e-6, atol=1e-6, msg=str(stop))
        for fast in (unfused, fused):
            functional.reset_net(fast)
        with recorded(unfused, neuron.BaseNode) as expected_spikes, recorded(fused, neuron.BaseNode) as got_spikes:
            unfused(x), fused(x)
    for name, (spikes,) in expected_spikes.items():
        if name == "2" and policy == "collapse":
            spikes = torch.cat([g.mean(0, keepdim=True).expand_as(g) for g in spikes.split(3)])
        torch.testing.assert_close(got_spikes[name][0], spikes, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", list(ZOO))
def test_fused_zoo_nets_agree_with_unfused_ones(name):
    net, x = zoo(name)
    example = x if name == "ms_resnet18" else None
    for k in (1, 2):
        unfused, fused = both(net, "preserve", k, example_input=example)
        with torch.no_grad():
            expected, got = unfused(x), fused(x)
        kernels = [v.kernel for v in sj_tac.report(fused).converted]
        assert set(kernels) <= {"numba, fused", "reference, fused"}
        # Flips at the threshold grow through the layers behind them; without any, outputs are equal.
        assert (expected != got).float().mean() < 0.25
        assert (expected - got).abs().mean() <= 0.02 * expected.abs().mean().clamp_min(1e-3)


@pytest.mark.parametrize("kind", [pytest.param("threshold", marks=only_v2), "no affine", "none", "identity"])
def test_every_norm_fuses(kind):
    torch.manual_seed(0)
    made = {
        "threshold": lambda: [layer.ThresholdDependentBatchNorm2d(1.0, 0.5, 4)],
        "no affine": lambda: [layer.BatchNorm2d(4, affine=False, step_mode="m")],
        "none": lambda: [],
        "identity": lambda: [nn.Identity(), norm(4)],
    }[kind]
    modules = []
    for inputs in (2, 4):
        modules += [conv(inputs, 4), *made(), node("plif", v_threshold=0.3), layer.Dropout(0.3, step_mode="m")]
    net = nn.Sequential(*modules).eval()
    for module in net:
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    x = frames(7, 2, 2, 8, 8)
    awake(net, x)
    for training in (False, True):
        outputs = []
        for fast in both(net, "preserve", 3):
            fast.train(training)
            sj_tac.freeze_bn(fast)
            torch.manual_seed(1)  # the dropout masks
            outputs.append(fast(x).detach())
            assert all(v.status == "converted" for v in sj_tac.report(fast).verdicts)
        assert outputs[0].std() > 0
        assert torch.equal(*outputs)
    assert {v.kernel for v in sj_tac.report(fast).verdicts} == {"numba, fused"}


def test_state_and_calls_in_a_row():
    unfused, fused = both(csnn(), "preserve", 4)
    x = frames(12, 2, 2, 8, 8)
    with torch.no_grad():
        for chunk in (x[:8], x[8:], x[:3]):
            assert torch.equal(unfused(chunk), fused(chunk))
    for a, b in zip(unfused, fused, strict=True):
        if hasattr(a, "v_threshold"):
            torch.testing.assert_close(a.v, b.v, rtol=1e-5, atol=1e-5)


@only_v2
def test_store_v_seq_and_other_surrogates_are_named_and_right():
    from spikingjelly.activation_based import surrogate

    net = csnn(make=lambda: node("lif", surrogate_function=surrogate.Rect()))
    net[2].store_v_seq = True
    unfused, fused = both(net, "preserve", 2)
    x = frames(6, 2, 2, 8, 8)
    with torch.no_grad():
        assert torch.equal(unfused(x), fused(x))
    assert fused[2].v_seq.shape[0] == 6
    report = sj_tac.report(fused)
    assert "store_v_seq" in report["0"].detail
    # Without gradients any surrogate will do.
    assert report["4"].kernel == "numba, fused"
    assert report["4"].detail.startswith("in training it runs on reference: the compiled kernels have no derivative")
    for fast in (unfused, fused):
        functional.reset_net(fast)
    assert torch.equal(unfused(x), fused(x))
    verdict = sj_tac.report(fused)["4"]
    assert verdict.kernel == "reference, fused"
    assert "surrogate Rect" in verdict.detail


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_nets(dtype):
    unfused, fused = both(csnn().to(dtype), "preserve", 2)
    x = frames(6, 2, 2, 8, 8, dtype=dtype)
    with torch.no_grad():
        expected, got = unfused(x), fused(x)
    assert got.dtype == dtype
    assert fused[2].v.dtype == torch.float32
    # The unfused BatchNorm rounds its output to half, the fused one does not.
    assert (expected != got).float().mean() < 0.2
