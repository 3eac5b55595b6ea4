"""On a CUDA device: nets against SpikingJelly there and against the CPU, streams, graphs, autocast, torch.compile.

Where there is no device, whatever needs none runs through the stand-in for one (stub_cuda.py).
"""

import copy
from itertools import product

import pairs
import pytest
import torch
from spikingjelly.activation_based import functional
from stub_cuda import DEVICE, REAL, exact, needs_device, on_the_stub
from support import csnn, frames

import sj_tac
from sj_tac.definition.neurons import OperatorNeuron
from sj_tac.kernels import fire_op

pytestmark = [pytest.mark.gpu, pytest.mark.captured]
device = pytest.fixture(autouse=True)(on_the_stub)
# TF32 would round the convolutions of the device, not those of the CPU; the fastest algorithm may change by call.
exact_convolutions = pytest.fixture(autouse=True)(exact)


def on_device(policy, k, **options):
    net = csnn().to(DEVICE)
    return net, sj_tac.convert(net, policy, k, **options), frames(10, 4, 2, 8, 8).to(DEVICE)


def neurons(net):
    return [m for m in net.modules() if isinstance(m, OperatorNeuron)]


def there(test):
    """A test of a device; without one, of the stand-in where every test runs. test_launch.py has the like."""
    return test if REAL else pytest.mark.exhaustive(test)


@there
@torch.no_grad()
@pytest.mark.parametrize(("policy", "fuse"), list(product(["preserve", "collapse"], [True, False])))
def test_k1_is_spikingjelly_there(policy, fuse):
    net, fast, x = on_device(policy, 1, fuse=fuse)
    expected, got = net(x), fast(x)
    assert expected.std() > 0
    if fuse:  # the folded BatchNorm changes last bits, and with them a spike at the threshold now and then
        assert (got - expected).abs().mean() < 0.02
    else:
        assert torch.equal(got, expected)


@there
@torch.no_grad()
@pytest.mark.parametrize(("policy", "k"), list(product(["collapse", "preserve"], [2, 4])))
def test_the_device_agrees_with_the_cpu_up_to_spikes_at_the_threshold(policy, k):
    net, fast, x = on_device(policy, k)
    y = fast(x).cpu()
    # Where CPU tensors stand for the device's, the CPU's own kernels are not to be had.
    on_cpu = sj_tac.convert(copy.deepcopy(net).cpu(), policy, k, backend="auto" if REAL else "reference")
    functional.reset_net(on_cpu)
    assert (on_cpu(x.cpu()) - y).abs().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if REAL or pairs.EXHAUSTIVE else [torch.bfloat16])
def test_autocast_runs_the_kernels_in_half(dtype, monkeypatch):
    net, fast, x = on_device("preserve", 2)
    seen = []
    original = fire_op.Differentiated.apply
    monkeypatch.setattr(
        fire_op.Differentiated, "apply", lambda *operands: (seen.append(operands[0].dtype), original(*operands))[1]
    )
    with torch.autocast(DEVICE, dtype):
        y = fast(x)
    y.float().sum().backward()
    monkeypatch.undo()
    assert set(seen) == {dtype}
    assert all(p.grad.dtype == p.dtype for p in fast.parameters() if p.grad is not None)
    assert all(m.v.dtype == torch.float32 for m in neurons(fast))
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


@needs_device("torch asks the driver while it compiles")
@torch.no_grad()
def test_torch_compile():
    _, fast, x = on_device("preserve", 2)
    expected = fast(x).clone()
    functional.reset_net(fast)
    compiled = torch.compile(fast, fullgraph=True)
    assert (compiled(x) - expected).abs().mean() < 0.01
    torch.compiler.reset()


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
