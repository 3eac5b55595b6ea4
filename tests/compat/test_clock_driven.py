"""Old code on the installed host against the real SpikingJelly 0.0.0.0.12, and what is said where it cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sj_tac import host

OLD = os.environ.get("SJ_TAC_OLD_PYTHON")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
needs_old = pytest.mark.skipif(not OLD, reason="SJ_TAC_OLD_PYTHON names no Python with SpikingJelly 0.0.0.0.12")


def python(*command, cwd=ROOT, path=ROOT):
    """A fresh Python, because the module under test changes sys.modules for good."""
    there = {**os.environ, "PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, timeout=300, cwd=cwd, env=there
    )


def script(code, **where):
    return python(sys.executable, "-c", code, **where)


def passes(code):
    done = script(code)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def fails(code, **where):
    done = script(code, **where)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What the same file gives under 0.0.0.0.12, here, and there again with the states of here."""
    folder = tmp_path_factory.mktemp("old")
    words = [] if host.IS_V2 else ["14"]
    for where, given, out in (
        ("old", "-", "old.pt"),
        ("new", folder / "old.pt", "new.pt"),
        ("old", folder / "new.pt", "again.pt"),
    ):
        interpreter = OLD if where == "old" else sys.executable
        done = python(interpreter, HERE / "old_code.py", where, given, folder / out, *words)
        assert done.returncode == 0, done.stderr[-3000:]
    return tuple(torch.load(folder / name) for name in ("old.pt", "new.pt", "again.pt"))


def close(new, old):
    """Equal up to the order in which a gradient's terms are added."""
    torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6 * max(1.0, old.abs().max().item()))


@needs_old
@pytest.mark.parametrize("name", ["sew", "tet", "transformer", "steps", "mixed", "own"])
def test_nets_have_the_same_keys_states_and_results(both, name):
    old, new, again = (side["nets"][name] for side in both)
    # The same seed fills them alike, so the constructors draw in the same order.
    assert list(old["fresh"]) == list(new["fresh"]) == list(again["fresh"])
    for key, value in old["fresh"].items():
        assert torch.equal(value, new["fresh"][key]), key
        assert value.dtype == new["fresh"][key].dtype
    for mode in ("train", "eval"):
        there, here = old[mode], new[mode]
        for before, after in zip(there["out"], here["out"], strict=True):
            assert before.std() > 0.01
            assert torch.equal(before, after)
        # And with the states of the new one, there again.
        assert all(torch.equal(a, b) for a, b in zip(again[mode]["out"], there["out"], strict=True))
        for key, value in there["buffers"].items():
            assert torch.equal(here["buffers"][key], value), key
        assert there["v"].keys() == here["v"].keys()
        for key, value in there["v"].items():
            torch.testing.assert_close(here["v"][key], value, rtol=0, atol=2e-6)
        # In eval mode 0.0.0.0.14 fires without a surrogate.
        if mode == "eval" and not host.IS_V2:
            continue
        assert there["grad"].keys() == here["grad"].keys()
        for key, value in there["grad"].items():
            close(here["grad"][key], value)


@needs_old
def test_neurons_step_alike_in_every_setting(both):
    old, new, _ = (side["neurons"] for side in both)
    assert old.keys() == new.keys()
    assert len(old) == 318
    for setting, there in old.items():
        here = new[setting]
        assert 0.01 < there["spikes"].mean() < 0.9, setting
        assert torch.equal(there["spikes"], here["spikes"]), setting
        # 2.0 writes the decay of an input that does not decay as a product with 1 - 1 / tau.
        torch.testing.assert_close(here["v"], there["v"], rtol=0, atol=2e-6, msg=str(setting))
        if len(setting) > 2 and (setting[1] or setting[3] == 2.0):
            assert torch.equal(there["v"], here["v"]), setting
        close(here["grad"], there["grad"])
        assert (there["w"] is None) == (here["w"] is None)
        if there["w"] is not None:
            assert there["w"].shape == here["w"].shape == ()
            torch.testing.assert_close(here["w"], there["w"], rtol=1e-4, atol=1e-3)


@needs_old
def test_functions_encoders_and_surrogates_give_the_same(both):
    old, new, _ = (side["others"] for side in both)
    assert old.keys() == new.keys()
    for name, there in old.items():
        torch.testing.assert_close(new[name], there, rtol=1e-6, atol=1e-7, msg=str(name))


IMPORT = "import sj_tac.compat.clock_driven\n"


