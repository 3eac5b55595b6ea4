"""Operands that do not fit are refused before a kernel reads, by the functions and by the torch operators alike."""

import pytest
import torch
from fire_cases import assert_is_the_reference
from spikingjelly.activation_based import layer
from support import node
from torch._subclasses.fake_tensor import FakeTensorMode

from sj_tac.errors import BackendError
from sj_tac.functional import aggregate, fire
from sj_tac.kernels.gpu import launchers, launches
from sj_tac.kernels.operands import Operands

G, N, C, H, W = 2, 1, 3, 4, 6
STEPS = [2, 1]


def operands(**changed):
    """A call of the operator that fits, with some of its operands changed."""
    fitting = {
        "y": torch.randn(G, N, C, H, W), "residual": None, "scale": torch.ones(C), "shift": torch.zeros(C),
        "v0": torch.zeros(N, C, H, W), "linear": torch.ones(G, 2), "q": torch.tensor(0.5), "weights": torch.ones(3),
        "lengths": STEPS, "mode": 2, "tau": 2.0, "decay": 1.0, "gain": 1.0, "rest": 0.0, "threshold": 0.4, "hard": True,
        "detach": False, "surrogate": 1, "alpha": 2.0, "pool": 0, "window": [1, 1, 1, 1, 0, 0], "group": 2,
    }  # fmt: skip
    return Operands(**(fitting | changed))


BAD = {
    "drives of four dimensions": {"y": torch.randn(G, C, H, W)},
    "no drives": {"y": torch.randn(0, N, C, H, W), "lengths": [], "linear": None, "weights": None},
    "drives of integers": {"y": torch.ones(G, N, C, H, W, dtype=torch.int32)},
    "too few lengths": {"lengths": [3]},
    "a length of nothing": {"lengths": [3, 0]},
    "no group": {"group": 0},
    "short voltages": {"v0": torch.zeros(N, C, H, W - 1)},
    "voltages of another dtype": {"v0": torch.zeros(N, C, H, W, dtype=torch.float64)},
    "voltages elsewhere": {"v0": torch.zeros(N, C, H, W, device="meta")},
    "a short scale": {"scale": torch.ones(1)},
    "a scale of another dtype": {"scale": torch.ones(C).double()},
    "a scale alone": {"shift": None},
    "a shift with dimensions": {"shift": torch.zeros(C, 1, 1)},
    "a shift alone": {"scale": None},
    "short weights": {"weights": torch.ones(2)},
    "weights of another dtype": {"weights": torch.ones(3).double()},
    "a short residual": {"residual": torch.zeros(G, N, C, H, W)},
    "a residual of another dtype": {"residual": torch.zeros(3, N, C, H, W).double()},
    "a short linear": {"linear": torch.ones(1, 2)},
    "a linear of another dtype": {"linear": torch.ones(G, 2).double()},
    "q by channel": {"q": torch.ones(C)},
    "q of another dtype": {"q": torch.tensor(0.5).double()},
    "an unknown pool": {"pool": 3},
    "a window of four numbers": {"pool": 1, "window": [2, 2, 2, 2]},
    "a window that stands still": {"pool": 2, "window": [2, 2, 0, 2, 0, 0]},
    "a window of padding alone": {"pool": 1, "window": [2, 2, 1, 1, 2, 0]},
    "a window larger than the map": {"pool": 2, "window": [5, 2, 1, 1, 0, 0]},
}
FIRE = torch.ops.sj_tac.fire
FIRE_BACKWARD = torch.ops.sj_tac.fire_backward


def gradients(o):
    return torch.ones(2, N, C, H, W), torch.ones(N, C, H, W)


@pytest.mark.parametrize("changed", BAD.values(), ids=BAD)
def test_the_operators_refuse_operands_that_do_not_fit(changed):
    o = operands(**changed)
    with pytest.raises(ValueError, match=r"^fire got .*; it takes "):
        FIRE(*o)


def test_so_do_the_backward_fake_tensors_and_the_cuda_kernels(monkeypatch):
    monkeypatch.setattr(launchers, "prepared", lambda *_: pytest.fail("a kernel was launched"))
    o = operands(**BAD["short voltages"])
    with pytest.raises(ValueError, match=r"^fire_backward got .*; it takes "):
        FIRE_BACKWARD(*gradients(o), *o, True, True)
    with FakeTensorMode() as mode:
        fake = Operands(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in o))
        with pytest.raises(ValueError, match=r"fire got .*; it takes "):
            FIRE(*fake)
    with pytest.raises(ValueError, match=r"^fire got .*; it takes "):
        launches.forward("cupy", o)
    with pytest.raises(ValueError, match=r"fire got .* it takes one of torch\.float32, torch\.float16, torch\.bfloat16"):
        launches.forward("cupy", operands(y=torch.randn(G, N, C, H, W).double()))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("wrong", [lambda g: g[:, :, :2], lambda g: g.double(), lambda g: g.to("meta"), lambda g: g[0]])
def test_the_backward_refuses_gradients_that_do_not_fit(which, wrong):
    o = operands()
    pair = list(gradients(o))
    pair[which] = wrong(pair[which])
    with pytest.raises(ValueError, match=r"^fire_backward got the (output|voltages)'s? gradient|voltages' gradient"):
        FIRE_BACKWARD(*pair, *o, True, True)


def test_a_dtype_that_a_kernel_does_not_read():
    dtype, says = torch.int32, "got .* of torch.int32 .*; it takes one of .*torch.float16 on cpu: convert what"
    with pytest.raises(ValueError, match=f"fire {says}"):
        FIRE(*operands(y=torch.ones(G, N, C, H, W, dtype=dtype)))
    with pytest.raises(ValueError, match=f"aggregate {says}"):
        torch.ops.sj_tac.aggregate(torch.ones(4, 2, dtype=dtype), torch.ones(4), 2)


