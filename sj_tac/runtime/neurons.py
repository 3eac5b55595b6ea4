"""What neurons become: units that run with the norm before and the pool behind them as one operator, ``fire``.

A unit looks at the value it is handed. Drives that steps share it runs on as they are, with the affine map and the residual
that the value notes; anything else as frames. What it emits is prepared for the reader that was planned, and says so itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.host import dispatch, neuron
from sj_tac.kernels import backends, reference
from sj_tac.kernels.layout import laid_like
from sj_tac.kernels.weights import group_lengths, temporal_sum
from sj_tac.runtime import compiled, straight
from sj_tac.runtime.borders import PLAIN, Borders, Span
from sj_tac.runtime.convs import LOGITS, DriveModule
from sj_tac.runtime.expressions import Made, SharedAgain, SharedExpression, over
from sj_tac.runtime.functional import ByState, recordable
from sj_tac.runtime.groups import Groups, Sums, single
from sj_tac.runtime.launching import Prepared
from sj_tac.runtime.layers import pending
from sj_tac.runtime.marks import defined
from sj_tac.runtime.regions import as_traced
from sj_tac.runtime.runs import Inputs, Run, check_voltage
from sj_tac.runtime.values import Shared, Spikes, ordinary

# What runs a neuron, as long as nobody has patched it.
_FORWARD: Any = host.MemoryModule.forward
_FLOAT32_ON_CPU = torch.float32, torch.device("cpu")


@dataclass(eq=False)
class Unit:
    """A neuron of a converted net.

    Attributes:
        span: what the trace says of the frames in front of it; merge: how many steps it takes as one, in a binary collapse.
        pool: the pool behind it that ``fire`` does, or None; pools_later: the mean is taken at a pool further on.
        folded: its drives were folded, so that T is looked at.
        head: it is the neuron of a Linear layer that is not converted: half voltages of it stay half.
        reader: the conv that sums are prepared for, or None; direct: the one that reads them in another dtype, or None.
        launches: what straight.py has prepared, by what it was prepared for.
        ran: the kernel of the last call, or why it ran as the host's own steps; convolved: that kernel ran the convolution
            in front as well.
        gave: "sums", "means", "frames" or "plain"; made: who had frames made, how often.
    """

    name: str
    borders: Borders
    span: Span = PLAIN
    merge: int = 1
    normalize: bool = True
    pool: Any = None
    pools_later: bool = False
    folded: bool = False
    head: bool = False
    backend: str = "auto"
    ran: str = ""
    convolved: bool = False
    gave: str = ""
    made: Counter[str] = field(default_factory=Counter)
    reader: weakref.ref[nn.Module] | None = None
    direct: weakref.ref[nn.Module] | None = None
    launches: dict[Any, Prepared] = field(default_factory=dict, repr=False)
    _means: dict[Any, tuple[Tensor, int]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # A unit alone must not drag its readers along; the root links them again (root.py).
        return self.__dict__ | {"reader": None, "direct": None, "launches": {}, "_means": {}, "made": Counter(self.made)}

    def keeps_half(self, x: Tensor) -> bool:
        """Whether the steps are the host's, with voltages in the half dtype of ``x``: kernels have them in float32.

        On CUDA the kernel runs them. The host's half steps are a dozen launches each, and all others have float32 there.
        """
        if not self.head or host.wide_dtype(x.dtype) is x.dtype:
            return False
        kernel, problem = backends.fastest(self.backend, x.device, x.dtype)
        return self.backend == reference.NAME or kernel not in backends.ON_CUDA or bool(problem)

    def frames_made(self, reader: str) -> None:
        self.made[reader] += 1

    def pools_means(self, pooled: Any) -> bool:
        """Whether the frames behind the pool are means of what it takes of single steps: the largest, of a MaxPool."""
        return isinstance(self.pool, host.ANY_MAX_POOLS) and getattr(pooled, "means", None) is not None

    def wanted(self, groups: Groups, kind: tuple[torch.dtype, torch.device], direct: bool = False) -> Sums | None:
        """What the planned reader, or the direct one, sums of the frames of ``groups``; None where that one reads frames.

        The direct one reads single frames as sums, too.
        """
        reader = self.direct if direct else self.reader
        conv: Any = reader() if reader is not None else None
        if not isinstance(conv, DriveModule):
            return None
        if conv.__dict__.get("_step_mode") != "m" and not host.is_multi_step(conv):
            return None
        steps = single(sum(groups.steps)) if groups.frames is groups.steps else groups.stepwise()
        found = conv._tac.wants(steps, kind, conv._parameters.get(LOGITS))
        if found is None or direct or len(found.groups.steps) != len(found.of.steps):
            return found
        return None

    def narrow(self, groups: Groups, kind: tuple[torch.dtype, torch.device]) -> tuple[Sums, torch.dtype] | None:
        """What the one reader will sum, be it single frames, and the dtype in which it will read that; None where it is the
        net's own.
        """
        conv: Any = self.direct() if self.direct is not None and kind == _FLOAT32_ON_CPU else None
        dtype = conv.narrows() if isinstance(conv, DriveModule) else None
        found = None if dtype is None else self.wanted(groups, kind, True)
        return None if found is None or dtype is None else (found, dtype)

    def mean_weights(self, means: Groups, kind: tuple[torch.dtype, torch.device]) -> tuple[Tensor, int]:
        """One weight for each step, whose sums are the means of ``means``; and steps in a whole group."""
        key = (means, kind)
        found = self._means.get(key)
        if found is None:
            wide = reference.accumulation_dtype(kind[0])
            found = reference.constant([1.0 / n for n in means.steps for _ in range(n)], wide, kind[1]), means.steps[0]
            if type(found[0]) is Tensor:
                self._means = {key: found}
        return found


class UnitModule(ByState, neuron.BaseNode):
    """A neuron of a converted net. The voltage of a converted layer's is float32 for half inputs."""

    _tac: Unit

    def single_step_forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().single_step_forward(ordinary(x, self._tac.name), *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # What the host's forward does, past its properties; a subclass of the user's, or a patched class, may have another.
        host_class = OWN.get(type(self))
        if host_class is not None and host_class.forward is _FORWARD and self.__dict__.get("_step_mode") == "m":
            return self.multi_step_forward(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def _look_at(self, x: Tensor) -> Tensor:
        """What a neuron of folded drives is handed, whether a part that begins here is watched, and what is collapsed."""
        unit, borders = self._tac, self._tac.borders
        if unit.folded:
            borders.check(x, unit.name)
        if not borders.entered and not isinstance(x, (Shared, Spikes)):
            borders.look()
        if borders.collapses and not borders.are_plain and borders.go_by_trace():
            x = as_traced(x, unit.name, unit.span, unit.merge, unit.normalize)
        return x

    def multi_step_forward(self, x_seq: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = self._tac
        if unit.folded or unit.borders.collapses or not unit.borders.entered:
            x_seq = self._look_at(x_seq)
        check_voltage(self, x_seq.shape[1:])
        if unit.borders.are_plain:
            return self._on_frames(ordinary(x_seq, unit.name), *args, **kwargs)
        fused = unit.borders.fused
        if fused and not torch.is_grad_enabled() and not args and not kwargs:
            short: Any = straight.run if type(x_seq) is Shared else straight.run_features if unit.head else None
            found = None if short is None else short(self, unit, x_seq)
            if found is not None:
                return found
        problem = host.neuron_problem(self) or ("it is called with more than its drive" if args or kwargs else "")
        if unit.keeps_half(x_seq):
            problem = "it is not converted, and its voltage is as half as its drives"
        surrogate = self._modules.get("surrogate_function")  # a bare function is no module
        if surrogate is not None and (surrogate._forward_hooks or surrogate._forward_pre_hooks):
            problem = "a hook watches its surrogate function"
        shared = x_seq if isinstance(x_seq, Shared) and x_seq.folded is None and x_seq.intact else None
        if problem or not fused:
            unit.ran, unit.gave = problem or reference.NAME, "plain"
            if args or kwargs:
                return super().multi_step_forward(ordinary(x_seq, unit.name), *args, **kwargs)
            return self._steps(ordinary(x_seq, unit.name)) if shared is None else self._by_the_host(shared)
        if shared is not None:
            return self._on_drives(shared)
        x = ordinary(x_seq, unit.name)
        return self._emit(self._run(x, None, None, single(x.shape[0])), single(x.shape[0]), None)

    def _run(
        self, y: Tensor, residual: Tensor | None, affine: tuple[Tensor, Tensor] | None, groups: Groups, merge: Any = None
    ) -> Run:
        """A run from the voltages as they are; ``merge``: the value whose drives are one step each."""
        v = None if host.is_at_rest(self) else recordable(host.take_state(self, y))
        scale, shift = affine or (None, None)
        inputs = Inputs(y, v, residual, scale, shift, self._parameters.get("w"))
        return Run(self, inputs, list(groups.steps), merge is not None, merge is None or merge.normalize)

    def _by_the_host(self, x: Shared) -> Tensor:
        """Run the host's own steps on a value's frames, and note of what comes out what ``fire`` would."""
        given = self._noted(x)
        return given if self._tac.borders.fused or not isinstance(given, Shared) else defined(given)

    def _noted(self, x: Shared) -> Tensor:
        unit, groups = self._tac, x.expression.groups
        if x.merges:
            steps = self._merge(x.expression.mapped(), groups.steps, x.normalize)
            return Shared.of(SharedExpression(steps, groups.merged()))
        frames = x.frames(unit.name)
        one_for_many = groups.frames is not groups.steps
        if one_for_many:  # behind a binary collapse
            groups = groups.stepwise()
            frames = reference.first(frames, groups.frames)
        spikes = self._steps(frames)
        if x.means is None:
            return Shared.of(SharedExpression(spikes, groups)) if one_for_many else spikes
        if unit.pools_later:
            return pending(spikes, x.means)
        means = SharedExpression(reference.mean(spikes, x.means.steps), x.means)
        if unit.pool is None or spikes.dim() != 5:
            return Shared.of(means, x.means)
        # The mean of pooled steps, as ``fire`` gives it.
        pooled = reference.mean(unit.pool._pooled(spikes), x.means.steps)
        inner = Shared.of(SharedExpression(pooled, x.means), x.means)
        shape = (x.means.total, *spikes.shape[1:])
        return Spikes.of(means, shape, spikes, pooled=(host.pool_window(unit.pool) or (), inner))

    def _on_drives(self, x: Shared) -> Tensor:
        """Run on drives that steps share, with what the value notes of norms and residuals."""
        expression = x.expression
        x.note_use()
        groups, residual = expression.groups, None
        if expression.residual is not None:
            residual = expression.residual.make()
        y, affine = expression.compact, expression.affine
        if residual is not None and residual.dtype != y.dtype:
            y, residual, affine, groups = x.frames(self._tac.name), None, None, single(x.steps)
        run = self._run(y, residual, affine, groups, x if x.merges else None)
        return self._emit(run, groups.merged() if x.merges else groups, x.means)

    def _emit(self, run: Run, groups: Groups, means: Groups | None) -> Tensor:
        """The run's output, as its readers want it; ``groups``: what the drives stand for."""
        if means is not None and (max(means.steps) > 1 or groups.frames is not groups.steps):
            return self._emit_means(run, means)
        if groups.frames is not groups.steps:
            return self._emit_steps(run, groups)
        unit, y = self._tac, run.inputs.y
        assert y is not None
        pool = unit.pool if len(run.frame) == 4 else None
        wanted = unit.wanted(groups, (y.dtype, y.device))
        if wanted is None:
            out, last = run(pool, None, 1)
            host.put_state(self, last, [])
            unit.gave = "frames"
            frames = Made(run.again(pool, None, 1).on, run.given, out)
            inner = Spikes.of(frames, tuple(out.shape), out)
        else:
            out, last = run(pool, wanted.flat, wanted.size)
            host.put_state(self, last, [])
            unit.gave = "sums"
            shape = (groups.total, *out.shape[1:])
            inner = Spikes.of(run.again(pool, None, 1), shape, out, sums={wanted: out})
            inner.maker = unit
        if pool is None:
            return inner
        value = Spikes.of(
            run.again(None, None, 1), (groups.total, *run.frame), out, pooled=(host.pool_window(pool) or (), inner)
        )
        value.maker = unit
        return value

    def _emit_steps(self, run: Run, groups: Groups) -> Tensor:
        """Behind a binary collapse: a compact frame for every step, which stands for several frames."""
        unit = self._tac
        groups = groups.stepwise()
        pool = unit.pool if len(run.frame) == 4 else None
        out, last = run(pool, None, 1)
        host.put_state(self, last, [])
        unit.gave = "means"
        inner = Shared.of(SharedExpression(out, groups))
        if pool is None:
            return inner
        shape = (len(groups.frames), *run.frame)
        value = Shared.of(SharedAgain(run.again(None, None, 1), groups, shape, out))
        value.pooled, value.maker = (host.pool_window(pool) or (), inner), unit
        return value

    def _emit_means(self, run: Run, means: Groups) -> Tensor:
        """Behind a count collapse: the mean of each group's steps, taken behind the pool."""
        unit, y = self._tac, run.inputs.y
        assert y is not None
        pool = unit.pool if len(run.frame) == 4 else None
        if unit.pools_later and pool is None:
            out, last = run(None, None, 1)
            host.put_state(self, last, [])
            unit.gave = "frames"
            return pending(out, means)
        weights, size = unit.mean_weights(means, (y.dtype, y.device))
        out, last = run(pool, weights, size)
        host.put_state(self, last, [])
        unit.gave = "means"
        inner = Shared.of(SharedExpression(out, means), means)
        if pool is None:
            return inner
        again, pooled = run.again(None, weights, size), (host.pool_window(pool) or (), inner)
        if unit.pools_later:
            repeated = over(again, lambda t: reference.repeat(t, means.frames))
            value: Spikes | Shared = Spikes.of(repeated, (means.total, *run.frame), out, pooled=pooled)
        else:  # a pool of averages: who reads the means in front of it reads what is collapsed
            value = Shared.of(SharedAgain(again, means, (len(means.steps), *run.frame), out), means)
            value.pooled = pooled
        value.maker = unit
        return value

    # ---- ordinary frames at the borders, by the trace's marks ---------------------------------------------------------
    def _on_frames(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = self._tac
        if not torch.compiler.is_compiling():
            unit.gave = "plain"
            unit.ran = unit.ran if host.neuron_problem(self) else reference.NAME
        if args or kwargs:
            return super().multi_step_forward(x, *args, **kwargs)
        if compiled.is_free(x) and not unit.keeps_half(x) and (kernel := compiled.kernel_of(self, x)):
            return self._on_free_frames(x, kernel)
        if unit.merge > 1:
            return self._merged_steps(x)
        lengths = group_lengths(x.shape[0], unit.span.merged)
        spikes = self._steps(reference.mean_of_alike(x, lengths))
        if unit.span.stretch > 1 and not unit.pools_later:
            inner = group_lengths(spikes.shape[0], unit.span.stretch)
            spikes = reference.repeat(reference.mean(spikes, inner), inner)
        return reference.repeat(spikes, lengths)

    def _on_free_frames(self, x: Tensor, kernel: str) -> Tensor:
        """The same of any number of frames, in a call that torch compiles."""
        unit, total, size = self._tac, x.shape[0], self._tac.span.merged
        drives = compiled.mean_of_alike(x, size)
        if unit.merge > 1:
            before = compiled.groups_of(total, size // unit.merge)
            return compiled.repeat(compiled.merged(self, drives, kernel, before), size, total)
        spikes = compiled.steps(self, drives, kernel)
        if unit.span.stretch > 1 and not unit.pools_later:
            spikes = compiled.repeat(compiled.mean(spikes, unit.span.stretch), unit.span.stretch, spikes.shape[0])
        return compiled.repeat(spikes, size, total)

    def _steps(self, x: Tensor) -> Tensor:
        transformed = not torch.compiler.is_compiling() and dispatch.transform() is not None
        if transformed and not dispatch.is_in_grad() and not host.neuron_problem(self):
            # The host's surrogate functions know no vmap; the operator does.
            out, last = self._run(x, None, None, single(x.shape[0]))(None, None, 1)
            host.put_state(self, last, [])
            return out
        # The older host makes a voltage of its input's dtype, so that is what widens it.
        spikes: Tensor = super().multi_step_forward(x if host.IS_V2 or self._tac.head else x.to(host.wide_dtype(x.dtype)))
        return spikes.to(x.dtype)

    def _merged_steps(self, x: Tensor) -> Tensor:
        """One step per group of the trace's."""
        unit, lengths = self._tac, group_lengths(x.shape[0], self._tac.span.merged)
        before = group_lengths(-(-x.shape[0] // (unit.span.merged // unit.merge)), unit.merge)
        return reference.repeat(self._merge(reference.mean_of_alike(x, lengths), before, unit.normalize), lengths)

    def _merge(self, drives: Tensor, before: Sequence[int], normalize: bool) -> Tensor:
        """A step on each drive, of so many: ``h = r + beta^K (v - r) + gamma S_K I`` (``gamma I`` where not normalised)."""
        v = laid_like(host.take_state(self, drives), drives[0])
        rest = host.resting_voltage(self)
        beta, gain = host.decay(self, v.dtype), host.input_gain(self, v.dtype)
        spikes, voltages = [], []
        for drive, length in zip(drives.unbind(), before, strict=True):
            scale = gain * temporal_sum(beta, length) if normalize else gain
            spike, v = host.fire_and_reset(self, rest + beta**length * (v - rest) + scale * drive.to(v.dtype))
            spikes.append(spike)
            voltages.append(v)
        host.put_state(self, v, voltages)
        return torch.stack(spikes).to(drives.dtype)


class TACLIFNode(UnitModule, neuron.LIFNode):
    """LIFNode of a converted net."""


class TACIFNode(UnitModule, neuron.IFNode):
    """IFNode of a converted net."""


class TACParametricLIFNode(UnitModule, neuron.ParametricLIFNode):
    """ParametricLIFNode of a converted net."""


UNIT_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    neuron.LIFNode: TACLIFNode,
    neuron.IFNode: TACIFNode,
    neuron.ParametricLIFNode: TACParametricLIFNode,
}
OWN: dict[type[nn.Module], type[nn.Module]] = {ours: theirs for theirs, ours in UNIT_SWAPS.items()}