def test_the_classes_are_subclasses_of_the_hosts_with_a_constructor_and_what_2_0_took():
    passes(
        IMPORT + "import copy, inspect, pickle, torch\n"
        "import sj_tac.compat.clock_driven\n"
        "from spikingjelly import activation_based as host\n"
        "import spikingjelly.activation_based.neuron, spikingjelly.activation_based.layer\n"
        "from spikingjelly.clock_driven import neuron, layer\n"
        "from spikingjelly.cext import neuron as cext\n"
        "import spikingjelly\n"
        "assert spikingjelly.clock_driven.neuron is neuron and spikingjelly.cext.neuron is cext\n"
        "allowed = {'__init__', '__module__', '__doc__', '__qualname__', '__firstlineno__', '__static_attributes__'}\n"
        "charges = dict.fromkeys(('IFNode', 'LIFNode', 'ParametricLIFNode'), {'neuronal_charge', '_adds_nothing'})\n"
        "given = charges | {'BaseNode': {'register_memory'}}\n"
        "for module in (neuron, layer, cext):\n"
        "    for name, cls in inspect.getmembers(module, inspect.isclass):\n"
        "        if cls.__module__.startswith('sj_tac.'):\n"
        "            more = given.get(name, set()) if cls.__module__.endswith('.neuron') else set()\n"
        "            assert set(vars(cls)) <= allowed | more, (name, set(vars(cls)) - allowed)\n"
        "assert issubclass(neuron.MultiStepLIFNode, neuron.LIFNode) and issubclass(neuron.LIFNode, neuron.BaseNode)\n"
        "assert issubclass(neuron.MultiStepLIFNode, host.neuron.LIFNode)\n"
        "assert issubclass(cext.MultiStepIFNode, host.neuron.IFNode)\n"
        "assert layer.SeqToANNContainer is host.layer.SeqToANNContainer\n"
        "node = neuron.MultiStepParametricLIFNode(backend='cupy')\n"
        "x = torch.rand(4, 2, 3)\n"
        "want = node(x * 2).detach()\n"
        "node.reset()\n"
        "for other in (pickle.loads(pickle.dumps(node)), copy.deepcopy(node)):\n"
        "    other.reset()\n"
        "    assert type(other) is type(node) and torch.equal(other(x * 2), want)\n"
        "node.store_v_seq = True\n"
        "node(x)\n"
        "assert node.v_seq.shape == x.shape\n"
    )


def test_the_neurons_of_cext_take_the_name_of_a_surrogate():
    passes(
        IMPORT + "import torch\n"
        "from spikingjelly.cext import neuron as cext\n"
        "from spikingjelly.clock_driven import neuron, surrogate\n"
        "x = torch.rand(4, 2, 30) * 3\n"
        "a = cext.MultiStepLIFNode(2, 1, 0, surrogate_function='Sigmoid', alpha=3.0, detach_reset=True)\n"
        "b = neuron.MultiStepLIFNode(2.0, True, 1.0, 0.0, surrogate.Sigmoid(3.0), True)\n"
        "out = []\n"
        "for node in (a, b):\n"
        "    y = x.clone().requires_grad_()\n"
        "    z = node(y)\n"
        "    z.sum().backward()\n"
        "    out.append((z.detach(), y.grad))\n"
        "assert out[0][0].mean() > 0.1 and all(torch.equal(p, q) for p, q in zip(*out))\n"
        "assert cext.MultiStepIFNode(surrogate_function='ATan', alpha=3.0).surrogate_function.alpha == 3.0\n"
        "assert cext.MultiStepParametricLIFNode().w.shape == ()\n"
    )
    told = fails(IMPORT + "from spikingjelly.cext import neuron\nneuron.MultiStepIFNode(surrogate_function='Erf')")
    assert "'Erf'" in told
    assert "'ATan', 'Sigmoid'" in told


def test_an_old_net_reaches_convert():
    """Convolutions in the host's own containers are found; nothing of the module is in the way of tracing."""
    told = passes(
        IMPORT + "import sys, torch\n"
        f"sys.argv = ['x', 'new', '-', '-', '14']; sys.path.insert(0, {str(HERE)!r})\n"
        "import old_code, sj_tac\n"
        "net = old_code.Sew().eval()\n"
        "x = torch.rand(6, 2, 2, 8, 8)\n"
        "print(len(sj_tac.plan(net, 'preserve', 2, example_input=x).verdicts))\n"
    )
    assert int(told.split()[-1]) == 5


