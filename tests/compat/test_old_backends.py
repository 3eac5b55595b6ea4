"""activation_based code of 0.0.0.0.14 on the installed host: what is accepted, and that nothing else changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sj_tac import host

OTHER = os.environ.get("SJ_TAC_OTHER_PYTHON")
ROOT = Path(__file__).parents[2]
HEAD = (
    "import sj_tac.compat.backends as compat, torch\n"
    "from spikingjelly.activation_based import base, functional, layer, neuron, surrogate\n"
)


def script(code, interpreter=sys.executable):
    there = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [interpreter, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=there)


def passes(code):
    done = script(HEAD + code)
    assert done.returncode == 0, done.stderr[-3000:]


def fails(code):
    done = script(HEAD + code)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_published_idioms_build_and_run_without_cuda():
    passes(
        "from spikingjelly.activation_based.neuron import surrogate as s, base as b\n"
        "assert s is surrogate and b is base\n"
        "x = torch.rand(4, 2, 3) * 3\n"
        "plain = neuron.LIFNode(2.0, True, 1.0, 0.0, surrogate.ATan(), True, 'm')\n"
        "want = plain(x)\n"
        "for node in (neuron.LIFNode(2.0, True, 1.0, 0.0, surrogate.ATan(), True, 'm', 'cupy', True),\n"
        "             neuron.LIFNode(detach_reset=True, step_mode='m', backend='cupy', store_v_seq=True)):\n"
        "    assert type(node) is neuron.LIFNode and node.store_v_seq and node.backend == 'torch'\n"
        "    assert 'cupy' in node.supported_backends\n"
        "    assert torch.equal(node(x), want) and node.v_seq.shape == x.shape\n"
        "class Mine(neuron.IFNode):\n"
        "    def __init__(self, v_threshold=1.0, step_mode='s', backend='torch', store_v_seq=False):\n"
        "        super().__init__(v_threshold, 0.0, surrogate.Sigmoid(), False, step_mode, backend, store_v_seq)\n"
        "net = torch.nn.Sequential(Mine(step_mode='m', backend='cupy'), neuron.ParametricLIFNode(step_mode='m'))\n"
        "functional.set_backend(net, 'cupy', (neuron.IFNode, neuron.LIFNode))\n"
        "functional.set_backend(net, 'torch')\n"
        "assert net(x).shape == x.shape and not net[0].store_v_seq and net[0].backend == 'torch'\n"
        "class Steep(surrogate.SurrogateFunctionBase):\n"
        "    def __init__(self, alpha=2.0, spiking=True): super().__init__(alpha, spiking)\n"
        "    @staticmethod\n"
        "    def spiking_function(x, alpha): return surrogate.atan.apply(x, alpha)\n"
        "y = x.clone().requires_grad_()\n"
        "neuron.IFNode(surrogate_function=Steep(3.0), step_mode='m')(y).sum().backward()\n"
        "assert y.grad.abs().sum() > 0\n"
        "box = layer.StepModeContainer(True, torch.nn.Linear(3, 3), neuron.IFNode())\n"
        "assert box.step_mode == 's' and len(box) == 2\n"
        "assert issubclass(base.SingleModule, base.StepModule) and surrogate.MultiArgsSurrogateFunctionBase\n"
    )


@pytest.mark.skipif(not host.IS_V2, reason="0.0.0.0.14 checks backends itself")
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("neuron.LIFNode(backend='lava')", "backend='lava' of LIFNode"),
        ("neuron.IFNode(1.0, 0.0, surrogate.ATan(), True, 'm', 'triton')", "backend='triton' of IFNode"),
        ("functional.set_backend(neuron.IFNode(), 'lava')", "backend='lava'"),
        ("neuron.IFNode(backends='cupy')", "unexpected keyword argument 'backends'"),
    ],
)
def test_an_unknown_backend_is_named(code, told):
    assert told in fails(code)


@pytest.mark.skipif(not host.IS_V2, reason="0.0.0.0.14 steps through these methods")
def test_dynamics_that_2_0_would_ignore_are_refused():
    own = "class Mine(neuron.LIFNode):\n    def neuronal_charge(self, x): self.v = self.v + x\n"
    assert "HostError: Mine (of __main__) overrides neuronal_charge" in fails(own + "Mine(backend='cupy')")
    passes(own + "class Fine(Mine):\n    def single_step_functional_forward(self, i, s): return (i[0],), s\nFine()")


def test_nothing_else_changes():
    """The same classes, signatures, keys and results with and without it, and twice as once."""
    code = (
        "import inspect, json, sys, torch\n"
        "{first}"
        "from spikingjelly.activation_based import base, functional, layer, neuron, surrogate\n"
        "torch.manual_seed(0)\n"
        "x = torch.rand(4, 2, 3)\n"
        "net = torch.nn.Sequential(neuron.LIFNode(step_mode='m', store_v_seq=True), neuron.IFNode(step_mode='m'))\n"
        "said = [str(net), str(net(x * 3).sum()), sorted(net.state_dict()), sorted(vars(net[0]))]\n"
        "for module in (neuron, layer):\n"
        "    for name in dir(module):\n"
        "        if name.endswith(('Node', 'Container')): said.append(str(inspect.signature(getattr(module, name))))\n"
        "said += [str(surrogate.LeakyKReLU(0.1)), str(surrogate.ATan(3.0, False)), str(surrogate.PiecewiseLeakyReLU())]\n"
        "try: neuron.LIFNode(1)\n"
        "except AssertionError: said.append('checked')\n"
        "print(json.dumps(said))\n"
    )
    twice = "import sj_tac.compat.backends, importlib; importlib.reload(sj_tac.compat.backends)\n"
    said = [script(code.replace("{first}", first)) for first in ("", twice)]
    assert json.loads(said[0].stdout) == json.loads(said[1].stdout), said[1].stderr


@pytest.mark.skipif(not OTHER or not host.IS_V2, reason="SJ_TAC_OTHER_PYTHON names no Python with SpikingJelly 0.0.0.0.14")
def test_it_covers_every_neuron_that_took_a_backend():
    code = (
        "import inspect\nfrom spikingjelly.activation_based import neuron\n"
        "for name, cls in inspect.getmembers(neuron, inspect.isclass):\n"
        "    if 'backend' in inspect.signature(cls).parameters: print(name)\n"
    )
    there = script(code, OTHER)
    found = "from sj_tac.compat import backends; print('\\n'.join(backends.NEURONS))"
    assert set(there.stdout.split()) == set(script(found).stdout.split()), there.stderr


CUDA_CODE = (
    "from spikingjelly.activation_based.auto_cuda.neuron_kernel import NeuronFPTTKernel, NeuronATGFBase, scalar_to_cupy\n"
    "from spikingjelly.activation_based.auto_cuda import base as kernels, cfunction\n"
    "from spikingjelly.activation_based import cuda_utils, neuron_kernel, tensor_cache\n"
    "import spikingjelly.activation_based.auto_cuda.cfunction as same\n"
    "assert same is cfunction\n"
    "class Kernel(NeuronFPTTKernel):\n"
    "    def __init__(self, hard_reset, dtype): super().__init__(hard_reset, dtype)\n"
    "    def neuronal_charge(self): return cfunction.add(z='h_seq[t]', x='x_seq[t]', y='v_v_seq[t]', dtype=self.dtype)\n"
    "class ATGF(NeuronATGFBase):\n"
    "    @staticmethod\n"
    "    def forward(ctx, x_seq): return x_seq\n"
)


def test_models_that_bring_cuda_code_of_their_own_can_be_imported():
    passes(CUDA_CODE + "assert issubclass(Kernel, NeuronFPTTKernel) and not isinstance(1, Kernel)\n")


@pytest.mark.skipif(not host.IS_V2, reason="SpikingJelly before 2.0 has that code")
@pytest.mark.parametrize(
    "use",
    [
        "Kernel(True, 'float')",
        "ATGF.apply(torch.ones(1))",
        "scalar_to_cupy(1.0)",
        "cfunction.add(z='a', x='b', y='c', dtype='float')",
        "cuda_utils.cal_blocks(1, 1)",
    ],
)
def test_cuda_code_that_is_gone_says_so_where_it_is_used(use):
    last = fails(CUDA_CODE + use)
    assert last.startswith("sj_tac.errors.HostError: ")
    assert "is CUDA code of SpikingJelly 0.0.0.0.14, which 2.0 has no counterpart of" in last
    assert "backend='torch'" in last


@pytest.mark.skipif(not host.IS_V2, reason="SpikingJelly before 2.0 has that code")
def test_other_modules_that_are_gone_stay_so():
    assert "No module named" in fails("import spikingjelly.activation_based.auto_cuda.other")
    passes(
        "from spikingjelly.activation_based import auto_cuda\n"
        "assert not hasattr(auto_cuda, '__all__')\n"
        "import inspect; inspect.getmembers(auto_cuda)\n"
    )
