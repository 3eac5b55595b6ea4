"""Dynamo captures a net's forward; the equations rewrite what it captured, once for each vector of settings.

A captured graph does not depend on k: it has marks where shared convolutions stand. ``Capture`` keeps each graph as Dynamo
gave it and a rewritten copy for each vector of settings, so ``set_k`` costs a rewrite and no new capture.
"""

from __future__ import annotations

import inspect
import itertools
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import spikingjelly
import torch
from torch import nn
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node

import sj_tac
from sj_tac.definition import notices, ops
from sj_tac.definition.collapse import Mean
from sj_tac.definition.convs import SharedConv, Sharing
from sj_tac.errors import CaptureWarning
from sj_tac.kernels import backends
from sj_tac.rewrites import equations
from sj_tac.rewrites.equations.nodes import MARK, NEURON, argument, shape
from sj_tac.rewrites.equations.sink import WEIGHTED
from sj_tac.rewrites.lower import lower

_NUMBER = itertools.count()
_QUESTIONS = {"is_compiling", "is_dynamo_compiling"}
_NOT_THE_USERS = tuple(str(Path(str(module.__file__)).parent) for module in (torch, spikingjelly, sj_tac))
# torch of today counts recompilations for each of our call functions alone; before, inner frames of all nets shared a limit.
_OPTIONS: dict[str, Any] = {
    name: value
    for name, value in {"recompile_limit": 64, "isolate_recompiles": True}.items()
    if name in inspect.signature(torch.compile).parameters
}


def is_strict() -> bool:
    """Return whether errors of this package, or of Dynamo, are raised instead of told: in tests."""
    return os.environ.get("SJ_TAC_STRICT") == "1"


class NewFactsError(Exception):
    """A rewritten graph would need facts about sizes that its capture does not hold."""


class Captured:
    """One graph of Dynamo's, and what was made of it.

    Attributes:
        gm: as captured, with marks. rewritten: by settings, the graph that runs. problem: why it runs as the definition.
        around: shared layers whose frames it convolves one by one.
    """

    def __init__(self, gm: GraphModule, capture: Capture, around: Sequence[Sharing] = ()) -> None:
        self.gm, self.capture, self.around = gm, capture, around
        self.rewritten: dict[Any, GraphModule] = {}
        self.problem, self._with_gradients = "", torch.is_grad_enabled()
        self._guards = _guards(gm)
        self._find()

    @property
    def code(self) -> str:
        """The Python of the graph that runs under today's settings."""
        return self._find().code

    def neurons(self) -> tuple[set[str], set[str]]:
        """Return the names of its neurons: those that are kernels under today's settings, and those that are not."""
        lowered = {_module(n) for n in self._find().graph.nodes if hasattr(n.target, "is_fire")}
        return lowered, {_module(n) for n in self.gm.graph.nodes if n.target is NEURON} - lowered

    def float32(self) -> dict[str, str]:
        """Return, by name, why layers that are to run in int8 do not under today's settings; empty for those that do."""
        gm = self._find()
        graphs = [m.graph for m in gm.modules() if isinstance(m, GraphModule)]
        return {layer: why for graph in graphs for layer, why in getattr(graph, "sj_tac_int8", {}).items()}

    def holds(self) -> bool:
        """Return whether the graph serves today's settings for all sizes that it was captured for."""
        try:
            # Where no size varies there are no facts.
            return not self._guards or self._find() is not None
        except NewFactsError:
            return False

    def __call__(self, *args: Any) -> Any:
        self.capture.ran += 1
        return self._find().forward(*args)

    def _find(self) -> GraphModule:
        """Return the graph under today's settings, rewritten for them once."""
        found = self.rewritten.get(self.capture.key)
        if found is None:
            # Who asks may record gradients, or not; what the graph's calls do is what equations go by.
            with torch.set_grad_enabled(self._with_gradients):
                found = self.rewritten[self.capture.key] = self._rewrite()
        return found

    def _rewrite(self) -> GraphModule:
        for sharing in self.around:
            if sharing.aggregates():
                notices.around(sharing)
        gm, settings = copied(self.gm), self.capture.settings
        try:
            equations.run(gm, settings, self.capture.in_int8)
            if self.rewritten and _guards(gm) != self._guards:
                raise NewFactsError
            lower(gm, self.capture.launcher)
        except NewFactsError:
            raise
        except Exception as error:
            if is_strict():
                raise
            self.problem = f"{_where(gm)}: {type(error).__name__}: {error}"
            self.capture.tell(self.problem)
            gm = copied(self.gm)
            equations.define(gm, settings)
            lower(gm, self.capture.launcher)
        self._guards = _guards(gm)
        return gm


