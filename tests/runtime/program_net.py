"""What a random program is made of: blocks, statements, edits and calls; the net that runs the statements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from spikingjelly.activation_based import layer
from support import conv, node, norm
from torch import Tensor, nn

C, SIZE = 3, 4


@dataclass(frozen=True)
class Block:
    """conv -> [norm] -> neuron -> [pool]; ``residual``: "", "before" the neuron or "behind" it."""

    kind: str = "lif"
    tau: float = 2.0
    v_reset: float | None = 0.0
    decay_input: bool = True
    norm: bool = True
    pool: str = ""
    residual: str = ""
    detach: bool = True


@dataclass(frozen=True)
class Do:
    """One statement. ``a``, ``b``: how far back the values stand that it reads; ``n``: a number it needs."""

    what: str
    a: int = 0
    b: int = 1
    n: int = 1


@dataclass(frozen=True)
class Edit:
    """What is done after convert to a block."""

    what: str
    block: int = 0


@dataclass(frozen=True)
class Call:
    """One call."""

    frames: int = 5
    samples: int = 2
    train: bool = False
    grad: str = "grad"
    reset: bool = True


@dataclass(frozen=True)
class Program:
    """``rule``: another mode and k for the first block, or None. ``features``: a value in the middle is given out too: "",
    "always", or "later", which the trace has not seen.
    """

    blocks: tuple[Block, ...]
    steps: tuple[Do, ...]
    edits: tuple[Edit, ...] = ()
    calls: tuple[Call, ...] = (Call(),)
    mode: str = "preserve"
    k: int = 2
    rule: tuple[str, int] | None = None
    inputs: int = 1
    features: str = ""
    seed: int = 0


# ---- the net -----------------------------------------------------------------------------------------------------------


class BlockNet(nn.Module):
    """One block, of values [T, N, C, H, W]."""

    def __init__(self, spec: Block) -> None:
        super().__init__()
        self.residual = spec.residual
        self.conv = conv(C, C)
        self.node = node(spec.kind, spec.v_reset, spec.decay_input, spec.tau, detach_reset=spec.detach)
        self.norm = norm(C) if spec.norm else nn.Identity()
        pools = {"max": layer.MaxPool2d, "avg": layer.AvgPool2d}
        self.pool = pools[spec.pool](3, 1, 1, step_mode="m") if spec.pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if self.residual == "before":
            y = y + x
        y = self.pool(self.node(y))
        return y + x if self.residual == "behind" else y


def shifted(x: Tensor) -> Tensor:
    """The frames one later, written into a buffer."""
    buffer = torch.zeros_like(x)
    buffer[1:] = x[:-1]
    return buffer


torch.fx.wrap("shifted")


class Net(nn.Module):
    """The program's forward, in ordinary torch code on modules."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.steps = program.steps
        self.blocks = nn.ModuleList([BlockNet(spec) for spec in program.blocks])
        self.drops = nn.ModuleList([layer.Dropout(0.3, step_mode="m") for _ in program.steps])
        self.head = nn.Sequential(layer.Flatten(step_mode="m"), layer.Linear(C * SIZE**2, 3, step_mode="m"))
        self.kept: Any = None
        self.features = program.features == "always"

    def forward(self, x: Any) -> Any:
        values = list(x) if isinstance(x, tuple) else [x]
        # What T is made of: two values of one kind have the same T in every call.
        kinds = [(i,) for i in range(len(values))]
        used = 0
        for i, do in enumerate(self.steps):
            a = len(values) - 1 - do.a % len(values)
            b = len(values) - 1 - do.b % len(values)
            block = self.blocks[max(used - 1, 0)]
            if do.what == "block" and used < len(self.blocks):
                block, used = self.blocks[used], used + 1
            elif do.what == "block":
                continue
            value, kind = self.step(do, i, block, (values[a], values[b]), (kinds[a], kinds[b]))
            if value is not None:
                values.append(value)
                kinds.append(kind)
        y = self.head(values[-1])
        return (y, values[len(values) // 2].mean((1, 3))) if self.features else y

    def step(self, do: Do, i: int, block: nn.Module, values: Any, kinds: Any) -> Any:
        (a, b), (kind, other) = values, kinds
        what, n = do.what, do.n
        if what in ("block", "again"):
            return block(a), kind
        if what == "in training":
            return (block(a) if self.training else a * 0.5), kind
        if what == "slice":
            cuts = {1: slice(1, None), 2: slice(None, None, 2), 3: slice(-2, None)}
            return a[cuts[n]], (*kind, n)
        if what == "cat":
            return torch.cat([a, b]), (*kind, "cat", *other)
        if what == "stack":
            return (torch.stack([a, b]).mean(0), kind) if kind == other else (torch.cat([a[:1], b]), ("+1", *other))
        if what == "add":
            return (a + b, kind) if kind == other else (a + b.mean(0), kind)
        if what == "pool time":
            return torch.stack([a[:-1], a[1:]]).mean(0), (*kind, "pool")
        return self.frame_wise(what, n, i, a, b if kind == other else b.mean(0)), kind

    def frame_wise(self, what: str, n: int, i: int, a: Tensor, b: Tensor) -> Tensor | None:
        """Statements that leave T as it is."""
        if what == "scale":
            return a * (0.5 * n)
        if what == "write":
            y = a * 1.0
            y.mul_(0.5 * n)
            return y
        if what == "write there":
            a.add_(0.25 * n)
            return None
        if what == "write a sum":
            y = a * 1.0
            y += b
            return y
        if what == "buffer":
            return shifted(a)
        if what == "mean":
            return a - a.mean(0, keepdim=True)
        if what == "dropout":
            return self.drops[i](a)
        if what == "keep":
            self.kept = a
            return None
        raise AssertionError(what)


STATEMENTS = ["again", "in training", "slice", "cat", "stack", "add", "pool time", "scale", "write"]
STATEMENTS += ["write there", "write a sum", "buffer", "mean", "dropout", "keep"]


# ---- edits -------------------------------------------------------------------------------------------------------------


def put(name: str, make: Any) -> Any:
    def edit(net: Any, index: int) -> None:
        part = make().double()
        setattr(net.blocks[index], name, part.train(net.training))

    return edit


def another_blocks(name: str) -> Any:
    def edit(net: Any, index: int) -> None:
        setattr(net.blocks[index], name, getattr(net.blocks[index - 1], name))

    return edit


def other_order(net: Any, index: int) -> None:
    net.blocks[index], net.blocks[index - 1] = net.blocks[index - 1], net.blocks[index]


def other_tau(net: Any, index: int) -> None:
    made = net.blocks[index].node
    made.tau, made.v_threshold = 3.0, getattr(made, "v_threshold", 1.0) * 0.75


def look(module: nn.Module, args: Any, out: Tensor) -> None:
    module.__dict__["seen"] = float(out.detach().sum() + args[0].detach().sum())


EDITS = {
    "new neuron": put("node", lambda: node("if", None)),
    "new norm": put("norm", lambda: norm(C)),
    "new conv": put("conv", lambda: conv(C, C)),
    "no neuron": put("node", nn.Identity),
    "no conv": put("conv", nn.Identity),
    "no norm": put("norm", nn.Identity),
    "no block": lambda net, index: setattr(net.blocks, str(index), nn.Identity()),
    "a pool of means": put("pool", lambda: layer.AvgPool2d(3, 1, 1, step_mode="m")),
    "another block's neuron": another_blocks("node"),
    "another order": other_order,
    "freeze": lambda net, index: net.blocks[index].requires_grad_(False),
    "another tau": other_tau,
    "hook reads": lambda net, index: net.blocks[index].register_forward_hook(look),
    "hook writes": lambda net, index: net.blocks[index].register_forward_hook(lambda m, a, o: (o.mul_(0.5), None)[1]),
}


def edit_with(edit: Edit, net: Any) -> None:
    """One edit, the same on every net."""
    torch.manual_seed(7)
    EDITS[edit.what](net, edit.block % len(net.blocks))
