"""With an example input, a conversion that went wrong is an error that names the layer, and leaves the model as it was."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, csnn, frames, node, norm, same_state
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError
from sj_tac.kernels.cpu.launches import Launch
from sj_tac.rewrites import verify
from sj_tac.runtime.convs import DriveModule
from sj_tac.runtime.neurons import TACLIFNode


@pytest.fixture
def x():
    return frames(6, 2, 2, 8, 8)


def broken(change):
    """DriveModule.forward of the layer '4' with its output changed."""
    original = DriveModule.forward

    def forward(self, x):
        y = original(self, x)
        return change(y) if self._tac.name == "4" else y

    return forward


@pytest.mark.parametrize(
    ("inplace", "k", "change", "message"),
    [
        (True, 2, lambda y: y[..., :-1], r"layer '4' puts out \(\(6, 2, 4, 4, 3\),\), the source \(\(6, 2, 4, 4, 4\),\)"),
        (False, 1, lambda y: y + 1e-3, "layer '4' is the first whose output differs from the source's at k=1"),
        (True, 1, lambda y: y.flip(0), "layer '4' is the first whose output differs from the source's at k=1"),
        (False, 2, lambda y: y.no_such_thing, r"does not run on example_input of shape \[6, 2, 2, 8, 8\] in module '4'"),
    ],
)
def test_the_first_layer_that_differs_is_named(x, inplace, k, change, message, monkeypatch):
    net = csnn()
    net[0].register_forward_hook(lambda m, a, y: None)
    before = copy.deepcopy(net)
    monkeypatch.setattr(DriveModule, "forward", broken(change))
    sj_tac.convert(net, "preserve", k)  # without an example nobody looks
    with pytest.raises(ConversionError, match="verification failed: .*" + message):
        sj_tac.convert(net, "preserve", k, example_input=x, inplace=inplace)
    assert [type(m) for m in net.modules()] == [type(m) for m in before.modules()]
    assert all("_tac" not in vars(m) for m in net.modules())
    assert len(net._forward_pre_hooks) == len(before._forward_pre_hooks) == 0
    assert same_state(net, before)
    with torch.no_grad():
        functional.reset_net(net)
        assert torch.equal(net(x), before(x))


class ByClass(nn.Module):
    """Asks for the class of a tensor, which a value that passes between fused layers is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.lif1 = conv(2, 4), node("lif", v_threshold=0.2)
        self.second, self.lif2 = conv(4, 4), node("lif", v_threshold=0.1)

    def forward(self, x):
        y = self.lif1(self.first(x))
        return self.lif2(self.second(y if type(y) in (torch.Tensor, torch.fx.Proxy) else y * 0))


@pytest.mark.parametrize("k", [1, 2])
def test_a_fused_net_that_takes_another_way_is_told_at_any_k(k, x):
    net = ByClass().eval()
    assert 0.02 < net(x).mean() < 0.6
    with pytest.raises(ConversionError, match=r"fused kernels alone: the output differs from .* the class of a tensor"):
        sj_tac.convert(net, k=k, example_input=x)
    functional.reset_net(net)
    slow = sj_tac.convert(net, k=k, example_input=x, fuse=False)
    assert slow(x).mean() > 0.02


