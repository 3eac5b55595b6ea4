"""Random programs: a net, a forward written in small statements, edits after convert, and calls; run twice and compared.

``check(program)`` converts the net and compares every call with the definition, and with the source where all k are 1.

    PYTHONPATH=.:tests python tests/runtime/programs.py 20000 [seed]    # by hand; a failing program is printed small

Each example of such a run has a process of its own, so that a crash is a failure like any other.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from typing import Any

import torch
from comparing import Outcome, definitions, flat, grad_mode, read, reset, same, unmark, voltages
from definition import margins
from program_net import SIZE, C, Call, Net, Program, edit_with
from spikingjelly.activation_based import functional
from support import awake, frames
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError


class Skip(Exception):
    """The program says nothing: torch or the source cannot run it, nothing is converted, or a voltage is too close."""


def inputs_of(program: Program, call: Call, seed: int) -> Any:
    made = [
        frames(max(1, call.frames - 2 * i), call.samples, C, SIZE, SIZE, dtype=torch.float64, seed=seed + i)
        for i in range(program.inputs)
    ]
    return made[0] if program.inputs == 1 else tuple(made)


class Stop(Exception):
    """An exception of the user's own code."""


def perform(net: Any, program: Program, marks: bool) -> list[Outcome]:
    """All calls on one net. Raises Skip where the definition or torch itself cannot."""
    reset(net)
    net.zero_grad()
    statistics = {n: b.clone() for n, b in net.named_buffers()}
    outcomes = []
    for i, call in enumerate(program.calls):
        net.train(call.train)
        if call.reset:
            functional.reset_net(net)
        net.kept = None
        x = inputs_of(program, call, program.seed + 10 * i)
        if call.grad == "input":
            x = torch.utils._pytree.tree_map(lambda t: t.requires_grad_(), x)
        torch.manual_seed(i)
        outcome = one_call(net, call, x, marks)
        outcome.gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        outcome.gradients |= {f"input {j}": t.grad.clone() for j, t in enumerate(flat(x)) if t.grad is not None}
        outcome.voltages = voltages(net)
        outcome.statistics = {n: b.clone() for n, b in net.named_buffers()}
        for n, b in net.named_buffers():
            b.copy_(statistics[n])
        outcomes.append(outcome)
        functional.detach_net(net)
        if call.grad == "inference":
            functional.reset_net(net)
    return outcomes


def one_call(net: Any, call: Call, x: Any, marks: bool) -> Outcome:
    def stop(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt if call.stop == "keyboard" else Stop

    handles = [net.blocks[-1].register_forward_pre_hook(stop)] if call.stop else []
    try:
        with grad_mode(call.grad, marks):
            values = [*flat(unmark(net(x))), *([net.kept * 1] if net.kept is not None else [])]
            wanted = [v for v in values if v.requires_grad]
            if wanted:
                sum(v.square().sum() + v.sum() for v in wanted).backward()
    except (KeyboardInterrupt, Stop):
        if not call.stop:
            raise
        values = []
    finally:
        for handle in handles:
            handle.remove()
    return Outcome([read(unmark(v)) for v in values])


def build(program: Program) -> Net:
    """The source, awake, in float64 (or in float32 with the same numbers)."""
    torch.manual_seed(program.seed)
    net = Net(program).double().eval()
    try:
        awake(net, inputs_of(program, Call(6, 2), program.seed + 1000), 0.02, 0.6)
    except (AssertionError, RuntimeError) as error:
        raise Skip(f"the source: {error}") from None
    net.kept = None
    return net.float() if program.cast else net


def policy_of(program: Program) -> dict[str, Any]:
    rules = [] if program.rule is None else [{"match": "blocks.0.*", "mode": program.rule[0], "k": program.rule[1]}]
    return {"default": {"mode": program.mode, "k": program.k}, "rules": rules}


def check(program: Program) -> str:
    """Compare. Returns how the program went; raises AssertionError, or whatever the converted net raises."""
    source = build(program)

    def edit(net: nn.Module) -> None:
        net.double()
        net.features = bool(program.features)
        for one in program.edits:
            edit_with(one, net)

    try:
        fast = sj_tac.convert(copy.deepcopy(source), policy_of(program))
    except ConversionError as error:
        raise Skip(str(error)) from None
    neurons = {f"blocks.{i}.conv": f"blocks.{i}.node" for i in range(len(program.blocks))}
    others = definitions(source, fast, edit, neurons=neurons)
    with margins(others[0]) as distances:
        expected = [performed(net, program, True) for net in others]
    if distances and min(distances) < 1e-9:
        raise Skip("a voltage lies on its threshold")
    edit(fast)
    try:
        got = perform(fast, program, False)
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            # Sums of frames need less of what they read than a convolution does; the source may be as loud.
            fresh = copy.deepcopy(source)
            edit(fresh)
            performed(fresh, program, True)
        raise
    agree(got, expected)
    ks = {v.k for v in sj_tac.report(fast).converted}
    if ks == {1}:
        edit(source)
        agree(got, [performed(source, program, True)])
    return f"{len(ks)} {program.mode}"


def performed(net: Any, program: Program, marks: bool) -> list[Outcome]:
    try:
        return perform(net, program, marks)
    except (RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise Skip(f"the definition: {error}") from None


def agree(got: list[Outcome], expected: list[list[Outcome]]) -> None:
    """All calls equal those of one reading of the definition."""
    first = None
    for reading in expected:
        try:
            for i, (a, b) in enumerate(zip(got, reading, strict=True)):
                same(a, b, f"call {i}")
            return
        except AssertionError as error:
            first = first or error
    raise first


def check_apart(program: Program) -> str:
    """``check`` in a process of its own; a crash is an AssertionError."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            message = "ok " + check(program)
        except Skip as error:
            message = f"skip {error}"
        except BaseException:
            message = "bad " + traceback.format_exc()[-1500:]
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        message = stream.read().decode()
    os.waitpid(child, 0)
    word, _, rest = (message or "bad the process crashed").partition(" ")
    if word == "skip":
        raise Skip(rest)
    assert word == "ok", rest
    return rest


if __name__ == "__main__":
    from test_programs import by_hand

    sys.exit(by_hand(*(int(a) for a in sys.argv[1:])))
