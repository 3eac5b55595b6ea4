"""Whole nets on a CUDA device, as users run them there: residual nets, training, half precision, graphs, calibration, files.

Fused against unfused nets on the same device, and the device against the CPU. They need a device: their shapes are many, and
each specialisation takes g++ a while.
"""

import pytest
import torch
from spikingjelly.activation_based import functional, neuron
from stub_cuda import exact, needs_device
from support import ZOO, csnn, frames, zoo

import sj_tac
from sj_tac.kernels.layout import RUNS

pytestmark = [pytest.mark.gpu, pytest.mark.captured, needs_device("whole nets on one")]
exact_convolutions = pytest.fixture(autouse=True)(exact)
LAYOUTS = [torch.contiguous_format, torch.channels_last]
NETS = [name for name in ZOO if name != "ms_resnet18"]


def there(name, layout=torch.contiguous_format):
    net, x = zoo(name)
    return net.to("cuda", memory_format=layout), x.cuda()


def small(steps=6, samples=4):
    """A net of three chains and frames of events, on the device."""
    return csnn(8, size=16).cuda(), frames(steps, samples, 2, 16, 16).cuda()


def voltages(net):
    return [m.v for m in net.modules() if isinstance(m, neuron.BaseNode) and isinstance(m.v, torch.Tensor)]


@torch.no_grad()
@pytest.mark.parametrize(("policy", "k"), [("preserve", 1), ("preserve", 2), ("preserve", 3), ("collapse", 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETS)
def test_fused_is_unfused(name, layout, policy, k):
    net, x = there(name, layout)
    plain, fast = sj_tac.convert(net, policy, k, fuse=False) if k > 1 else net, sj_tac.convert(net, policy, k)
    before = RUNS["fire", "cupy"]
    for _ in range(2):  # the second call goes on from the first one's voltages
        expected, found = plain(x), fast(x)
        assert expected.std() > 0
        assert (found - expected).abs().mean() < 0.05 * expected.abs().mean() + 0.02
    assert RUNS["fire", "cupy"] > before
    assert all(v.device.type == "cuda" for v in voltages(fast))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["csnn", "sew_resnet18", "spiking_vgg11_bn"])
def test_gradients_point_the_same_way(name, layout, frozen):
    """Fused and unfused: a spike that is tipped over by a rounding changes what is behind it, but not by much."""
    if name == "csnn":
        net, x = csnn(8, size=16).to("cuda", memory_format=layout), frames(5, 2, 2, 16, 16).cuda()
    else:
        net, x = there(name, layout)
    net.train(not frozen)
    for m in net.modules():
        if hasattr(m, "p"):
            m.p = 0.0  # Dropout
    found = []
    for fuse in (False, True):
        fast = sj_tac.convert(net, "preserve", 2, fuse=fuse)
        y = fast(x)
        (y * torch.linspace(-1, 1, y.numel(), device="cuda").reshape(y.shape)).sum().backward()
        found.append({name: p.grad for name, p in fast.named_parameters()})
    plain, fused = found
    assert {n for n, g in plain.items() if g is None} == {n for n, g in fused.items() if g is None}
    largest = max(g.abs().max() for g in plain.values() if g is not None)
    for key, gradient in plain.items():
        if gradient is None or gradient.abs().max() < 1e-5 * largest:  # of a bias before a norm: nothing but roundings
            continue
        angle = torch.nn.functional.cosine_similarity(gradient.flatten(), fused[key].flatten(), 0)
        assert angle > 0.9, (key, float(angle))


def test_a_training_step_with_a_scaler_and_channels_last():
    net = csnn(8, size=16).to("cuda", memory_format=torch.channels_last).train()
    fast, x = sj_tac.convert(net, "preserve", 2), frames(6, 4, 2, 16, 16).cuda()
    optimizer, scaler = torch.optim.SGD(fast.parameters(), 0.01), torch.amp.GradScaler("cuda")
    before = [p.detach().clone() for p in fast.parameters()]
    for _ in range(3):
        functional.reset_net(fast)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = fast(x).float().mean(0).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert any(not torch.equal(a, b) for a, b in zip(before, fast.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in fast.parameters())


def test_calibration_and_files(tmp_path):
    net, x = small(samples=32)
    fast = sj_tac.convert(net, "preserve", 2, match=[x])
    with torch.no_grad():
        functional.reset_net(fast)
        expected = fast(x)
    sj_tac.save(fast, tmp_path / "net.safetensors")
    loaded = sj_tac.load(tmp_path / "net.safetensors", csnn(8, size=16).cuda())
    with torch.no_grad():
        assert torch.equal(loaded(x), expected)
    sj_tac.set_k(loaded, 1)
    restored = sj_tac.restore(fast)
    assert all(torch.equal(a, b) for a, b in zip(restored.state_dict().values(), net.state_dict().values(), strict=True))


def test_a_training_step_as_a_graph():
    """What the device does in a step depends on nothing that the host waits for."""
    net, still = small()
    fast = sj_tac.convert(net, "preserve", 2)

    def step():
        functional.reset_net(fast)
        fast(still).square().sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fast.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    expected = [p.grad.clone() for p in fast.parameters() if p.grad is not None]
    fast.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    found = [p.grad for p in fast.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))