@pytest.mark.parametrize(
    ("share", "dtype", "fault", "k"),
    [(0, torch.float32, False, 1), (0, torch.float32, False, 2), (0.2, torch.float32, True, 2), (0, torch.float64, True, 1)],
    ids=["rounding", "rounding with k", "too many", "in float64"],
)
def test_what_rounding_moves_is_no_fault_of_the_kernels(share, dtype, fault, k, x, monkeypatch):
    """A spike of the first neuron that differs, in float32 alone: deep nets make any distance of it."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for i in (2, 8, 8) for m in (conv(i, 8), norm(8), node("lif", v_threshold=0.3)))).eval()
    original = Launch.__call__

    def launched(self, y, *arguments):
        out, v = original(self, y, *arguments)
        if y.dtype is dtype:
            moved = torch.zeros(out.numel(), dtype=torch.bool)
            moved[: 1 + int(share * out.numel())] = True
            out = torch.where(moved.view(out.shape), 1 - out, out)
        return out, v

    monkeypatch.setattr(Launch, "__call__", launched)
    monkeypatch.setattr(verify, "FAR", 1e-4)
    net, x = (net.double(), x.double()) if dtype is torch.float64 else (net, x)
    if not fault:
        assert sj_tac.report(sj_tac.convert(net, k=k, example_input=x)).converted
        return
    with pytest.raises(ConversionError, match="failed in the fused kernels alone: the output differs"):
        sj_tac.convert(net, k=k, example_input=x)


def test_a_fault_of_the_fused_kernels_is_told_from_one_of_the_layers(x, monkeypatch):
    original = Launch.__call__

    def launched(self, *arguments):
        out, v = original(self, *arguments)
        return out * float("nan"), v

    monkeypatch.setattr(Launch, "__call__", launched)
    net = csnn()[:13]  # ends with Linear: a neuron makes a spike or none of anything
    with pytest.raises(ConversionError, match=r"failed in the fused kernels alone: the output is not finite.*fuse=False"):
        sj_tac.convert(net, "preserve", 2, example_input=x)
    assert len(sj_tac.report(sj_tac.convert(net, "preserve", 2, example_input=x, fuse=False)).converted) == 3


def test_numbers_that_are_not_finite_are_traced_to_their_layer(x, monkeypatch):
    original = TACLIFNode.multi_step_forward
    monkeypatch.setattr(TACLIFNode, "multi_step_forward", lambda self, x: original(self, x) / 0)
    with pytest.raises(ConversionError, match="layer '2' puts out numbers that are not finite, the source's are"):
        sj_tac.convert(csnn()[:13], "preserve", 2, example_input=x)


def test_an_interrupted_verification_leaves_the_model_as_it_was(x, monkeypatch):
    net = csnn()
    monkeypatch.setattr(Launch, "__call__", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        sj_tac.convert(net, "preserve", 2, example_input=x, inplace=True)
    assert all("_tac" not in vars(m) for m in net.modules())


def test_only_the_hosts_own_memories_are_reset(x):
    class Counter(nn.Module):
        resets = 0

        def reset(self):
            self.resets += 1

        def forward(self, x):
            return x

    net = nn.Sequential(csnn(), Counter())
    sj_tac.convert(net, "preserve", 2, example_input=x, inplace=True)
    assert net[1].resets == 0


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
@pytest.mark.parametrize("k", [1, 3])
def test_verification_leaves_nothing_behind(x, policy, k):
    net = csnn().train()
    net[11].p = 0.9
    seen = []
    net[2].register_forward_hook(lambda m, a, y: seen.append(len(y)))
    random = torch.get_rng_state()
    fast = sj_tac.convert(net, policy, k, example_input=x)
    assert torch.equal(torch.get_rng_state(), random)
    assert seen == []
    assert fast.training
    assert all(isinstance(m.v, float) for m in fast.modules() if isinstance(m, neuron.BaseNode))
    assert not any(t is not None and t.numel() > 64 for t in [*fast._sj_tac.plan.seen.output])
    assert fast._sj_tac.plan.seen.calls == []


def test_groups_several_outputs_and_numbers_that_are_no_numbers_in_the_source(x):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))

        def forward(self, x):
            y = self.body(x)
            return {"spikes": y, "rates": [y.mean(0), torch.log(y.sum(0) * 0)]}

    fast = sj_tac.convert(Several(), "preserve", 1, example_input=x)
    assert fast(x)["spikes"].shape == (6, 2, 3, 8, 8)
    policy = {"default": {"mode": "collapse", "k": 4, "emit": "groups"}}
    net = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3), layer.AvgPool2d(2, step_mode="m"))
    assert sj_tac.convert(net, policy, example_input=x)(x).shape[0] == 2


@pytest.mark.parametrize("what", ["first", "within", "last", "rows"])
def test_one_bit_of_a_layers_output_is_seen_and_rows_in_another_order(what, monkeypatch):
    def change(y):
        y = y.clone()
        flat = y.view(-1)
        if what == "rows":
            flat[:16384] = flat[:16384].roll(8192)
        else:
            place = {"first": 0, "within": 12345, "last": -1}[what]
            flat[place] = torch.nextafter(flat[place], torch.tensor(9.0))
        return y

    monkeypatch.setattr(DriveModule, "forward", broken(change))
    with pytest.raises(ConversionError, match="layer '4' is the first whose output differs from the source's at k=1"):
        sj_tac.convert(csnn(size=16), "preserve", 1, example_input=frames(6, 16, 2, 16, 16), fuse=False)


def test_outputs_are_compared_as_numbers_in_their_order_not_as_memory(x, monkeypatch):
    def change(y):
        return torch.where(y == 0, -y, y).transpose(1, 3).contiguous().transpose(1, 3)

    monkeypatch.setattr(DriveModule, "forward", broken(change))
    assert sj_tac.report(sj_tac.convert(csnn(), "preserve", 1, example_input=x, fuse=False)).converted


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_part_takes_no_hooks_and_needs_none(x):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))
            self.head = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))

        def forward(self, x):
            return self.head(self.body(x).mean(0))

    net, x = Net().double().eval(), x.double()
    fast = sj_tac.convert(net, k=1, example_input=x)
    assert len(sj_tac.report(fast).converted) == 1
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-9, atol=1e-9)
