"""What a forward asks about its values while it is traced is answered as it is in a call."""

import builtins
import sys
import warnings
from collections import namedtuple

import pytest
import torch
from definition import Setting, define
from spikingjelly.activation_based import functional, layer, neuron
from torch import fx, nn
from torch.nn import functional as F

import sj_tac
from sj_tac.errors import SjTacError

Pair = namedtuple("Pair", "spikes rest")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch would rather have it compiled: published nets have it scripted

    @torch.jit.script
    def halved(x: torch.Tensor, factor: float = 0.5) -> torch.Tensor:
        return x * factor


def lif():
    node = neuron.LIFNode(v_threshold=0.15, step_mode="m")
    return node.train()  # the older host differentiates no neuron in eval mode


class Net(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.conv1, self.bn1, self.lif1 = layer.Conv2d(2, 8, 3, padding=1), layer.BatchNorm2d(8), lif()
        self.conv2, self.bn2, self.lif2 = layer.Conv2d(8, 8, 3, padding=1), layer.BatchNorm2d(8), lif()
        self.ask = ask
        functional.set_step_mode(self, "m")

    def forward(self, x):
        x = self.ask(self, self.lif1(self.bn1(self.conv1(x))))
        return self.lif2(self.bn2(self.conv2(x)))


def _asserted(net, x):
    assert isinstance(x, torch.Tensor)
    assert isinstance(x, (list, torch.Tensor))
    assert not isinstance(x, (list, tuple))
    assert torch.is_tensor(x)
    return x


def _branch(net, x):
    return x * 0.5 if isinstance(x, torch.Tensor) else x[0]


def _shaped(net, x):
    return x.view(*x.shape) if isinstance(x, torch.Tensor) else x


def _parameter(net, x):
    return x * 0.5 if isinstance(net.conv1.weight, nn.Parameter) and not isinstance(x, nn.Parameter) else x


def _several(net, x):
    both = Pair(x, {"x": x})
    return both.rest["x"] if isinstance(both, tuple) and isinstance(both.rest["x"], torch.Tensor) else x * 0


def _scripted(net, x):
    return halved(x)


def _scripted_by_name(net, x):
    return halved(x, factor=0.7)


SETTINGS = {k: {f"conv{i}": Setting("preserve", k, f"lif{i}") for i in (1, 2)} for k in (1, 2)}


def _formatted(net, x):
    net.text = f"{x.mean():.3f} " + f"{x.max():.2f}"
    assert 1.0 in x[0] or 0.0 in x[0]
    return x


ASKS = [_formatted, _asserted, _branch, _shaped, _parameter, _several, _scripted, _scripted_by_name]


def frames():
    torch.manual_seed(3)
    return (torch.rand(6, 2, 2, 8, 8) < 0.4).double()


def made(ask):
    torch.manual_seed(1)
    return Net(ask).double()


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("k", [1, 2])
def test_the_branch_that_a_call_takes_is_traced(ask, fuse, k):
    x = frames()
    net = define(made(ask), SETTINGS[k])
    converted = sj_tac.convert(made(ask), k=k, fuse=fuse, example_input=x)
    assert len(sj_tac.report(converted).converted) == 2
    seen, wanted = converted(x), net(x)
    assert 0.05 < wanted.mean() < 0.6
    torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-9)
    weights = torch.rand(seen.shape, dtype=seen.dtype)
    (seen * weights).sum().backward()
    (wanted * weights).sum().backward()
    for (name, mine), (_, theirs) in zip(converted.named_parameters(), net.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("ask", [_asserted, _branch, _parameter, _scripted], ids=lambda ask: ask.__name__)
def test_symbols_alone_are_taken_for_tensors(ask):
    converted, net = sj_tac.convert(made(ask).eval(), k=2), define(made(ask).eval(), SETTINGS[2])
    with torch.no_grad():
        torch.testing.assert_close(converted(frames()), net(frames()), rtol=0, atol=1e-9)


def test_a_voltage_that_a_forward_writes():
    """Modules run on values: a symbol in a neuron's memory took the neuron out of the graph."""

    class Started(Net):
        def forward(self, x):
            y = self.bn1(self.conv1(x))
            self.lif1.v = torch.full_like(y[0], 0.1)
            y = self.lif1(y)
            self.rates = [float(y.detach().mean())]
            return self.lif2(self.bn2(self.conv2(y)))

    x, net = frames(), Started(None).double()
    converted = sj_tac.convert(net, k=2, example_input=x)
    assert len(sj_tac.report(converted).converted) == 2
    out = converted(x)
    functional.reset_net(converted)
    slow = sj_tac.convert(net, k=2, fuse=False, example_input=x)(x)
    torch.testing.assert_close(out, slow, rtol=0, atol=1e-9)
    assert 0.05 < out.mean() < 0.6


@pytest.mark.parametrize(
    "head", [torch.sigmoid, lambda x: x.amax(2), lambda x: x.mean((0, 3, 4))], ids=["sigmoid", "max", "mean"]
)
def test_a_head_has_no_neuron(head):
    class Headed(Net):
        def forward(self, x):
            return head(self.conv2(self.lif1(self.bn1(self.conv1(x)))))

    assert sj_tac.plan(Headed(None).double(), k=2, example_input=frames())["conv2"].reason == "NO_NEURON"


def test_a_scripted_drive_is_refused():
    """Nobody knows what a scripted function does to the sum of what a neuron is given."""

    class Scripted(Net):
        def forward(self, x):
            return self.lif2(halved(self.bn2(self.conv2(self.lif1(self.bn1(self.conv1(x)))))))

    net = Scripted(None).double()
    plan = sj_tac.plan(net, k=2, example_input=frames())
    assert {v.layer: str(v.reason) for v in plan.refused} == {"conv2": "NOT_LINEAR"}


def test_a_branch_behind_a_class_that_no_call_has_is_not_judged():
    """The list's branch would keep both convolutions from being converted."""

    class Branching(Net):
        def forward(self, x):
            x = self.lif1(self.bn1(self.conv1(x)))
            if not isinstance(x, torch.Tensor):
                x = self.bn1(F.relu(self.conv1(x)))
            return self.lif2(self.bn2(self.conv2(x)))

    assert len(sj_tac.plan(Branching(None).double(), k=2, example_input=frames()).converted) == 2


@pytest.mark.parametrize("error", [None, ValueError("mine"), KeyboardInterrupt()], ids=["runs", "raises", "interrupted"])
def test_everything_is_as_before_afterwards(error):
    names, inside, run = sys.modules[__name__].__dict__, [], torch.jit.ScriptFunction.__call__
    is_tensor = torch.is_tensor

    def ask(net, x):
        inside.append("isinstance" in names)
        if error is not None:
            raise error
        return x

    try:
        sj_tac.plan(made(ask), k=2, example_input=frames())
    except (SjTacError, KeyboardInterrupt):
        assert error is not None
    assert any(inside)
    assert "isinstance" not in names
    assert torch.is_tensor is is_tensor
    assert torch.jit.ScriptFunction.__call__ is run
    assert not any("isinstance" in vars(m) for n, m in list(sys.modules.items()) if n.startswith("spikingjelly"))


def test_a_name_of_the_models_own_stays(monkeypatch):
    """A module that has made a name of its own of isinstance keeps it."""
    asked = []

    def own(x, classes):
        asked.append(x)
        return builtins.isinstance(x, (classes, fx.Proxy))

    monkeypatch.setattr(sys.modules[__name__], "isinstance", own, raising=False)
    assert len(sj_tac.plan(made(_branch), k=2, example_input=frames()).converted) == 2
    assert asked
    assert sys.modules[__name__].isinstance is own
