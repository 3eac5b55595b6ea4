"""What is done around a converted net: interrupts, threads, fake tensors, copies, parametrizations, transforms."""

import copy
import io
import pickle
import threading

import pytest
import torch
from comparing import CLOSE, definitions, nothing, policy_of, run, same, same_as_one, unmark
from definition import define, settings_of
from forwards import build, lif, spikes_in
from spikingjelly.activation_based import functional, layer, neuron
from support import frames, only_v2
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import sj_tac

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")
BOTH = pytest.mark.parametrize("mode", ["preserve", "collapse"])


def pair(mode="preserve", k=2, **more):
    """A converted net and what it may compute."""
    source = build(**more)
    fast = sj_tac.convert(source, policy_of(mode, k))
    return fast, definitions(source, fast, nothing)


def quiet(net, x):
    functional.reset_net(net)
    with torch.no_grad():
        return net(x)


@BOTH
def test_an_interrupted_call_leaves_nothing_behind(mode):
    fast, others = pair(mode)
    x, z = spikes_in(), spikes_in(9, 5)

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = fast.c.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        quiet(fast, x)
    handle.remove()

    def call(net, x):
        return net.b(net.a(x)).mul(1.0).sum((3, 4)), net.c[0](net.a(x))

    same_as_one(run(fast, z, call=call), [run(n, z, call=call, marks=True) for n in others], "a part after an interrupt")
    same_as_one(run(fast, x), [run(n, x, marks=True) for n in others], "the net after an interrupt")


@BOTH
def test_two_threads_with_other_t(mode):
    """The host keeps voltages in the modules, so nets whose neurons begin anew at every call have values to compare."""
    fast, others = pair(mode)
    for net in (fast, *others):
        for module in net.modules():
            if isinstance(module, neuron.BaseNode):
                module.v_threshold = 1e9  # no spikes: the voltages do not matter
    net, wrong = fast, []
    inputs = [spikes_in(1, 8), spikes_in(2, 5)]
    expected = [quiet(others[0], x) for x in inputs]

    def work(i):
        with torch.no_grad():
            for _ in range(40):
                try:
                    out = net(inputs[i])
                    if out.shape != expected[i].shape or not torch.allclose(out, unmark(expected[i])):
                        wrong.append(tuple(out.shape))
                except Exception as error:
                    wrong.append(repr(error)[:80])

    functional.reset_net(net)
    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@BOTH
def test_a_call_under_fake_tensors_leaves_no_fake_behind(mode):
    from torch._subclasses.fake_tensor import FakeTensorMode

    source = build()
    for k in (2, 5):  # 5: groups and weights that no call has made before
        fast = sj_tac.convert(source, policy_of(mode, k))
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
            out = fast(fake.from_tensor(spikes_in()))
        assert out.shape == (7, 2, 5)
        functional.reset_net(fast)
        other = sj_tac.convert(source, policy_of(mode, k))
        for net in (fast, other):
            same_as_one(
                run(net, spikes_in()), [run(n, spikes_in(), marks=True) for n in definitions(source, fast, nothing)], ""
            )


# ---- parametrizations and pruning after convert ------------------------------------------------------------------------


def weight_norm(net):
    parametrizations.weight_norm(net.b[0])


def spectral_norm(net):
    torch.manual_seed(3)
    parametrizations.spectral_norm(net.c[0])


def pruned(net):
    prune.l1_unstructured(net.b[0], "weight", 0.5)


@pytest.mark.parametrize("change", [weight_norm, spectral_norm, pruned])
@BOTH
def test_a_weight_that_is_computed_after_convert(change, mode):
    source = build()
    fast = sj_tac.convert(source, policy_of(mode, 2))
    others = definitions(source, fast, change)
    change(fast)
    changed = copy.deepcopy(source)
    change(changed)
    x = spikes_in()
    same_as_one(run(fast, x), [run(n, x, marks=True) for n in others], "converted")
    back = sj_tac.restore(fast, inplace=True)
    same(run(back, x), run(changed, x), "restored")


# ---- copies ------------------------------------------------------------------------------------------------------------


def deep(depth=200):
    """Plain blocks of one channel that fire."""
    torch.manual_seed(0)
    blocks = []
    for _ in range(depth):
        norm = layer.BatchNorm2d(1)
        nn.init.constant_(norm.weight, 3.0)
        nn.init.constant_(norm.bias, 1.0)
        blocks += [layer.Conv2d(1, 1, 3, padding=1, bias=False), norm, lif()]
    net = nn.Sequential(*blocks)
    functional.set_step_mode(net, "m")
    return net.double().eval()


def by_pickle(net):
    return pickle.loads(pickle.dumps(net))


def by_save(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_save, lambda net: sj_tac.restore(net)])
def test_copies_of_a_deep_net(copied):
    net = deep()
    fast = sj_tac.convert(net, "preserve", 2)
    x = frames(3, 1, 1, 3, 3, dtype=torch.float64)
    expected = quiet(fast, x)
    functional.reset_net(fast)
    other = copied(fast)
    if other._modules["0"].__class__ is layer.Conv2d:
        expected = quiet(net, x)
    torch.testing.assert_close(quiet(other, x), expected, **CLOSE)


@BOTH
def test_a_part_alone_is_small_and_runs(mode):
    fast, others = pair(mode)
    part = fast.b
    assert len(pickle.dumps(part)) < 4 * len(pickle.dumps(build().b)), "a part does not drag the net along"
    x = frames(7, 2, 4, 8, 8, dtype=torch.float64, seed=6)
    expected = [run(n.b, x, call=lambda n, x: n(x) * 1, marks=True) for n in others]
    for made in (by_pickle(part), by_save(part), copy.deepcopy(part)):
        same_as_one(run(made, x, call=lambda n, x: n(x) * 1), expected, "a part alone")


