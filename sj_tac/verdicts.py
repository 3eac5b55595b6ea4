"""What became of every layer, and why: stable reason codes, verdicts, and a table of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from rich.table import Table

from sj_tac.support import page
from sj_tac.support.page import short
from sj_tac.support.printing import Shown

Status = Literal["converted", "kept", "refused", "stretched"]


class Reason(StrEnum):
    """Why a layer was left alone. The codes are stable; docs/reasons.md says more about each."""

    POLICY_KEEP = "POLICY_KEEP"
    INSIDE_LEAF = "INSIDE_LEAF"
    NEVER_CALLED = "NEVER_CALLED"
    CALLED_TWICE = "CALLED_TWICE"
    TIME_LOOP = "TIME_LOOP"
    FAN_OUT = "FAN_OUT"
    NOT_MULTI_STEP = "NOT_MULTI_STEP"
    PARAMETRIZED = "PARAMETRIZED"
    UNSUPPORTED_CONV = "UNSUPPORTED_CONV"
    UNSUPPORTED_NORM = "UNSUPPORTED_NORM"
    BATCH_STATS = "BATCH_STATS"
    UNSUPPORTED_NEURON = "UNSUPPORTED_NEURON"
    POOL_BEFORE_NEURON = "POOL_BEFORE_NEURON"
    ADD_BEFORE_NEURON = "ADD_BEFORE_NEURON"
    NOT_LINEAR = "NOT_LINEAR"
    NO_NEURON = "NO_NEURON"
    COLLAPSE_BRANCHED = "COLLAPSE_BRANCHED"
    COLLAPSE_POOL = "COLLAPSE_POOL"
    K_NOT_WHOLE = "K_NOT_WHOLE"
    FOLD_UNSEEN = "FOLD_UNSEEN"
    FOLD_AMBIGUOUS = "FOLD_AMBIGUOUS"
    TIME_UNKNOWN = "TIME_UNKNOWN"
    NEURON_FOLDED = "NEURON_FOLDED"
    COLLAPSE_FOLDED = "COLLAPSE_FOLDED"
    ONCE_ALREADY = "ONCE_ALREADY"
    PROMISE_UNTRIED = "PROMISE_UNTRIED"
    COLLAPSE_REGISTERED = "COLLAPSE_REGISTERED"
    PROMISE_BROKEN = "PROMISE_BROKEN"


# What each code means, and what its reader can do about it.
REASONS: dict[Reason, tuple[str, str]] = {
    Reason.POLICY_KEEP: ("the policy says keep", "change the rule to convert it"),
    Reason.INSIDE_LEAF: (
        "it sits inside a module that is one step of the graph",
        "write conv, norm and neuron as multi-step layers of their own; SeqToANNContainer(conv, norm, pool) will do too",
    ),
    Reason.NEVER_CALLED: (
        "the traced forward never calls it as a module",
        "call the conv itself, not F.conv2d on its weight; a branch not taken stays as it is",
    ),
    Reason.CALLED_TWICE: (
        "a module of the chain is called more than once in one forward, so it has no single place in time",
        "give each place a module of its own (weights may be shared)",
    ),
    Reason.TIME_LOOP: (
        "the forward loops over time with neurons that take one step a call",
        "run all steps in one call: frames [T, N, C, H, W] in place of the loop, and functional.set_step_mode(model, 'm'), "
        "which alone, in the loop, would take samples for steps",
    ),
    Reason.FAN_OUT: (
        "what it computes before the neuron is also read where every frame is needed",
        "let only neurons read it, directly or through sums, pools of means and convs",
    ),
    Reason.NOT_MULTI_STEP: (
        "a module of the chain is in step_mode 's'",
        "hand it frames [T, N, ...] and set step_mode 'm' (functional.set_step_mode) before convert; on folded frames use "
        "torch's own layers",
    ),
    Reason.PARAMETRIZED: (
        "what torch.nn.utils.parametrize makes of its weights can be tried on example_input alone",
        "pass example_input=, or torch.nn.utils.parametrize.remove_parametrizations first",
    ),
    Reason.UNSUPPORTED_CONV: (
        "it is neither SpikingJelly's layer.Conv1d, Conv2d, Conv3d or Linear nor torch's own on folded frames [T * N, ...]",
        "use layer.Conv2d, or put torch's own conv and norm into a layer.SeqToANNContainer; a forward of its own must be "
        "one affine map of every frame, in training too, which is tried on example_input",
    ),
    Reason.UNSUPPORTED_NORM: (
        "its normalisation is not one whose eval mode is the same map for every frame",
        "use layer.BatchNorm1d, 2d or 3d; where its eval mode is one affine map, sj_tac.register_affine(its class)",
    ),
    Reason.BATCH_STATS: (
        "its norm keeps no running statistics, so its map depends on the batch, aggregated or not",
        "train with track_running_stats=True",
    ),
    Reason.UNSUPPORTED_NEURON: (
        "the neuron is not exactly LIFNode, IFNode or ParametricLIFNode with one time constant, so its dynamics are its own",
        "use one of the three, its tau one number; where it leaks by a factor and charges linearly, "
        "sj_tac.register_neuron(its class, decay)",
    ),
    Reason.POOL_BEFORE_NEURON: (
        "a MaxPool stands between it and the neuron, and the largest of shared drives is not the frames' own largest",
        "pool after the neuron, as conv -> BN -> neuron -> pool, or allow it with a rule that says approximate: true",
    ),
    Reason.ADD_BEFORE_NEURON: (
        "its sum with other frames does not go to neurons alone",
        "let neurons read the sum, directly or through further sums, pools of means and convs",
    ),
    Reason.NOT_LINEAR: (
        "what stands between it and the neuron is not affine, or does not treat all frames alike",
        "keep conv -> norm -> neuron together; activations, attention and products behind the neuron. A module of your own "
        "that in eval mode is one affine map of every frame: sj_tac.register_affine(its class); a neuron of your own: "
        "sj_tac.register_neuron",
    ),
    Reason.NO_NEURON: (
        "no neuron follows it",
        "only convs that drive neurons are converted; a neuron class of your own over [T, N, ...] can be registered with "
        "sj_tac.register_neuron",
    ),
    Reason.COLLAPSE_BRANCHED: (
        "steps cannot be merged there: its drive does not go to one neuron alone",
        "use spikes: count or mode: preserve, which are right in every graph",
    ),
    Reason.COLLAPSE_POOL: (
        "the mean over a group must be taken after the MaxPool behind the neuron, and this one cannot take it",
        "give the neuron a layer.MaxPool2d of its own, right behind it, in no container and without return_indices",
    ),
    Reason.K_NOT_WHOLE: (
        "k source steps are no whole number of the frames that a collapse before it makes",
        "choose k as a multiple of the collapse before it",
    ),
    Reason.FOLD_UNSEEN: (
        "it is torch's own convolution, and whether its batch is folded frames [T * N, ...] can only be seen on a sample",
        "pass example_input=, a real batch with N >= 2 samples and N other than T",
    ),
    Reason.FOLD_AMBIGUOUS: (
        "the sample has one sample, or as many as steps, so that folded frames [T * N, ...] cannot be told from others",
        "pass an example_input with N >= 2 samples and N other than T",
    ),
    Reason.TIME_UNKNOWN: (
        "it folds time, and neither T nor N of the neurons is the size of a dimension of forward's arguments",
        "let forward take frames whose T or N is that of the neurons: cut, pad or join them before the net is called",
    ),
    Reason.NEURON_FOLDED: (
        "the neuron is handed folded frames [T * N, ...], or samples in front of time, so it steps through samples",
        "hand it frames [T, N, ...], x.reshape(T, N, ...) or x.transpose(0, 1), if the model was meant so; published ones "
        "are not all",
    ),
    Reason.COLLAPSE_FOLDED: (
        "time is folded into the batch there, which a collapse would change the size of, or stands behind it",
        "use mode: preserve for this layer",
    ),
    Reason.COLLAPSE_REGISTERED: (
        "its neuron is a registered one, whose own forward runs ordinary steps and cannot take several as one",
        "use mode: preserve for this layer",
    ),
    Reason.ONCE_ALREADY: (
        "it runs before the image is repeated T times, so it runs once for all steps already",
        "nothing: there is nothing to save",
    ),
    Reason.PROMISE_UNTRIED: (
        "a registered class stands behind it, and whether it keeps its promise can only be tried on a sample",
        "pass example_input=, a real batch",
    ),
    Reason.PROMISE_BROKEN: (
        "a registered class does not keep on the sample what it promises",
        "see sj_tac.register_neuron and sj_tac.register_affine for what a class must keep",
    ),
}


# Begins a note of a report; what can be done about it.
AT_RISK = "ACCURACY_AT_RISK"
HELP = "sj_tac.match(net, batches) says how far it is from its source, and corrects most of it without labels"


@dataclass(frozen=True)
class Refusal:
    """A reason with the words of the case: which module, which shape, how often. ``more``: what else is in the way."""

    reason: Reason
    detail: str = ""
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What became of one layer.

    Attributes:
        layer: qualified name, of the conv, or of a neuron that is stretched without being part of a converted chain.
        status: "converted", "kept" (by policy), "refused", or "stretched" (runs at the rate of a collapse before it).
        mode: of a converted layer.
        k: of a converted layer; for a stretched neuron the inner steps it takes on a frame.
        kernel: the backend that runs it.
        reason: the code that says why a layer was left alone.
        detail: the same in words, in this case.
        hint: what to do about it.
        obstacles: what else is in the way of a refused layer, the nearest first.
        macs_before: multiply-accumulates of the source's convolution per sample; None until the net has seen a shape.
        macs_after: the same of the converted one.
        reads: what is planned to come to a converted conv: "frames", "sums" that the neurons before it have made, "shared"
            frames, or "plain", ordinary frames at every border.
        last_read: what came in the last call, "frames of a value" where frames had to be made for it.
        last_gave: what its neuron gave then: "sums", "means", "frames" or "plain".
        exact: its frames are one frame T times over, so that it runs once for all of them, with the source's own result.
        dtype: what the convolution of a converted layer computes in, "source" for the net's own.
        frames_made: who had frames of its values made since it was converted, and how often. Each costs time; none changes
            a result.
    """

    layer: str
    status: Status
    mode: str | None = None
    k: int | None = None
    kernel: str | None = None
    reason: str | None = None
    detail: str = ""
    hint: str = ""
    macs_before: int | None = None
    macs_after: int | None = None
    reads: str = ""
    last_read: str = ""
    last_gave: str = ""
    exact: bool = False
    dtype: str = "source"
    obstacles: tuple[str, ...] = ()
    frames_made: Mapping[str, int] = field(default_factory=dict)

    @property
    def unplanned(self) -> str:
        """What went another way than planned in the last call; empty where nothing did."""
        if self.reads == "sums" and self.last_read not in ("", "sums", "plain"):
            readers = ", ".join(f"{reader} ({n}x)" for reader, n in self.frames_made.items())
            why = f"; frames were made for {readers}" if readers else ""
            return f"slower than planned: the last call gave it {self.last_read}{why}"
        return ""

    @classmethod
    def refuse(cls, layer: str, refusal: Refusal, **more: Any) -> Verdict:
        """The verdict of a layer that is left alone for this reason."""
        text, hint = REASONS[refusal.reason]
        status: Status = "kept" if refusal.reason is Reason.POLICY_KEEP else "refused"
        return cls(
            layer,
            status,
            reason=refusal.reason.value,
            detail=refusal.detail or text,
            hint=hint,
            obstacles=refusal.more,
            **more,
        )


