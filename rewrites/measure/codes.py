"""Which frames each row of a convolution's output serves, read from gradients.

Cut the graph behind every neuron, so that nothing mixes time any more. Then the gradient of ``sum(r * drives)`` at the
output of a convolution, with random signs r, is not 0 where it drives a neuron. And the gradient of ``sum(r * 2^t *
drives)``, where t is the step of each element, is ``2^t`` times the first: exactly, for a power of two changes no bit of a
product. Where frames meet on the way (a mean over time, attention, a shift), the quotient is no power of two, or not one
for all elements of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sj_tac import host
from sj_tac.definition.noted import is_norm
from sj_tac.host import dispatch
from sj_tac.rewrites.arguments import copied
from sj_tac.rewrites.measure.neurons import Layout
from sj_tac.rewrites.measure.runs import before_calls, first, fresh, replace_outputs
from sj_tac.rewrites.measure.survey import Neuron
from sj_tac.verdicts import Reason, Refusal

# A code is written in digits below this: 2^31 fits into float32, 2^T need not. float16 ends at 2^16.
DIGIT, DIGIT_OF_HALF = 32, 8
# What the net is given, and what it returns, among the names of modules.
INPUT, OUTPUT = "<input>", "<output>"
# Functions of autograd that show the same elements in another shape.
_VIEWS = {"ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "UnflattenBackward", "SqueezeBackward",
          "UnsqueezeBackward", "CloneBackward", "AsStridedBackward"}  # fmt: skip


class _Output(torch.autograd.Function):
    """The identity, whose node in the graph names what made the tensor: a convolution, a neuron, or INPUT."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made_by: str) -> Tensor:
        ctx.made_by = made_by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Coded:
    """A run of a copy of ``net``: its neurons are cut off, with the outputs of the survey, and their drives carry codes.

    Attributes:
        outputs: of each convolution, for each of its calls.
        driven: of each convolution, the neurons that it drives, in the order of their calls.
        sources: of each neuron, convolution, BatchNorm and OUTPUT, what its input is made of: the nearest convolutions
            and neurons, and INPUT. pools: of a neuron, the MaxPool that alone reads its spikes.
    """

    def __init__(
        self,
        net: nn.Module,
        arguments: tuple[Any, ...],
        neurons: dict[str, Neuron],
        looks_at: Callable[[nn.Module], bool],
    ) -> None:
        self.neurons, self.outputs = neurons, dict[str, list[Tensor]]()
        self.driven: dict[str, list[str]] = {}
        self.sources: dict[str, set[str]] = {}
        self.pools: dict[str, str] = {}
        # (neuron, its drives with random signs, for each digit of a code and for none: the powers of two)
        self._drives: list[tuple[str, Tensor, list[Tensor]]] = []
        self._gradients: dict[str, list[tuple[Tensor | None, ...]]] = {}
        # Nodes of the graph: of each neuron's spikes; what each MaxPool reads and makes; what is in front of a module.
        self._spikes: dict[str, Any] = {}
        self._pools: dict[Any, tuple[str, Any]] = {}
        self._ends: list[Any] = []
        self._generator = torch.Generator().manual_seed(0)
        is_half = any(n.drives.dtype is torch.float16 for n in neurons.values())
        self._base = DIGIT_OF_HALF if is_half else DIGIT
        self._step_digits = _digits(max([n.layout.T for n in neurons.values()], default=1), self._base)
        self._sample_digits = _digits(max([n.layout.N for n in neurons.values()], default=1), self._base)
        with torch.enable_grad(), _gradients_stay():
            given = tree_map(lambda x: _marked(x, INPUT) if isinstance(x, Tensor) else x, copied(arguments))
            made = fresh(net)
            self._hook(made, looks_at)
            self._end(made(*given))

    def read(self, name: str, leads: int, neuron: str | None = None) -> list[Layout | Refusal]:
        """Return, for each call of a convolution, the layout of its output, or why it has none.

        Args:
            leads: dimensions in front of [C, H, W]. neuron: look at what it drives of this neuron alone.
        """
        if name not in self.driven or name not in self.outputs:
            return [Refusal(Reason.NO_NEURON, "it drives no neuron")]
        found = list[Layout | Refusal]()
        of_all = self._of_all()[name] if neuron is None else self._differentiate(self.outputs[name], neuron)
        for out, (plain, *coded) in zip(self.outputs[name], of_all, strict=True):
            if plain is None or not plain.any():
                found.append(Refusal(Reason.NO_NEURON, "it drives no neuron"))
            else:
                found.append(self._read(plain, [torch.zeros_like(out) if c is None else c for c in coded], leads))
        return found

    def _of_all(self) -> dict[str, list[tuple[Tensor | None, ...]]]:
        """Return the gradients at all convolutions: one backward pass for each digit."""
        if not self._gradients:
            flat = [(name, out) for name, outs in self.outputs.items() if name in self.driven for out in outs]
            for (name, _), gradients in zip(flat, self._differentiate([out for _, out in flat]), strict=True):
                self._gradients.setdefault(name, []).append(gradients)
        return self._gradients

    def _differentiate(self, outputs: list[Tensor], neuron: str | None = None) -> list[tuple[Tensor | None, ...]]:
        """Return, for each output, its gradients of the sums without code and with each digit."""
        signed, powers = zip(*[(u, powers) for n, u, powers in self._drives if neuron in (None, n)], strict=True)
        digits = []
        for of in zip(*powers, strict=True):
            codes = [power.expand(u.shape) for u, power in zip(signed, of, strict=True)]
            digits.append(torch.autograd.grad(signed, outputs, codes, retain_graph=True, allow_unused=True))
        return list(zip(*digits, strict=True))

    def _read(self, plain: Tensor, coded: list[Tensor], leads: int) -> Layout | Refusal:
        steps, samples = coded[: self._step_digits], coded[self._step_digits :]
        found: Layout | Refusal = Refusal(Reason.TIME_INSIDE, "time is inside its frames")
        rows = plain.shape[0]
        t, n = _numbers(plain, steps, 1, self._base), _numbers(plain, samples, 1, self._base)
        if t is not None:
            T = int(t[0].max()) + 1
            if T < 2:
                return Refusal(Reason.ONE_STEP, "its frames are one step")
            if rows == T and torch.equal(t[0][t[1]], torch.arange(rows)[t[1]]):
                return Layout(T, plain.shape[1], 0) if leads > 1 else Layout(T, 1, 0, True)
            if n is not None:
                N = int(n[0].max()) + 1
                if rows != T * N:
                    found = Refusal(Reason.NO_ORDER, f"it has {rows} rows for {T} steps of {N} samples")
                elif (ordered := _ordered(t, n[0], Layout(T, N, 0, True), Layout(T, N, 0, True, True))) is not None:
                    return ordered
                else:
                    found = Refusal(Reason.NO_ORDER, "its rows are in no order")
        if plain.dim() > 2:
            t, n = _numbers(plain, steps, 2, self._base), _numbers(plain, samples, 2, self._base)
            A, B = plain.shape[:2]
            if t is not None and n is not None:
                ordered = _ordered(t, n[0], Layout(A, B, 0), Layout(B, A, 1))
                if ordered is not None:
                    return ordered
                found = (_other_steps(t) or found) if leads > 1 else found
        return _meeting(plain, coded) or found

    def _hook(self, net: nn.Module, looks_at: Callable[[nn.Module], bool]) -> None:
        for name, module in net.named_modules():
            _without_zeros(module)
            if name in self.neurons:
                before_calls(module, partial(self._drive, name))
                replace_outputs(module, [tree_map(self._awake, out) for out in self.neurons[name].outputs])
                module.register_forward_hook(lambda m, a, out, name=name: self._emit(name, out))
            elif looks_at(module):
                before_calls(module, partial(self._note, name))
                module.register_forward_hook(lambda m, a, out, name=name: self._hold(name, out))
            elif is_norm(module):
                before_calls(module, partial(self._note, name))
            elif isinstance(module, host.ANY_MAX_POOLS) and host.is_multi_step(module):
                module.register_forward_hook(lambda m, a, out, name=name: self._pool(name, first(a), out))

    def _end(self, output: Any) -> None:
        """Look at what the net returns, and find the MaxPools that alone read a neuron's spikes."""
        for x in tree_leaves(output):
            self._note(OUTPUT, x if isinstance(x, Tensor) else None)
        readers: dict[Any, set[Any]] = {}
        stack, seen = [*self._ends], set(self._ends)
        while stack:
            node = stack.pop()
            for ahead, _ in node.next_functions:
                readers.setdefault(ahead, set()).add(node)
                if ahead is not None and ahead not in seen:
                    seen.add(ahead)
                    stack.append(ahead)
        for name, node in self._spikes.items():
            while node is not None:
                if node in self._pools and len(readers.get(node, ())) == 1:
                    self.pools[name], node = self._pools[node]
                    continue
                # Views of the spikes, which a pool of folded frames reads.
                behind = readers.get(node, set())
                node = next(iter(behind)) if len(behind) == 1 else None
                if type(node).__name__.rstrip("0") not in _VIEWS:
                    node = None

    def _note(self, name: str, x: Tensor | None) -> None:
        if x is not None and x.grad_fn is not None:
            self.sources.setdefault(name, set()).update(_made_of(x, through=False))
            self._ends.append(x.grad_fn)

    def _emit(self, name: str, out: Any) -> Any:
        made = first(out)
        if made is None or dispatch.is_transformed():
            return None
        spikes = _marked(made, name)
        # Called twice: no one pool reads it all.
        self._spikes[name] = None if name in self._spikes else spikes.grad_fn
        return tree_map(lambda x: spikes if x is made else x, out)

    def _pool(self, name: str, x: Tensor | None, out: Any) -> None:
        if x is not None and isinstance(out, Tensor) and x.grad_fn is not None:
            self._pools[x.grad_fn] = name, out.grad_fn

    def _drive(self, name: str, u: Tensor | None) -> None:
        neuron = self.neurons[name]
        if u is None or not u.requires_grad or not neuron.layout.fits(u, neuron.drives):
            return
        self._note(name, u)
        signs = torch.randn(u.shape, generator=self._generator).sign().to(u)
        codes = [torch.zeros(1, dtype=torch.long)]
        for places, digits in zip(neuron.layout.places(u), (self._step_digits, self._sample_digits), strict=True):
            codes += [places // self._base**i % self._base for i in range(digits)]
        self._drives.append((name, u * signs, [2.0 ** c.to(u) for c in codes]))
        for convolution in _made_of(u, through=True) - self.neurons.keys() - {INPUT}:
            driven = self.driven.setdefault(convolution, [])
            if name not in driven:
                driven.append(name)

    def _awake(self, x: Any) -> Any:
        """Return random spikes in place of those of a neuron that is silent, or never is: products with 0 hide a path."""
        if not isinstance(x, Tensor) or 0.01 < int(x.count_nonzero()) / max(1, x.numel()) < 0.99:
            return x
        return (torch.rand(x.shape, generator=self._generator) < 0.5).to(x)

    def _hold(self, name: str, out: Any) -> Any:
        made = first(out)
        if made is None or dispatch.is_transformed():
            return None
        held = made if made.requires_grad else made.detach().requires_grad_()
        self.outputs.setdefault(name, []).append(held)
        named = _Output.apply(held, name)
        return tree_map(lambda x: named if x is made else x, out)


def _numbers(plain: Tensor, digits: list[Tensor], dims: int, base: int) -> tuple[Tensor, Tensor] | None:
    """Return the number that is written on each row of the leading ``dims`` dimensions, and which rows have one.

    None if the elements of a row have several. Where sums of many paths cancel, rounding hides a code; they may differ.
    """
    rows = plain.flatten(0, dims - 1).flatten(1)
    largest, at = rows.abs().max(1)
    number, seen = torch.zeros(len(rows), dtype=torch.long), largest > 0
    for place, digit in enumerate(digits):
        coded = digit.flatten(0, dims - 1).flatten(1)
        quotient = (coded.gather(1, at[:, None]) / rows.gather(1, at[:, None])).squeeze(1)
        factor = 2 ** torch.where(seen, quotient.abs(), 1.0).log2().round().clamp(0, base)
        off = torch.addcmul(coded, rows, factor[:, None], value=-1).abs_()
        if (off.amax(1) > 1e-5 * factor * largest.max()).any() or (quotient[seen] < 0).any():
            return None
        number += factor.log2().long() * base**place
    return number.view(plain.shape[:dims]), seen.view(plain.shape[:dims])


def _meeting(plain: Tensor, coded: list[Tensor]) -> Refusal | None:
    """Return which part of the elements serves several frames; None if none does."""
    on, clear = plain.abs() > 1e-5 * plain.abs().max(), torch.ones_like(plain, dtype=torch.bool)
    for gradient in coded:
        quotient = gradient / plain
        clear &= ((quotient / 2 ** quotient.abs().log2().round()) - 1).abs() < 1e-6
    part = float((on & ~clear).sum() / on.sum())
    why = f"frames meet between it and its neurons (in {100 * part:.2g} % of its output)"
    return Refusal(Reason.FRAMES_MEET, why) if part else None


def _ordered(of_steps: tuple[Tensor, Tensor], samples: Tensor, *layouts: Layout) -> Layout | None:
    """Return the layout whose steps and samples these numbers are, on the rows that have one."""
    t, seen = of_steps
    rows = t.unsqueeze(-1)
    for layout in layouts:
        step, sample = (places.expand(rows.shape)[..., 0][seen] for places in layout.places(rows))
        if layout.T > 1 and torch.equal(t[seen], step) and torch.equal(samples[seen], sample):
            return layout
    return None


def _other_steps(of_steps: tuple[Tensor, Tensor]) -> Refusal | None:
    """Return which steps the frames of dimension 0 go to, where each goes to one, but not to that of its place."""
    t, seen = of_steps
    steps = torch.where(seen, t, -1).amax(1)
    if not torch.equal(t[seen], steps[:, None].expand_as(t)[seen]):
        return None
    shown = ", ".join("none" if step < 0 else str(step) for step in steps[:8].tolist()) + (", .." if len(steps) > 8 else "")
    return Refusal(Reason.NO_ORDER, f"its {len(steps)} frames go to steps {shown} of {int(t.max()) + 1}")


def _digits(largest: int, base: int) -> int:
    count = 1
    while largest > base**count:
        count += 1
    return count


@contextlib.contextmanager
def _gradients_stay() -> Iterator[None]:
    """Let a forward that says torch.no_grad() record gradients all the same: they are how this is measured."""
    with (
        mock.patch.object(torch.no_grad, "__enter__", return_value=None),
        mock.patch.object(torch.no_grad, "__exit__", return_value=None),
    ):
        yield


def _marked(x: Tensor, made_by: str) -> Tensor:
    """Return a tensor that the graph names."""
    made: Tensor = _Output.apply(x if x.requires_grad else x.requires_grad_(), made_by) if x.is_floating_point() else x
    return made


def _without_zeros(module: nn.Module) -> None:
    """Replace parameters that are all zero, as of a norm at the end of a fresh residual branch: they would hide a path."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_floating_point() and not parameter.detach().any():
            module._parameters[name] = nn.Parameter(torch.ones_like(parameter))


def _made_of(u: Tensor, through: bool) -> set[str]:
    """Return the names that ``made_by`` notes in front of a tensor; without ``through``, those that no other name hides."""
    stack, seen, found = [u.grad_fn], set(), set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = getattr(node, "made_by", None)
        if name is not None:
            found.add(name)
        if name is None or through:
            stack += [following for following, _ in node.next_functions]
    return found
