"""On a CUDA device: nets against SpikingJelly there and against the CPU, streams, graphs, autocast, torch.compile.

Where there is no device, whatever needs none runs through the stand-in for one (stub_cuda.py).
"""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional
from stub_cuda import DEVICE, REAL, exact, needs_device, on_the_stub
from support import csnn, frames

import sj_tac
from sj_tac.errors import CaptureError
from sj_tac.kernels.gpu import launchers
from sj_tac.kernels.layout import RUNS
from sj_tac.runtime.neurons import UnitModule
from sj_tac.runtime.runs import Run

pytestmark = pytest.mark.gpu
device = pytest.fixture(autouse=True)(on_the_stub)
# TF32 would round the convolutions of the device, not those of the CPU; the fastest algorithm may change by call.
exact_convolutions = pytest.fixture(autouse=True)(exact)


def on_device(policy, k, **options):
    net = csnn().to(DEVICE)
    return net, sj_tac.convert(net, policy, k, **options), frames(10, 4, 2, 8, 8).to(DEVICE)


def test_the_cuda_kernels_are_what_runs():
    assert launchers.problem("cupy") == ""
    _, fast, x = on_device("preserve", 2, backend="cupy")
    before = RUNS["fire", "cupy"]
    with torch.no_grad():
        fast(x)
    converted = sj_tac.report(fast).converted
    heads = [m for m in fast.modules() if isinstance(m, UnitModule) and m._tac.head]
    assert RUNS["fire", "cupy"] == before + len(converted) + len(heads)
    assert {v.kernel for v in converted} == {"cupy, fused with its convolution"}  # all of four channels at most


