"""Whatever ordinary code does with a converted net, it computes the definition.

Random programs: a net, a forward of small statements, edits after convert, and calls. Every call is compared with the
definition, and with the source where all k are 1.
"""

import copy

import pairs
import pytest
import torch
from comparing import Outcome, definitions, flat, grad_mode, learning, read, reset, same, unmark, voltages
from definition import margins
from hypothesis import HealthCheck, example, given, settings, strategies as st
from program_net import EDITS, SIZE, STATEMENTS, Block, C, Call, Do, Edit, Net, Program, edit_with
from spikingjelly.activation_based import functional
from support import awake, frames

import sj_tac
from sj_tac.errors import ConversionError

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")

blocks = st.builds(
    Block,
    kind=st.sampled_from(["lif", "lif", "if", "plif"]),
    tau=st.sampled_from([2.0, 1.5, 4.0]),
    v_reset=st.sampled_from([0.0, None, -0.3]),
    decay_input=st.booleans(),
    norm=st.sampled_from([True, True, False]),
    pool=st.sampled_from(["", "", "max", "avg"]),
    residual=st.sampled_from(["", "", "before", "behind"]),
    detach=st.booleans(),
)
block = st.builds(Do, st.just("block"), st.sampled_from([0, 0, 0, 1]))
statement = st.builds(
    Do, st.sampled_from(STATEMENTS), st.sampled_from([0, 0, 1, 2, 4]), st.sampled_from([1, 1, 2, 3]), st.integers(1, 3)
)
calls = st.builds(
    Call,
    frames=st.integers(1, 9),
    samples=st.sampled_from([1, 2, 2, 3, 0]),
    train=st.sampled_from([False, False, True]),
    grad=st.sampled_from(["grad", "input", "no_grad", "inference"]),
    reset=st.booleans(),
)


@st.composite
def programs(draw):
    made = draw(st.lists(blocks, min_size=2, max_size=5))
    steps = []
    for _ in made:
        steps.append(draw(block))
        steps += draw(st.lists(statement, max_size=2))
    return Program(
        tuple(made),
        tuple(steps),
        tuple(draw(st.lists(st.builds(Edit, st.sampled_from(list(EDITS)), st.integers(0, 4)), max_size=2))),
        tuple(draw(st.lists(calls, min_size=1, max_size=3))),
        draw(st.sampled_from(["preserve", "collapse", "collapse"])),
        draw(st.sampled_from([2, 1, 3, 2, 4])),
        draw(st.none() | st.tuples(st.sampled_from(["preserve", "collapse", "keep"]), st.integers(1, 4))),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.sampled_from(["", "", "always", "later"])),
        draw(st.integers(0, 50)),
    )


class Skip(Exception):
    """The program says nothing: torch or the source cannot run it, nothing is converted, or a voltage is too close."""


def inputs_of(program, call, seed):
    made = [
        frames(max(1, call.frames - 2 * i), call.samples, C, SIZE, SIZE, dtype=torch.float64, seed=seed + i)
        for i in range(program.inputs)
    ]
    return made[0] if program.inputs == 1 else tuple(made)


def perform(net, program, marks):
    """All calls on one net. Raises Skip where the definition or torch itself cannot."""
    reset(net)
    net.zero_grad()
    statistics = {n: b.clone() for n, b in net.named_buffers()}
    outcomes = []
    for i, call in enumerate(program.calls):
        net.train(call.train)
        learning(net)
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


def one_call(net, call, x, marks):
    with grad_mode(call.grad, marks):
        values = [*flat(unmark(net(x))), *([net.kept * 1] if net.kept is not None else [])]
        wanted = [v for v in values if v.requires_grad]
        if wanted:
            sum(v.square().sum() + v.sum() for v in wanted).backward()
    return Outcome([read(unmark(v)) for v in values])


def build(program):
    """The source, awake."""
    torch.manual_seed(program.seed)
    net = Net(program).double().eval()
    try:
        awake(net, inputs_of(program, Call(6, 2), program.seed + 1000), 0.02, 0.6)
    except (AssertionError, RuntimeError) as error:
        raise Skip(f"the source: {error}") from None
    net.kept = None
    return net


def policy_of(program):
    rules = [] if program.rule is None else [{"match": "blocks.0.*", "mode": program.rule[0], "k": program.rule[1]}]
    return {"default": {"mode": program.mode, "k": program.k}, "rules": rules}


def check(program):
    """Compare. Raises AssertionError, or whatever the converted net raises; Skip where nothing can be compared."""
    source = build(program)

    def edit(net):
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
    if {v.k for v in sj_tac.report(fast).converted} == {1}:
        edit(source)
        agree(got, [performed(source, program, True)])


def performed(net, program, marks):
    try:
        return perform(net, program, marks)
    except (RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise Skip(f"the definition: {error}") from None


def agree(got, expected):
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


TWO, THREE = (Block(),) * 2, (Block(), Block(), Block(pool="max"))
STRAIGHT = (Do("block"), Do("block"))
# No gradients, gradients, training; one without a reset, of other T and N.
MANY = (
    Call(7, grad="no_grad"),
    Call(5, grad="input", reset=False),
    Call(7, train=True),
    Call(4, 1),
    Call(3, 1, reset=False),
)


@settings(derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(programs())
# Each of these was wrong once, in silence.
@example(Program(TWO, (Do("block"), Do("keep"), Do("block"))))
@example(Program(TWO, STRAIGHT, features="later"))
@example(Program(TWO, (Do("block"), Do("slice", n=3), Do("block")), mode="collapse"))
@example(Program(TWO, (Do("block"), Do("pool time"), Do("block")), mode="collapse", k=3))
@example(Program(TWO, (Do("block"), Do("in training"), Do("block")), calls=(Call(5, train=True),)))
def test_a_program_gives_what_the_definition_gives(program):
    try:
        check(program)
    except Skip:
        return  # it says nothing


@pairs.parametrize(edit=EDITS, mode=["preserve", "collapse"], k=[2, 3, 1])
def test_an_edit(edit, mode, k):
    check(Program(THREE, STRAIGHT + STRAIGHT[:1], (Edit(edit, 1),), MANY, mode, k))


FORWARDS = {
    "the same layers with T and 5": (Do("block"), Do("slice"), Do("again", 1), Do("again", 1), Do("cat", 0, 1), Do("block")),
    "a summand that is written later": (Do("block"), Do("block"), Do("add"), Do("write there", 2), Do("block")),
    "cat, stack, slices": (Do("block"), Do("block"), Do("stack"), Do("cat", 0, 2), Do("slice", n=2), Do("block")),
    "a branch that was not traced": (Do("block"), Do("in training"), Do("scale"), Do("block"), Do("block")),
}


@pairs.parametrize(forward=FORWARDS, mode=["preserve", "collapse"], k=[2, 3])
def test_a_forward(forward, mode, k):
    # torch itself objects to a summand that is written where it has a gradient.
    check(Program(THREE, FORWARDS[forward], (), MANY[:1] if "written" in forward else MANY[:3], mode, k))
