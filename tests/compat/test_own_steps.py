"""Neurons of one's own that step by the hooks they inherit, as SpikingJelly 0.0.0.0.12 gave them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

OLD = os.environ.get("SJ_TAC_OLD_PYTHON")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
needs_old = pytest.mark.skipif(not OLD, reason="SJ_TAC_OLD_PYTHON names no Python with SpikingJelly 0.0.0.0.12")
HEAD = (
    "import sj_tac.compat.clock_driven, torch\nfrom spikingjelly.clock_driven import functional, layer, neuron, surrogate\n"
)


def python(*command):
    """A fresh Python, because the module under test changes sys.modules for good."""
    there = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=300, env=there)


def passes(code):
    done = python(sys.executable, "-c", HEAD + code)
    assert done.returncode == 0, done.stderr[-3000:]


def recorded(interpreter, where, out):
    done = python(interpreter, HERE / "own_steps.py", where, out)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


def test_they_run_by_the_equations(tmp_path):
    """The file builds them, keeps their records and resets them; here their numbers are looked at, in float64."""
    torch.manual_seed(0)
    x = (torch.randn(8, 3, 50) + 0.6).double()
    found = recorded(sys.executable, "new", tmp_path / "new.pt")
    assert len(found) == 48
    for (name, _, reset, decays), given in found.items():
        rest, rate = reset or 0.0, {"if": 0.0, "lif": 1 / 3, "plif": 1 / 2.7}[name]
        threshold = 0.9 if name == "if" else 0.7
        gain = rate if decays and name != "if" else 1.0
        v, out = torch.full_like(x[0], rest), []
        for frame in x:
            h = v - rate * (v - rest) + gain * frame
            out.append(h.relu())
            spike = (h >= threshold).double()
            v = h - spike * threshold if reset is None else (1 - spike) * h + spike * reset
        assert 0.02 < (torch.stack(out) >= threshold).double().mean() < 0.8
        torch.testing.assert_close(given["y"].double(), torch.stack(out), rtol=1e-4, atol=1e-5)
        assert torch.equal(given["again"], given["y"])
        assert given["x"].abs().sum() > 0
        assert given["w"].abs().sum() > 0


@needs_old
def test_they_give_the_bits_that_they_gave(tmp_path):
    old, new = recorded(OLD, "old", tmp_path / "old.pt"), recorded(sys.executable, "new", tmp_path / "new.pt")
    assert old.keys() == new.keys()
    for setting, there in old.items():
        here = new[setting]
        for what in ("y", "v", "again"):
            assert torch.equal(here[what], there[what]), (setting, what)
        for what in ("x", "w"):
            torch.testing.assert_close(here[what], there[what], rtol=1e-5, atol=1e-5, msg=str((setting, what)))


def test_a_net_with_such_a_neuron_is_planned():
    passes("""
import sj_tac
class Analog(neuron.LIFNode):
    def forward(self, x):
        self.neuronal_charge(x); spike = self.neuronal_fire(); y = torch.relu(self.v); self.neuronal_reset(spike)
        return y
class MultiStepAnalog(Analog):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_memory("v_seq", None)
    def forward(self, x_seq):
        self.v_seq = torch.stack([super(MultiStepAnalog, self).forward(x) for x in x_seq])
        return self.v_seq
first = layer.SeqToANNContainer(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)), neuron.MultiStepLIFNode(v_threshold=0.1)
second = layer.SeqToANNContainer(torch.nn.Conv2d(4, 4, 3)), MultiStepAnalog(detach_reset=True)
net = torch.nn.Sequential(*first, *second).eval()
x = torch.rand(4, 2, 3, 8, 8)
statuses = [v.status for v in sj_tac.plan(net, "preserve", 2, example_input=x).verdicts]
assert statuses == ["converted", "refused"], statuses
fast = sj_tac.convert(net, k=2, example_input=x)
assert fast(x).shape == (4, 2, 4, 4, 4)
functional.reset_net(fast)
""")


def test_the_classes_still_count_as_the_hosts_own():
    passes("""
from sj_tac import host
for name in ("IFNode", "LIFNode", "ParametricLIFNode"):
    class Mine(getattr(neuron, name)):
        def __init__(self): super().__init__(v_threshold=0.5)
    for made in (getattr(neuron, name)(), getattr(neuron, "MultiStep" + name)(), Mine()):
        assert host.kind(made) is getattr(host.neuron, name), made
""")


def test_what_was_refused_is_refused():
    passes("""
from sj_tac.errors import HostError
from sj_tac import host
class Charge(neuron.LIFNode):
    def neuronal_charge(self, x): super().neuronal_charge(x); self.v = self.v * 0.9
class Fire(neuron.LIFNode):
    def neuronal_fire(self): return super().neuronal_fire() * 0.5
class Half(neuron.IFNode):
    def neuronal_reset(self, spike): self.v = self.v * 0.5
    def single_step_forward(self, x): self.neuronal_charge(x); return super().single_step_forward(x)
for kind in (Charge, Fire, Half) if host.IS_V2 else (Charge, Fire):
    try: kind()
    except HostError as error: assert "overrides neuronal_" in str(error)
    else: raise AssertionError(kind)
""")


def test_a_v_seq_is_registered_once_more_and_other_names_as_ever():
    passes("""
class Node(neuron.MultiStepLIFNode):
    def __init__(self):
        super().__init__()
        self.register_memory("mine", 0.5)
node = Node()
node.mine = 2.0
node.reset()
assert node.mine == 0.5
try: node.register_memory("mine", 1.0)
except AssertionError as error: assert "mine has been set" in str(error)
else: raise SystemExit("it was registered twice")
""")
