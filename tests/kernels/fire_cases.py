"""What the tests of ``fire`` on any kernel share: the space of calls, and the comparison with the reference kernel."""

import torch
from hypothesis import strategies as st
from spikingjelly.activation_based import layer
from support import NEURONS, node

from sj_tac import host
from sj_tac.functional import fire

POOLS = [None, layer.MaxPool2d(2), layer.MaxPool2d(3, 2, 1), layer.MaxPool2d((1, 2), (2, 1)), layer.AvgPool2d(2)]
POOLS += [layer.AvgPool2d((2, 3), 1, 1), layer.MaxPool2d(2, 3), layer.MaxPool2d(3, 1, 1), layer.AvgPool2d(3, 2, 1)]


space = st.fixed_dictionaries(
    {
        "neuron": st.sampled_from(NEURONS),
        "tau": st.sampled_from([2.0, 1.3, 10.0]),
        "detach_reset": st.booleans(),
        "surrogate": st.sampled_from(range(len(host.FUSED_SURROGATES))),
        "k": st.integers(1, 5),
        "steps": st.one_of(st.integers(1, 11), st.sampled_from([31, 32, 33, 64, 70])),
        # Fewer channels than fill a vector of 4, 8 or 16 lanes, as many, one more, some blocks and what is left over.
        "shape": st.tuples(
            st.integers(1, 3),
            st.sampled_from([1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 75, 147]),
            st.integers(3, 10),
            st.integers(3, 10),
        ),
        "pool": st.sampled_from(range(len(POOLS))),
        "group": st.sampled_from([None, 1, 2, 3, 7]),
        "affine": st.booleans(),
        "residual": st.booleans(),
        "merge": st.booleans(),
        "normalize": st.booleans(),
        "channels_last": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        "seed": st.integers(0, 999),
    }
)


def build(case):
    """Drives, neuron, k and options of one point of the space."""
    torch.manual_seed(case["seed"])
    kind, v_reset, decay_input = case["neuron"]
    function = host.FUSED_SURROGATES[case["surrogate"]]()
    options = {"detach_reset": case["detach_reset"], "surrogate_function": function, "v_threshold": 0.4}
    spiking = node(kind, v_reset, decay_input, case["tau"], **options)
    groups = -(-case["steps"] // case["k"])
    n, c, height, width = case["shape"]
    wide = torch.float64 if case["dtype"] == torch.float64 else torch.float32
    spiking = spiking.to(wide)
    y = (torch.randn(groups, n, c, height, width) * 1.5).to(case["dtype"])
    if case["channels_last"]:
        y = y.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (groups, n))
    options = {"steps": case["steps"], "v": torch.randn(n, c, height, width).mul(0.2).to(wide), "pool": POOLS[case["pool"]]}
    options |= {"merge": case["merge"], "normalize": case["normalize"]}
    if case["affine"]:
        options |= {"scale": torch.rand(c).add(0.5).to(wide), "shift": torch.randn(c).mul(0.3).to(wide)}
    if case["residual"] and not case["merge"]:
        options["residual"] = torch.randn(case["steps"], n, c, height, width).to(case["dtype"])
    if case["group"]:
        emitted = groups if case["merge"] else case["steps"]
        options |= {"weights": torch.rand(emitted).to(wide), "group": case["group"]}
    return y, spiking, case["k"], options


def run(backend, y, spiking, k, options):
    """Output, voltage and every gradient of a random linear function of both."""
    leaves = {name: x.clone().requires_grad_() for name, x in options.items() if isinstance(x, torch.Tensor)}
    drive = y.clone().requires_grad_()
    spiking.zero_grad()
    out, v = fire(drive, spiking, k, backend=backend, **{**options, **leaves})
    generator = torch.Generator(y.device).manual_seed(1)
    loss = (out.to(v.dtype) * torch.randn(out.shape, generator=generator, device=y.device)).sum()
    (loss + (v * torch.randn(v.shape, generator=generator, device=y.device)).sum()).backward()
    leaves |= {"y": drive, **dict(spiking.named_parameters())}
    return out.detach(), v.detach(), {name: x.grad for name, x in leaves.items()}


def assert_is_the_reference(backend, y, spiking, k, options, flips=0.0, tolerance=None, like=None):
    """Spikes and voltages are the reference kernel's, gradients within ``tolerance``; gives back what the kernel found.

    Args:
        flips: share of outputs that may differ, and a tenth of the share of gradients: above 0 only where torch's own
            kernels may contract multiply-adds.
        like: the same drives for the reference kernel, where torch is wrong in their memory format.
        tolerance: of gradients; by default 1e-10 in float64, 1e-5 in float32, 2e-2 in half.
    """
    expected = run("reference", y if like is None else like, spiking, k, options)
    got = run(backend, y, spiking, k, options)
    assert got[0].dtype == y.dtype
    assert got[0].shape == expected[0].shape
    if flips:
        assert (got[0] != expected[0]).float().mean() <= flips
        assert ((got[1] - expected[1]).abs() > 1e-4).float().mean() <= flips
    else:
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    assert got[2].keys() == expected[2].keys()
    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 1e-5}.get(y.dtype, 2e-2)
    terms = expected[2]["y"].to(expected[1].dtype).abs().sum().clamp_min(1e-3)
    for name, gradient in expected[2].items():
        if not gradient.numel():
            continue  # of an empty batch
        scale = gradient.abs().max().to(terms.dtype).clamp_min(1e-3)
        if name not in ("y", "v", "residual"):
            # A sum over all frames and pixels, whose terms cancel: its rounding is relative to what is summed. float64,
            # where it is held to 1e-10, shows that the terms are the right ones.
            scale = torch.maximum(scale, terms / 10)
        wrong = ~((got[2][name] - gradient).abs() / scale < tolerance)  # a NaN is wrong
        assert wrong.float().mean() <= 10 * flips, name
    return got


def assert_gradient_to_the_time_constant(backend, v_reset, decay_input):
    """Few terms and a resting voltage away from zero, so that no part of the sum is lost in the tolerance."""
    torch.manual_seed(0)
    y, spiking = torch.randn(2, 1, 1, 2, 2), node("plif", v_reset, decay_input, 3.0, v_threshold=0.4)
    for options in ({"v": torch.randn(1, 1, 2, 2)}, {}):
        expected, got = (run(b, y, spiking, 2, options) for b in ("reference", backend))
        torch.testing.assert_close(got[2]["w"], expected[2]["w"], rtol=1e-5, atol=1e-6)