def _where(gm: GraphModule) -> str:
    """Return what a failed equation looked at: the equation, the layer and the user's line."""
    begun = [m.graph for m in gm.modules() if isinstance(m, GraphModule) and hasattr(m.graph, "sj_tac_equation")]
    if not begun:
        return "before the first equation"
    # The graphs inside a graph come before it, one after the other.
    graph: Any = begun[0] if begun[0] is gm.graph else begun[-1]
    node, equation = graph.sj_tac_at, graph.sj_tac_equation
    if node is None:
        return f"equation {equation}"
    modules = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    line = " ".join((node.meta.get("stack_trace") or "").strip().splitlines()[-2:]).strip()
    return f"equation {equation}, layer {modules[-1] if modules else 'unknown'}, at {node.name}, {line}"


def _module(node: Node) -> str:
    """Return the name of the module that made a node."""
    path = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()][-1:]
    return path[0].removeprefix("L['net'].").replace("['", ".").replace("']", "").lstrip(".") if path else ""


def _guards(gm: GraphModule) -> int:
    """Return how many facts about sizes hold of the graph."""
    for node in gm.graph.nodes:
        fake = getattr(node.meta.get("example_value"), "fake_mode", None)
        if fake is not None and fake.shape_env is not None:
            return len(fake.shape_env.guards)
    return 0


