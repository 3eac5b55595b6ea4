"""``fire`` on Numba against the reference kernel, SpikingJelly, torch's operator checks and finite differences."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pairs
import pytest
import torch
from fire_cases import POOLS, assert_gradient_to_the_time_constant, assert_is_the_reference, build, run, space
from hypothesis import given, settings
from spikingjelly.activation_based import layer, surrogate
from support import NEURONS, node, only_v2

from sj_tac import host
from sj_tac.errors import BackendError
from sj_tac.functional import fire
from sj_tac.kernels import fire as kernels, fire_op
from sj_tac.kernels.fire import Call

TESTS = Path(__file__).resolve().parents[1]


# A kernel is compiled for each kind of neuron in each dtype: all of them in float32, a hard and a soft reset in the others.
FEW = [("lif", 0.0, True), ("plif", None, False)]


def few_in_other_dtypes(case):
    return case if case["dtype"] is torch.float32 else case | {"neuron": FEW[case["seed"] % 2]}


@settings(max_examples=4 * settings().max_examples, deadline=None)
@given(space.map(few_in_other_dtypes))
def test_numba_is_the_reference(case):
    before = fire_op.RUNS["fire", "numba"]
    assert_is_the_reference("numba", *build(case))
    assert fire_op.RUNS["fire", "numba"] == before + 2  # forward and backward: the kernel really ran


# Maps of several strips in both layouts, odd and even sizes, channels that do not divide into sheets, a single pixel.
@pytest.mark.parametrize(
    "shape", [(1, 2, 131, 129), (2, 67, 9, 33), (1, 64, 8, 34), (2, 5, 7, 6), (1, 3, 1, 1), (1, 9, 2, 1)]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overlapping_windows_are_torchs_bit_for_bit(shape, layout, dtype):
    """Output and gradients are those of fire without a pool and torch's own pool behind it, ties and all."""
    torch.manual_seed(0)
    pool, spiking = layer.MaxPool2d(3, 2, 1), node("lif", tau=1.7, v_threshold=0.4)
    y = torch.randn(3 * shape[0], *shape[1:], dtype=dtype).contiguous(memory_format=layout).unflatten(0, (3, shape[0]))
    y, v0 = y.requires_grad_(), torch.randn(shape, dtype=dtype).mul(0.2).requires_grad_()
    spikes, v = fire(y, spiking, 2, steps=5, v=v0, backend="numba")
    leaf = spikes.detach().requires_grad_()
    expected = pool(leaf.flatten(0, 1)).unflatten(0, (5, shape[0]))
    go, gv = torch.randn_like(expected), torch.randn_like(v)
    expected.backward(go)
    unpooled = torch.autograd.grad((spikes, v), (y, v0), (leaf.grad, gv))
    before = fire_op.RUNS["fire", "numba"]
    out, v_pooled = fire(y, spiking, 2, steps=5, v=v0, pool=pool, backend="numba")
    found = torch.autograd.grad((out, v_pooled), (y, v0), (go, gv))
    assert fire_op.RUNS["fire", "numba"] == before + 2
    assert torch.equal(out, expected)
    assert torch.equal(v_pooled, v)
    assert all(torch.equal(a, b) for a, b in zip(found, unpooled, strict=True))
    assert found[0].flatten(0, 1).is_contiguous(memory_format=layout)


def test_maps_too_large_to_be_kept_are_taken_in_fewer_channels(monkeypatch):
    """Sums by channel and gradients do not depend on how many channels a sheet has."""
    torch.manual_seed(0)
    y = torch.randn(4, 20, 9, 10).contiguous(memory_format=torch.channels_last).unflatten(0, (2, 2))
    options = {"pool": layer.MaxPool2d(3, 2, 1), "scale": torch.rand(20), "shift": torch.randn(20), "weights": torch.rand(4)}
    options |= {"steps": 4, "group": 2}
    expected = run("numba", y, node("plif", v_threshold=0.4), 2, options)
    monkeypatch.setattr("sj_tac.kernels.cpu.fire.KEPT", 1)
    monkeypatch.setattr("sj_tac.kernels.cpu.fire.BLOCK", 7)
    got = assert_is_the_reference("numba", y, node("plif", v_threshold=0.4), 2, options)
    assert torch.equal(got[2]["y"], expected[2]["y"])
    assert torch.equal(got[0], expected[0])


MANY = [(2, 3, 34, 36), (1, 20, 16, 16), (3, 300, 2, 4), (2, 1, 2, 700), (2, 40, 4, 4)]
# Of odd height, odd width and both: the last row or column has a neuron in no window of a 2x2 pool.
ODD = [(2, 3, 35, 37), (3, 20, 17, 16), (3, 300, 2, 5), (3, 300, 3, 3), (2, 1, 3, 701), (2, 40, 4, 5)]


