"""activation_based code of 0.0.0.0.14 on the installed host. test_old_code.py runs this file in a Python of its own."""

import importlib
import inspect
import sys

import pytest
import torch
from spikingjelly.activation_based import base, functional, layer, neuron, surrogate

from sj_tac import host
from sj_tac.errors import BackendError, HostError

only_v2 = pytest.mark.skipif(not host.IS_V2, reason="SpikingJelly before 2.0 has it itself")


def said():
    """What the host's classes are and do."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(neuron.LIFNode(step_mode="m", store_v_seq=True), neuron.IFNode(step_mode="m"))
    found = [str(net), str(net(torch.rand(4, 2, 3) * 3).sum()), sorted(net.state_dict()), sorted(vars(net[0]))]
    for module in (neuron, layer):
        names = [name for name in dir(module) if name.endswith(("Node", "Container"))]
        found += [str(inspect.signature(getattr(module, name))) for name in names]
    found += [str(surrogate.LeakyKReLU(0.1)), str(surrogate.ATan(3.0, False)), str(surrogate.PiecewiseLeakyReLU())]
    with pytest.raises(AssertionError):
        neuron.LIFNode(1)
    return found


BEFORE = said()
backends = importlib.import_module("sj_tac.compat.backends")
X = torch.linspace(0, 3, 24).view(4, 2, 3)


def test_code_that_uses_none_of_it_runs_as_before():
    assert said() == BEFORE
    importlib.reload(sys.modules["sj_tac.compat.backends"])
    assert said() == BEFORE


def test_neurons_take_a_backend_where_they_had_it():
    expected = neuron.LIFNode(2.0, True, 1.0, 0.0, surrogate.ATan(), True, "m")(X)
    for node in (
        neuron.LIFNode(2.0, True, 1.0, 0.0, surrogate.ATan(), True, "m", "cupy", True),
        neuron.LIFNode(detach_reset=True, step_mode="m", backend="cupy", store_v_seq=True),
    ):
        assert type(node) is neuron.LIFNode
        assert node.store_v_seq
        assert node.backend == "torch"
        assert "cupy" in node.supported_backends
        assert torch.equal(node(X), expected)
        assert node.v_seq.shape == X.shape

    class Mine(neuron.IFNode):
        def __init__(self, v_threshold=1.0, step_mode="s", backend="torch", store_v_seq=False):
            super().__init__(v_threshold, 0.0, surrogate.Sigmoid(), False, step_mode, backend, store_v_seq)

    net = torch.nn.Sequential(Mine(step_mode="m", backend="cupy"), neuron.ParametricLIFNode(step_mode="m"))
    functional.set_backend(net, "cupy", (neuron.IFNode, neuron.LIFNode))
    functional.set_backend(net, "torch")
    assert net(X).shape == X.shape
    assert not net[0].store_v_seq
    assert net[0].backend == "torch"


def test_old_names_and_orders_of_arguments_are_there():
    found = importlib.import_module("spikingjelly.activation_based.neuron")
    assert found.surrogate is surrogate
    assert found.base is base
    assert issubclass(base.SingleModule, base.StepModule)

    class Steep(surrogate.SurrogateFunctionBase):
        def __init__(self, alpha=2.0, spiking=True):
            super().__init__(alpha, spiking)

        @staticmethod
        def spiking_function(x, alpha):
            return surrogate.atan.apply(x, alpha)

    gradients = []
    for function in (Steep(3.0), surrogate.ATan(3.0)):
        x = X.clone().requires_grad_()
        neuron.IFNode(surrogate_function=function, step_mode="m")(x).sum().backward()
        gradients.append(x.grad)
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)

    class Several(surrogate.MultiArgsSurrogateFunctionBase):
        def __init__(self, low, high, spiking=True):
            super().__init__(spiking, low, high)

    assert Several(0.1, 0.2, False).spiking is False
    box = layer.StepModeContainer(True, torch.nn.Linear(3, 3), neuron.IFNode())
    assert box.step_mode == "s"
    assert len(box) == 2


@only_v2
def test_a_backend_that_the_host_has_no_equivalent_of_is_named():
    for make, told in (
        (lambda: neuron.LIFNode(backend="lava"), "backend='lava' of LIFNode"),
        (lambda: neuron.IFNode(1.0, 0.0, surrogate.ATan(), True, "m", "triton"), "backend='triton' of IFNode"),
        (lambda: functional.set_backend(neuron.IFNode(), "lava"), "backend='lava'"),
    ):
        with pytest.raises(BackendError, match=told):
            make()
    with pytest.raises(TypeError, match="unexpected keyword argument 'backends'"):
        neuron.IFNode(backends="cupy")


class Own(neuron.LIFNode):
    def neuronal_charge(self, x):
        self.v = self.v + x


class Written(Own):
    def single_step_functional_forward(self, inputs, states):
        return (inputs[0],), states


@only_v2
def test_dynamics_that_2_0_would_ignore_are_refused():
    with pytest.raises(HostError, match=r"Own \(of .*\) overrides neuronal_charge"):
        Own(backend="cupy")
    Written()


class Connecting(neuron.BaseNode):
    def neuronal_charge(self, x):
        self.v = self.v + (x - self.v) / 2

    def single_step_forward(self, x):
        self.v_float_to_tensor(x)
        self.neuronal_charge(x)
        spike = self.neuronal_fire()
        self.v = self.jit_hard_reset(self.v, spike, 0.25)
        return spike


def test_a_neuron_that_steps_by_itself_has_its_inherited_helpers():
    node, x = Connecting(), torch.linspace(0, 4, 50)
    spikes = node(x)
    assert torch.equal(spikes, (x / 2 >= 1).float())
    assert torch.equal(node.v, torch.where(spikes > 0, torch.full((), 0.25), x / 2))
    assert torch.equal(node.jit_soft_reset(x, spikes, 1.0), x - spikes)


@pytest.mark.skipif(host.IS_V2, reason="0.0.0.0.14 has a backend of its own")
def test_it_covers_every_neuron_that_took_a_backend():
    takes = [n for n, cls in inspect.getmembers(neuron, inspect.isclass) if "backend" in inspect.signature(cls).parameters]
    assert set(takes) == set(backends.NEURONS)


def test_cuda_code_that_is_gone_can_be_imported_and_says_so_where_it_is_used():
    from spikingjelly.activation_based import auto_cuda, cuda_utils, neuron_kernel, tensor_cache
    from spikingjelly.activation_based.auto_cuda import base as kernels, cfunction
    from spikingjelly.activation_based.auto_cuda.neuron_kernel import NeuronATGFBase, NeuronFPTTKernel, scalar_to_cupy

    assert sys.modules["spikingjelly.activation_based.auto_cuda.cfunction"] is cfunction
    assert kernels is not neuron_kernel is not tensor_cache

    class Kernel(NeuronFPTTKernel):
        def __init__(self, hard_reset, dtype):
            super().__init__(hard_reset, dtype)

    assert issubclass(Kernel, NeuronFPTTKernel)
    assert not isinstance(1, Kernel)
    if not host.IS_V2:
        return
    for use in (
        lambda: Kernel(True, "float"),
        lambda: type("ATGF", (NeuronATGFBase,), {}).apply(torch.ones(1)),
        lambda: scalar_to_cupy(1.0),
        lambda: cfunction.add(z="a", x="b", y="c", dtype="float"),
        lambda: cuda_utils.cal_blocks(1, 1),
    ):
        with pytest.raises(HostError, match=r"is CUDA code of SpikingJelly 0.0.0.0.14, .*backend='torch'"):
            use()
    with pytest.raises(ImportError, match="No module named"):
        importlib.import_module("spikingjelly.activation_based.auto_cuda.other")
    assert not hasattr(auto_cuda, "__all__")
    inspect.getmembers(auto_cuda)
