"""What a call of a net gives, and that a converted net gives what its definition gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pairs
import torch
from definition import Setting, define, margins, planned_neurons, settings_of, unmark
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn

import sj_tac
from sj_tac import host
from sj_tac.definition import ops


class OnThreshold(AssertionError):
    """A voltage lies on its threshold, where rounding decides: choose another net."""


def given(
    net: nn.Module, x: Tensor, grad: bool = True, call: Callable[..., Any] | None = None, reset: bool = True
) -> dict[str, Tensor]:
    """Outputs, voltages, gradients and running statistics of a call, by name. Buffers are put back.

    Args:
        call: takes the input, in place of the net. reset: the call begins at rest; False: where the one before ended.
    """
    for module in net.modules() if not host.IS_V2 else ():
        if isinstance(module, neuron.BaseNode):
            module.train()  # the older host differentiates no neuron in eval mode
    if reset:
        rest(net)
    net.zero_grad()
    before = {n: b.clone() for n, b in net.named_buffers()}
    x = x.clone().requires_grad_(grad)
    torch.manual_seed(1)
    with torch.set_grad_enabled(grad):
        outputs = [y for y in torch.utils._pytree.tree_leaves(unmark((call or net)(x))) if isinstance(y, Tensor)]
        weighed = [(y * torch.linspace(-1, 1.5, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in outputs]
    assert all(type(y) is Tensor for y in outputs), "outputs of a net are ordinary tensors"
    if grad and any(y.requires_grad for y in outputs):
        sum(weighed).backward()
    found = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
    nodes = {n: m for n, m in net.named_modules() if isinstance(m, neuron.BaseNode)}
    found |= {f"voltage of {n}": m.v.detach().clone() for n, m in nodes.items() if isinstance(m.v, Tensor)}
    gradients = {n: p.grad for n, p in [("input", x), *net.named_parameters()]}
    found |= {f"gradient of {n}": g.clone() for n, g in gradients.items() if g is not None}
    found |= {n: b.clone() for n, b in net.named_buffers() if b.is_floating_point()}
    for name, buffer in net.named_buffers():
        buffer.copy_(before[name])
    if not reset:
        functional.detach_net(net)
    return found


def rest(net: nn.Module) -> None:
    """``reset_net`` that also finds neurons which were put in since the last one: the host remembers a net's neurons."""
    getattr(functional, "invalidate_reset_cache", lambda net: None)(net)
    functional.reset_net(net)


def same(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str = "", rtol: float = 1e-9, atol: float = 1e-9
) -> None:
    """Equal names and, nearly, values, or an AssertionError that says which differ."""
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())} on one side only"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{what}: {n}: {m}")


def settings(source: nn.Module, fast: nn.Module, neurons: Mapping[str, str] | None = None) -> dict[str, Setting]:
    """What is done to each converted conv, with the weights and spikes that the policy says."""
    report = sj_tac.report(fast)
    found = settings_of(source, report, neurons)
    chosen = sj_tac.policy_of(fast).resolve([v.layer for v in report.verdicts])
    return {
        name: replace(s, **{key: getattr(chosen[name][0], key) for key in ("weights", "normalize", "spikes")})
        for name, s in found.items()
    }


def defined(source: nn.Module, fast: nn.Module, neurons: Mapping[str, str] | None = None) -> nn.Module:
    """The definition of a converted net."""
    of = settings(source, fast, neurons)
    return define(source, of, planned_neurons(of, sj_tac.report(fast)))


def backend(source: nn.Module, policy: Any = "") -> str:
    """Compiled kernels for the commonest neurons and pools, the definition's for others: each takes seconds to compile.

    tests/kernels compares the kernels of all, and ``--exhaustive`` takes them here, too.
    """
    common = "binary" not in str(policy)
    for module in source.modules():
        if isinstance(module, neuron.BaseNode):
            common &= type(module) is neuron.LIFNode and module.decay_input and module.v_reset == 0
        elif isinstance(module, (nn.MaxPool2d, nn.AvgPool2d)):
            common &= module.kernel_size == module.stride == 2
    return "auto" if pairs.EXHAUSTIVE or common else "reference"


def check(
    source: nn.Module, policy: Any, x: Tensor, neurons: Mapping[str, str] | None = None, train: bool = False, **options: Any
) -> nn.Module:
    """Compare the converted net, recorded and not, with its definition; fused, too, in the tests that capture (conftest).
    Returns the fused one, if there is one.

    Args:
        neurons: of each conv, where it is not the next one in the order of the modules.
        train: norms and dropouts too. options: of ``convert``.
    """
    options = {"backend": backend(source, policy)} | options
    both = not getattr(ops.CAPTURE, "defined", False)
    options |= {} if both else {"backend": "auto"}
    nets = {fuse: sj_tac.convert(source, policy, fuse=fuse, **options).train(train) for fuse in (False, *[True] * both)}
    wanted = defined(source, nets[False], neurons).train(train)
    with margins(wanted) as distances:
        expected = given(wanted, x)
    if min(distances) < 1e-9:
        raise OnThreshold(f"a voltage of the definition lies {min(distances)} from its threshold")
    values = {name: value for name, value in expected.items() if not name.startswith("gradient")}
    for fuse, net in nets.items():
        same(given(net, x), expected, f"fuse={fuse}")
        same(given(net, x, grad=False), values, f"fuse={fuse}, no_grad")
    return nets[both]
