"""What became of every layer, and why: stable reason codes, verdicts, and a table of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from rich.table import Table

from sj_tac.support import page
from sj_tac.support.page import short
from sj_tac.support.printing import Shown

Status = Literal["converted", "kept", "refused", "stretched"]


class Reason(StrEnum):
    """Why a layer was left alone: what was observed. The codes are stable; docs/reasons.md says more about each."""

    POLICY_KEEP = "POLICY_KEEP"
    NEVER_CALLED = "NEVER_CALLED"
    NO_TENSOR = "NO_TENSOR"
    NO_NEURON = "NO_NEURON"
    ONE_STEP = "ONE_STEP"
    FRAMES_MEET = "FRAMES_MEET"
    TIME_INSIDE = "TIME_INSIDE"
    TIME_IN_CHANNELS = "TIME_IN_CHANNELS"
    NO_ORDER = "NO_ORDER"
    OTHER_FRAMES = "OTHER_FRAMES"
    NOT_ALIKE = "NOT_ALIKE"
    STEPS_UNKNOWN = "STEPS_UNKNOWN"
    NOT_RUN = "NOT_RUN"
    NOT_AFFINE = "NOT_AFFINE"
    K_NOT_WHOLE = "K_NOT_WHOLE"
    COLLAPSE_BRANCHED = "COLLAPSE_BRANCHED"
    COLLAPSE_FOLDED = "COLLAPSE_FOLDED"


# What each code means, and what its reader can do about it.
REASONS: dict[Reason, tuple[str, str]] = {
    Reason.POLICY_KEEP: ("the policy says keep", "change the rule to convert it"),
    Reason.NEVER_CALLED: (
        "no call of the net calls it as a module",
        "call the convolution itself, not F.conv2d on its weight; a branch that is not taken stays as it is",
    ),
    Reason.NO_TENSOR: ("it returns no tensor of numbers", "let it return its maps as one tensor"),
    Reason.NO_NEURON: (
        "what it computes reaches no neuron",
        "only convolutions that drive neurons are converted; a neuron whose steps cannot be measured can be registered with "
        "sj_tac.register_neuron",
    ),
    Reason.ONE_STEP: (
        "each of its calls serves one step: the forward loops over time, or T is 1",
        "run all steps in one call: frames [T, N, C, H, W] in place of the loop, and functional.set_step_mode(model, 'm'), "
        "which alone, in the loop, would take samples for steps; what stands in front of a repeated image runs once already",
    ),
    Reason.FRAMES_MEET: (
        "steps or samples are mixed between it and its neurons, so each of its frames serves several",
        "let attention over time, shifts and means over time stand behind the neuron, or convert what lies in front of them",
    ),
    Reason.TIME_INSIDE: (
        "steps lie along a dimension of its maps",
        "hand it frames whose time is in front: [T, N, C, H, W] or folded, [T * N, C, H, W]",
    ),
    Reason.TIME_IN_CHANNELS: ("steps are its channels", "nothing: it weighs the frames itself"),
    Reason.NO_ORDER: (
        "its rows are neither T * N nor N * T, or its frames go to other steps than those of their places",
        "hand it frames [T, N, ...] in the order of the neuron's steps, x.reshape(T, N, ...) or x.transpose(0, 1), if the "
        "model was meant so",
    ),
    Reason.OTHER_FRAMES: (
        "its calls take frames of several layouts",
        "give each place a module of its own (weights may be shared)",
    ),
    Reason.NOT_ALIKE: (
        "it treats frames differently, draws random numbers, keeps a state, or takes T frames alone",
        "a convolution of one's own must be one map of every frame, in any number",
    ),
    Reason.STEPS_UNKNOWN: (
        "its rows are folded, and T does not follow from the shapes of a call",
        "let forward take frames whose T or N is that of the neurons: cut, pad or join them before the net is called",
    ),
    Reason.NOT_RUN: ("it cannot be run by itself, or the net not with it shared", "see what the error says"),
    Reason.NOT_AFFINE: (
        "what stands between it and the neuron is not affine (a MaxPool, an activation): a group's drive would be another",
        "pool and activate behind the neuron, or allow it with a rule that says approximate: true",
    ),
    Reason.K_NOT_WHOLE: (
        "k source steps are no whole number of the frames that a collapse before it makes",
        "choose k as a multiple of the collapse before it",
    ),
    Reason.COLLAPSE_BRANCHED: (
        "steps cannot be merged there: its drive does not go to one neuron of SpikingJelly's alone",
        "use spikes: count or mode: preserve, which are right in every net",
    ),
    Reason.COLLAPSE_FOLDED: (
        "its neuron steps through folded or batch-first frames, in which a collapse is not made",
        "use mode: preserve for this layer",
    ),
}


# Begins a note of a report; what can be done about it.
AT_RISK = "ACCURACY_AT_RISK"
HELP = "sj_tac.match(net, batches) says how far it is from its source, and corrects most of it without labels"


@dataclass(frozen=True)
class Refusal:
    """A reason with the words of the case: which module, which shape, how often."""

    reason: Reason
    detail: str = ""


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
        macs_before: multiply-accumulates of the source's convolution per sample; None until the net has seen a shape.
        macs_after: the same of the converted one.
        dtype: what the convolution of a converted layer computes in, "source" for the net's own.
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
    dtype: str = "source"

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
        graphs: what was captured of the net's calls; ``graphs[i].code`` is the Python that runs, ``.problem`` why it is
            not fused.
    """

    verdicts: tuple[Verdict, ...]
    title: str = "sj_tac"
    evidence: Any = None
    notes: tuple[str, ...] = ()
    policy: Any = None
    layers: tuple[Any, ...] = ()
    graphs: tuple[Any, ...] = ()

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
        verdicts = [asdict(v) for v in self.verdicts]
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
            why = f"{v.reason}: {v.detail}" if v.reason else v.detail
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
