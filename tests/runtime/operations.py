"""What a forward may do with a value between two layers: functions of the value, of another like it, and of a parameter."""

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

T, N, C, SIZE = 7, 2, 4, 6
CHANNELS = torch.linspace(0.5, 2, C, dtype=torch.float64).view(C, 1, 1)
MAP = torch.randn(C, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
EYE = torch.eye(C, dtype=torch.float64)[..., None, None] * 1.25
SAMPLES = torch.tensor([1.0, 2.0], dtype=torch.float64)


class Doubled(torch.autograd.Function):
    """Linear, and below torch's own functions."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Same(torch.autograd.Function):
    """What it is handed."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Saved(torch.autograd.Function):
    """Its backward reads its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (2 + x * 0.1)


def several(*found):
    """What several operations give, in one tensor."""
    return torch.cat([part.reshape(-1) for part in found])


def added(x, y):
    x += y
    return x


def read_and_added(x, y):
    assert x.sum().isfinite()
    return added(x, y)


def put(x, index, value):
    x[index] = value
    return x


def put_two_times(x, gain):
    before = x * 0.5
    x[..., 0:2] = 0.2
    between = x.clone()
    x[..., -1] = gain.view(C, 1)
    return x + before - between * 0.25


def put_between_views(x):
    before = x.flatten(0, 1)
    x[:, :, 1:3] = 0.4
    return x + before.unflatten(0, x.shape[:2]) * 0.5 + x.flatten(3).view_as(x) * 0.1


def put_through_a_view(x):
    x.flatten(0, 1)[:, 2] = 0.4
    x[:1].mul_(0.5)
    return x


def put_in_inference_mode(x):
    with torch.no_grad():
        y = x * 1.0
    with torch.inference_mode():
        y[:, :, 1] = 0.3
    return y + x


def put_after_a_function(x, gain):
    y = Saved.apply(x)
    y[:, :, 1] = gain[1]
    return y


# name -> function of [T, N, C, H, W], another such value, and a parameter [C, 1, 1].
FRAMES = {
    "nothing": lambda x, y, g: x,
    # Two values.
    "sum": lambda x, y, g: x + y,
    "difference": lambda x, y, g: torch.sub(x, y),
    "scaled sum": lambda x, y, g: torch.add(y, x, alpha=2),
    "summed in place": lambda x, y, g: added(x, y),
    "subtracted in place": lambda x, y, g: x.sub_(y),
    "doubled in place": lambda x, y, g: added(x, x),
    "with its copy, in place": lambda x, y, g: added(x, x.clone()),
    "read, then summed in place": lambda x, y, g: read_and_added(x, y),
    "beside itself, by names": lambda x, y, g: torch.cat(tensors=[x, x], dim=2)[:, :, :C],
    "beside zeros, and away": lambda x, y, g: torch.cat([x, torch.zeros_like(x)], 2)[:, :, :C],
    "rows side by side": lambda x, y, g: torch.cat([x, y], axis=-2),
    "one after the other": lambda x, y, g: torch.cat([x, y], 0),
    "products": lambda x, y, g: x * y + x @ y.transpose(-1, -2) * 0.2,
    # Numbers and tensors.
    "scaled": lambda x, y, g: torch.mul(3, -x) * 0.5 / 4,
    "scaled by other numbers": lambda x, y, g: x * np.float64(0.7) * True,
    "scaled in place by channels": lambda x, y, g: x.mul_(CHANNELS),
    "moved": lambda x, y, g: 1 - (x + 0.5).sub(0.2),
    "moved in place": lambda x, y, g: added(x, CHANNELS).add_(0.25),
    "by a parameter": lambda x, y, g: g * (x * CHANNELS[0, 0, 0] * g),
    "by a parameter of all dimensions": lambda x, y, g: x * g[None, None],
    "with a parameter": lambda x, y, g: torch.sub(g, x + g),
    "parameter by": lambda x, y, g: g / (x.abs() + 1),
    "by maps": lambda x, y, g: x / (MAP.abs() + 1) + MAP,
    "by sample": lambda x, y, g: x * SAMPLES.view(N, 1, 1, 1),
    "by frame": lambda x, y, g: x * torch.linspace(0.5, 2, T, dtype=x.dtype).view(T, 1, 1, 1, 1),
    "rows through a matrix": lambda x, y, g: F.linear(x, 0.3 * MAP[0]),
    "plus frames": lambda x, y, g: torch.ones(T, N, C, SIZE, SIZE, dtype=x.dtype) + x,
    "of other shapes": lambda x, y, g: several(x[..., :1] * MAP, x * CHANNELS.new_ones(2, 1, 1, 1, 1, 1)),
    "matrix products": lambda x, y, g: several(g.view(1, C) @ x.flatten(3), MAP[0, 0] @ x, x @ MAP[0, 0], MAP[:, 0] @ x),
    "einsums": lambda x, y, g: several(
        torch.einsum("tnchw,cd->tndhw", x, MAP[:, :C, 0]),
        torch.einsum("cd,tnchw->tndhw", MAP[:, :C, 0], x),
        torch.einsum("tnchw,ts->snchw", x, x.new_ones(T, 2)),
    ),
    # Copies and dtypes.
    "copy": lambda x, y, g: +x.clone(memory_format=torch.preserve_format).contiguous(),
    "copy of its dtype": lambda x, y, g: x.to(x.dtype, False, True),
    "what it is": lambda x, y, g: x.to(dtype=x.dtype).cpu().to("cpu").to(y).type_as(y).double(),
    "rounded": lambda x, y, g: x.float().double(),
    "detached, and itself": lambda x, y, g: x.detach() + x,
    # Shapes, parts, places.
    "flat": lambda x, y, g: several(x.flatten(2), torch.flatten(x, 3, 4), x.flatten(), torch.flatten(input=x, start_dim=3)),
    "flat maps and back": lambda x, y, g: x.flatten(3).view_as(x).reshape(x.shape).unsqueeze(-1).squeeze(-1),
    "folded and back": lambda x, y, g: x.flatten(0, 1).unflatten(0, (T, N)),
    "folded and back by torch.unflatten": lambda x, y, g: torch.unflatten(x.flatten(0, 1), 0, x.shape[:2]),
    "folded from the end": lambda x, y, g: x.flatten(0, -4).view(x.shape),
    "folded": lambda x, y, g: several(
        x.reshape(-1, *x.shape[2:]), x.reshape(T * N, C, -1), x.reshape(N, T, *x.shape[2:]), x.reshape(T, N, 2, C // 2, -1)
    ),
    "more dimensions": lambda x, y, g: several(x.unsqueeze(0), x.unsqueeze(2), x.unsqueeze(2).squeeze(2)[..., None]),
    "transposed": lambda x, y, g: x.transpose(-1, -2),
    "transposed, in one piece": lambda x, y, g: x.transpose(-1, -2).contiguous(),
    "dimensions moved": lambda x, y, g: several(
        x.movedim(2, -1), torch.permute(x, (0, 1, 3, 4, 2)), x.swapaxes(2, 3), x.transpose(0, 1), x.permute(1, 0, 2, 3, 4)
    ),
    "parts": lambda x, y, g: several(
        x[:, :, 1:3], x[:, :, 1], x[..., -1], x[:, 1], x[1:-1:2], torch.split(x, 4, dim=3)[1], x.split(2)[1], x.chunk(2)[0]
    ),
    "some channels, two times": lambda x, y, g: x[:, :, ::2].repeat_interleave(2, dim=2),
    "halves": lambda x, y, g: torch.cat(x.chunk(2, -3), -3),
    "halves, one by one": lambda x, y, g: torch.cat([*x.unflatten(-3, (2, 2)).unbind(-3)], -3),
    "border": lambda x, y, g: F.pad(F.pad(x, (1, 2, 0, 1)), (1, 1), value=0.5),
    "half of it mirrored": lambda x, y, g: F.pad(x[..., 1:-1, 1:-1], (1, 1, 1, 1, 0, 0), mode="reflect"),
    "channels or samples around": lambda x, y, g: several(F.pad(x, pad=(0,) * 4 + (1, 1)), F.pad(x, (0,) * 6 + (1, 0))),
    "turned": lambda x, y, g: torch.flip(x.flip(-1), (2, 3)),
    "rolled": lambda x, y, g: torch.roll(x.roll(1, -1), (1, 2), (2, 3)),
    "time turned or rolled": lambda x, y, g: several(x.flip(0), x.roll(1), x.roll(1, dims=0), x[torch.tensor([1, 0])]),
    "chosen": lambda x, y, g: several(x.index_select(-1, torch.tensor([1, 0, 0])), x.index_select(0, torch.tensor([1, 0]))),
    # Means.
    "means of maps": lambda x, y, g: x.mean((-1, -2), keepdim=True).squeeze((-1, -2)).unsqueeze(-1).unsqueeze(-1),
    "with its means": lambda x, y, g: x + x.mean(-3, keepdim=True) - x.mean((3, 4), keepdim=True),
    "less its mean over time": lambda x, y, g: x - x.mean(0),
    "cut off": lambda x, y, g: (x * 1.5).detach_() + x,
    "shifted in time": lambda x, y, g: x + torch.roll(y, 1, 0),
    "by means of frames and places": lambda x, y, g: x * y.mean((0, 3, 4), keepdim=True),
    "by its own mean": lambda x, y, g: x * (1 + x.detach().mean()) + x.mean(),
    "other means": lambda x, y, g: several(
        x.mean(0), x.mean((1, 3)), torch.sum(x, 2), torch.mean(input=x, dim=-1), x.sum(-1)
    ),
    # What the table does not know, and what acts below it.
    "dropout that is off": lambda x, y, g: F.dropout(x, 0.5, training=False),
    "not linear": lambda x, y, g: x.relu(),
    "a Function": lambda x, y, g: Doubled.apply(x),
    "a Function that gives what it gets": lambda x, y, g: Same.apply(x),
    "a Function, summed": lambda x, y, g: added(Saved.apply(Saved.apply(x) * 0.2), x),
    "a checkpoint": lambda x, y, g: checkpoint(lambda t: t * g, x, use_reentrant=False),
    "a reentrant checkpoint": lambda x, y, g: checkpoint(
        lambda t: put(t * 1.5, (..., slice(2, 3)), g), x, use_reentrant=True
    ),
    # Writes to places.
    "put": lambda x, y, g: put(x, (slice(None), slice(None), 1), 0.3),
    "put with a place for time": lambda x, y, g: put(x, (..., 0, slice(1, 3)), CHANNELS.view(1, 1, C, 1)),
    "put everywhere": lambda x, y, g: put(x, ..., 1) + y,
    "put by sample": lambda x, y, g: put(x, (..., 0), SAMPLES.view(N, 1, 1)),
    "put not in every frame": lambda x, y, g: put(put(x, 1, 0.25), (slice(None), 0, ..., 1), 0.25),
    "put by a mask and by frames": lambda x, y, g: put(put(x, (..., MAP[0] > 0), 0.25), (..., slice(0, 2)), y[..., 1:3]),
    "put by what was read": lambda x, y, g: put(x, (..., 1), 0.01 * x.max().item()),
    "put two times": lambda x, y, g: put_two_times(x, g),
    "put between views": lambda x, y, g: put_between_views(x),
    "put through a view": lambda x, y, g: put_through_a_view(x),
    "put in inference mode": lambda x, y, g: put_in_inference_mode(x),
    "put after a Function": lambda x, y, g: put_after_a_function(x, g),
    "put into a buffer": lambda x, y, g: put(x.new_zeros(T, N, C, SIZE, SIZE), slice(2, None), x[2:]),
}
# The same of [T * N, C, H, W].
FOLDED = {
    "sum": lambda x, y, g: x + y,
    "difference in place": lambda x, y, g: x.__isub__(y),
    "side by side": lambda x, y, g: torch.cat([x, y], 1),
    "by a parameter": lambda x, y, g: x * g[None] + 0.25,
    "by frame": lambda x, y, g: x * torch.linspace(0.5, 2, T * N, dtype=x.dtype).view(-1, 1, 1, 1),
    "a Function": lambda x, y, g: Doubled.apply(x),
    "a reentrant checkpoint": lambda x, y, g: checkpoint(lambda t: t * 1.5, x, use_reentrant=True),
    "border": lambda x, y, g: F.pad(F.pad(x, (1, 1, 1, 1)), (1, 1, 1, 1), mode="reflect"),
    "samples around": lambda x, y, g: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0)),
    "put": lambda x, y, g: put(x, (slice(None), slice(None), slice(-2, None)), MAP[None, :, :2]),
    "pixels for channels": lambda x, y, g: several(F.pixel_unshuffle(x, 3), F.pixel_shuffle(x, 2)),
    "shuffled": lambda x, y, g: torch.channel_shuffle(x, 2),
    "einsum": lambda x, y, g: torch.einsum("cd,bchw->bdhw", MAP[:, :C, 0], x),
    "means of maps": lambda x, y, g: x.mean((2, 3), keepdim=True),
    "with its sum over channels": lambda x, y, g: x + 0.2 * x.sum(-3, keepdim=True),
    "less its mean over frames": lambda x, y, g: x - x.mean(0),
    "shapes": lambda x, y, g: several(
        x.flatten(2).transpose(1, 2), x.permute(0, 2, 3, 1), x.unbind(dim=-1)[0], x.reshape(T, N, C // 2, -1), x.flatten(1)
    ),
    "another memory format": lambda x, y, g: x.contiguous(memory_format=torch.channels_last),
    "rounded": lambda x, y, g: x.float().type_as(y),
    "average pool": lambda x, y, g: F.avg_pool2d(input=x, kernel_size=3, stride=1, padding=1),
    "other pools": lambda x, y, g: several(F.adaptive_avg_pool2d(x, 2), F.avg_pool1d(x.flatten(2), 3)),
    "interpolated": lambda x, y, g: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "convolutions": lambda x, y, g: F.conv_transpose2d(F.conv2d(x, EYE), EYE),
    "norm": lambda x, y, g: F.batch_norm(x, CHANNELS.flatten() - 1, CHANNELS.flatten()),
    "norm that learns": lambda x, y, g: F.batch_norm(x, None, None, training=True),
    "linear": lambda x, y, g: F.linear(x, MAP[0] * 0.5),
}
