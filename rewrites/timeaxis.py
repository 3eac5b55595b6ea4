"""Where collapsed time begins, what runs at its rate, and where frames must come back.

In this version a collapse needs a graph that is one chain of modules; ``skeleton`` says whether it is. The pass itself works
on names only, so that ``set_k`` can run it again on a converted net without tracing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rewrites.chains import Chain, data_users, module_calls
from sj_tac import host
from sj_tac.operators import Swap, chain_swaps, drive_place
from sj_tac.policy import Settings
from sj_tac.report import Reason, Refusal
from sj_tac.spans import PLAIN, Span, Timeline
from sj_tac.swapped import FiringPlace, NormPlace, Place, source_class


@dataclass(frozen=True)
class Step:
    """One node of a graph that is one chain: a module by name, or a function."""

    module: str | None
    per_frame: bool
    once: bool


@dataclass
class Layout:
    """What ``swap`` is to do: every swap, the modules behind which frames come back, and the verdicts that follow."""

    timeline: Timeline
    swaps: list[Swap] = field(default_factory=list)
    exits: list[tuple[nn.Module, Place]] = field(default_factory=list)
    drives: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    stretched: dict[str, Span] = field(default_factory=dict)
    # Of the fused chains: the kernel that will run, and why a chain is not fused or not on the fastest kernel.
    kernels: dict[str, str] = field(default_factory=dict)
    unfused: dict[str, str] = field(default_factory=dict)


def skeleton(model: nn.Module, graph: fx.Graph) -> tuple[list[Step] | None, str]:
    """The graph as a list of steps where it is one chain; otherwise None and the first node where it branches."""
    calls = module_calls(model, graph)
    names = {module: name for name, module in model.named_modules()}
    steps: list[Step] = []
    placeholders = [n for n in graph.nodes if n.op == "placeholder" and data_users(n)]
    if len(placeholders) != 1:
        return None, f"the model has {len(placeholders)} inputs"
    node = placeholders[0]
    while True:
        users = data_users(node)
        if len(users) != 1:
            return None, f"{_label(node)} is read {len(users)} times" if users else f"nothing reads {_label(node)}"
        node = users[0]
        if node.op == "output":
            return (steps, "") if node.args[0] in node.all_input_nodes else (None, "the model has several outputs")
        # A constant or a parameter that is mixed in is no branch of the data.
        joined = [n for n in node.all_input_nodes if n.op != "get_attr"]
        if len(joined) != 1:
            return None, f"{_label(node)} joins {len(joined)} values"
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            steps.append(Step(names[module], _treats_frames_alike(module), calls[module] == 1))
        else:
            steps.append(Step(None, _flattens_behind_time(node), True))


def _label(node: fx.Node) -> str:
    return f"module {str(node.target)!r}" if node.op == "call_module" else f"{node.name!r}"


def _treats_frames_alike(module: nn.Module) -> bool:
    known = (*host.PER_FRAME, *host.NORMS)
    return type(module) in known and host.is_multi_step(module) and not getattr(module, "return_indices", False)


def _flattens_behind_time(node: fx.Node) -> bool:
    if node.target not in (torch.flatten, "flatten"):
        return False
    start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
    return isinstance(start, int) and start >= 1


def lay_out(
    model: nn.Module,
    chains: Mapping[str, Chain | Refusal],
    settings: Mapping[str, Settings],
    steps: list[Step] | None,
    branches: str,
) -> Layout:
    """Places for all chains under ``settings``; collapses that cannot be, in ``refused``. Changes nothing."""
    walk = _Walk(model, chains, settings)
    if steps is None:
        walk.branched(branches)
    else:
        walk.along(steps)
    return walk.layout


class _Walk:
    def __init__(self, model: nn.Module, chains: Mapping[str, Chain | Refusal], settings: Mapping[str, Settings]) -> None:
        self.model, self.settings = model, settings
        self.chains = {
            name: chain for name, chain in chains.items() if isinstance(chain, Chain) and settings[name].mode != "keep"
        }
        self.kept = {name for name, chain in chains.items() if isinstance(chain, Chain) and settings[name].mode == "keep"}
        self.layout = Layout(Timeline())
        self.span = PLAIN
        # Index of the last step that may carry the hook which gives frames back.
        self.last_exit: int | None = None

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def add_chain(self, chain: Chain, span: Span, pool: nn.Module | None) -> None:
        conv, node = self.module(chain.conv), self.module(chain.neuron)
        norm = self.module(chain.norm) if chain.norm else None
        drive = drive_place(chain.conv, self.settings[chain.conv], span, node, self.layout.timeline)
        self.layout.drives[chain.conv] = drive
        self.layout.swaps += chain_swaps(drive, conv, norm, node, pool)

    def branched(self, why: str) -> None:
        for chain in self.chains.values():
            if self.settings[chain.conv].mode == "collapse":
                detail = f"collapse needs a graph that is one chain, and here {why}"
                self.layout.refused[chain.conv] = Refusal(Reason.COLLAPSE_BRANCHED, detail)
            else:
                self.add_chain(chain, PLAIN, None)

    def along(self, steps: list[Step]) -> None:
        i = 0
        while i < len(steps):
            chain = self.chains.get(steps[i].module or "")
            if chain is not None:
                refusal = self.refuse(chain, steps, i)
                if refusal is None:
                    i = self.take(chain, steps, i)
                    continue
                self.layout.refused[chain.conv] = refusal
            if not self.span.is_plain:
                self.pass_through(steps, i, refused=chain is not None)
            i += 1
        self.close(steps, at_output=True)

    def refuse(self, chain: Chain, steps: list[Step], i: int) -> Refusal | None:
        """Why this chain cannot be converted at this place of the time axis."""
        k, stretch, mode = self.settings[chain.conv].k, self.span.stretch, self.settings[chain.conv].mode
        if k > stretch and k % stretch:
            detail = f"k={k} is no multiple of {stretch}, the steps that a frame stands for behind the collapse before it"
            return Refusal(Reason.K_NOT_WHOLE, detail)
        counts = mode == "collapse" and self.settings[chain.conv].spikes == "count"
        if (counts and max(k, stretch) > 1) or (mode == "preserve" and stretch > 1):
            return self.pool_problem(steps, self.index_of(steps, chain.neuron, i))
        return None

    def pool_problem(self, steps: list[Step], node: int) -> Refusal | None:
        at = self.mean_pool(steps, node)
        if at is None:
            return None
        name = steps[at].module or ""
        pool = self.module(name)
        if not steps[at].once:
            return Refusal(Reason.COLLAPSE_POOL, f"its MaxPool {name!r} is called more than once in one forward")
        if getattr(pool, "return_indices", False):
            return Refusal(Reason.COLLAPSE_POOL, f"its MaxPool {name!r} returns indices")
        if not steps[at].per_frame:
            return Refusal(Reason.COLLAPSE_POOL, f"its MaxPool {name!r} is in step_mode 's'")
        return None

    def mean_pool(self, steps: list[Step], node: int) -> int | None:
        """Index of the last MaxPool behind a neuron, before anything that weighs spikes: there the mean is taken."""
        last = None
        for i in range(node + 1, len(steps)):
            name = steps[i].module
            kind = source_class(self.module(name)) if name else None
            if kind in host.MAX_POOLS:
                last = i
            elif kind not in (*host.POOLS, *host.DROPOUTS, nn.Identity) or not steps[i].per_frame:
                break
        return last

    @staticmethod
    def index_of(steps: list[Step], name: str, start: int) -> int:
        return next(j for j in range(start, len(steps)) if steps[j].module == name)

    def take(self, chain: Chain, steps: list[Step], i: int) -> int:
        """Convert the chain that starts at step i; the index behind it."""
        node = self.index_of(steps, chain.neuron, i)
        at = self.mean_pool(steps, node)
        self.add_chain(chain, self.span, self.module(steps[at].module or "") if at is not None else None)
        self.span = self.layout.drives[chain.conv].out
        averaged = at is not None and self.span.stretch > 1
        behind = at if averaged and at is not None else node
        self.last_exit = behind
        return behind + 1

    def pass_through(self, steps: list[Step], i: int, refused: bool) -> None:
        """A step inside a collapsed region that no converted chain covers: run it at the region's rate, or end there."""
        step = steps[i]
        module = self.module(step.module) if step.module else None
        if module is not None and source_class(module) in host.NEURONS and step.once and host.is_multi_step(module):
            problem = self.pool_problem(steps, i) if self.span.stretch > 1 else None
            if problem is None:
                self.stretch(step.module or "", module, steps, i)
                return
        elif step.per_frame and not refused and self.is_left_alone(step.module):
            if module is not None and source_class(module) in host.NORMS:
                if not step.once:
                    self.close(steps)
                    return
                self.layout.swaps.append(
                    Swap(module, NormPlace(self.layout.timeline, self.span, name=step.module or "", aggregated=True))
                )
            if step.module in self.kept:
                self.layout.stretched[step.module] = self.span
            if module is not None and step.once:
                self.last_exit = i
            return
        self.close(steps)

    def is_left_alone(self, name: str | None) -> bool:
        """False for a conv that was refused: a collapsed region ends before it."""
        return name is None or name in self.kept or not host.is_conv(self.module(name))

    def stretch(self, name: str, node: nn.Module, steps: list[Step], i: int) -> None:
        at = self.mean_pool(steps, i) if self.span.stretch > 1 else None
        firing = FiringPlace(self.layout.timeline, self.span, emit_mean=at is None)
        self.layout.swaps.append(Swap(node, firing))
        self.layout.stretched[name] = self.span
        self.last_exit = i
        if at is not None:
            pool = self.module(steps[at].module or "")
            self.layout.swaps.append(Swap(pool, Place(self.layout.timeline, self.span)))
            self.last_exit = at

    def close(self, steps: list[Step], at_output: bool = False) -> None:
        """End the region: frames come back behind the last module that can carry the hook."""
        if self.span.is_plain or self.last_exit is None:
            return
        opened = [d for d in self.layout.drives.values() if d.mode == "collapse"]
        emits_groups = bool(opened) and self.settings[opened[-1].name].emit == "groups"
        if not (at_output and emits_groups):
            module = self.module(steps[self.last_exit].module or "")
            self.layout.exits.append((module, Place(self.layout.timeline, self.span)))
        self.span, self.last_exit = PLAIN, None
