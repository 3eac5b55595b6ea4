"""Which convs are the head of a conv -> [norm] -> neuron chain, and why the others are not."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from sj_tac import host
from sj_tac.report import Reason, Refusal

_ADDS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_QUERIES = {"shape", "ndim", "dtype", "device", "size", "dim", "is_cuda"}


@dataclass(frozen=True)
class Chain:
    """Qualified names of the modules of one chain."""

    conv: str
    norm: str | None
    neuron: str


def data_users(node: fx.Node) -> list[fx.Node]:
    """The users that read a node's content, not just its shape."""
    users = []
    for user in node.users:
        asks = user.target == "size" or user.target == "dim" or (user.target is getattr and user.args[1] in _QUERIES)
        if not asks:
            users.append(user)
    return users


def module_calls(model: nn.Module, graph: fx.Graph) -> Counter[nn.Module]:
    """How often the graph calls each module object, whatever name it goes by."""
    return Counter(model.get_submodule(str(n.target)) for n in graph.nodes if n.op == "call_module")


def find_chains(model: nn.Module, graph: fx.Graph) -> dict[str, Chain | Refusal]:
    """A chain or the reason for none, for every conv among ``model.named_modules()``, in their order."""
    finder = _Finder(model, graph)
    return {name: finder.look(name, module) for name, module in model.named_modules() if host.is_conv(module)}


class _Finder:
    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.calls = module_calls(model, graph)
        self.nodes = {self.module(n): n for n in graph.nodes if n.op == "call_module"}

    def module(self, node: fx.Node) -> nn.Module | None:
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def describe(self, node: fx.Node) -> str:
        module = self.module(node)
        if module is not None:
            return f"{self.names[module]!r} ({type(module).__name__})"
        if node.op == "output":
            return "the model's output"
        return f"{getattr(node.target, '__name__', node.target)}()"

    def look(self, name: str, conv: nn.Module) -> Chain | Refusal:
        return self.reject(name, conv) or self.follow(name, conv)

    def reject(self, name: str, conv: nn.Module) -> Refusal | None:
        """What is wrong with the conv itself."""
        if self.calls[conv] == 0:
            around = next((m for m in self.calls if conv in list(m.modules())), None)
            if around is not None:
                return Refusal(Reason.INSIDE_LEAF, f"it sits inside {self.names[around]!r} ({type(around).__name__})")
            return Refusal(Reason.NEVER_CALLED)
        if self.calls[conv] > 1:
            return Refusal(Reason.CALLED_TWICE, f"one forward calls it {self.calls[conv]} times")
        if parametrize.is_parametrized(conv):
            return Refusal(Reason.PARAMETRIZED)
        if type(conv) not in host.CONVS:
            kind = f"{type(conv).__module__}.{type(conv).__qualname__}"
            return Refusal(Reason.UNSUPPORTED_CONV, f"it is a {kind}, not exactly SpikingJelly's layer.Conv2d")
        if not host.is_multi_step(conv):
            return Refusal(Reason.NOT_MULTI_STEP, "it is in step_mode 's'")
        return None

    def follow(self, name: str, conv: nn.Module) -> Chain | Refusal:
        """Along the single users of the conv to its neuron."""
        node = self.nodes[conv]
        norm: str | None = None
        while True:
            users = data_users(node)
            if len(users) > 1:
                readers = ", ".join(self.describe(u) for u in users)
                return Refusal(Reason.FAN_OUT, f"{self.describe(node)} is read by {readers}")
            if not users:
                return Refusal(Reason.NO_NEURON, f"nothing reads {self.describe(node)}")
            node = users[0]
            module = self.module(node)
            if module is None:
                if node.target in _ADDS:
                    return Refusal(Reason.ADD_BEFORE_NEURON)
                return Refusal(Reason.NO_NEURON, f"it is followed by {self.describe(node)}, not by a neuron")
            if type(module) is nn.Identity:
                continue
            refusal = self.reject_follower(module, node, norm is not None)
            if refusal is not None:
                return refusal
            if host.is_neuron(module):
                return Chain(name, norm, self.names[module])
            norm = self.names[module]

    def reject_follower(self, module: nn.Module, node: fx.Node, has_norm: bool) -> Refusal | None:
        """What is wrong with the module behind the conv; None for a norm or a neuron that will do."""
        label = self.describe(node)
        if type(module) in host.POOLS:
            return Refusal(Reason.POOL_BEFORE_NEURON, f"{label} stands between it and the neuron")
        if host.is_neuron(module):
            if type(module) not in host.NEURONS:
                return Refusal(Reason.UNSUPPORTED_NEURON, f"its neuron is {label}, of a type with dynamics of its own")
        elif host.is_norm(module) and not has_norm:
            if parametrize.is_parametrized(module) or type(module) not in host.NORMS:
                return Refusal(Reason.UNSUPPORTED_NORM, f"its norm is {label}")
            if host.uses_batch_statistics(module):
                return Refusal(Reason.BATCH_STATS, f"its norm {label} has track_running_stats=False")
        else:
            return Refusal(Reason.NO_NEURON, f"it is followed by {label}, not by a neuron")
        if self.calls[module] > 1:
            return Refusal(Reason.CALLED_TWICE, f"one forward calls {label} {self.calls[module]} times")
        if not host.is_multi_step(module):
            return Refusal(Reason.NOT_MULTI_STEP, f"{label} is in step_mode 's'")
        return None
