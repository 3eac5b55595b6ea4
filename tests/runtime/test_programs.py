"""Whatever ordinary code does with a converted net, it computes the definition: random programs, see programs.py."""

import warnings
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, seed, settings, strategies as st
from program_net import EDITS, STATEMENTS, Block, Call, Do, Edit, Program
from programs import Skip, check, check_apart

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
    surrogate=st.integers(0, 3),
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
    stop=st.sampled_from(["", "", "", "error", "keyboard"]),
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
        draw(st.sampled_from([False, False, True])),
        draw(st.integers(0, 50)),
    )


def run_one(program):
    """Skip what says nothing."""
    torch.set_num_threads(1)
    try:
        check(program)
    except Skip:
        return


TWO = (Block(), Block())
STRAIGHT = (Do("block"), Do("block"))


@settings(
    max_examples=80,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs())
# Each of these was wrong once, in silence.
@example(Program(TWO, (Do("block"), Do("keep"), Do("block"))))
@example(Program(TWO, STRAIGHT, features="later"))
@example(Program(TWO, STRAIGHT, (Edit("new norm", 1),)))
@example(Program(TWO, STRAIGHT, (Edit("no neuron", 0),)))
@example(Program(TWO, STRAIGHT, (Edit("no conv", 1),)))
@example(Program(TWO, STRAIGHT, (Edit("new neuron", 0),), mode="collapse"))
@example(Program(TWO, (Do("block"), Do("slice", n=3), Do("block")), mode="collapse"))
@example(Program(TWO, (Do("block"), Do("pool time"), Do("block")), mode="collapse", k=3))
@example(Program(TWO, (Do("block"), Do("in training"), Do("block")), calls=(Call(5, train=True),)))
def test_every_program(program):
    run_one(program)


def test_most_programs_say_something():
    """The space is not empty: at least half of the programs are converted and compared, in both modes, at several k."""
    kinds = Counter()
    for mode in ("preserve", "collapse"):  # compiled kernels are loaded once, not in each process
        run_one(Program(TWO, STRAIGHT, mode=mode))

    @settings(
        max_examples=40, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def look(program):
        try:
            check_apart(program)
            kinds[program.mode] += 1
        except Skip:
            kinds["skipped"] += 1
        except AssertionError:
            kinds[program.mode] += 1

    look()
    assert kinds["skipped"] < 0.5 * sum(kinds.values()), kinds
    assert kinds["preserve"] > 5, kinds
    assert kinds["collapse"] > 3, kinds


def by_hand(examples=2000, start=0):
    """``examples`` programs from the seed ``start``; failing ones are made small and printed. Returns the exit status."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for mode in ("preserve", "collapse"):  # compiled kernels are loaded once, not in each process
        run_one(Program(TWO, STRAIGHT, mode=mode))
    kinds = Counter()

    @seed(start)
    @settings(
        max_examples=examples, database=None, deadline=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def look(program):
        try:
            kinds[check_apart(program)] += 1
        except Skip as error:
            kinds[f"skipped: {str(error)[:60]}"] += 1

    try:
        look()
    finally:
        for kind, count in kinds.most_common(12):
            print(f"{count:6d}  {kind}")
    return 0
