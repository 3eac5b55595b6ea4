"""Which nets' first layers run in one kernel on the CPU, and that nobody sees it: torch's own drives, to the last bit."""

import pairs
import pytest
import torch
from conv_cases import last
from spikingjelly.activation_based import functional, layer
from straight_cases import NEURONS, POOLS, awake
from torch import nn

import sj_tac
from sj_tac.kernels.cpu import conv_launches, halves
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.layout import RUNS
from sj_tac.runtime.deferred import Deferred
from sj_tac.runtime.values import Shared, Spikes


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch):
    monkeypatch.delenv(conv_fire.VARIABLE, raising=False)


def source(node=None, pool=None, bias=False):
    """``awake`` with a first layer of 2 -> 64 channels, weights of any numbers."""
    torch.manual_seed(0)
    net = awake(node, pool, 2)
    net[0] = layer.Conv2d(2, 64, 3, padding=1, bias=bias, step_mode="m")
    net[1] = layer.BatchNorm2d(64, step_mode="m")
    net[1].running_var.fill_(0.2)
    nn.init.uniform_(net[1].bias, -0.2, 0.9)
    convs = [at for at, module in enumerate(net) if isinstance(module, nn.Conv2d)]
    net[convs[1]] = layer.Conv2d(64, 8, 3, padding=1, bias=bias, step_mode="m")
    return net.eval()


def converted(net, k=2, policy="preserve", last=True, **options):
    net = sj_tac.convert(net, policy, k, **options)
    return net.to(memory_format=torch.channels_last) if last else net


def frames(steps=6, size=34):
    return last((torch.rand(steps, 2, 2, size, size, generator=torch.Generator().manual_seed(1)) < 0.3).float())


def count():
    return RUNS["conv_fire", "numba"]


def held_by(net, x):
    """What holds the first convolution's output of a call."""
    value = net[0](x)
    return value.expression.held if isinstance(value, Shared) else None


def taken(net, x):
    """Whether the first convolution of a call is left to the neuron's kernel."""
    with torch.no_grad():
        held = held_by(net, x)
    return type(held) is Deferred and held.one is not None


def needs_the_kernel(net, x):
    if not taken(net, x):
        pytest.skip("torch's convolution of this shape takes its sums in another order on this processor")


# Computing in bfloat16 under autocast, by a policy's dtype, or because the net is of that: on some processors.
WAYS = ["float32", *(["autocast", "dtype", "net"] if halves.can_multiply_pairs() else [])]