@torch.no_grad()
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
@pytest.mark.parametrize("fuse", [False, True])
def test_k1_is_spikingjelly_there(policy, fuse):
    net, fast, x = on_device(policy, 1, fuse=fuse)
    expected, got = net(x), fast(x)
    assert expected.std() > 0
    if fuse:  # the folded BatchNorm changes last bits, and with them a spike at the threshold now and then
        assert (got - expected).abs().mean() < 0.02
    else:
        assert torch.equal(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
@pytest.mark.parametrize("k", [2, 4])
def test_the_device_agrees_with_the_cpu_up_to_spikes_at_the_threshold(policy, k):
    net, fast, x = on_device(policy, k)
    y = fast(x).cpu()
    # Where CPU tensors stand for the device's, the CPU's own kernels are not to be had.
    on_cpu = sj_tac.convert(copy.deepcopy(net).cpu(), policy, k, backend="auto" if REAL else "reference")
    functional.reset_net(on_cpu)
    assert (on_cpu(x.cpu()) - y).abs().mean() < 0.02


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_fused_is_unfused_and_so_are_gradients(policy):
    net, fused, x = on_device(policy, 2)
    unfused = sj_tac.convert(net, policy, 2, fuse=False)
    found = []
    for fast in (unfused, fused):
        fast.eval()
        y = fast(x)
        y.sum().backward()
        found.append((y.detach(), {name: p.grad for name, p in fast.named_parameters()}))
    assert (found[0][0] - found[1][0]).abs().mean() < 0.01
    for name, gradient in found[0][1].items():
        error = (found[1][1][name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-6)
        assert error < 0.05, name


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_keeps_its_voltages_in_float32(dtype):
    _, fast, x = on_device("preserve", 2)
    y = fast.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    assert all(m.v.dtype == torch.float32 for m in fast.modules() if isinstance(m, UnitModule))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_runs_the_kernels_in_half(dtype, monkeypatch):
    net, fast, x = on_device("preserve", 2)
    seen = []
    original = Run.__call__

    def fire(self, *arguments):
        seen.append(self.inputs.y.dtype)
        return original(self, *arguments)

    monkeypatch.setattr(Run, "__call__", fire)
    with torch.autocast(DEVICE, dtype):
        y = fast(x)
    y.float().sum().backward()
    monkeypatch.undo()
    assert set(seen) == {dtype}
    assert all(p.grad.dtype == p.dtype for p in fast.parameters() if p.grad is not None)
    assert all(m.v.dtype == torch.float32 for m in fast.modules() if isinstance(m, UnitModule))
    with torch.no_grad():
        functional.reset_net(net)
        assert (net(x) - y.float()).abs().mean() < 0.3


@needs_device("streams and graphs are the device's")
@torch.no_grad()
def test_another_stream_and_a_cuda_graph():
    _, fast, x = on_device("preserve", 2)
    expected = fast(x).clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        functional.reset_net(fast)
        late = torch.empty_like(x).normal_()  # the kernels must wait for what this stream does before
        late.copy_(x)
        got = fast(late)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, expected)
    graph, still = torch.cuda.CUDAGraph(), x.clone()
    functional.reset_net(fast)
    fast(still)
    functional.reset_net(fast)
    with torch.cuda.graph(graph):
        out = fast(still)
    for _ in range(2):
        still.copy_(x)
        graph.replay()
        assert torch.equal(out, expected)
    still.zero_()
    graph.replay()
    assert not torch.equal(out, expected)


@needs_device("two of them")
@torch.no_grad()
def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    net, fast, x = on_device("preserve", 2)
    there = sj_tac.convert(copy.deepcopy(net).to("cuda:1"), "preserve", 2)
    assert torch.equal(there(x.to("cuda:1")).cpu(), fast(x).cpu())


@needs_device("torch asks the driver while it compiles")
@torch.no_grad()
def test_torch_compile():
    _, fast, x = on_device("preserve", 2)
    expected = fast(x).clone()
    functional.reset_net(fast)
    compiled = torch.compile(fast, fullgraph=True)
    assert (compiled(x) - expected).abs().mean() < 0.01
    torch.compiler.reset()


def test_repeats_are_the_same():
    """Gradients too: every sum has one order."""
    _, fast, x = on_device("preserve", 2)
    found = []
    for _ in range(3):
        functional.reset_net(fast)
        fast.zero_grad()
        y = fast(x)
        y.square().sum().backward()
        found.append([y.detach().clone(), *(p.grad.clone() for p in fast.parameters() if p.grad is not None)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_diagnosing_searching_and_recalibrating_there():
    net, fast, x = on_device("preserve", 2)
    on_cpu = sj_tac.diagnose([x.cpu()], net)
    assert list(on_cpu.layers) == ["0", "4", "8"]
    assert on_cpu.ratio == pytest.approx(sj_tac.diagnose([x], net).ratio, rel=1e-6)

    def cost(net):
        return sum(1 / v.k for v in sj_tac.report(net).converted) if "_sj_tac" in vars(net) else 9.0

    policy = sj_tac.search(net, [x.cpu()], max_drop=1, ks=(1, 2), cost=cost, progress=False)
    assert [rule.k for rule in policy.rules] == [2, 2, 2]
    before = {key: value.clone() for key, value in fast.state_dict().items()}
    assert sj_tac.recalibrate(fast, [x.cpu()]) == ["1", "5"]
    assert not torch.equal(fast[1].running_var, before["1.running_var"])
    sj_tac.recalibrate(fast, undo=True)
    assert all(torch.equal(before[key], value) for key, value in fast.state_dict().items())


@needs_device("a CUDA graph is the device's")
@pytest.mark.parametrize("state", ["reset", "carried"])
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_a_captured_call_replays_what_the_net_computes(policy, state):
    _, fast, x = on_device(policy, 2)
    xs = [x, x.flip(0), x.roll(1, 1)]
    call = sj_tac.capture(fast, x, state=state)
    found = [call(part) for part in xs]
    functional.reset_net(fast)
    with torch.no_grad():
        for part, out in zip(xs, found, strict=True):
            if state == "reset":
                functional.reset_net(fast)
            assert torch.equal(out, fast(part))


class Waiting(torch.nn.Module):
    """A net behind which something waits for the device."""

    def __init__(self, net, wait):
        super().__init__()
        self.net, self.wait = net, wait

    def forward(self, x):
        y = self.net(x)
        return y * 2 if self.wait(y) else y


# What torch notices before a recording begins, and what nobody does: the recording itself fails.
@needs_device("a CUDA graph is the device's")
@pytest.mark.parametrize(
    "wait", [lambda y: bool(y.sum() > 0), lambda y: torch.cuda.synchronize()], ids=["bool", "synchronize"]
)
def test_a_forward_that_waits_cannot_be_captured_and_leaves_nothing_behind(wait):
    _, fast, x = on_device("preserve", 2)
    stream, mode, random = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode(), torch.cuda.get_rng_state()
    with pytest.raises(CaptureError, match="cannot be recorded"):
        sj_tac.capture(Waiting(fast, wait).eval(), x)
    assert (torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == (stream, mode)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert torch.rand(1000, device=DEVICE).std() > 0.1
    call = sj_tac.capture(fast, x)
    functional.reset_net(fast)
    with torch.no_grad():
        assert torch.equal(call(x), fast(x))