@pytest.mark.parametrize(
    ("x", "weights", "group", "says"),
    [
        (torch.ones(0, 3), torch.ones(0), 1, "frames"),
        (torch.tensor(1.0), torch.ones(1), 1, "frames"),
        (torch.ones(4, 3), torch.ones(4), 0, "group"),
        (torch.ones(4, 3), torch.ones(3), 2, "weights"),
        (torch.ones(4, 3), torch.ones(4, 1), 2, "weights"),
        (torch.ones(4, 3), torch.ones(4).double(), 2, "weights"),
        (torch.ones(4, 3), torch.ones(4, device="meta"), 2, "weights"),
        (torch.ones(4, 3, dtype=torch.int64), torch.ones(4), 2, "frames"),
    ],
)
def test_aggregate_refuses_operands_that_do_not_fit(x, weights, group, says):
    with pytest.raises(ValueError, match=f"aggregate got {says} .*; it takes "):
        torch.ops.sj_tac.aggregate(x, weights, group)
    with pytest.raises(ValueError, match=r"aggregate got .*; it takes "):
        torch.ops.sj_tac.aggregate_backward(torch.ones(2, 3), x, weights, group, True, True)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("options", [{"v": torch.zeros(N, C, H, 1)}, {"pool": layer.AvgPool2d(9)}, {"steps": 5}])
def test_fire_refuses_what_does_not_fit(options, backend):
    with pytest.raises(ValueError, match=r"^fire got .*; it takes"):
        fire(torch.randn(G, N, C, H, W), node("lif"), 2, backend=backend, **options)


def test_aggregate_refuses_weights_and_frames_of_a_wrong_kind():
    x = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"aggregate got weights \[2, 1\]; it takes \[k\]"):
        aggregate(x, torch.ones(2, 1), 2)
    with pytest.raises(ValueError, match="aggregate got a weight that is a tensor of a shape"):
        aggregate(x, [torch.ones(3), torch.ones(3)], 2)
    with pytest.raises(ValueError, match=r"aggregate got frames of torch.int64; .*x\.float"):
        aggregate(x.long(), [0.5, 0.5], 2)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4)])
@pytest.mark.parametrize("pool", [None, layer.MaxPool2d(2), layer.AvgPool2d(3, 2, 1)])
def test_nothing_to_compute_is_computed_or_said(shape, pool):
    y, spiking = torch.randn(2, *shape), node("plif", v_threshold=0.4)
    options = {"steps": 5, "pool": pool, "v": torch.zeros(shape), "weights": torch.rand(5), "group": 2}
    options |= {"scale": torch.ones(shape[1]), "shift": torch.zeros(shape[1])}
    if pool is not None and 0 in shape[2:]:
        for backend in ("cpp", "reference"):
            with pytest.raises(ValueError, match="fire got the pool's window"):
                fire(y, spiking, 3, backend=backend, **options)
    elif pool is not None and shape[1] == 0:
        assert fire(y, spiking, 3, backend="cpp", **options)[0].numel() == 0  # torch's own pools refuse it
    else:
        got = assert_is_the_reference("cpp", y, spiking, 3, options)
        assert got[0].shape[:3] == (3, *shape[:2])


def test_thresholds_by_channel_run_on_the_reference_kernel():
    torch.manual_seed(0)
    y, thresholds = torch.randn(3, 2, 2, 4, 4), [0.2, 0.9]
    by_channel = node("plif")
    by_channel.v_threshold = torch.tensor(thresholds).view(2, 1, 1)
    out, v = fire(y, by_channel, 2)
    for c, threshold in enumerate(thresholds):
        expected, voltage = fire(y[:, :, c : c + 1], node("plif", v_threshold=threshold), 2, backend="reference")
        assert torch.equal(out[:, :, c : c + 1], expected)
        assert torch.equal(v[:, c : c + 1], voltage)
        assert 0 < expected.mean() < 1
    with pytest.raises(BackendError, match=r"one fixed v_threshold for all neurons, not a tensor \[2, 1, 1\]"):
        fire(y, by_channel, 2, backend="cpp")
    by_channel.v_reset = torch.zeros(2, 1, 1)
    with pytest.raises(ValueError, match=r"v_reset is a tensor \[2, 1, 1\]; sj_tac knows neurons with one v_reset"):
        fire(y, by_channel, 2)


@pytest.mark.parametrize("fake", [False, True])
def test_no_lengths_are_one_step_on_each_drive(fake):
    """As a call is compiled, where T is no number: the same operator, forward and backward."""
    given = {"y": torch.randn(G, N, C, H, W), "v0": None, "weights": torch.rand(G), "linear": torch.rand(G, 2)}
    each, none = operands(**given, lengths=[1] * G), operands(**given, lengths=[])
    go, gv = torch.rand(1, N, C, H, W), torch.rand(N, C, H, W)
    if not fake:
        for a, b in zip(FIRE(*each), FIRE(*none), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(FIRE_BACKWARD(go, gv, *each, True, True), FIRE_BACKWARD(go, gv, *none, True, True), strict=True):
            assert torch.equal(a, b)
        assert FIRE(*none)[0].any()
        torch.library.opcheck(FIRE, tuple(none), test_utils=("test_schema", "test_faketensor"))
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert FIRE(*none)[0].shape == (1, N, C, H, W)
        assert FIRE(*none._replace(weights=None))[0].shape == (G, N, C, H, W)
    with pytest.raises(ValueError, match=r"a residual .* one frame for each of 2 steps"):
        FIRE(*none._replace(residual=torch.zeros(3, N, C, H, W)))
