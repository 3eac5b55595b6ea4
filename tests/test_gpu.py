"""On a CUDA device: the same definitions, against SpikingJelly there and against the CPU."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional
from support import csnn, frames

import sj_tac

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def exact_convs(monkeypatch):
    """TF32 would round the convolutions of the device, not those of the CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def on_device(policy, k):
    net = csnn().cuda()
    return net, sj_tac.convert(net, policy, k), frames(10, 4, 2, 8, 8).cuda()


@torch.no_grad()
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_k1_is_spikingjelly_there(policy, exact_convs):
    net, fast, x = on_device(policy, 1)
    expected = net(x)
    assert expected.std() > 0
    assert torch.equal(fast(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
@pytest.mark.parametrize("k", [2, 4])
def test_the_device_agrees_with_the_cpu_up_to_spikes_at_the_threshold(policy, k, exact_convs):
    net, fast, x = on_device(policy, k)
    y = fast(x).cpu()
    on_cpu = sj_tac.convert(copy.deepcopy(net).cpu(), policy, k)
    functional.reset_net(on_cpu)
    assert (on_cpu(x.cpu()) - y).abs().mean() < 0.02


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_keeps_its_voltages_in_float32(dtype):
    _, fast, x = on_device("preserve", 2)
    y = fast.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    assert all(m.v.dtype == torch.float32 for m in fast.modules() if hasattr(m, "v_threshold") and hasattr(m, "_tac"))
