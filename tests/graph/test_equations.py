"""Each equation alone, on random graphs: the same values and gradients before and after, and it did what it says."""

import contextlib
import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from support import only_v2

from sj_tac.definition import ops
from sj_tac.rewrites import equations
from sj_tac.rewrites.capture import copied
from sj_tac.rewrites.equations import absorb, fuse, marks, nodes, repeats, reshapes, sink, writes
from sj_tac.rewrites.lower import lower

pytestmark = only_v2
LIF = ("lif", 2.0, True, 1.0, 0.0, False, 0, 2.0)
PLAIN = ("plif", 1.0, False, 0.5, None, True, 0, 2.0)


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 3


def graph_of(function, *inputs):
    """The graph that Dynamo makes of a function."""
    found = []
    torch._dynamo.reset()
    with contextlib.suppress(RuntimeError):  # a mark does not run
        torch.compile(function, backend=lambda gm, _: (found.append(gm), gm.forward)[1], dynamic=False, fullgraph=True)(
            *inputs
        )
    return found[0]


def check(function, inputs, *steps, **settings):
    """Run equations on the graph of a function, compare what it gives and its gradients, and return the new graph."""
    gm = graph_of(function, *inputs)
    before, after = gm, copied(gm)
    writes.freeze(after.graph)
    for step in steps:
        step(after.graph)
        writes.sweep(after.graph)
    targets = [node.target for node in after.graph.nodes]
    lower(after)
    outputs = []
    for of in (before, after):
        leaves = [x.clone().requires_grad_() for x in inputs]
        made = of(*[leaves[place] for place in placed(gm, inputs)])
        made = [x for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
        sum((x * torch.linspace(0.5, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in made).backward()
        outputs.append([*made, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-9)
    return targets


def placed(gm, inputs):
    """Which input each placeholder of a graph is, by name: L_x_ of x."""
    names = [node.target for node in gm.graph.nodes if node.op == "placeholder"]
    return [int("".join(filter(str.isdigit, name))) for name in names]


SIZES = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 3))  # T, k, N


@given(SIZES, st.lists(st.sampled_from(["conv", "norm", "scale", "relu", "pool", "number", "fold", "mean"]), max_size=4))
def test_an_expand_sinks_below_what_treats_frames_alike(sizes, maps):
    T, k, N = sizes
    weight, stats = rand(4, 4, 3, 3), rand(4) + 0.5

    def f(x0, x1, x2):
        x = ops.expand(x0, k, T)
        for name in maps:
            if name == "conv":
                x = F.conv2d(x, x1, padding=1)
            elif name == "norm":
                x = F.batch_norm(x, x2.detach(), x2.detach(), x2, x2)
            elif name == "scale":
                x = x * 0.5
            elif name == "relu":
                x = F.relu(x)
            elif name == "pool":
                x = F.max_pool2d(x, 3, 1, 1)
            elif name == "number":
                x = x + 1.5
            elif name == "fold":
                x = x.view(T, N, 4, 6, 6).flatten(0, 1)
            else:
                x = F.avg_pool2d(x, 3, 1, 1)
        return x

    G = ops.groups(T, k)
    targets = check(f, (rand(G * N, 4, 6, 6), weight, stats), sink.sink)
    assert targets[-2] is nodes.EXPAND


def test_an_expand_sinks_below_casts():
    """As of a convolution that computes in half precision: else it would run on all frames."""
    targets = check(lambda x0: F.relu(ops.expand(x0, 2, 3).to(torch.float64)), (rand(2, 4),), sink.sink)
    assert targets[-2] is nodes.EXPAND


@given(SIZES, st.sampled_from(["same", "other k", "residual", "number"]))
def test_sums_of_expands_are_expands_of_sums_of_the_same_groups(sizes, kind):
    T, k, N = sizes
    other = k + 1 if kind == "other k" else k

    def f(x0, x1):
        b = x1.repeat(T, 1) if kind == "residual" else ops.expand(x1, other, T)
        return ops.expand(x0, k, T) + (2.0 if kind == "number" else b)

    rows = N if kind == "residual" else ops.groups(T, other) * N
    targets = check(f, (rand(ops.groups(T, k) * N, 3), rand(rows, 3)), sink.sink)
    assert (targets[-2] is nodes.EXPAND) == (kind in ("same", "number"))


@given(SIZES, st.sampled_from(["normalized", "plain", "other k", "other T"]))
def test_an_aggregate_of_an_expand_of_the_same_groups_is_what_was_expanded(sizes, kind):
    T, k, N = sizes
    T = 2 * T if kind == "other T" else T
    weights = [0.5**j for j in range(k + (kind == "other k"))]
    form = "plain" if kind == "plain" else "normalized"
    of = T // 2 if kind == "other T" else T

    def f(x0):
        return ops.aggregate(ops.expand(x0, k, T), weights, None, of, form)

    targets = check(f, (rand(ops.groups(T, k) * N, 3),), sink.sink)
    kept = kind in ("other k", "other T") or (kind == "plain" and k > 1)
    assert (nodes.AGGREGATE in targets) == kept


@given(SIZES, st.sampled_from(["repeat", "expand", "new dimension", "features too", "rows"]))
def test_an_image_that_is_repeated_is_an_expand(sizes, kind):
    T, _, N = sizes
    calls = {
        "repeat": lambda x: x.repeat(T, 1, 1),
        "expand": lambda x: x.expand(T, -1, -1),
        "new dimension": lambda x: x.squeeze(0).repeat(T, 1, 1),
        "features too": lambda x: x.repeat(T, 1, 2),
        "rows": lambda x: x.flatten(0, 1).repeat(T, 1),
    }

    def f(x0):
        return calls[kind](x0) * 2

    targets = check(f, (rand(1, N, 3),), repeats.repeat)
    assert (nodes.EXPAND in targets) == (T > 1 and (kind not in ("features too", "rows") or (kind == "rows" and N == 1)))


@given(SIZES, st.sampled_from(["normalized", "logits", "plain, of sum 1", "plain"]))
def test_an_aggregate_of_a_repeated_image_is_the_image(sizes, kind):
    T, k, N = sizes
    form = kind.partition(",")[0]
    weights = {"normalized": [0.5**j for j in range(k)], "plain": [0.5**j for j in range(k)], "logits": []}.get(
        kind, [1 / k] * k
    )

    def f(x0, x1):
        return ops.aggregate(ops.expand(x0, T, T), weights, x1.detach() if kind == "logits" else None, T, form) * 2

    targets = check(f, (rand(N, 3), rand(k)), repeats.share)
    kept = form == "plain" and (T % k > 0 or (kind == "plain" and k > 1))
    assert (nodes.AGGREGATE in targets) == kept
    assert (nodes.EXPAND in targets) == (kept or ops.groups(T, k) > 1)


@given(SIZES, st.booleans())
def test_an_expand_of_an_expand_of_one_image_is_one_expand(sizes, folded):
    T, k, N = sizes
    G = ops.groups(T, k)

    def f(x0):
        x = ops.expand(x0, G, G)
        return ops.expand(x.view(G, N, 3).flatten(0, 1) if folded else x, k, T) * 2

    targets = check(f, (rand(N, 3),), repeats.share)
    assert targets.count(nodes.EXPAND) == 1


@settings(max_examples=12)
@given(SIZES, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([LIF, PLAIN]))
def test_a_neuron_takes_the_expand_the_norm_and_the_residual_in_front_of_it(sizes, normed, added, carried, numbers):
    T, k, N = sizes
    G = ops.groups(T, k)

    def f(x0, x1, x2, x3, x4):
        y = F.batch_norm(x0, x1.detach(), x1.detach() + 0.5, x1, x1) if normed else x0
        x = ops.expand(y, k, T).view(T, N, 4, 5, 5)
        x = x + x2 if added else x
        return ops.neuron(x, x3 if carried else None, x4 if numbers[0] == "plif" else None, *numbers)

    inputs = rand(G * N, 4, 5, 5), rand(4), rand(T, N, 4, 5, 5, seed=1), rand(N, 4, 5, 5) / 3, rand(1)[0]
    targets = check(f, inputs, sink.sink, fuse.fuse)
    assert fuse.fire in targets
    assert not {nodes.NEURON, nodes.EXPAND} & set(targets)
    assert (F.batch_norm in targets) != normed or not normed


@settings(max_examples=12)
@given(SIZES, st.sampled_from(["max", "mean", "overlapping", "none"]), st.sampled_from(["sums", "learned", "two readers"]))
def test_a_neuron_takes_the_pool_and_the_sums_behind_it(sizes, pool, kind):
    T, k, N = sizes

    def f(x0, x1):
        spikes, v = ops.neuron(x0, None, None, *LIF)
        y = spikes.flatten(0, 1)
        if pool == "max":
            y = F.max_pool2d(y, 2)
        elif pool == "mean":
            y = F.avg_pool2d(y, 2)
        elif pool == "overlapping":
            y = F.max_pool2d(y, 3, 2, 1)
        by = (x1, "logits") if kind == "learned" else (None, "normalized")
        sums = ops.aggregate(y, [] if kind == "learned" else [0.5**j for j in range(k)], by[0], T, by[1])
        return (sums, v, y * 2) if kind == "two readers" else (sums, v)

    targets = check(f, (rand(T, N, 3, 6, 6), rand(k)), fuse.fuse, absorb.absorb)
    assert (nodes.AGGREGATE in targets) == (kind == "two readers")
    assert not nodes.POOLS & set(targets)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("training", "T", "k"), [(False, 7, 3), (True, 6, 2), (True, 7, 3)])
def test_a_norm_in_training_mode_counts_frames_and_writes_statistics_once(training, T, k, affine):
    def f(x0, x1, mean, var):
        return F.batch_norm(ops.expand(x0, k, T), mean, var, *([x1, x1] if affine else [None, None]), training, 0.1)

    def tensors():
        leaves = {"x0": rand(ops.groups(T, k) * 2, 4, 3, 3).requires_grad_(), "x1": rand(4).requires_grad_()}
        return leaves | {"mean": torch.zeros(4, dtype=torch.float64), "var": torch.ones(4, dtype=torch.float64)}

    gm, found = graph_of(f, *(x.detach() for x in tensors().values())), []
    names = [n.target.removeprefix("L_").removesuffix("_") for n in gm.graph.nodes if n.op == "placeholder"]
    for rewritten in (False, True):
        if rewritten:
            writes.freeze(gm.graph)
            sink.sink(gm.graph)
            assert list(gm.graph.nodes)[-2].target is nodes.EXPAND
            gm.recompile()
        given = tensors()
        (out,) = gm(*[given[name] for name in names])
        (out * rand(*out.shape)).sum().backward()
        found.append([out, given["mean"], given["var"], given["x0"].grad, given["x1"].grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seen", [False, True])
def test_a_write_that_nobody_sees_is_a_value_and_one_that_is_seen_freezes_what_it_touches(seen):
    def f(x0, x1):
        y = x0 * 2
        view = y.view(-1)
        y += x1
        z = y * 3
        z.relu_()
        return (z, view * 2) if seen else z

    gm = graph_of(f, rand(4, 3), rand(4, 3))
    wanted = gm(rand(4, 3), rand(4, 3))
    writes.functionalize(gm.graph)
    writes.freeze(gm.graph)
    left = [node for node in gm.graph.nodes if writes.written(node)]
    assert [node.target for node in left] == ([operator.iadd] if seen else [])
    frozen = {node.name for node in gm.graph.nodes if nodes.is_frozen(node)}
    assert bool(frozen) == seen
    gm.recompile()
    torch.testing.assert_close(gm(rand(4, 3), rand(4, 3)), wanted)


def test_a_views_write_behind_a_write_that_became_a_value_writes_that_value():
    def f(x0):
        y = x0 * 2
        y += 1
        y.view(-1).mul_(3)
        return y + 0

    gm = graph_of(f, rand(4, 3))
    wanted = f(rand(4, 3))
    writes.functionalize(gm.graph)
    gm.recompile()
    torch.testing.assert_close(gm(rand(4, 3))[0], wanted)


def test_an_output_shares_memory_only_where_it_did_before():
    def f(x0):
        y = ops.expand(x0, 1, 4)
        return y.view(4, 3), x0.view(-1)

    gm = graph_of(f, rand(4, 3))
    equations.run(gm, {})
    lower(gm)
    x = rand(4, 3)
    a, b = gm(x)
    a.zero_()
    assert x.abs().sum() > 0
    b.zero_()
    assert x.abs().sum() == 0


def test_reshapes_that_do_nothing_go_and_equal_nodes_are_one():
    def f(x0):
        y = x0 + 1
        return F.max_pool2d(y.view(4, 6, 6).view(2, 2, 6, 6), 2) + F.max_pool2d(y.view(4, 6, 6).view(2, 2, 6, 6), 2)

    targets = check(f, (rand(2, 2, 6, 6),), reshapes.merge_equal, reshapes.tidy, reshapes.merge_equal)
    assert targets.count(F.max_pool2d) == 1
    assert not nodes.RESHAPES & set(targets)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("weights", ["decay", "uniform", "learned"])
def test_a_mark_becomes_what_todays_settings_say(k, weights):
    T, x, logits, kernel = 7, rand(7 * 2, 3, 5, 5), rand(k), rand(4, 3, 3, 3)

    def marked(x0, x1, x2):
        return F.conv2d(ops.mark(x0, x1 if weights == "learned" else None, None, 0.5, T, "a"), x2, padding=1)

    gm = graph_of(marked, x, logits, kernel)
    of = {"x0": x, "x1": logits, "x2": kernel}
    given = [of[n.target.removeprefix("L_").removesuffix("_")] for n in gm.graph.nodes if n.op == "placeholder"]
    with pytest.raises(RuntimeError, match="mark of layer 'a' was not replaced"):
        gm(*given)
    marks.replace_marks(gm.graph, {"a": (k, weights, True)})
    marks.keep_convolutions_shared(gm.graph)
    assert (list(gm.graph.nodes)[-2].target is nodes.EXPAND) == (k > 1)
    gm.recompile()
    by = (0.5 ** torch.arange(k - 1.0, -1, -1) if weights == "decay" else torch.ones(k)).double()
    wanted = []
    for at in range(0, T, k):
        w = logits[max(0, at + k - T) :].softmax(0) if weights == "learned" else by[max(0, at + k - T) :]
        frames = x.view(T, 2, 3, 5, 5)[at : at + k]
        one = F.conv2d((frames * (w / w.sum()).view(-1, 1, 1, 1, 1)).sum(0), kernel, padding=1)
        wanted += [one] * len(frames)
    torch.testing.assert_close(gm(*given)[0], torch.cat(wanted))