WRONG = [
    ("from spikingjelly.clock_driven.layer import DCT", "layer.DCT has no counterpart"),
    ("from spikingjelly.clock_driven import layer; layer.STDPLearner", "learning.STDPLearner"),
    ("from spikingjelly.clock_driven.neuron import Foo", "'Foo'"),
    (
        "from spikingjelly.clock_driven import neuron; neuron.Foo",
        "clock_driven.neuron of SpikingJelly 0.0.0.0.12 has no 'Foo'",
    ),
    ("from spikingjelly.clock_driven.lava_exchange import to_lava_neuron", "activation_based.lava_exchange"),
    ("from spikingjelly.clock_driven import ann2snn", "spikingjelly.clock_driven.ann2snn"),
    ("import spikingjelly.clock_driven.model.sew", "spikingjelly.clock_driven.model"),
    ("from spikingjelly.cext import functional", "covers neuron of spikingjelly.cext"),
    (
        "from spikingjelly.clock_driven import neuron; neuron.MultiStepIFNode(backend='lava')",
        "'lava' of MultiStepIFNode",
    ),
    ("from spikingjelly.clock_driven import neuron; neuron.MultiStepLIFNode(backend='cuda')", "'torch', 'cupy'"),
]


def test_what_is_not_there_is_named():
    told = passes(
        IMPORT + f"for code in {[code for code, _ in WRONG]!r}:\n"
        "    try: exec(code)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "    else: print('nothing')\n"
    ).splitlines()
    assert len(told) == len(WRONG)
    for (_, want), line in zip(WRONG, told, strict=True):
        assert want in line
    assert {line.partition(" ")[0] for line in told} == {
        "ImportError",
        "AttributeError",
        "ModuleNotFoundError",
        "BackendError",
    }


OWN = (
    "from spikingjelly.clock_driven import neuron\n"
    "class Leaky(neuron.LIFNode):\n"
    "    def neuronal_charge(self, x):\n"
    "        self.v = 0.9 * self.v + x\n"
)


def test_dynamics_of_ones_own_are_refused_where_the_host_would_ignore_them():
    told = fails(IMPORT + OWN + "Leaky()")
    assert "sj_tac.errors.HostError: Leaky (of __main__) overrides neuronal_charge" in told
    assert "what LIFNode does" in told
    base = OWN.replace("neuron.LIFNode", "neuron.BaseNode")
    if host.IS_V2:
        assert "its steps would not run" in fails(IMPORT + base + "Leaky()")
    else:
        passes(IMPORT + base + "import torch\nassert Leaky().eval()(torch.full((3,), 2.0)).sum() == 3")
    # Nothing is refused for a class that nobody makes, or one that only has a constructor.
    passes(IMPORT + OWN + "class Mine(neuron.MultiStepLIFNode):\n    def __init__(self): super().__init__(3.0)\nMine()")


def test_twice_is_fine():
    passes(
        IMPORT + "import importlib, sys\n"
        "import spikingjelly.clock_driven.neuron as first\n"
        "finders = len(sys.meta_path)\n"
        "importlib.reload(sys.modules['sj_tac.compat.clock_driven'])\n"
        "import spikingjelly.clock_driven.neuron as second\n"
        "assert first is second and len(sys.meta_path) == finders\n"
    )


def test_importing_the_package_alone_changes_nothing():
    passes(
        "import sys, sj_tac.compat\n"
        "assert 'torch' not in sys.modules and 'spikingjelly' not in sys.modules\n"
        "assert callable(sj_tac.compat.remap_keys) and 'spikingjelly.clock_driven' not in sys.modules\n"
    )


def test_the_real_one_imported_before_is_refused():
    """0.0.0.0.14 ships it; elsewhere an older copy may have been loaded under the name."""
    first = "import sys, types\n" + (
        "sys.modules['spikingjelly.clock_driven'] = types.ModuleType('spikingjelly.clock_driven')\n"
        if host.IS_V2
        else "import spikingjelly.clock_driven.neuron\n"
    )
    told = fails(first + IMPORT)
    assert "ImportError: spikingjelly.clock_driven was imported before sj_tac.compat.clock_driven" in told
    assert "put 'import sj_tac.compat.clock_driven' in front" in told


def test_an_old_copy_in_the_users_project_is_named(tmp_path):
    old = tmp_path / "spikingjelly" / "clock_driven"
    old.mkdir(parents=True)
    for folder in (old, old.parent):
        (folder / "__init__.py").write_text("")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    told = fails(IMPORT, cwd=tmp_path, path=path)
    installed = Path(host.types.layer.__file__).parents[2 if host.IS_V2 else 1]
    assert "ImportError: 'import spikingjelly' finds the copy in" in told
    assert str(old.parent) in told
    assert str(installed) in told
    # A copy that has both hides the host, too.
    (old.parent / "activation_based").mkdir()
    assert "finds the copy in" in fails(IMPORT, cwd=tmp_path, path=path)