@pairs.parametrize(
    shape=MANY + ODD, layout=[torch.contiguous_format, torch.channels_last], pool=POOLS[:3], residual=[False, True]
)
def test_many_tiles_in_both_layouts(shape, layout, pool, residual):
    """Maps of many tiles, tiles of many maps, rows and channels longer than a tile; the output has the layout of y."""
    torch.manual_seed(0)
    y = torch.randn(3 * shape[0], *shape[1:]).contiguous(memory_format=layout).unflatten(0, (3, shape[0]))
    channels = shape[1]
    options = {"steps": 8, "v": torch.randn(shape).mul(0.2), "pool": pool, "weights": torch.rand(8), "group": 3}
    options |= {"scale": torch.rand(channels).add(0.5), "shift": torch.randn(channels).mul(0.3)}
    if residual:
        options["residual"] = torch.randn(8, *shape)
    spiking = node("plif", v_threshold=0.4)
    got = assert_is_the_reference("numba", y, spiking, 3, options)
    assert got[0].flatten(0, 1).is_contiguous(memory_format=layout)
    assert got[1].is_contiguous(memory_format=layout)
    torch.set_num_threads(1)
    try:
        alone = run("numba", y, spiking, 3, options)
    finally:
        torch.set_num_threads(2)
    assert all(torch.equal(alone[2][name], got[2][name]) for name in got[2])


@pytest.mark.parametrize("decay_input", [True, False])
@pytest.mark.parametrize("v_reset", [None, -0.5])
def test_gradient_to_the_time_constant(decay_input, v_reset):
    assert_gradient_to_the_time_constant("numba", v_reset, decay_input)


@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), NEURONS)
def test_one_step_a_drive_is_spikingjelly(kind, v_reset, decay_input):
    torch.manual_seed(0)
    for tau in (2.0, 1.7, 10.0):
        spiking = node(kind, v_reset, decay_input, tau, v_threshold=0.3)
        x = torch.randn(12, 2, 3, 7, 5, requires_grad=True)
        out, v = fire(x, spiking, backend="numba")
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


