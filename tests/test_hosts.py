"""The two hosts: a checkpoint of the quickstart's net goes from the one to the other, converts there, and comes back."""

import copy
import math
import subprocess
from pathlib import Path

import hosts
import pytest
import quickstart
import torch
from defined import given, same
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, frames, norm
from torch import nn

import sj_tac
from sj_tac import host
from sj_tac.errors import InputError

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


NEURONS = {"LIF": neuron.LIFNode, "IF": neuron.IFNode, "PLIF": neuron.ParametricLIFNode}
NODES = pytest.mark.parametrize(("kind", "v_reset"), [("LIF", None), ("LIF", 0.0), ("IF", None), ("PLIF", -0.1)])


def one_neuron(kind, v_reset, v_threshold):
    torch.manual_seed(0)
    spiking = NEURONS[kind](v_reset=v_reset, step_mode="m")
    spiking.v_threshold = v_threshold
    return nn.Sequential(conv(2, 6), norm(6), spiking).double()


@NODES
@pytest.mark.parametrize("mode", ["preserve", "collapse"])
def test_a_trained_threshold_has_the_sources_gradient(kind, v_reset, mode):
    """SpikingJelly before 2.0 passes a threshold no gradient through a soft reset, and neither does a converted net."""
    source, x = one_neuron(kind, v_reset, nn.Parameter(torch.tensor(0.4))), frames(6, 3, 2, 7, 7, dtype=torch.float64)
    made = [sj_tac.convert(copy.deepcopy(source), mode, k, fuse=fuse) for k in (1, 2) for fuse in (True, False)]
    of_source, *found = [given(net.train(), x) for net in (source, *made)]
    assert 0.05 < of_source["output 0"].mean() < 0.6
    pairs = [(found[0], of_source), (found[1], of_source)] if mode == "preserve" else []
    for got, expected in [*pairs, (found[0], found[1]), (found[2], found[3])]:
        same(got, expected)
    by_the_host = v_reset is None and not host.IS_V2
    assert ("v_threshold is trained" in str(sj_tac.report(made[2]))) is by_the_host


@pytest.mark.captured
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("kind", "v_reset"), [("LIF", None), ("PLIF", -0.1)])
def test_a_trained_threshold_has_the_sources_gradient_in_a_captured_call(kind, v_reset, shape):
    """SpikingJelly before 2.0 steps in TorchScript, which takes such a parameter for a number."""
    source, x = one_neuron(kind, v_reset, nn.Parameter(torch.full(shape, 0.4))), frames(6, 3, 2, 7, 7, dtype=torch.float64)
    fast = sj_tac.convert(copy.deepcopy(source), "preserve", 1)
    expected, found = given(source.train(), x), given(fast.train(), x)
    assert 0.05 < expected["output 0"].mean() < 0.6
    same(found, expected)


@NODES
@pytest.mark.parametrize("threshold", [math.inf, torch.tensor(math.inf), -math.inf, math.nan])
def test_a_threshold_without_end_leaves_the_sources_voltages(kind, v_reset, threshold):
    """A soft reset by it is 0 times infinity in SpikingJelly: NaN, which a converted net does not hide."""
    source, x = one_neuron(kind, v_reset, threshold), frames(6, 3, 2, 7, 7, dtype=torch.float64)
    for k in (1, 2):
        fused, unfused = [sj_tac.convert(copy.deepcopy(source), "preserve", k, fuse=fuse) for fuse in (True, False)]
        for training, grad in ((True, True), (False, False)):
            shown = [given(net.train(training), x, grad) for net in (fused, unfused, *([source] if k == 1 else []))]
            values = [{name: value for name, value in of.items() if not name.startswith("gradient")} for of in shown]
            for other in values[1:]:
                torch.testing.assert_close(values[0], other, rtol=1e-9, atol=1e-9, equal_nan=True)
            assert v_reset is not None or threshold == -math.inf or values[0]["voltage of 2"].isnan().all()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("mode", ["preserve", "collapse"])
def test_another_number_of_samples_without_a_reset(mode, fuse):
    """SpikingJelly 2.0 makes new voltages; before, its error was torch's, about sizes of tensors."""
    fast = sj_tac.convert(one_neuron("LIF", 0.0, 0.4).eval(), mode, 2, fuse=fuse)
    x = frames(6, 4, 2, 7, 7, dtype=torch.float64)
    with torch.no_grad():
        few = fast(x[:, :2])
        if not host.IS_V2:
            message = r"neuron '2' holds voltages \[2, 6, 7, 7\] of an earlier call, .* \[4, 6, 7, 7\]; call"
            with pytest.raises(InputError, match=message):
                fast(x)
            functional.reset_net(fast)
        whole = fast(x)
        assert (whole[:, :2] != few).double().mean() < 0.01
        fast[2].v = torch.tensor(0.3, dtype=torch.float64).expand(1, 1, 1, 1)
        if not host.IS_V2:
            assert (fast(x) != whole).any(), "one voltage for all samples and places fits"