@BOTH
def test_a_net_that_keeps_values_can_be_copied(mode):
    def keep(module, args, out):
        module.__dict__["kept"] = out

    fast, _ = pair(mode)
    handle = fast.b.register_forward_hook(keep)
    out = quiet(fast, spikes_in())
    handle.remove()
    functional.reset_net(fast)
    for made in (copy.deepcopy(fast), by_pickle(fast), by_save(fast)):
        assert torch.equal(made.b.kept * 1, fast.b.kept * 1)
        assert torch.equal(quiet(made, spikes_in()), out)


# ---- transforms and compilers ------------------------------------------------------------------------------------------


def compiled(net, x):
    return torch.compile(net, backend="eager")(x)


def compiled_whole(net, x):
    return torch.compile(net, backend="eager", fullgraph=True)(x)


def exported(net, x):
    return torch.export.export(net, (x,), strict=False).module()(x)


def symbolic(net, x):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: net(x))(x)(x)


def functionally(net, x):
    return functional_call(net, {n: p.detach().clone() for n, p in net.named_parameters()}, (x,))


def mapped(net, x):
    return torch.vmap(lambda x: net(x), randomness="different")(x[None])[0]


def partly_compiled(net, x):
    whole = copy.deepcopy(net)
    whole.b = torch.compile(whole.b, backend="eager")
    return whole(x)


WAYS = [compiled, compiled_whole, exported, symbolic, functionally, mapped, partly_compiled]


@only_v2
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The tensor attributes",
    "ignore:There is a performance drop",
)
@pytest.mark.parametrize("call", WAYS)
@BOTH
def test_a_transform_gives_the_same(call, mode):
    torch.compiler.reset()
    fast, others = pair(mode, 3)
    x = spikes_in()
    expected = [unmark(quiet(n, x)) for n in others]
    functional.reset_net(fast)
    with torch.no_grad():
        out = call(fast, x)
    assert any(torch.allclose(out, e, **CLOSE) for e in expected), call.__name__
    functional.reset_net(fast)
    with torch.no_grad():
        assert any(torch.allclose(fast(x), e, **CLOSE) for e in expected), f"a plain call after {call.__name__}"


@BOTH
def test_functional_gradients(mode):
    fast, others = pair(mode)

    def gradients(net):
        functional.reset_net(net)
        names = {n: p.detach().clone() for n, p in net.named_parameters()}
        return torch.func.grad(lambda p: functional_call(net, p, (spikes_in(),)).square().sum())(names)

    try:
        gradients(build())
    except RuntimeError as error:
        pytest.skip(f"the source cannot either: {error}")
    found = gradients(fast)
    net = others[0]
    functional.reset_net(net)
    net.zero_grad()
    unmark(net(spikes_in())).square().sum().backward()
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, **CLOSE)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@BOTH
def test_forward_mode_gives_a_derivative_or_an_error(mode):
    fast, others = pair(mode)
    x = spikes_in()
    direction = torch.ones_like(x)

    def tangent(net):
        functional.reset_net(net)
        return torch.func.jvp(lambda x: unmark(net(x)), (x,), (direction,))[1]

    problem = ""
    try:
        found = tangent(fast)
    except (RuntimeError, NotImplementedError) as raised:
        problem = str(raised)
    if problem:
        assert "forward-mode" in problem or "forward AD" in problem, problem
        return
    functional.reset_net(others[0])
    ones = torch.ones(7, 2, 5, dtype=torch.float64)
    z = x.clone().requires_grad_()
    (unmark(others[0](z)) * ones).sum().backward()
    torch.testing.assert_close((found * ones).sum(), (z.grad * direction).sum(), **CLOSE)


def test_one_process_of_ddp(tmp_path):
    fast, others = pair()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(fast, find_unused_parameters=True)
        functional.reset_net(fast)
        wrapped(spikes_in()).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    net = others[0]
    functional.reset_net(net)
    unmark(net(spikes_in())).square().sum().backward()
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(fast.get_parameter(name).grad, parameter.grad, **CLOSE)


def test_set_k_and_restore_after_calls():
    source = build()
    fast = sj_tac.convert(source, "preserve", 2)
    for k in (3, 1, 2):
        sj_tac.set_k(fast, k)
        defined = define(source, settings_of(source, sj_tac.report(fast)))
        same(run(fast, spikes_in()), run(defined, spikes_in(), marks=True), f"set_k to {k}")
    same(run(sj_tac.restore(fast), spikes_in()), run(source, spikes_in()), "restored")


@pytest.mark.parametrize(
    "wrong", [{"v": (2, 3, 4, 3)}, {"v": (1, 3, 4, 4)}, {"scale": (2,), "shift": (3,)}, {"scale": (3,), "shift": (4,)}]
)
def test_fire_refuses_shapes_that_do_not_fit(wrong):
    y = torch.rand(2, 2, 3, 4, 4)
    with pytest.raises(ValueError, match="fire got"):
        sj_tac.functional.fire(y, lif(step_mode="m"), 2, **{name: torch.ones(shape) for name, shape in wrong.items()})


@BOTH
def test_training_after_inference_without_a_reset(mode):
    fast, others = pair(mode)

    def call(net, x):
        with torch.inference_mode() if net is fast else torch.no_grad():
            net(x)
        return net(x)

    same_as_one(run(fast, spikes_in(), call=call), [run(n, spikes_in(), call=call, marks=True) for n in others], "training")


def test_no_samples_are_no_error():
    fast, others = pair()
    with torch.no_grad():
        assert fast(spikes_in()[:, :0]).shape == unmark(others[0](spikes_in()[:, :0])).shape