@pytest.mark.parametrize(("pool", "group", "merge"), list(product(POOLS[:3], [None, 3], [False, True])))
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
    out, v = fire(y, node("plif", v_threshold=0.3), 2, steps=5, backend="numba", **options)
    (out.sum() + v.sum()).backward()
    assert {name for name, _ in calls} == set(operators)
    for name, arguments in calls:
        # The backward has no derivative of its own: surrogate gradients have no second order.
        wanted = name == "fire"
        leaves = tuple(
            a.detach().requires_grad_(wanted and a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments
        )
        torch.library.opcheck(operators[name], leaves)


@pytest.mark.parametrize("pool", POOLS[:3])
def test_a_call_that_nobody_watches_gives_what_the_operator_gives(pool, monkeypatch):
    """To the last bit: the last voltages, and gradients to each operand, where one of the outputs has none, too."""
    torch.manual_seed(0)
    given = {
        "y": torch.randn(3, 2, 2, 4, 4), "v": torch.randn(2, 2, 4, 4), "scale": torch.rand(2), "shift": torch.rand(2),
        "weights": torch.rand(5),
    }  # fmt: skip
    seen, operator, found = [], fire_op.fire, []
    monkeypatch.setattr(fire_op, "fire", lambda *a: (seen.append(1), operator(*a))[1])
    for watched in (False, True):
        if watched:
            monkeypatch.setattr(fire_op.dispatch, "is_plain", lambda x: False)
        for used in ((1, 1), (1, 0), (0, 1)):
            leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
            y = leaves.pop("y")
            out, v = fire(y, node("plif", v_threshold=0.3), 2, steps=5, pool=pool, group=3, backend="numba", **leaves)
            loss = used[0] * out.square().sum() if used[0] else 0.0
            (loss + v.square().sum() if used[1] else loss).backward()
            found.append([out.detach(), v.detach(), *(x.grad for x in (y, *leaves.values()))])
    assert len(seen) == 3
    for one, other in zip(found[:3], found[3:], strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("lengths", [[2, 1, 2], [1, 3, 1, 2], [1, 1, 4]])
def test_drives_may_be_for_any_number_of_steps_each(lengths):
    """Neither kernel takes all groups but the last to be alike."""
    torch.manual_seed(0)
    y, neuron = torch.randn(len(lengths), 2, 3, 4, 4), node("lif", v_threshold=0.3)
    call = Call(y, neuron, lengths, torch.randn(2, 3, 4, 4) * 0.2, torch.randn(sum(lengths), 2, 3, 4, 4))
    (expected, v), (got, last) = kernels.run("reference", call), kernels.run("numba", call)
    assert got.shape[0] == sum(lengths)
    assert torch.equal(got, expected)
    assert torch.equal(last, v)


@pytest.mark.parametrize("last", [True, False])
def test_many_gradients_at_once_are_those_one_by_one(last):
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them, to the output or the voltages."""
    torch.manual_seed(0)
    y = torch.randn(3, 2, 2, 4, 4, requires_grad=True)
    found = fire(y, node("lif", v_threshold=0.3), 2, pool=POOLS[1], backend="numba")[last]
    many = torch.randn(3, *found.shape)
    (together,) = torch.autograd.grad(found, y, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(found, y, one, retain_graph=True)[0] for one in many]
    assert torch.equal(together, torch.stack(each))
    assert together.abs().max() > 0


def test_gradcheck_where_the_map_is_differentiable():
    """Below threshold with detach_reset the voltage is linear in everything; weights always enter linearly."""
    torch.manual_seed(0)
    y = torch.randn(2, 1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    v0 = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    for kind, v_reset, decay_input in NEURONS:
        quiet = node(kind, v_reset, decay_input, 3.0, detach_reset=True, v_threshold=1e6).double()

        def voltage(y, v0, scale, shift, quiet=quiet):
            return fire(y, quiet, 3, steps=5, v=v0, scale=scale, shift=shift, backend="numba")[1]

        assert torch.autograd.gradcheck(voltage, (y, v0, scale, shift))
        loud = node(kind, v_reset, decay_input, 3.0, v_threshold=0.3).double()

        def counts(weights, loud=loud):
            return fire(y.detach(), loud, 3, steps=5, weights=weights, group=2, backend="numba")[0]

        assert torch.autograd.gradcheck(counts, (weights,))


@only_v2
def test_what_the_kernel_cannot_do_goes_to_the_reference_or_says_so():
    y = torch.randn(2, 1, 2, 6, 6)
    rect = node("lif", surrogate_function=surrogate.Rect(), v_threshold=0.3)
    before = fire_op.RUNS["fire", "numba"]
    assert torch.equal(fire(y, rect)[0], rect(y))
    assert fire_op.RUNS["fire", "numba"] == before
    with pytest.raises(BackendError, match=r"no derivative of surrogate Rect, only of Sigmoid, ATan.*backend=\"auto\""):
        fire(y, rect, backend="numba")
    with pytest.raises(BackendError, match="do not pool with this MaxPool2d's options"):
        fire(y, node("lif"), pool=layer.MaxPool2d(2, ceil_mode=True), backend="numba")
    with pytest.raises(BackendError, match="run on the CPU, not on meta"):
        fire(y.to("meta"), node("lif"), backend="numba")
    with pytest.raises(ValueError, match=r"fire got drives \[2, 1, 2, 6, 6\] with k=2 and 5 steps"):
        fire(y, node("lif"), 2, steps=5)
    with pytest.raises(ValueError, match=r"fire got a residual \[2, 1, 2, 6, 6\] of torch.float32.*one frame"):
        fire(y, node("lif"), 2, residual=y)
    with pytest.raises(ValueError, match=r"fire got weights \[3\] of torch.float32.*one weight for each of 4 steps"):
        fire(y, node("lif"), 2, weights=torch.ones(3), group=2)


SCRIPT = """
import sys, threading, torch
from spikingjelly.activation_based import neuron
from sj_tac.functional import fire
from sj_tac.kernels.cpu import threads as of_kernels
of_kernels.ALONE = 0
if sys.argv[1] == "lazy":
    assert "numba" not in sys.modules
    sys.exit()
y, node = torch.randn(4, 8, 16, 8, 8), neuron.LIFNode(step_mode="m", v_threshold=0.4)
torch.set_num_threads(2)
expected = fire(y, node, 2, backend="numba")[0]
torch.set_num_threads(1)
assert torch.equal(fire(y, node, 2, backend="numba")[0], expected), "one thread"
torch.set_num_threads(2)
wrong = []
def work():
    for _ in range(10):
        if not torch.equal(fire(y, node, 2, backend="numba")[0], expected): wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in threads], [t.join() for t in threads]
assert not wrong, "Python threads"
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return fire(y, node, 2, backend="numba")[0]
for batch in torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"):
    assert torch.equal(batch[0], expected), "forked worker"
import os
from sj_tac.kernels.cpu import threads as numba_threads
pid = os.fork()
if pid == 0:
    os._exit(1 if numba_threads.are_safe() else 0)
assert os.waitpid(pid, 0)[1] == 0, "a forked child would enter the parent's threads"
"""


@pytest.mark.parametrize("layer_name", ["lazy", "default", "workqueue"])
def test_threads_forks_and_lazy_imports(layer_name):
    environment = {"NUMBA_THREADING_LAYER": layer_name} if layer_name == "workqueue" else {}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, layer_name]
    env = {**__import__("os").environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, env=env, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path):
    """Numba compiles anew where it may not write; the result is the same."""
    script = (
        "import torch\nfrom spikingjelly.activation_based import neuron\nfrom sj_tac.functional import fire\n"
        "node = neuron.LIFNode(step_mode='m')\ny = torch.ones(3, 1, 1, 4, 4) * 1.5\n"
        "assert torch.equal(fire(y, node, backend='numba')[0], node(y))\n"
    )
    blocked = tmp_path / "file"
    blocked.write_text("")
    env = {**__import__("os").environ, "NUMBA_CACHE_DIR": str(blocked / "cache")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
