"""The two hosts: a checkpoint of the quickstart's net goes from the one to the other, converts there, and comes back."""

import subprocess
from pathlib import Path

import hosts
import pytest
import quickstart
import torch
from spikingjelly.activation_based import base, layer, neuron
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac import host

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import nets, sj_tac
from sj_tac import host
from spikingjelly.activation_based import functional
given = torch.load(sys.argv[2], weights_only=True)
net = getattr(nets, given["net"])()
net.load_state_dict(given["state"], strict=True)
net.eval()
fast = sj_tac.convert(net, given["policy"], 2, example_input=given["x"][:, :1])
functional.reset_net(fast)
with torch.no_grad():
    source, converted = net(given["x"]), fast(given["x"])
torch.save({"state": fast.state_dict(), "is_v2": host.IS_V2, "source": source, "converted": converted}, sys.argv[3])
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not host.IS_V2, reason="this Python has the older host itself")
@pytest.mark.parametrize(("which", "policy"), [("digits", "preserve"), ("events", "collapse")])
def test_the_quickstarts_checkpoint_goes_to_the_older_host_and_back(which, policy, tmp_path):
    task = getattr(quickstart, which)()
    x = task.frames[:, :50]
    given = {"net": type(task.net).__name__, "state": task.net.state_dict(), "policy": policy, "x": x}
    torch.save(given, tmp_path / "there.pt")
    other = hosts.python_or_skip(hosts.OLDER)
    command = [other, "-W", "ignore", "-c", SCRIPT, str(EXAMPLES), tmp_path / "there.pt", tmp_path / "back.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert not back["is_v2"]

    fast = sj_tac.convert(task.net, policy, 2)
    with torch.no_grad():
        source, converted = task.net(x), fast(x)
    # The hosts order their operations differently: a spike may tip over at the threshold, and go on.
    for here, there in ((source, back["source"]), (converted, back["converted"])):
        assert (here.mean(0).argmax(1) == there.mean(0).argmax(1)).float().mean() >= 0.98
        assert (here - there).abs().mean() <= 0.01 * here.abs().mean()
    again = type(task.net)()
    again.load_state_dict(back["state"], strict=True)
    sj_tac.convert(again, policy, 2).load_state_dict(back["state"], strict=True)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), given["state"].values(), strict=True))


@pytest.mark.skipif(host.IS_V2, reason="SpikingJelly 2.0 has no backend=")
def test_code_that_names_a_backend_converts():
    """neuron.LIFNode(backend="cupy") needs CuPy to be made, and then is an ordinary LIFNode that sj_tac converts."""
    spiking = neuron.LIFNode(step_mode="m", v_threshold=0.4)
    spiking._backend = "cupy"
    torch.manual_seed(0)
    net = nn.Sequential(layer.SeqToANNContainer(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), spiking).double().eval()
    x = frames(4, 2, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = net(x)
        fast = sj_tac.convert(net, "preserve", 1, example_input=x)
        assert fast[1].backend == "cupy"
        torch.testing.assert_close(fast(x), expected, rtol=1e-9, atol=1e-9)


def test_which_host_this_is():
    assert hasattr(base.MemoryModule, "materialize_states") == host.IS_V2
    fast = sj_tac.convert(nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3)))
    with torch.no_grad():
        fast(frames(4, 2, 2, 6, 6))
    assert fast[2].v.shape == (2, 3, 6, 6)
