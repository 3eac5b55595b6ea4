"""What a converted conv knows: which frames share one drive, by which weights, and which values it takes as they are."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import ConversionError, PlanNotKeptWarning
from sj_tac.host import dispatch
from sj_tac.kernels import aggregate as aggregation, reference
from sj_tac.kernels.checks import WIDE, wide_dtype
from sj_tac.kernels.weights import decay_weights, learned_weights
from sj_tac.runtime import compiled, matched
from sj_tac.runtime.borders import PLAIN, Borders, Span
from sj_tac.runtime.expressions import Later, SharedExpression
from sj_tac.runtime.groups import Groups, Sums, sums
from sj_tac.runtime.marks import defined
from sj_tac.runtime.packing import Packing
from sj_tac.runtime.values import Frames, Shared

# Neurons whose decay may hang on a tensor.
_LIF, _PLIF = host.neuron.LIFNode, host.neuron.ParametricLIFNode


@dataclass(eq=False)
class Drive:
    """A converted conv: ``k`` source steps share one drive.

    Attributes:
        planned: the neuron whose decay gives the weights; no child module, or it would be in the state_dict twice.
        span: what the trace says of the frames in front of it.
        repeated: the trace says that they are one frame T times over; a call looks whether they are.
        batch_first: its frames are [N, T, ...], or [N * T, ...]; it gives ordinary ones.
        dtype: what the convolution computes in, where that is not the net's own; outside of autocast.
        backend: of the sums of frames. ran: what the last call took: "sums", "shared", "frames", "frames of a value" or
            "plain"; seen: T and the shape of the convolution's output in the last call; made: readers of its frames.
        matched: what its bias was corrected for, empty where it was not.
        declined: the convolution that no kernel ran with the neuron behind it, in the last call that tried.
        packing: its weights in another layout, where that is faster.
    """

    name: str
    planned: InitVar[nn.Module]
    borders: Borders
    mode: str = "preserve"
    k: int = 2
    weights: str = "decay"
    normalize: bool = True
    spikes: str = "count"
    span: Span = PLAIN
    repeated: bool = False
    batch_first: bool = False
    dtype: torch.dtype | None = None
    backend: str = reference.NAME
    ran: str = ""
    seen: tuple[int, Sequence[int]] | None = None
    made: Counter[str] = field(default_factory=Counter)
    told: bool = False
    matched: str = ""
    declined: Any = field(default=None, repr=False)
    packing: Packing = field(default_factory=Packing, repr=False)
    _cache: dict[Any, Sums] = field(default_factory=dict, repr=False)

    def __post_init__(self, planned: nn.Module) -> None:
        self._hold(planned)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_cache": {}, "declined": None, "packing": Packing(), "made": Counter(self.made)}
        del state["_neuron"], state["_twin"]
        return state | {"node": self.node}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        node = self.__dict__.pop("node")
        if not host.has_known_decay(node):
            kind = type(node)
            raise ConversionError(
                f"layer {self.name!r} shares drives for neurons of {kind.__module__}.{kind.__qualname__}, which is not "
                "registered in this process: call sj_tac.register_neuron with it, as where the net was converted, before "
                "the net is loaded"
            )
        self._hold(node)

    def _hold(self, node: nn.Module) -> None:
        """Note a neuron, without keeping it alive where it is replaced: the host's ``reset_net`` looks for that."""
        twin = object.__new__(type(node))
        twin.__dict__ = node.__dict__
        # Nobody resets the voltages of a neuron that is gone, which may hang on autograd's graph.
        self._neuron, self._twin = weakref.ref(node, lambda _: host.reset_memories(twin)), twin

    @property
    def node(self) -> nn.Module:
        """The neuron; where that is gone, another object with all that it held."""
        node = self._neuron()
        return self._twin if node is None else node

    @property
    def fits(self) -> str:
        """What a correction of its bias is fitted to."""
        return matched.words(self.mode, self.k, self.weights)

    @property
    def frames(self) -> int:
        """Frames in a whole group, where the trace is right."""
        return max(1, self.k // self.span.stretch)

    @property
    def out(self) -> Span:
        """What the trace says of the frames behind it."""
        if self.mode == "preserve":
            return self.span
        return self.span.collapsed(max(self.k, self.span.stretch), self.spikes)

    @property
    def merges(self) -> bool:
        """True for a binary collapse: one step for ``k``."""
        return self.mode == "collapse" and self.spikes == "binary" and max(self.k, self.span.stretch) > 1

    def frames_made(self, reader: str) -> None:
        self.made[reader] += 1

    def pools_means(self, pooled: Any) -> bool:
        """As of a unit; a conv has no pool."""
        return False

    def tell(self, x: Frames) -> None:
        """Warn, once, that a value came whose sums could not be used; not where somebody holds a view, as may be usual."""
        if self.told or x._lent:
            return
        self.told = True
        made = getattr(x.maker, "made", {})
        readers = ", ".join(name for name in made if name and name != self.name)
        why = "it was written, or its gradient is wanted" if not x.intact else "they are sums of other groups or weights"
        why += f" (frames were made for {readers})" if readers else ""
        warnings.warn(
            f"layer {self.name!r}: sums of frames came as was planned, but cannot be used: {why}. The call goes another way "
            "than the traced one, or the net was changed; it is slower, the result is the same",
            PlanNotKeptWarning,
            stacklevel=4,
        )

    def wants(
        self, of: Groups, kind: tuple[torch.dtype, torch.device], logits: Tensor | None = None, keeps: bool = True
    ) -> Sums | None:
        """What this conv sums of compact frames ``of``; None where ``k`` steps are no whole number of them.

        ``keeps``: what was found before may be taken again, which a call that is compiled must not.
        """
        first = of.whole or of.steps[0]  # of.first, written out: every layer of every call asks
        # The only group of frames that no collapse made may be shorter than a whole one.
        if self.k > first and self.k % first and (of.whole or len(of.steps) > 1):
            return None
        wide = WIDE.get(kind[0]) or reference.accumulation_dtype(kind[0])
        source = logits
        decays = self.weights == "decay" and self.k > first  # one frame alone is what it is
        # The twin has what the neuron has, without a look whether that is still there.
        node: Any = self._twin
        learns = isinstance(node, _PLIF) or (isinstance(node, _LIF) and type(node.__dict__.get("tau")) is not float)
        if source is None and decays and learns:
            node = self.node
            source = host.decay_source(node)  # parametrized: another tensor every time
        number = _number(source) if source is not None and keeps else None
        if number is not None and (found := self._cache.get((of, kind, number))) is not None:
            return found
        beta = host.decay(node, wide) if decays else 0.0
        if isinstance(beta, Tensor) or logits is not None:
            assert source is not None
            # A compiled call compares no weights, and torch.compile cannot ask a tensor whether it is of inference mode.
            version = -1 if not keeps or source.is_inference() else source._version
            tag = (id(source), version, torch.is_grad_enabled(), _number(source, True) if keeps else None)
            if number is None:
                return self._sums(of, beta, (wide, kind[1]), (self.weights, tag), logits)
            with torch.inference_mode(False), torch.no_grad():  # it outlives the call that it was made in
                return self._keep((of, kind, number), self._sums(of, beta, (wide, kind[1]), (self.weights, tag), logits))
        found = self._cache.get((of, kind, beta)) if keeps else None
        if found is None:
            found = self._sums(of, beta, (wide, kind[1]), None, None)
            return self._keep((of, kind, beta), found) if keeps else found
        return found

    def _keep(self, key: Any, found: Sums) -> Sums:
        if len(self._cache) > 16:
            self._cache.clear()
        if type(found.flat) is Tensor:
            self._cache[key] = found
        return found

    def _sums(
        self, of: Groups, beta: float | Tensor, like: tuple[torch.dtype, torch.device], tag: object, logits: Tensor | None
    ) -> Sums:
        size = max(1, self.k // of.first)
        cuts = [of.steps[i : i + size] for i in range(0, len(of.steps), size)]
        rows: list[Sequence[float | Tensor]] = []
        for i, lengths in enumerate(cuts):
            # All groups but the last are alike.
            rows.append(rows[0] if 0 < i < len(cuts) - 1 else self._row(lengths, beta, like[0], logits))
        return sums(of, size, rows, like, tag)

    def _row(
        self, lengths: tuple[int, ...], beta: float | Tensor, dtype: torch.dtype, logits: Tensor | None
    ) -> Sequence[float | Tensor]:
        """Weights of a group whose frames stand for ``lengths`` steps."""
        if len(lengths) == 1:
            return [1.0]
        if logits is not None:
            return _learned(logits, len(lengths), dtype)
        if self.weights == "uniform":
            return [length / (sum(lengths) if self.normalize else 1) for length in lengths]
        return decay_weights(beta, lengths, self.normalize)

    def aggregate(self, x: Tensor, wanted: Sums) -> Tensor:
        """The sums of compact frames or ordinary ones."""
        if wanted.sums_nothing:
            return x
        kernel = aggregation.choose(self.backend, x.device, x.dtype)
        if not x.dtype.is_floating_point:
            wide_dtype("aggregate", x)  # says what to do; plain PyTorch would sum whole numbers
        if kernel == reference.NAME or dispatch.is_in_grad():
            return reference.aggregate(x, *wanted.weights())
        return aggregation.run_compiled(kernel, x, wanted.flat, wanted.size)

    def sums_of_free_frames(self, x: Tensor, logits: Tensor | None) -> tuple[Tensor, int]:
        """In a call that torch compiles: the sums of any number of frames [T, ...], and how many frames each is for."""
        merged, stretch = self.span
        compact = compiled.mean_of_alike(x, self.span.factor)
        size, wide = self.frames, reference.accumulation_dtype(x.dtype)
        if size == 1:
            return compact, self.span.factor
        beta = host.decay(self.node, wide) if self.weights == "decay" else 0.0
        table = []
        for held in range(1, size * stretch + 1):  # steps in a group: the last frame may stand for fewer
            lengths = (*[stretch] * (held // stretch), *([held % stretch] if held % stretch else []))
            table.append(self._row(lengths, beta, wide, logits))
        last = compiled.last_of(compiled.groups_of(x.shape[0], merged), size * stretch)
        return compiled.sums(compact, table, size, last), self.span.factor * size

    def takes(self, x: Frames) -> bool:
        """True where the compact form of a value will do: what the frames' own sums would be is known from it."""
        if not isinstance(x, Shared) or not x.intact or not x.is_bare or x.merges:
            return False
        groups = x.expression.groups
        if x.means is not None:
            first = x.means.first
            whole = self.k <= first or self.k % first == 0
            return whole and (x.means == groups or groups.split(x.means) is not None or x.means.split(groups) is not None)
        return groups.steps is not groups.frames or self._gives_back(groups.steps[0])

    def _gives_back(self, steps: int) -> bool:
        """Whether sums of frames alike for ``steps`` steps are such frames: weights that sum to 1 give them back."""
        whole = self.k % steps == 0 or steps % self.k == 0
        return steps == 1 or (self.normalize and self.weights != "learned" and whole)

    def compact(self, x: Shared) -> tuple[Groups, Tensor]:
        """What is summed of a value that the conv takes, and what each frame of it stands for."""
        groups = x.expression.groups
        first, wanted = groups.steps[0], x.means or groups
        # Steps may share a drive that was preserved. They are steps all the same, of which a collapse takes ``k``.
        apart = self.mode == "collapse" and 1 < self.k < first
        if x.means is None and (apart or not self._gives_back(first)):
            wanted = groups.stepwise()
        made = x.expression.split(wanted) or x.expression.joined(wanted)
        assert made is not None
        return wanted, made.mapped()

    def emit(self, y: Tensor | Later, groups: Groups, x: Any, folded: int | None = None) -> Tensor:
        """The value of drives ``y``, one for each of ``groups``, of what came as ``x``; ``folded``: N, where it folds."""
        means = x.means if isinstance(x, Shared) and not x.is_written else None
        # Behind a binary collapse one step may stand for all frames of a short call; it is of a longer one all the same.
        several = groups.steps[0] > 1 or (groups.frames is not groups.steps and len(groups.steps) == 1)
        collapses = self.mode == "collapse" and several and (self.k > 1 or means is not None)
        if collapses:
            self.borders.collapsed = True
            groups = groups._replace(whole=max(self.k, 1 if means is None else means.whole))
        if self.mode == "collapse" and self.spikes == "count":
            means = groups if collapses else None
        value = Shared.of(SharedExpression(y, groups), means, folded)
        value.__dict__["maker"] = self
        if collapses and self.merges:
            value.merges, value.normalize, value.means = True, self.normalize, None
        return value if self.borders.fused else defined(value)


def _number(source: Tensor, recorded: bool = False) -> tuple[float, ...] | None:
    """The numbers that weights hang on, where they are at hand and, unless ``recorded``, nobody wants their gradient.

    The numbers themselves: who writes through ``.data`` leaves no other trace.
    """
    if (
        (torch.is_grad_enabled() and not recorded)
        or source.device.type not in dispatch.AT_HAND
        or not dispatch.is_plain(source)
    ):
        return None
    return tuple(source.flatten().tolist()) if source.dim() else (source.item(),)


def _learned(logits: Tensor, frames: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Learned weights of ``frames`` frames; where a group has more frames than were planned, each weight is shared out."""
    if frames <= len(logits):
        return learned_weights(logits, frames, dtype)
    learned, each = learned_weights(logits, len(logits), dtype), -(-frames // len(logits))
    shared = [learned[len(logits) - 1 - (frames - 1 - j) // each] / each for j in range(frames)]
    total: Tensor = torch.stack(shared).sum()
    return [w / total for w in shared]
