"""What torch does with operators besides running them: fake tensors, inference mode, derivatives of other kinds, tracing."""

import io

import pytest
import torch
from spikingjelly.activation_based import layer
from support import node, only_v2
from torch.autograd import forward_ad

from sj_tac.errors import BackendError
from sj_tac.functional import aggregate, fire
from sj_tac.kernels import fire as kernels, reference

BACKENDS = ["cpp", "reference"]

# Forward-mode derivatives make torch script functions of its own, and warn of it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is:FutureWarning")


def merged(y, backend="reference", **options):
    """A call whose beta and gamma are constants that are kept, [G, 2]."""
    return fire(y, node("lif", tau=1.9, v_threshold=0.4), 2, merge=True, backend=backend, **options)[0]


def summed(x, backend="cpp"):
    """Sums whose weights are constants that are kept."""
    return aggregate(x, [0.37, 0.63], 2, backend=backend)


@pytest.mark.parametrize("call", [merged, summed])
def test_constants_that_were_made_in_inference_mode_train(call):
    reference._held.cache_clear()
    x = torch.randn(4, 1, 2, 4, 4)
    with torch.inference_mode():
        call(x)
    leaf = x.clone().requires_grad_()
    call(leaf).sum().backward()
    assert leaf.grad.abs().sum() > 0
    assert not any(t.is_inference() for t in [reference.constant([0.37, 0.63] * 2, torch.float32, x.device)])


ROUTES = {
    "fire": lambda x, backend: fire(x, node("lif", v_threshold=0.4), backend=backend)[0],
    "fire of its voltages": lambda x, backend: fire(x.detach(), node("lif"), v=x[0], backend=backend)[1],
    "aggregate": summed,
}
SAYS = "forward-mode derivatives are not implemented; use reverse mode"


@pytest.mark.parametrize("route", [("fire", "cpp"), ("fire of its voltages", "reference"), ("aggregate", "cpp")])
def test_forward_mode_is_refused(route):
    name, backend = route
    x = torch.randn(4, 1, 2, 4, 4)

    def call(x):
        return ROUTES[name](x, backend)

    with pytest.raises(NotImplementedError, match=SAYS):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    for leaf in (x, x.clone().requires_grad_()):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(leaf, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match=SAYS):
                call(dual)
    with forward_ad.dual_level():  # nothing is lost here
        assert call(x).shape[-2:] == x.shape[-2:]


def test_forward_mode_of_an_operator_that_is_called_by_itself_is_refused():
    """torch hands its kernel a tensor without the tangent."""
    x = torch.randn(4, 1, 2, 4, 4)
    of = kernels.operands(kernels.Call(x, node("lif", v_threshold=0.4), [1] * 4), None)

    def call(x):
        return torch.ops.sj_tac.fire(x, *of[1:])[0]

    assert call(x).sum() > 0
    with pytest.raises(NotImplementedError, match=SAYS):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with pytest.raises(NotImplementedError, match=SAYS):
        torch.func.jvp(lambda x: 2 * x.sum() + call(x.detach()).sum(), (x,), (torch.ones_like(x),))


def test_the_gradient_of_a_gradient_of_spikes_is_refused():
    y = torch.randn(3, 1, 2, 4, 4, requires_grad=True)
    out, v = fire(y, node("lif", v_threshold=0.4), 2, backend="cpp")
    (first,) = torch.autograd.grad(out.square().sum() + v.sum(), y, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no gradient of a gradient \(create_graph=True\)"):
        first.square().sum().backward()


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_the_gradient_of_a_gradient_of_sums_is_right(wanted):
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=wanted[0])
    weights = torch.rand(5, dtype=torch.float64, requires_grad=wanted[1])
    assert torch.autograd.gradgradcheck(lambda x, w: torch.ops.sj_tac.aggregate(x, w, 2), (x, weights))


# torch warns that the number of frames becomes part of the trace, as it does.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_jit_trace(backend):
    torch.manual_seed(0)
    reference._held.cache_clear()
    spiking = node("lif", v_threshold=0.4)

    def call(x):
        return aggregate(
            fire(x, spiking, 2, pool=layer.MaxPool2d(2), backend=backend)[0], [0.4, 0.6, 0.1], 3, backend=backend
        )

    with torch.no_grad():
        traced = torch.jit.trace(call, (torch.randn(3, 1, 2, 4, 4),))
        again = torch.randn(3, 2, 2, 8, 6)
        assert torch.equal(traced(again), call(again))


@only_v2
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_onnx_exporter_that_traces_is_refused():
    class Net(torch.nn.Module):
        def forward(self, x):
            return ROUTES["fire"](x, "cpp")

    with pytest.raises(BackendError, match=r"has no operator sj_tac::fire; torch.export.export takes"):
        torch.onnx.export(Net(), (torch.randn(4, 1, 2, 4, 4),), io.BytesIO(), dynamo=False)
    with torch.no_grad():
        exported = torch.export.export(Net(), (torch.randn(4, 1, 2, 4, 4),))
    assert any("sj_tac.fire" in str(n.target) for n in exported.graph.nodes)
