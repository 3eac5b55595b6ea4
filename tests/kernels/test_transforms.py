"""What torch does with operators besides running them: fake tensors, inference mode, derivatives of other kinds, tracing."""

import io

import pytest
import torch
from fire_cases import run
from spikingjelly.activation_based import layer
from support import node, only_v2
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from sj_tac.errors import BackendError
from sj_tac.functional import aggregate, fire
from sj_tac.kernels import reference

BACKENDS = ["numba", "reference"]

# Forward-mode derivatives make torch script functions of its own, and warn of it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is:FutureWarning")


def merged(y, backend="numba", **options):
    """A call whose beta and gamma are constants that are kept, [G, 2]."""
    return fire(y, node("lif", tau=1.9, v_threshold=0.4), 2, merge=True, backend=backend, **options)[0]


def summed(x, backend="numba"):
    """Sums whose weights are constants that are kept."""
    return aggregate(x, [0.37, 0.63], 2, backend=backend)


@pytest.mark.parametrize("call", [merged, summed])
def test_constants_that_were_made_fake_are_not_kept(call):
    torch.manual_seed(0)
    x = torch.randn(4, 1, 2, 4, 4)
    expected = call(x, "reference")
    reference._held.cache_clear()
    with FakeTensorMode() as mode:
        assert isinstance(call(mode.from_tensor(x)), FakeTensor)
    out = call(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, expected)
    with FakeTensorMode() as mode:  # nor are real ones handed to fake tensors
        assert isinstance(call(mode.from_tensor(x)), FakeTensor)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize])
@pytest.mark.parametrize("backend", BACKENDS)
def test_constants_that_were_made_in_a_transform_are_not_kept(transform, backend):
    x = torch.randn(3, 4, 1, 2, 4, 4)
    reference._held.cache_clear()
    transform(lambda x: summed(x, backend))(x)
    weights = reference.constant([0.37, 0.63, 0.37, 0.63], torch.float32, x.device)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(weights)
    assert not torch._is_functional_tensor(weights)
    assert torch.equal(summed(x[0], backend), summed(x[0].clone(), backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", [merged, summed])
def test_constants_that_were_made_in_inference_mode_train(call, backend):
    reference._held.cache_clear()
    x = torch.randn(4, 1, 2, 4, 4)
    with torch.inference_mode():
        call(x, backend)
    leaf = x.clone().requires_grad_()
    call(leaf, backend).sum().backward()
    assert leaf.grad.abs().sum() > 0
    assert not any(t.is_inference() for t in [reference.constant([0.37, 0.63] * 2, torch.float32, x.device)])


ROUTES = {
    "fire": lambda x, backend: fire(x, node("lif", v_threshold=0.4), backend=backend)[0],
    "fire of its voltages": lambda x, backend: fire(x.detach(), node("lif"), v=x[0], backend=backend)[1],
    "aggregate": summed,
}
SAYS = "forward-mode derivatives are not implemented; use reverse mode"


@pytest.mark.parametrize("route", [(n, b) for n in ROUTES for b in BACKENDS if (n, b) != ("aggregate", "reference")])
def test_forward_mode_is_refused(route):
    name, backend = route
    x = torch.randn(4, 1, 2, 4, 4)

    def call(x):
        return ROUTES[name](x, backend)

    with pytest.raises(NotImplementedError, match=SAYS):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with pytest.raises(NotImplementedError, match=SAYS):
        torch.func.jacfwd(call)(x)
    for leaf in (x, x.clone().requires_grad_()):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(leaf, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match=SAYS):
                call(dual)
    with forward_ad.dual_level():  # nothing is lost here
        assert call(x).shape[-2:] == x.shape[-2:]


def test_forward_mode_through_the_operators_themselves():
    x, weights = torch.randn(4, 3), torch.rand(4)
    operator = torch.ops.sj_tac.aggregate
    with pytest.raises(NotImplementedError, match=f"aggregate: {SAYS}"):
        torch.func.jvp(lambda w: operator(x, w, 2), (weights,), (weights,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"aggregate: {SAYS}"):
        operator(x, forward_ad.make_dual(weights, weights), 2)


def test_forward_mode_of_the_reference_sum():
    x, tangent = torch.randn(4, 3), torch.randn(4, 3)
    out, derivative = torch.func.jvp(lambda x: summed(x, "reference"), (x,), (tangent,))
    assert torch.equal(out, summed(x, "reference"))
    torch.testing.assert_close(derivative, summed(tangent, "reference"))


def test_the_gradient_of_a_gradient_of_spikes_is_refused():
    y = torch.randn(3, 1, 2, 4, 4, requires_grad=True)
    out, v = fire(y, node("lif", v_threshold=0.4), 2, backend="numba")
    (first,) = torch.autograd.grad(out.square().sum() + v.sum(), y, create_graph=True)
    once = torch.autograd.grad(sum(x.square().sum() for x in fire(y, node("lif", v_threshold=0.4), 2, backend="numba")), y)
    assert once[0].shape == first.shape
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
@pytest.mark.parametrize("pool", [None, layer.MaxPool2d(2)])
def test_jit_trace(backend, pool):
    torch.manual_seed(0)
    reference._held.cache_clear()
    spiking = node("lif", v_threshold=0.4)

    def call(x):
        return aggregate(fire(x, spiking, 2, pool=pool, backend=backend)[0], [0.4, 0.6, 0.1], 3, backend=backend)

    with torch.no_grad():
        traced = torch.jit.trace(call, (torch.randn(3, 1, 2, 4, 4),))
        again = torch.randn(3, 2, 2, 8, 6)
        assert torch.equal(traced(again), call(again))


@only_v2
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["fire", "aggregate"])
def test_the_onnx_exporter_that_traces_is_refused(name):
    class Net(torch.nn.Module):
        def forward(self, x):
            return ROUTES[name](x, "numba")

    with pytest.raises(BackendError, match=rf"has no operator sj_tac::{name}; torch.export.export takes"):
        torch.onnx.export(Net(), (torch.randn(4, 1, 2, 4, 4),), io.BytesIO(), dynamo=False)
    with torch.no_grad():
        exported = torch.export.export(Net(), (torch.randn(4, 1, 2, 4, 4),))
    assert any(f"sj_tac.{name}" in str(n.target) for n in exported.graph.nodes)


def test_gradients_do_not_depend_on_the_mode_around_the_forward():
    """The same net in inference mode first, then trained: nothing of the first call is left in the second."""
    torch.manual_seed(0)
    y, spiking = torch.randn(4, 1, 2, 6, 6), node("plif", v_threshold=0.4)
    options = {"merge": True, "scale": torch.ones(2), "shift": torch.zeros(2)}
    expected = run("numba", y, spiking, 2, options)
    with torch.inference_mode():
        fire(y, spiking, 2, backend="numba", **options)
    got = run("numba", y, spiking, 2, options)
    assert all(torch.equal(got[2][name], expected[2][name]) for name in expected[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_for_any_number_of_frames(backend):
    spiking = node("plif", v_threshold=0.4)

    def call(y):
        return aggregate(fire(y, spiking, 2, backend=backend)[0], [0.4, 0.6], 2, backend=backend)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    try:
        for frames, samples in ((4, 2), (6, 3), (5, 2)):
            y = torch.randn(frames, samples, 2, 4, 4)
            assert torch.equal(compiled(y), call(y))
    finally:
        torch.compiler.reset()