@needs_old
def test_an_older_host_alone_is_named():
    done = python(OLD, "-c", IMPORT)
    assert "pip install 'spikingjelly>=0.0.0.0.14'" in done.stderr.strip().splitlines()[-1]


OWN_STEPS = """
import sj_tac.compat.clock_driven
import torch
from spikingjelly.clock_driven import neuron, surrogate

class Complementary(neuron.LIFNode):
    def __init__(self):
        super().__init__(2.0, False, 1.0, None, surrogate.ATan())
        self.register_memory("m", 0.0)
    def forward(self, x):
        self.neuronal_charge(x)
        self.m = self.m * torch.sigmoid(self.v / self.tau)
        spike = self.neuronal_fire()
        self.m = self.m + spike
        self.neuronal_reset(spike)
        self.v = self.v - spike * torch.sigmoid(self.m)
        return spike
    def neuronal_charge(self, x):
        self.v = self.v * (1 - 1 / self.tau) + x

class Hard(Complementary):
    def __init__(self):
        super().__init__()
        self.v_reset = 0.25

def expected(xs, reset):
    v, m, spikes = 0.0, 0.0, []
    for x in xs:
        v = v * 0.5 + x
        m = m * torch.sigmoid(v / 2)
        spikes.append((v >= 1).to(x))
        m = m + spikes[-1]
        v = v - spikes[-1] if reset is None else (1 - spikes[-1]) * v + spikes[-1] * reset
        v = v - spikes[-1] * torch.sigmoid(m)
    return torch.stack(spikes)

torch.manual_seed(0)
xs = torch.rand(8, 500) * 1.5
for made, reset in ((Complementary(), None), (Hard(), 0.25)):
    for mode in (True, False):
        made.train(mode).reset()
        spikes = torch.stack([made(x) for x in xs])
        assert torch.equal(spikes, expected(xs, reset)) and 0.05 < spikes.mean() < 0.6

class Calls(neuron.LIFNode):
    def forward(self, x):
        return super().forward(x)
    def neuronal_charge(self, x):
        self.v = x
Calls()
"""


def test_a_neuron_that_steps_by_itself_runs_its_own_steps_with_the_hooks_it_inherited():
    told = fails(OWN_STEPS)
    assert "HostError: Calls (of __main__) overrides neuronal_charge" in told
    passes(OWN_STEPS.partition("class Calls")[0])


def test_what_stood_in_the_place_of_decay_input_before_there_was_one():
    """LIFNode(tau, v_threshold, v_reset) of 0.0.0.0.8 would fire at a threshold of 0, without a word."""
    for name in ("LIFNode", "MultiStepLIFNode", "ParametricLIFNode", "MultiStepParametricLIFNode"):
        told = fails(
            f"import sj_tac.compat.clock_driven\nfrom spikingjelly.clock_driven import neuron\nneuron.{name}(2.0, 1.0, 0.0)"
        )
        assert f"HostError: {name}: decay_input=1.0 is no bool; code for SpikingJelly before 0.0.0.0.10" in told


def test_a_neuron_that_steps_by_itself_has_its_inherited_helpers():
    passes(
        "import sj_tac.compat.backends\n"
        "import torch\n"
        "from spikingjelly.activation_based import neuron\n"
        "class Connecting(neuron.BaseNode):\n"
        "    def neuronal_charge(self, x):\n"
        "        self.v = self.v + (x - self.v) / 2\n"
        "    def single_step_forward(self, x):\n"
        "        self.v_float_to_tensor(x)\n"
        "        self.neuronal_charge(x)\n"
        "        spike = self.neuronal_fire()\n"
        "        self.v = self.jit_hard_reset(self.v, spike, 0.0)\n"
        "        return spike\n"
        "node = Connecting()\n"
        "x = torch.rand(50) * 4\n"
        "spikes = node(x)\n"
        "assert torch.equal(spikes, (x / 2 >= 1).float()) and 0.1 < spikes.mean() < 0.9\n"
        "assert torch.equal(node.v, torch.where(spikes > 0, torch.zeros(()), x / 2))\n"
        "assert torch.equal(node.jit_soft_reset(x, spikes, 1.0), x - spikes)\n"
    )
