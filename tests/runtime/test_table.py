"""Every operation of the closed list, on every kind of value: what it gives is what it gives for the frames."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sj_tac.runtime.entries import is_usable
from sj_tac.runtime.expressions import Computed, Made, SharedExpression
from sj_tac.runtime.groups import Groups, even, sums
from sj_tac.runtime.table import TABLE
from sj_tac.runtime.values import Frames, Shared, Spikes

T, N, C = 5, 2, 4
SHAPE = (N, C, 6, 6)


def shared(means=False, affine=False, residual=False, seed=0):
    """Drives of groups of 2, 2 and 1 frames."""
    torch.manual_seed(seed)
    compact = torch.randn(3, *SHAPE, dtype=torch.float64, requires_grad=True)
    groups = even(T, 2)
    maps = (torch.rand(C, dtype=torch.float64) + 0.5, torch.randn(C, dtype=torch.float64)) if affine else None
    added = None
    if residual:
        plain = torch.randn(T, *SHAPE, dtype=torch.float64)
        added = Made(torch.clone, (plain,), plain)
    return Shared.of(SharedExpression(compact, groups, maps, added), groups if means else None), compact


def spikes(made=False, seed=0):
    """Spikes with sums of groups of 2 frames, weighted 1/3 and 2/3."""
    torch.manual_seed(seed)
    plain = (torch.rand(T, *SHAPE, dtype=torch.float64) < 0.4).double().requires_grad_()
    ones = Groups((1,) * T, (1,) * T)
    wanted = sums(ones, 2, [[1 / 3, 2 / 3], [1 / 3, 2 / 3], [1.0]], (torch.float64, torch.device("cpu")), None)
    summed = torch.stack([plain[0] / 3 + plain[1] * 2 / 3, plain[2] / 3 + plain[3] * 2 / 3, plain[4]])
    expression = Made(torch.clone, (plain,), plain * 1) if made else Computed(lambda t: t * 1, (plain,))
    return Spikes.of(expression, (T, *SHAPE), plain, sums={} if made else {wanted: summed}), plain


KINDS = {
    "shared": lambda seed=0: shared(seed=seed),
    "mapped": lambda seed=0: shared(affine=True, seed=seed),
    "means": lambda seed=0: shared(means=True, seed=seed),
    "residual": lambda seed=0: shared(residual=True, seed=seed),
    "spikes": lambda seed=0: spikes(seed=seed),
    "made": lambda seed=0: spikes(made=True, seed=seed),
}
WEIGHT = torch.randn(3, C, 3, 3, dtype=torch.float64)
STATISTICS = (torch.randn(C, dtype=torch.float64), torch.rand(C, dtype=torch.float64) + 0.5)
GAINS = torch.linspace(0.5, 2, C, dtype=torch.float64).view(C, 1, 1)
MAP = torch.randn(C, *SHAPE[2:], dtype=torch.float64)


def filled(x, index, value):
    """``x``, to places of which something was written; what was read of it before stays as it was."""
    before = x * 2
    x = x * 1
    x[index] = value
    return x + before


# name -> (operation, on folded frames). Every function of the table stands here at least once.
def doubled(x):
    x += x
    return x


OPERATIONS = {
    "add": (lambda x, y: x + y, False),
    "torch.add": (lambda x, y: torch.add(x, y), False),
    "sub": (lambda x, y: x - y, False),
    "torch.sub": (lambda x, y: torch.sub(x, y), False),
    "add of a tensor": (lambda x, y: x + torch.ones(T, *SHAPE, dtype=torch.float64), False),
    "radd": (lambda x, y: torch.ones(T, *SHAPE, dtype=torch.float64) + x, False),
    "twice": (lambda x, y: x + x, False),
    "iadd": (lambda x, y: x.__iadd__(y), False),
    "isub": (lambda x, y: x.sub_(y), False),
    "cat": (lambda x, y: torch.cat([x, y], 2), False),
    "concat": (lambda x, y: torch.concat((x, y), dim=-1), False),
    "cat in time": (lambda x, y: torch.cat([x, y], 0), False),
    "flatten": (lambda x, y: x.flatten(2), False),
    "torch.flatten": (lambda x, y: torch.flatten(x, 3, 4), False),
    "fold": (lambda x, y: x.flatten(0, 1), False),
    "fold by view": (lambda x, y: x.reshape(-1, *SHAPE[1:]), False),
    "fold and back": (lambda x, y: x.flatten(0, 1).unflatten(0, (T, N)), False),
    "fold and view": (lambda x, y: x.flatten(0, 1).view(T, N, *SHAPE[1:]), False),
    "all of it": (lambda x, y: x.flatten(), False),
    "unsqueeze": (lambda x, y: x.unsqueeze(2), False),
    "unsqueeze in front": (lambda x, y: x.unsqueeze(0), False),
    "squeeze": (lambda x, y: x.unsqueeze(3).squeeze(3), False),
    "contiguous": (lambda x, y: x.contiguous(), False),
    "times": (lambda x, y: x * 0.5, False),
    "rtimes": (lambda x, y: 3 * x, False),
    "by": (lambda x, y: x / 4, False),
    "torch.div": (lambda x, y: torch.div(x, 2), False),
    "times channels": (lambda x, y: x * GAINS, False),
    "channels times": (lambda x, y: GAINS * x, False),
    "torch.mul, a map": (lambda x, y: torch.mul(x, MAP), False),
    "by channels": (lambda x, y: x / GAINS, False),
    "channels by": (lambda x, y: GAINS / (x.abs() + 1), False),
    "plus a map": (lambda x, y: x + MAP, False),
    "a map minus": (lambda x, y: MAP - x, False),
    "torch.sub, channels first": (lambda x, y: torch.sub(GAINS, x), False),
    "times one element": (lambda x, y: x * GAINS[0, 0, 0], False),
    "times what has other maps": (lambda x, y: x[..., :1] * MAP, False),
    "times what each sample has": (lambda x, y: x * GAINS.new_tensor([1.0, 2.0]).view(N, 1, 1, 1), False),
    "times what each frame has": (lambda x, y: x * torch.arange(T, dtype=torch.float64).view(T, 1, 1, 1, 1), False),
    "times what has more dimensions": (lambda x, y: x * GAINS.new_ones(2, 1, 1, 1, 1, 1), False),
    "in place by channels": (lambda x, y: x.__imul__(GAINS), False),
    "in place plus channels": (lambda x, y: x.__iadd__(GAINS), False),
    "folded times channels": (lambda x, y: x * GAINS, True),
    "folded times a map of dimension 4": (lambda x, y: x * MAP[None], True),
    "folded times what each frame has": (lambda x, y: x * torch.arange(T * N, dtype=torch.float64).view(-1, 1, 1, 1), True),
    "float": (lambda x, y: x.float().double(), False),
    "half": (lambda x, y: x.half().double(), False),
    "bfloat16": (lambda x, y: x.bfloat16().double(), False),
    "to": (lambda x, y: x.to(torch.float32).to(torch.float64), False),
    "to, as a keyword": (lambda x, y: x.to(dtype=torch.float32).double(), False),
    "to what it is": (lambda x, y: x.to(torch.float64) + 1, False),
    "to a device": (lambda x, y: x.to("cpu"), False),
    "type_as": (lambda x, y: x.float().type_as(y), False),
    "folded type_as": (lambda x, y: x.type_as(GAINS), True),
    "pad": (lambda x, y: F.pad(x, (1, 2, 0, 1)), False),
    "pad with a number": (lambda x, y: F.pad(x, (1, 1), value=0.5), False),
    "pad of channels": (lambda x, y: F.pad(x, pad=(0, 0, 0, 0, 1, 1)), False),
    "pad of the batch": (lambda x, y: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0)), False),
    "pad by what is there": (lambda x, y: F.pad(x, (1, 1, 1, 1), mode="reflect"), True),
    "folded pad": (lambda x, y: F.pad(x, (1, 1, 1, 1)), True),
    "folded pad of the batch": (lambda x, y: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0)), True),
    "pixel_shuffle": (lambda x, y: F.pixel_shuffle(x, 2), False),
    "pixel_unshuffle": (lambda x, y: F.pixel_unshuffle(x, 3), True),
    "flip": (lambda x, y: torch.flip(x.flip(-1), (2, 3)), False),
    "folded flip": (lambda x, y: x.flip(1), True),
    "flip of time": (lambda x, y: x.flip(0), False),
    "roll": (lambda x, y: torch.roll(x.roll(1, -1), (1, 2), (2, 3)), False),
    "roll of all": (lambda x, y: x.roll(1), False),
    "index_select": (lambda x, y: torch.index_select(x, -1, torch.tensor([1, 0, 0])), False),
    "index_select of time": (lambda x, y: x.index_select(0, torch.tensor([1, 0])), False),
    "repeat_interleave": (lambda x, y: x.repeat_interleave(2, dim=3), False),
    "channel_shuffle": (lambda x, y: torch.channel_shuffle(x, 1), True),
    "matmul": (lambda x, y: torch.matmul(x, torch.ones(x.shape[-1], 2, dtype=x.dtype)), False),
    "matmul from the left": (lambda x, y: torch.ones(2, x.shape[-2], dtype=x.dtype) @ x, False),
    "matmul by a vector": (lambda x, y: x @ torch.ones(x.shape[-1], dtype=x.dtype), False),
    "matmul of values": (lambda x, y: x @ y.transpose(-1, -2), False),
    "einsum": (lambda x, y: torch.einsum("tnchw,cd->tndhw", x, torch.ones(x.shape[2], 2, dtype=x.dtype)), False),
    "folded einsum": (lambda x, y: torch.einsum("cd,bchw->bdhw", torch.ones(x.shape[1], 2, dtype=x.dtype), x), True),
    "einsum of time": (lambda x, y: torch.einsum("tnchw,ts->snchw", x, torch.ones(T, 2, dtype=x.dtype)), False),
    "product": (lambda x, y: x * y, False),
    "negative": (lambda x, y: -x, False),
    "plus a number": (lambda x, y: x + 0.5, False),
    "a number minus": (lambda x, y: 1 - x, False),
    "minus a number": (lambda x, y: x - 2, False),
    "in place by a number": (lambda x, y: x.__iadd__(0.25), False),
    "clone": (lambda x, y: x.clone(), False),
    "positive": (lambda x, y: +x, False),
    "detach": (lambda x, y: x.detach() + x, False),
    "mean": (lambda x, y: x.mean((3, 4)), False),
    "torch.sum": (lambda x, y: torch.sum(x, 2, keepdim=True), False),
    "mean over time": (lambda x, y: x.mean(0), False),
    "mean over the batch": (lambda x, y: x.mean((1, 3)), False),
    "dropout, off": (lambda x, y: F.dropout(x, 0.5, training=False), False),
    "avg_pool2d": (lambda x, y: F.avg_pool2d(x, 2), True),
    "adaptive_avg_pool2d": (lambda x, y: F.adaptive_avg_pool2d(x, 2), True),
    "avg_pool1d": (lambda x, y: F.avg_pool1d(x.flatten(2), 3), True),
    "max_pool2d": (lambda x, y: F.max_pool2d(x, 2), True),
    "conv2d": (lambda x, y: F.conv2d(x, WEIGHT, padding=1), True),
    "conv_transpose2d": (lambda x, y: F.conv_transpose2d(x, WEIGHT.transpose(0, 1), padding=1), True),
    "batch_norm": (lambda x, y: F.batch_norm(x, *STATISTICS), True),
    "batch_norm, training": (lambda x, y: F.batch_norm(x, None, None, training=True), True),
    "linear": (lambda x, y: F.linear(x, WEIGHT[0, 0].new_ones(2, 6)), True),
    "linear, unfolded": (lambda x, y: F.linear(x, WEIGHT[0, 0].new_ones(2, 6)), False),
    "transpose": (lambda x, y: x.transpose(-1, -2), False),
    "torch.transpose": (lambda x, y: torch.transpose(x, 2, 4), False),
    "swapaxes": (lambda x, y: x.swapaxes(2, 3), False),
    "transpose of time": (lambda x, y: x.transpose(0, 1), False),
    "permute": (lambda x, y: x.permute(0, 1, 4, 2, 3), False),
    "torch.permute": (lambda x, y: torch.permute(x, (0, 1, 3, 2, 4)), False),
    "permute of time": (lambda x, y: x.permute(1, 0, 2, 3, 4), False),
    "channels": (lambda x, y: x[:, :, 1:3], False),
    "every other channel": (lambda x, y: x[:, :, ::2], False),
    "one channel": (lambda x, y: x[:, :, 1], False),
    "last column": (lambda x, y: x[..., -1], False),
    "one sample": (lambda x, y: x[:, 1], False),
    "unbind": (lambda x, y: x.unbind(2)[1], False),
    "unbind of folded frames": (lambda x, y: torch.unbind(x, dim=-1)[0], True),
    "movedim": (lambda x, y: x.movedim(2, -1), False),
    "moveaxis": (lambda x, y: torch.moveaxis(x, -1, 2), False),
    "clone as it is": (lambda x, y: x.clone(memory_format=torch.preserve_format), False),
    "a mean of channels, and the rest": (lambda x, y: x.mean(2, keepdim=True) + x, False),
    "the rest, less a mean of places": (lambda x, y: x - x.mean((3, 4), keepdim=True), False),
    "mul_": (lambda x, y: (x * 1).mul_(1.5), False),
    "mul_ by channel": (lambda x, y: (x * 1).mul_(torch.linspace(0.5, 2, x.shape[2], dtype=x.dtype).view(-1, 1, 1)), False),
    "doubled in place": (lambda x, y: doubled(x * 1), False),
    "chunk": (lambda x, y: x.chunk(2, 2)[1], False),
    "torch.chunk": (lambda x, y: torch.chunk(x, 4, dim=-1)[2], False),
    "split": (lambda x, y: torch.split(x, 3, 2)[0], False),
    "split of time": (lambda x, y: x.split(2)[1], False),
    "reshape behind": (lambda x, y: x.reshape(T, N, 2, C // 2, -1), False),
    "fold and more": (lambda x, y: x.reshape(T * N, C, -1), False),
    "view_as": (lambda x, y: x.flatten(0, 1).view_as(y), False),
    "reshape_as": (lambda x, y: x.reshape_as(y.flatten(0, 1)), False),
    "no fold": (lambda x, y: x.reshape(N, T, *SHAPE[1:]), False),
    "multiply": (lambda x, y: x.multiply(1.5), False),
    "torch.multiply, number first": (lambda x, y: torch.multiply(2.0, x), False),
    "multiply_": (lambda x, y: (x * 1).multiply_(1.5), False),
    "divide": (lambda x, y: torch.divide(x, 1.5).divide(2.0).true_divide(0.5), False),
    "divide, rounded": (lambda x, y: torch.divide(x, 0.3, rounding_mode="floor"), False),
    "torch.true_divide": (lambda x, y: torch.true_divide(x, 1.5), False),
    "subtract": (lambda x, y: torch.subtract(x, y).subtract(y), False),
    "subtract, scaled": (lambda x, y: torch.subtract(x, y, alpha=2), False),
    "subtract_": (lambda x, y: (x * 1).subtract_(y), False),
    "torch.negative": (lambda x, y: torch.negative(x).negative(), False),
    "torch.mul, number first": (lambda x, y: torch.mul(2.0, x), False),
    "cat by axis": (lambda x, y: torch.cat([x, y], axis=-3), False),
    "folded transpose": (lambda x, y: x.flatten(2).transpose(1, 2), True),
    "folded permute": (lambda x, y: x.permute(0, 2, 3, 1), True),
    "folded sum": (lambda x, y: x + y.flatten(0, 1), True),
    "folded difference": (lambda x, y: x - y.flatten(0, 1), True),
    "folded cat": (lambda x, y: torch.cat([x, y.flatten(0, 1)], 1), True),
    "folded channels": (lambda x, y: x[:, 1:3], True),
    "folded chunk": (lambda x, y: x.chunk(2, 1)[0], True),
    "folded mean": (lambda x, y: x.mean((2, 3)), True),
    "folded sum of channels": (lambda x, y: x.sum(-3), True),
    "folded flatten": (lambda x, y: x.flatten(1), True),
    "unfold and more": (lambda x, y: x.reshape(T, N, C // 2, -1), True),
    "unfold with -1": (lambda x, y: x.view(T, -1, *SHAPE[1:]), True),
    "interpolate": (lambda x, y: F.interpolate(x, scale_factor=2, mode="bilinear"), True),
    "filled": (lambda x, y: filled(x, (slice(None), slice(None), 1), 0.5), False),
    "filled, folded": (
        lambda x, y: filled(x, (slice(None), slice(None), slice(-2, None), slice(None)), MAP[None, :, :2, :1]),
        True,
    ),
    "filled by a Parameter": (lambda x, y: filled(x, (..., slice(0, 1)), torch.nn.Parameter(GAINS)), False),
    "filled by what has a place for time": (lambda x, y: filled(x, (..., 0, slice(1, 3)), GAINS.view(1, 1, C, 1)), False),
    "filled, all of it": (lambda x, y: filled(x, ..., 1), False),
    "filled by what each sample has": (lambda x, y: filled(x, (..., 0), GAINS.new_tensor([1.0, 2.0]).view(N, 1, 1)), False),
    "filled at one step": (lambda x, y: filled(x, 1, 0.25), False),
    "filled in one sample": (lambda x, y: filled(x, (slice(None), 0, ..., 1), 0.25), False),
    "filled where a mask is": (lambda x, y: filled(x, (..., MAP[0] > 0), 0.25), False),
    "filled by frames": (lambda x, y: filled(x, (..., slice(0, 2)), y[..., 1:3]), False),
    "filled through a view": (lambda x, y: filled(x.flatten(3), (..., slice(0, 2)), 0.25), False),
    "unknown": (lambda x, y: torch.relu(x), False),
    "slice": (lambda x, y: x[1:-1:2], False),
}


def plain_of(x):
    """The frames, made by the expression itself: independent of the table."""
    return x.expression.on(*x.expression.inputs)


def ordinary(x):
    return x.frames() if isinstance(x, Frames) else x


@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("other", ["same kind", "spikes", "shared"])
def test_an_operation_gives_what_it_gives_for_the_frames(kind, name, other):
    operation, folded = OPERATIONS[name]
    (x, leaf), (y, _) = KINDS[kind](), KINDS[kind if other == "same kind" else other](seed=1)
    a, b = plain_of(x).clone(), plain_of(y).detach()
    if folded:
        a, x = a.flatten(0, 1), x.flatten(0, 1)
        assert isinstance(x, Frames)
    assert is_usable(x) or folded
    expected, got = operation(a, b), operation(x, y)
    assert tuple(got.shape) == tuple(expected.shape)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(ordinary(got), expected, rtol=1e-12, atol=1e-12)
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), leaf, retain_graph=True)
    (found,) = torch.autograd.grad((got * weight).sum(), leaf)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n, (_, folded) in OPERATIONS.items() if not folded])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("change", ["written", "watched", "data", "read", "view written"])
def test_it_does_so_for_values_that_were_written_or_watched(kind, name, change):
    operation = OPERATIONS[name][0]
    with torch.no_grad():
        (x, _), (y, _) = KINDS[kind](), KINDS[kind](seed=1)
        a, b = plain_of(x).clone(), plain_of(y).clone()
        for value in (x, a):
            if change == "written":
                value.mul_(1.5)
            elif change == "view written":
                value.flatten(0, 1)[3:5].add_(0.25)
            elif change == "data":
                value.data.sub_(0.5)
            elif change == "watched":
                value.requires_grad_()
            else:
                value.sum()
        if change == "watched":
            x.requires_grad_(False)
            a.requires_grad_(False)
        torch.testing.assert_close(ordinary(operation(x, y)), operation(a, b), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["shared", "mapped", "means", "spikes"])
def test_sums_are_sums_of_the_frames(kind):
    """What an operation makes of the sums is what the sums of its frames would be."""
    for name, (operation, folded) in OPERATIONS.items():
        (x, _), (y, _) = KINDS[kind](), KINDS[kind](seed=1)
        value = operation(x.flatten(0, 1) if folded else x, y)
        if not isinstance(value, Spikes) or not value.sums or not value.intact:
            continue
        frames = value.frames()
        frames = frames.unflatten(0, (T, N)) if value.folded is not None else frames
        for wanted, summed in value.sums.items():
            groups = zip(wanted.rows, frames.split(2), strict=True)
            rows = [sum(w * f for w, f in zip(row, group, strict=True)) for row, group in groups]
            torch.testing.assert_close(summed, torch.stack(rows), rtol=1e-12, atol=1e-12, msg=name)


def test_the_list_is_closed_and_every_entry_is_tried():
    called = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.add(func)
            return func(*args, **(kwargs or {}))

    (x, _), (y, _) = shared(), shared(seed=1)
    with Watch():
        for operation, folded in OPERATIONS.values():
            operation(x.flatten(0, 1) if folded else x * 1, y)
    known = {getattr(f, "__name__", str(f)).strip("_") for f in called}
    others = {  # the same functions under other names, and those for frames of other dimensions
        "requires_grad", "get", "iadd", "isub", "radd", "rmul", "mul", "truediv", "div", "neg",
        "concatenate", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool3d", "dropout1d", "dropout2d", "dropout3d",
        "conv1d", "conv3d", "conv_transpose1d", "conv_transpose3d",
        "pad", "boolean_dispatch", "rsub", "pos", "rmatmul", "max_pool1d", "max_pool3d", "sub",
        "add", "fn", "view", "reshape",
    }  # fmt: skip
    assert {getattr(f, "__name__", str(f)).strip("_") for f in TABLE} - known - others == set()
    assert Tensor.relu not in TABLE
