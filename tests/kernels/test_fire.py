"""``fire`` on the CPU against the reference kernel, SpikingJelly, finite differences and torch's operator checks."""

import subprocess
import sys
from itertools import product

import pairs
import pytest
import torch
from fire_cases import POOLS, assert_gradient_to_the_time_constant, assert_is_the_reference, build, run, space
from hypothesis import given, settings, strategies as st
from spikingjelly.activation_based import layer, surrogate
from support import NEURONS, node, only_v2

from sj_tac import host
from sj_tac.errors import BackendError
from sj_tac.functional import aggregate, fire
from sj_tac.kernels import fire_op

# Maps of many blocks, blocks of many maps, long rows, many channels. Of odd height, odd width and both: the last row or
# column has a neuron in no window of a 2x2 pool.
MANY = [(2, 3, 34, 36), (3, 300, 2, 4), (2, 1, 2, 700), (2, 3, 35, 37), (3, 20, 17, 16), (2, 40, 4, 5)]


@settings(max_examples=8 * settings().max_examples, deadline=None)
@given(space, st.one_of(st.none(), st.sampled_from(MANY)))
def test_fire_and_its_gradients_are_the_references(case, shape):
    """Of large maps the same on another number of threads; the output has the layout of y."""
    if shape and min(shape[2:]) < 3:
        case = case | {"pool": case["pool"] % 2}
    built = build(case | {"shape": shape or case["shape"]})
    before = fire_op.RUNS["fire", "cpp"]
    got = assert_is_the_reference("cpp", *built)
    assert fire_op.RUNS["fire", "cpp"] == before + 2  # forward and backward: the kernel really ran
    layout = torch.channels_last if case["channels_last"] else torch.contiguous_format
    assert all(of.is_contiguous(memory_format=layout) for of in (got[0].flatten(0, 1), got[1]))
    if shape:
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if threads > 1 else 2)
        try:
            alone = run("cpp", *built)
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(alone[2][name], got[2][name]) for name in got[2])


@pytest.mark.parametrize("decay_input", [True, False])
@pytest.mark.parametrize("v_reset", [None, -0.5])
def test_gradient_to_the_time_constant(decay_input, v_reset):
    assert_gradient_to_the_time_constant("cpp", v_reset, decay_input)