@dataclass(frozen=True)
class Report(Shown):
    """One verdict per conv (and per stretched neuron), in the order of the model. ``print`` shows a table.

    Attributes:
        verdicts: all of them.
        title: of the table.
        evidence: what a policy "auto" was chosen by, an ``sj_tac.Evidence``.
        notes: what was seen of the net as a whole, on the sample.
        policy: what is converted, layer by layer, an ``sj_tac.Policy``: ``report.policy.save("policy.yaml")``.
        layers: firing rates and times of every layer, where ``report`` was given batches.
    """

    verdicts: tuple[Verdict, ...]
    title: str = "sj_tac"
    evidence: Any = None
    notes: tuple[str, ...] = ()
    policy: Any = None
    layers: tuple[Any, ...] = ()

    def _with(self, status: Status) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if v.status == status)

    @property
    def converted(self) -> tuple[Verdict, ...]:
        """The verdicts of layers that are converted."""
        return self._with("converted")

    @property
    def kept(self) -> tuple[Verdict, ...]:
        """The verdicts of layers that the policy keeps."""
        return self._with("kept")

    @property
    def refused(self) -> tuple[Verdict, ...]:
        """The verdicts of layers that cannot be converted."""
        return self._with("refused")

    @property
    def stretched(self) -> tuple[Verdict, ...]:
        """The verdicts of neurons that run at the rate of a collapse before them."""
        return self._with("stretched")

    def __getitem__(self, layer: str) -> Verdict:
        """The verdict of one layer. Raises KeyError with the names there are."""
        for verdict in self.verdicts:
            if verdict.layer == layer:
                return verdict
        raise KeyError(f"no verdict for {layer!r}; there are {[v.layer for v in self.verdicts]}")

    def __iter__(self) -> Iterator[Verdict]:
        """The verdicts, in the order of the model's modules."""
        return iter(self.verdicts)

    def __contains__(self, layer: object) -> bool:
        """Whether a layer of this name has a verdict."""
        return any(verdict.layer == layer for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"title": ..., "verdicts": [{"layer": ..., "status": ..., ...}]}."""
        verdicts = [asdict(v) | {"obstacles": list(v.obstacles)} for v in self.verdicts]
        plain: dict[str, Any] = {"title": self.title, "verdicts": verdicts}
        if self.notes:
            plain["notes"] = list(self.notes)
        if self.layers:
            plain["layers"] = [row._asdict() for row in self.layers]
        return plain if self.evidence is None else plain | {"evidence": self.evidence.to_dict()}

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page that needs no network, with what is known: verdicts, MACs, rates, times, what was searched.

        Raises:
            WriteError: the system could not write it. A file that stood at ``path`` is then as it was.
        """
        page.write(path, self)

    def __rich__(self) -> Table:
        table = Table(title=self.title, caption=self._summary(), caption_justify="left", title_justify="left")
        for column, style in (
            ("layer", "bold"),
            ("status", ""),
            ("mode", ""),
            ("k", ""),
            ("conv MACs/sample", ""),
            ("kernel", ""),
            ("why", ""),
        ):
            table.add_column(column, style=style, justify="right" if column == "k" else "left")
        for v in self.verdicts:
            also = "".join(f"; also: {obstacle}" for obstacle in v.obstacles[:2])
            why = f"{v.reason}: {v.detail}{also}" if v.reason else "; ".join(w for w in (v.detail, v.unplanned) if w)
            table.add_row(v.layer, v.status, v.mode or "", str(v.k or ""), _macs(v), v.kernel or "", why)
        return table

    def parts(self) -> list[Any]:
        return [self] if self.evidence is None else [self, self.evidence]

    def _summary(self) -> str:
        before, after = total_macs(self.verdicts)
        macs = f"; conv MACs per sample {short(before)} -> {short(after)}" if before and after else ""
        counts = f"{len(self.converted)} converted, {len(self.stretched)} stretched, {len(self.kept)} kept"
        # Every hint once, however many layers it concerns.
        hints = {v.reason: v.hint for v in self.verdicts if v.reason and v.hint}
        lines = [f"{counts}, {len(self.refused)} refused{macs}", *self.notes, *(f"{r}: {h}" for r, h in hints.items())]
        return "\n".join(lines)


def total_macs(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    """Multiply-accumulates of all convolutions per sample, before and after; (0, 0) where no shape was seen."""
    known = [v for v in verdicts if v.macs_before is not None and v.macs_after is not None]
    return sum(v.macs_before or 0 for v in known), sum(v.macs_after or 0 for v in known)


def _macs(verdict: Verdict) -> str:
    dtype = "" if verdict.dtype == "source" else f", {verdict.dtype}"
    if verdict.macs_before is None or verdict.macs_after is None:
        return "-" + dtype
    if verdict.macs_before == verdict.macs_after:
        return short(verdict.macs_before) + dtype
    return f"{short(verdict.macs_before)} -> {short(verdict.macs_after)}{dtype}"