def copied(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph module and of those inside it, with the same parameters and fake tensors."""
    graph, places = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        new = places[node] = graph.node_copy(node, places.__getitem__)
        new.meta = dict(node.meta)
    found = GraphModule(gm, graph)
    for name, inner in gm.named_children():
        if isinstance(inner, GraphModule):
            setattr(found, name, copied(inner))
    return found


class Capture:
    """The captured calls of one net.

    Attributes:
        net: its forward is captured. launcher: of its CUDA kernels; empty for the first that works.
        graphs: all that was captured, in order.
        settings: of each shared convolution, by name: (k, weights, normalize). key: the same as one tuple.
        in_int8: names of the convolutions that are to run in int8. ran: how many graphs ran.
        failed: why no call is captured any more; empty if calls are.
    """

    def __init__(self, net: nn.Module, backend: str) -> None:
        self.net, self.launcher = net, backend if backend in backends.ON_CUDA else ""
        self.graphs: list[Captured] = []
        self._functions: dict[Any, Callable[..., Any]] = {}
        self.told: dict[str, None] = {}
        self.ran, self.failed = 0, ""
        self._watch()

    def _watch(self) -> None:
        """Find what holds the settings of marks: convolutions, and the hooks that emit means."""
        modules = list(self.net.modules())
        self.shared = {m.sharing.layer: m.sharing for m in modules if isinstance(m, SharedConv)}
        self.in_int8 = {layer for layer, sharing in self.shared.items() if sharing.dtype is torch.int8}
        hooks = [hook for m in modules for hook in m._forward_hooks.values() if isinstance(hook, Mean)]
        self.means = {hook.layer: hook for hook in hooks}
        self.look()

    def fused(self) -> set[str]:
        """Return the names of the neurons that run as kernels in all graphs that hold them."""
        found = [graph.neurons() for graph in self.graphs]
        return {name for run, _ in found for name in run} - {name for _, rest in found for name in rest}

    def tell(self, problem: str) -> None:
        """Warn once of each reason why a call, or a graph of it, runs as it is defined."""
        if problem not in self.told:
            self.told[problem] = None
            warnings.warn(
                f"sj_tac runs this {type(self.net).__name__} or a graph of it as it is defined, right and slower: {problem}",
                CaptureWarning,
                stacklevel=2,
            )

    def look(self) -> None:
        """Read today's settings from the modules."""
        convs = [(s.k, s.weights, s.normalize) for s in self.shared.values()]
        key = *convs, *[(mean.steps, "uniform", True) for mean in self.means.values()]
        if key != getattr(self, "key", None):
            self.settings, self.key = dict(zip((*self.shared, *self.means), key, strict=True)), key
            if not all(graph.holds() for graph in self.graphs):
                self.forget()

    def forget(self) -> None:
        """Capture everything again when it is called next."""
        self._functions.clear()
        self.graphs.clear()
        self.failed = ""
        self._watch()
        for sharing in self.shared.values():
            sharing.unshared.clear()

    def backend(self, gm: GraphModule, examples: list[Any]) -> Captured:
        """Dynamo's backend. It is a method: Dynamo tells nets apart by it where their frames share code."""
        asking = _asking()
        if asking is not None:
            place = f"{asking.co_filename}:{asking.co_firstlineno}"
            self.failed = f"its code asks whether torch compiles it ({asking.co_name}, {place}), and must be told no"
            self.tell(self.failed)
            raise RuntimeError(self.failed)  # Dynamo then runs the frame as it is
        found = Captured(gm, self, _gone_around(gm, examples, self.net))
        self.graphs.append(found)
        return found

    def run(self, variant: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the net's captured forward. ``variant``: calls that differ in it get code objects of their own."""
        call = self._functions.get(variant)
        if call is None:
            call = self._functions[variant] = torch.compile(_call_function(), backend=self.backend, **_OPTIONS)
        if self.failed:
            return _call(self.net, *args, **kwargs)
        before, ops.CAPTURE.marks = getattr(ops.CAPTURE, "marks", False), True
        try:
            # DistributedDataParallel would have Dynamo split graphs at its buckets, for an overlap that needs Inductor. What
            # Dynamo cannot trace, or fails on, runs as it is defined: an error is then the user's own, in the user's words.
            with torch._dynamo.config.patch(optimize_ddp=False, suppress_errors=not is_strict()):
                return self._run_or_fail(call, args, kwargs)
        finally:
            ops.CAPTURE.marks = before

    def _run_or_fail(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        problem: Exception | None = None
        for _ in range(2):  # twice: another thread may have reset the net while Dynamo looked at it
            ran = self.ran
            try:
                return call(self.net, *args, **kwargs)
            except Exception as error:
                if self.ran != ran or not _is_dynamos(error):
                    raise
                # Nothing ran: what Dynamo wrote for the call failed before it came to a graph.
                problem = error
        if is_strict() and problem is not None:
            raise problem
        self.failed = f"Dynamo's own code failed on its forward ({type(problem).__name__}: {problem})"
        self.tell(self.failed)
        return _call(self.net, *args, **kwargs)


def _gone_around(gm: GraphModule, examples: list[Any], net: nn.Module) -> list[Sharing]:
    """Return the shared layers whose weight a captured graph convolves frames with, but that it has no mark of."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, GraphModule)]
    marked = {node.args[-1] for graph in graphs for node in graph.nodes if node.target is MARK}
    given = dict(zip([n for n in gm.graph.nodes if n.op == "placeholder"], map(id, examples), strict=False))
    convolved = {given.get(argument(n, 1, "weight")) for n in gm.graph.nodes if n.target in WEIGHTED and not _is_empty(n)}
    layers = [m for m in net.modules() if isinstance(m, SharedConv) and id(m._parameters.get("weight")) in convolved]
    return [m.sharing for m in layers if m.sharing.layer not in marked]


def _is_empty(node: Node) -> bool:
    rows = shape(node)[0]
    return type(rows) is int and rows == 0  # of a symbol the comparison would be a guard


def _asking() -> CodeType | None:
    """Return code of the user's that Dynamo traced and that asks whether it is compiled; None if there is none."""
    traced: Callable[[], list[CodeType] | None] = getattr(TracingContext, "get_traced_code", list)  # torch 2.6 has none
    for code in traced() or ():
        if _QUESTIONS & set(code.co_names) and not code.co_filename.startswith(_NOT_THE_USERS):
            return code
    return None


def _is_dynamos(error: BaseException) -> bool:
    """Return whether an error was raised by Dynamo's code, not by what it runs."""
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    return place.startswith(os.path.dirname(torch._dynamo.__file__))


def _call(net: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return net._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _call_function() -> Callable[..., Any]:
    """Return a function with a code object of its own: Dynamo's limits and caches are per code object."""
    code: CodeType = _call.__code__.replace(co_name=f"sj_tac_call_{next(_NUMBER)}")
    return FunctionType(code, globals())