@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), NEURONS[::3])
def test_gradcheck_where_the_map_is_differentiable(kind, v_reset, decay_input):
    """Below threshold with detach_reset the voltage is linear in everything; weights always enter linearly."""
    torch.manual_seed(0)
    y = torch.randn(2, 1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    v0 = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    quiet = node(kind, v_reset, decay_input, 3.0, detach_reset=True, v_threshold=1e6).double()
    loud = node(kind, v_reset, decay_input, 3.0, v_threshold=0.3).double()

    def voltage(y, v0, scale, shift):
        return fire(y, quiet, 3, steps=5, v=v0, scale=scale, shift=shift, backend="cpp")[1]

    def counts(weights):
        return fire(y.detach(), loud, 3, steps=5, weights=weights, group=2, backend="cpp")[0]

    assert torch.autograd.gradcheck(voltage, (y, v0, scale, shift))
    assert torch.autograd.gradcheck(counts, (weights,))


STEPPED = [("lif", 0.0, True, 2.0), ("lif", None, False, 10.0), ("lif", 0.0, True, 1.7), ("if", None, True, 1.7)]
STEPPED += [(*neuron, 1.7) for neuron in NEURONS]


@pytest.mark.parametrize(("kind", "v_reset", "decay_input", "tau"), STEPPED)
def test_one_step_a_drive_is_spikingjelly(kind, v_reset, decay_input, tau):
    torch.manual_seed(0)
    spiking = node(kind, v_reset, decay_input, tau, v_threshold=0.3)
    x = torch.randn(12, 2, 3, 7, 5, requires_grad=True)
    out, v = fire(x, spiking, backend="cpp")
    expected = spiking(x)
    assert 0 < expected.mean() < 1
    if host.IS_V2 or decay_input:
        assert torch.equal(out, expected)
        assert torch.equal(v, spiking.v)
    else:
        # The older host writes v (1 - 1/tau) + x, which differs in last bits, and a spike may tip over.
        assert (out != expected).float().mean() <= 1e-3
        assert ((v - spiking.v).abs() > 1e-5).float().mean() <= 1e-2
    spiking.reset()
    weight = torch.randn_like(expected)
    (a,) = torch.autograd.grad((expected * weight).sum(), x)
    (b,) = torch.autograd.grad((out * weight).sum(), x)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


OPCHECKED = list(product(POOLS[:3], [None, 3], [False, True])) if pairs.EXHAUSTIVE else [(POOLS[1], 3, False)]


@pytest.mark.parametrize(("pool", "group", "merge"), OPCHECKED)
# torch asks a tensor for a gradient that it then warns about.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_opcheck(pool, group, merge, monkeypatch):
    """torch's own checks of schema, fake kernels, autograd registration and AOT dispatch, on calls as fire makes them."""
    calls = []
    operators = {"fire": fire_op.fire, "fire_backward": fire_op.fire_backward}
    for name, operator in operators.items():
        monkeypatch.setattr(
            fire_op, name, lambda *a, name=name, operator=operator: (calls.append((name, a)), operator(*a))[1]
        )
    monkeypatch.setattr(fire_op.dispatch, "is_plain", lambda x: False)  # somebody watches
    torch.manual_seed(0)
    y = torch.randn(3, 2, 2, 4, 4, requires_grad=True)
    weights = torch.rand(3 if merge else 5, requires_grad=True) if group else None
    scale, shift = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    options = {"scale": scale, "shift": shift, "pool": pool, "weights": weights, "group": group or 1, "merge": merge}
    out, v = fire(y, node("plif", v_threshold=0.3), 2, steps=5, backend="cpp", **options)
    (out.sum() + v.sum()).backward()
    assert {name for name, _ in calls} == set(operators)
    for name, arguments in calls:
        # The backward has no derivative of its own: surrogate gradients have no second order.
        wanted = name == "fire"
        leaves = tuple(
            a.detach().requires_grad_(wanted and a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments
        )
        torch.library.opcheck(operators[name], leaves)


@pytest.mark.parametrize("last", [True, False])
def test_many_gradients_at_once_are_those_one_by_one(last):
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them, to the output or the voltages."""
    torch.manual_seed(0)
    y = torch.randn(3, 2, 2, 4, 4, requires_grad=True)
    found = fire(y, node("lif", v_threshold=0.3), 2, pool=POOLS[1], backend="cpp")[last]
    many = torch.randn(3, *found.shape)
    (together,) = torch.autograd.grad(found, y, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(found, y, one, retain_graph=True)[0] for one in many]
    assert torch.equal(together, torch.stack(each))
    assert together.abs().max() > 0


@only_v2
def test_what_the_kernel_cannot_do_goes_to_the_reference_or_says_so():
    y = torch.randn(2, 1, 2, 6, 6)
    rect = node("lif", surrogate_function=surrogate.Rect(), v_threshold=0.3)
    before = fire_op.RUNS["fire", "cpp"]
    assert torch.equal(fire(y, rect)[0], rect(y))
    assert fire_op.RUNS["fire", "cpp"] == before
    with pytest.raises(BackendError, match=r"no derivative of surrogate Rect, only of Sigmoid, ATan.*backend=\"auto\""):
        fire(y, rect, backend="cpp")
    with pytest.raises(BackendError, match="do not pool with this MaxPool2d's options"):
        fire(y, node("lif"), pool=layer.MaxPool2d(2, ceil_mode=True), backend="cpp")
    with pytest.raises(BackendError, match="run on the CPU, not on meta"):
        fire(y.to("meta"), node("lif"), backend="cpp")
    with pytest.raises(ValueError, match=r"fire got drives \[2, 1, 2, 6, 6\] with k=2 and 5 steps"):
        fire(y, node("lif"), 2, steps=5)
    with pytest.raises(ValueError, match=r"fire got a residual \[2, 1, 2, 6, 6\] of torch.float32.*one frame"):
        fire(y, node("lif"), 2, residual=y)
    with pytest.raises(ValueError, match=r"fire got weights \[3\] of torch.float32.*one weight for each of 4 steps"):
        fire(y, node("lif"), 2, weights=torch.ones(3), group=2)


def test_numbers_that_torch_negates_when_they_are_read():
    """As the imaginary part of a conjugate: drives, voltages, weights, and gradients that arrive."""
    torch.manual_seed(0)
    y, v = torch.randn(4, 2, 8, 6, 6), torch.rand(2, 8, 6, 6)
    weights, spiking = torch.rand(8), node("lif", v_threshold=0.3)
    found = []
    for lazy in (torch._neg_view, torch.neg):
        leaf = y.clone().requires_grad_()
        options = {"v": lazy(-v), "weights": lazy(-weights), "group": 2, "backend": "cpp"}
        out, _ = fire(lazy(-leaf), spiking, 2, **options)
        assert torch.equal(aggregate(lazy(-y), [0.5, 0.5], 2, backend="cpp"), aggregate(y, [0.5, 0.5], 2))
        found += [out, torch.autograd.grad(out, leaf, lazy(torch.ones_like(out)))[0]]
    assert found[0].count_nonzero()
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_memory_that_was_freed_is_an_error():
    y = torch.randn(4, 2, 8, 6, 6)
    y.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"a tensor \[4, 2, 8, 6, 6\] of torch.float32 has no memory.*bring it back"):
        fire(y, node("lif"), 2, backend="cpp")


SCRIPT = """
import os, threading, torch
from spikingjelly.activation_based import neuron
from sj_tac.functional import aggregate, fire
from sj_tac.kernels.cpu import call
call.ALONE = 0
y, node = torch.randn(4, 8, 16, 8, 8), neuron.LIFNode(step_mode="m", v_threshold=0.4)
torch.randn(4000000).exp()  # starts torch's threads, which a child has not
pid = os.fork()
if pid == 0:
    fire(y, node, 2, backend="cpp")
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0, "a child that calls first"
torch.set_num_threads(2)
expected = fire(y, node, 2, backend="cpp")[0]
torch.set_num_threads(1)
assert torch.equal(fire(y, node, 2, backend="cpp")[0], expected), "one thread"
torch.set_num_threads(2)
wrong = []
def work():
    for _ in range(10):
        if not torch.equal(fire(y, node, 2, backend="cpp")[0], expected): wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in threads], [t.join() for t in threads]
assert not wrong, "Python threads"
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return fire(y, node, 2, backend="cpp")[0]
for batch in torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"):
    assert torch.equal(batch[0], expected), "forked worker"
pid = os.fork()
if pid == 0:
    os._exit(call.threads(1e9) != 1)
assert os.waitpid(pid, 0)[1] == 0, "a forked child would enter the parent's threads"
"""


def test_threads_and_forks():
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
