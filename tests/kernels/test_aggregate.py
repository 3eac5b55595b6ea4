"""``aggregate`` on the CPU against the reference kernel, the sum written out, torch's operator checks, differences."""

import torch
from hypothesis import given, settings, strategies as st

from sj_tac.functional import aggregate
from sj_tac.kernels.layout import RUNS

space = st.fixed_dictionaries(
    {
        "k": st.integers(1, 6),
        "steps": st.integers(1, 13),
        "shape": st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple),
        "large": st.booleans(),
        "channels_last": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        "tail": st.booleans(),
        "seed": st.integers(0, 999),
    }
)


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(space)
def test_it_is_the_reference(case):
    torch.manual_seed(case["seed"])
    shape = (*case["shape"], 700) if case["large"] else case["shape"]
    x = torch.randn(case["steps"], *shape).to(case["dtype"])
    if case["channels_last"] and len(shape) == 4:
        x = x.movedim(-3, -1).contiguous().movedim(-1, -3)
    wide = torch.float64 if case["dtype"] == torch.float64 else torch.float32
    weights, rest = torch.randn(case["k"], dtype=wide), case["steps"] % case["k"]
    tail = torch.randn(rest, dtype=wide) if case["tail"] and rest else None
    if rest and tail is None and weights[-rest:].sum().abs() < 1e-2:
        weights = weights.abs() + 0.1
    results, before = {}, RUNS["aggregate", "cpp"]
    for backend in ("reference", "cpp"):
        leaves = [t.clone().requires_grad_() for t in (x, weights) + ((tail,) if tail is not None else ())]
        last = leaves[2].unbind() if tail is not None else ()
        out = aggregate(leaves[0], leaves[1], case["k"], last, backend=backend)
        (out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        results[backend] = (out.detach(), [t.grad for t in leaves])
    assert RUNS["aggregate", "cpp"] == before + 2
    (expected, gradients), (got, ours) = results["reference"], results["cpp"]
    assert torch.equal(got, expected)
    assert got.dtype == case["dtype"]
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(case["dtype"], 2e-2)
    for a, b, terms in zip(ours, gradients, [0.0, *[x.float().abs().sum() / 10] * 2], strict=False):
        if b is None:  # weights of whole groups, where the tail is all there is
            assert a is None
            continue
        scale = b.abs().max().float().clamp_min(1e-3).maximum(torch.as_tensor(terms))
        assert ((a - b).abs().max() / scale) < tolerance


def test_it_is_the_sum_and_keeps_the_memory_format():
    x = torch.randn(7, 2, 5, 6, 4, dtype=torch.float64).movedim(-3, -1).contiguous().movedim(-1, -3)
    weights = [0.5, 0.3, 0.2]
    got = aggregate(x, weights, 3, [1.0], backend="cpp")
    expected = torch.stack([sum(w * f for w, f in zip(weights, x[i : i + 3], strict=True)) for i in (0, 3)] + [x[6]])
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
    assert got.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.gradcheck(
        lambda x, w: aggregate(x, w, 2, backend="cpp"),
        (torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.rand(2, dtype=torch.float64, requires_grad=True)),
    )