@torch.no_grad()
# A kernel is compiled for each neuron.
@pairs.parametrize(
    node=NEURONS if pairs.EXHAUSTIVE else ["LIF"], pool=POOLS if pairs.EXHAUSTIVE else ["none", "2x2", "3x3"],
    last=[True, False], k=[1, 2, 4], way=WAYS,
)  # fmt: skip
def test_spikes_voltages_and_drives_are_the_same_without_the_kernel(node, pool, last, k, way, monkeypatch):
    """Over two calls of other lengths; the second starts from the voltages of the first."""
    for name, value in {"_KINDS": {}, "LARGE": 0, "FULL": 0}.items():
        monkeypatch.setattr(conv_launches, name, value)
    policy = {"default": {"mode": "preserve", "k": k} | ({"dtype": "bfloat16"} if way == "dtype" else {})}
    net = converted(source(NEURONS[node], POOLS[pool], k == 2), k, policy, last=last)
    x, found = frames() if last else frames().contiguous(), []
    net, x = (net.bfloat16(), x.bfloat16()) if way == "net" else (net, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        needs_the_kernel(net, x)
        for said in ("", "0"):
            monkeypatch.setenv(conv_fire.VARIABLE, said)
            before = count()
            functional.reset_net(net)
            outputs = [net(x).clone(), net(x[:5]).clone()]
            functional.reset_net(net)
            drives = net[0](x)
            spikes = net[2](net[1](drives))[:]
            # Windows that overlap, and averages, are no tiles'; contiguous ones are windows'.
            runs = 3 if pool == "2x2" or (pool == "none" and last) else 0
            assert count() == before + (runs if said == "" else 0)
            found.append([*outputs, spikes, drives[:], net[2].v.clone()])
    assert 0.02 < found[0][2].float().mean() < 0.9
    assert found[0][0].abs().sum() > 0
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_frames_and_drives_that_are_read_later(monkeypatch):
    """After the net's weights and the caller's frames were changed: those that the neuron ran on."""
    net, x = converted(source()), frames()
    needs_the_kernel(net, x)
    with monkeypatch.context() as patch:
        patch.setenv(conv_fire.VARIABLE, "0")
        expected = net[0](x).expression.held.clone()
    drives = net[0](x)
    value = net[2](net[1](drives))
    assert isinstance(value, Spikes)
    (wanted, found), *_ = value.sums.items()
    net[0].weight.zero_()
    x.zero_()
    assert torch.equal(net[3]._tac.aggregate(value[:], wanted), found)
    assert torch.equal(drives.expression.held.make(), expected)
    assert value[:].mean() > 0.02


def test_who_gets_no_kernel(monkeypatch):
    """Gradients, a profiler, other memory formats and dtypes, overridden convolutions, backends: as before."""
    net, x = converted(source()), frames()
    needs_the_kernel(net, x)
    with torch.no_grad():
        net(x)
    kernels = [layer.kernel for layer in sj_tac.report(net).converted]
    assert kernels.count("numba, fused with its convolution") == 1
    assert type(held_by(net, x)) is torch.Tensor, "somebody may differentiate"
    with torch.autocast("cpu", torch.float16):
        assert not taken(net, x)
    with torch.profiler.profile():
        assert not taken(net, x)
    assert not taken(converted(source()).to(memory_format=torch.contiguous_format), x.contiguous())
    assert not taken(net, frames(6, 8)), "so small a layer is faster in two"
    assert not taken(converted(source(), 1).double(), x.double())
    assert not taken(converted(source(), backend="reference"), x)
    assert not taken(converted(source(), policy="collapse"), x)
    with monkeypatch.context() as patch:
        patch.setenv(conv_fire.VARIABLE, "0")
        assert not taken(net, x)
        patch.setattr(conv_launches, "_KINDS", {})
        patch.setattr(conv_launches, "_is_torchs", lambda *_: False)
        patch.delenv(conv_fire.VARIABLE)
        assert not taken(net, x)
    for change in (
        {"padding_mode": "circular", "_reversed_padding_repeated_twice": [1, 1, 1, 1]}, {"padding": "same"},
        {"dilation": (2, 2)}, {"_conv_forward": lambda x, w, b: torch.conv2d(x, 2 * w, b, padding=1)},
    ):  # fmt: skip
        other = converted(source())
        other[0].__dict__.update(change)
        assert not taken(other, x)
    assert taken(net, x)


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2])
def test_frames_of_any_memory_format(k, monkeypatch):
    """The net's is channels_last; a view of every other frame, pixels that lie in reverse, a still image."""
    net, x = converted(source(), k), frames(12)
    needs_the_kernel(net, x)
    still = x[:1].contiguous()
    with_gaps = x.contiguous()[::2], still.expand(6, *still.shape[1:])
    for some in (x, x.contiguous(), x.flip(-1), still.repeat(6, 1, 1, 1, 1), *with_gaps):
        outputs, before = [], count()
        for said in ("1", "0"):
            monkeypatch.setenv(conv_fire.VARIABLE, said)
            functional.reset_net(net)
            outputs.append((net(some).clone(), net[2].v.clone()))
        assert count() == before + (k == 2 or all(some is not other for other in with_gaps))
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@torch.no_grad()
def test_one_step_at_a_time():
    """Calls of one frame that go on from each other's voltages, as a whole one.

    A convolution of fewer frames may take its sums in another order, and a spike at the threshold tip over.
    """
    net, x = converted(source(), 1), frames(size=46)
    needs_the_kernel(net, x[:1])
    expected = net(x).clone()
    functional.reset_net(net)
    found = torch.cat([net(frame[None]) for frame in x])
    assert (found != expected).float().mean() < 1e-3
    assert 0.02 < expected.mean() < 0.9
