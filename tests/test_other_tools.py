"""Other tools, unusual forwards and threads with a converted net: the result at k, or an error that says what to do."""

import copy
import threading
import warnings

import pytest
import torch
from spikingjelly.activation_based import functional, layer
from support import awake, conv, frames, node, norm, only_v2
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac
from sj_tac.errors import ConversionError

M = {"step_mode": "m"}
X = frames(6, 4, 2, 8, 8, dtype=torch.float64)


def source():
    torch.manual_seed(0)
    modules = [conv(2, 6, padding=1), norm(6), node("lif"), conv(6, 6, padding=1), norm(6), node("lif")]
    return awake(nn.Sequential(*modules).double().eval(), X)


def output(net, x=X):
    functional.reset_net(net)
    with torch.no_grad():
        return net(x)


# ---- tools that rewrite modules ---------------------------------------------------------------------------------------


def packed(net):
    return conv_bn_fusion().pack_conv_bn_train_modules(net.train()).eval()


def fused(net):
    return conv_bn_fusion().fuse_conv_bn_eval_modules(net.eval())


def conv_bn_fusion():
    return pytest.importorskip("spikingjelly.activation_based.functional.conv_bn_fusion")


def fused_by_torch(net):
    net[0], net[1] = nn.utils.fusion.fuse_conv_bn_eval(net[0], net[1]), nn.Identity()
    return net


def parametrized(net):
    nn.utils.parametrizations.weight_norm(net[0])
    return net


def there_and_back(net):
    functional.set_step_mode(net, "s")
    functional.set_step_mode(net, "m")
    return net


TOOLS = [packed, fused, fused_by_torch, parametrized, there_and_back]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_a_tool_that_rewrites_modules_keeps_k_or_says_that_it_does_not(tool):
    net = source()
    fast = sj_tac.convert(net, "preserve", 2, example_input=X)
    wanted = output(fast)
    assert (output(net) != wanted).double().mean() > 0.01
    assert (output(tool(copy.deepcopy(net))) != output(net)).double().mean() < 0.01
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        changed = tool(copy.deepcopy(fast))
        found = output(changed)
    told = [w for w in caught if "sj_tac" in str(w.message) or "aggregate" in str(w.message)]
    assert told or (found != wanted).double().mean() < 0.01


class Folded(nn.Module):
    """A layer in step mode "s" that forward hands folded frames."""

    def __init__(self):
        super().__init__()
        self.body = source()
        self.body[0].step_mode = "s"

    def forward(self, x):
        return self.body[1:](self.body[0](x.flatten(0, 1)).unflatten(0, x.shape[:2]))


class Direct(Folded):
    """Calls ``_conv_forward`` of a layer instead of the layer."""

    def forward(self, x):
        of = self.body[0]
        return self.body[1:](functional.seq_to_ann_forward(x, lambda t: of._conv_forward(t, of.weight, of.bias)))


def test_a_layer_in_step_mode_s_that_is_handed_folded_frames_is_converted():
    fast = sj_tac.convert(Folded().eval(), "preserve", 2, example_input=X)
    assert [v.layer for v in sj_tac.report(fast).converted] == ["body.0", "body.3"]
    unfolded = sj_tac.convert(source(), "preserve", 2, example_input=X)
    torch.testing.assert_close(output(fast), output(unfolded), rtol=1e-9, atol=1e-9)


def test_a_layer_whose_forward_is_gone_around_is_refused_by_name():
    fast = sj_tac.convert(Direct().eval(), "preserve", 2, example_input=X)
    found = {v.layer: (v.status, v.reason) for v in sj_tac.report(fast).verdicts}
    assert found == {"body.0": ("refused", "NEVER_CALLED"), "body.3": ("converted", None)}


@pytest.mark.parametrize("kind", ["Conv2d", "Linear", "the host's layer"])
def test_a_converted_layers_class_makes_layers(kind):
    """peft makes a new layer of the adapted layer's class."""
    made = {"Conv2d": nn.Conv2d(2, 6, 1), "Linear": nn.Linear(8, 8), "the host's layer": conv(2, 6, padding=1)}[kind]
    first = made if kind == "the host's layer" else layer.SeqToANNContainer(made)
    policy = {"layers": ["conv", "linear"], "default": {"k": 2}}
    fast = sj_tac.convert(nn.Sequential(first, node("lif")).eval(), policy, example_input=X.float())
    (verdict,) = sj_tac.report(fast).converted
    again = type(fast.get_submodule(verdict.layer))(8, 4, 1) if kind != "Linear" else type(fast[0][0])(8, 4)
    assert again(torch.rand(1, 8, 8, 8)).shape == ((1, 8, 8, 4) if kind == "Linear" else (1, 4, 8, 8))


@only_v2
@pytest.mark.parametrize("kind", ["lif", "if"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_net_is_written_to_nir_when_it_is_restored_and_else_the_error_names_its_layer(kind, k):
    """nirtorch looks classes up: it knows none of a converted net, and shows the name of the first."""
    pytest.importorskip("nirtorch")
    from spikingjelly.activation_based.nir_exchange import export_to_nir

    head = layer.Flatten(**M), layer.Linear(384, 5, **M), node(kind)
    net = nn.Sequential(conv(2, 6, padding=1), node(kind), *head).eval()
    x = frames(1, 4, 2, 8, 8)
    fast = sj_tac.convert(net, "preserve", k, example_input=frames(4, 4, 2, 8, 8))
    with pytest.raises(KeyError, match=r"Conv2d \(converted by sj_tac: give this tool sj_tac.restore\(net\) instead\)"):
        export_to_nir(fast, x)
    assert export_to_nir(sj_tac.restore(fast), x).nodes.keys() == export_to_nir(net, x).nodes.keys()


# ---- tools that count -------------------------------------------------------------------------------------------------


@only_v2
@pytest.mark.filterwarnings("ignore:SpikingJelly's operation counter")
@pytest.mark.parametrize(("mode", "training"), [("preserve", False), ("collapse", False), ("preserve", True)])
def test_a_strict_counter_knows_every_operation_of_a_converted_net(mode, training):
    """A converted net adds no operator of sj_tac's own to those that its source runs."""
    op_counter = pytest.importorskip("spikingjelly.activation_based.op_counter")

    def unknown(net):
        counter = op_counter.MACCounter()
        functional.reset_net(net)
        with op_counter.DispatchCounterMode([counter]) as watched:
            with torch.set_grad_enabled(training):
                out = net(X)
            if training:
                out.sum().backward()
        return set(watched.get_unsupported(counter))

    net = source().train(training)
    fast = sj_tac.convert(net, mode, 2, example_input=X)
    assert not [name for name in unknown(fast) - unknown(net) if "sj_tac" in str(name)]


# ---- what a message says ----------------------------------------------------------------------------------------------


class Headed(nn.Module):
    def __init__(self, head, flat):
        super().__init__()
        self.body, self.head, self.flat = nn.Sequential(conv(2, 6, padding=1), node("lif", v_threshold=0.1)), head, flat

    def forward(self, x):
        x = self.body(x)
        return self.head(x.flatten(2) if self.flat else x.flatten(0, 1))


LAZY = {"LazyLinear": (5,), "LazyConv2d": (4, 3), "LazyBatchNorm2d": ()}


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("kind", LAZY)
def test_a_lazy_layer_without_weights_is_named_with_what_makes_them(kind, sample):
    net, x = Headed(getattr(nn, kind)(*LAZY[kind]), kind == "LazyLinear").eval(), X.float()
    message = rf"module 'head' is a {kind} that has no weights yet; call the model once on a batch, which makes them"
    for call in (sj_tac.convert, sj_tac.plan):
        with pytest.raises(ConversionError, match=message):
            call(net, "preserve", 2, example_input=x if sample else None)
    net(x)
    functional.reset_net(net)
    fast = sj_tac.convert(net, "preserve", 2, example_input=x)
    assert [v.layer for v in sj_tac.report(fast).converted] == ["body.0"]


def test_a_copy_that_fails_offers_what_the_call_takes():
    fast = sj_tac.convert(source(), "preserve", 2, example_input=X)
    fast.kept = fast[0].weight * 2
    with pytest.raises(ConversionError, match=r"'kept' is a tensor computed from others.*; or pass inplace=True$"):
        sj_tac.restore(fast)
    sj_tac.restore(fast, inplace=True)
    with pytest.raises(ConversionError, match="pass inplace=True"):
        sj_tac.convert(fast, "preserve", 2, example_input=X)
    assert len(sj_tac.plan(fast, "preserve", 2, example_input=X).converted) == 2, "a plan copies nothing"


def test_what_cannot_be_copied_is_named():
    net, fast = source(), sj_tac.convert(source(), "preserve", 2, example_input=X)
    net.kept, fast[0].kept = threading.Lock(), [threading.Lock()]
    for call in (sj_tac.convert, sj_tac.plan):
        with pytest.raises(ConversionError, match=r"because of 'kept', a lock \(TypeError: .*\); set it to None meanwhile$"):
            call(net, "preserve", 2, example_input=X)
    with pytest.raises(ConversionError, match=r"because of '0.kept', a list .*; set it to None meanwhile; or pass inplace"):
        sj_tac.restore(fast)
    assert sj_tac.restore(fast, inplace=True) is fast


class Joined(nn.Module):
    """Frames that are put together along time behind the convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.more, self.lif = conv(2, 6, padding=1), conv(2, 6, padding=1), node("lif", v_threshold=0.1)

    def forward(self, x):
        return self.lif(torch.cat([self.conv(x[:3]), self.more(x[3:])]))


class Repeats(nn.Module):
    """An image, and how many frames are to be made of it."""

    def __init__(self):
        super().__init__()
        self.conv, self.lif = nn.Conv2d(2, 6, 3, padding=1), node("lif", v_threshold=0.1)

    def forward(self, x, T):
        return self.lif(functional.seq_to_ann_forward(x.unsqueeze(0).repeat(T, 1, 1, 1, 1), self.conv))


def test_of_frames_that_are_joined_along_time_those_from_step_0_on_are_shared():
    net = Joined().double().eval()
    fast = sj_tac.convert(net, "preserve", 2, example_input=X)
    assert [v.status for v in sj_tac.report(fast).verdicts] == ["converted", "refused"]
    assert sj_tac.report(fast)["more"].detail == "its 3 frames go to steps 3, 4, 5 of 6"
    with torch.no_grad():
        sums = torch.stack([(X[0] + 2 * X[1]) / 3, X[2]])
        drives = torch.cat([net.conv(sums)[[0, 0, 1]], net.more(X[3:])])
        torch.testing.assert_close(output(fast), output(net.lif, drives), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("moved", "steps"),
    [
        (lambda y: y.roll(1, 0), "1, 2, 3, 4, 5, 0 of 6"),
        (lambda y: y[::2], "0, none, 1, none, 2, none of 3"),
        (lambda y: torch.cat([y, y.flip(0)])[6:], "5, 4, 3, 2, 1, 0 of 6"),
    ],
)
def test_frames_in_another_order_than_steps_are_refused_by_the_steps_that_they_go_to(moved, steps):
    net = Joined().double().eval()
    net.forward = lambda x: net.lif(moved(net.conv(x)))
    refused = sj_tac.plan(net, "preserve", 2, example_input=X)["conv"]
    assert (refused.reason, refused.detail) == ("NO_ORDER", f"its 6 frames go to steps {steps}")


def test_a_net_that_takes_its_own_t_is_not_said_to_have_no_neuron():
    (verdict,) = sj_tac.plan(Repeats().eval(), "preserve", 2, example_input=(X[0].float(), 4)).verdicts
    assert verdict.status == "converted" or "no neuron" not in verdict.detail


@only_v2
def test_a_packed_nets_layers_are_not_said_to_be_called_with_several_tensors():
    verdicts = sj_tac.plan(packed(source()), "preserve", 2, example_input=X).verdicts
    assert not [v for v in verdicts if "other than one tensor" in (v.detail or "")]


# ---- threads ----------------------------------------------------------------------------------------------------------


class Unfolding(nn.Module):
    """Waits for another thread, and folds time for its convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lif = nn.Conv2d(2, 6, 3, padding=1), node("lif", v_threshold=0.1)

    def forward(self, x):
        return self.lif(self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


def at_once(nets):
    """Steps of what nets put out, or their errors, called in threads with so many frames each."""
    found, barrier = {}, threading.Barrier(len(nets))

    def work(steps, net):
        barrier.wait(10)
        try:
            with torch.no_grad():
                found[steps] = net(frames(steps, 3, 2, 8, 8)).shape[0]
        except Exception as error:
            found[steps] = str(error)

    threads = [threading.Thread(target=work, args=item) for item in nets.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_two_threads_call_a_net_with_other_frames_at_once():
    """T and N belong to a call. Only shapes are compared: SpikingJelly stores one set of voltages per net."""
    fast = sj_tac.convert(Unfolding().eval(), "preserve", 2, example_input=frames(6, 4, 2, 8, 8))
    for _ in range(20):
        assert at_once({4: fast, 8: fast}) == {4: 4, 8: 8}


def test_two_threads_call_two_copies_with_other_frames_at_once():
    fast = sj_tac.convert(Unfolding().eval(), "preserve", 2, example_input=frames(6, 4, 2, 8, 8))
    assert at_once({4: fast, 8: copy.deepcopy(fast)}) == {4: 4, 8: 8}


def test_a_call_in_a_call_and_one_that_fails_leave_the_outer_call_its_frames():
    fast = sj_tac.convert(Unfolding().eval(), "preserve", 2, example_input=frames(6, 4, 2, 8, 8))
    x, inner = frames(8, 3, 2, 8, 8), frames(4, 3, 2, 8, 8)
    wanted = output(fast, x)
    wanted_inside, found = output(fast, inner), []

    def inside(module, args):
        if not found:
            found.append(None)
            found[0] = output(fast, inner)
            functional.reset_net(fast)
            with pytest.raises(RuntimeError, match="to have 2 channels"):
                fast(x[:, :, :1])

    fast.conv.register_forward_pre_hook(inside)
    assert torch.equal(output(fast, x), wanted)
    assert torch.equal(found[0], wanted_inside)


def test_two_reentrant_checkpoints_hand_gradients_through_a_collapse():
    class Parts(nn.Module):
        how = None

        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.ModuleList([conv(2, 2, padding=1), node("lif", v_threshold=0.1)]) for _ in range(2))

        def forward(self, x):
            for c, lif in (self.a, self.b):
                part = lambda y, c=c, lif=lif: (functional.reset_net(lif), lif(c(y)))[1]  # noqa: E731
                x = part(x) if self.how is None else checkpoint(part, x, use_reentrant=self.how)
            return x

    torch.manual_seed(0)
    fast = sj_tac.convert(Parts().eval(), "collapse", 2, example_input=frames(7, 3, 2, 8, 8), fuse=False)
    found = []
    for fast.how in (False, True):
        x = frames(7, 3, 2, 8, 8).requires_grad_()
        fast(x).sum().backward()
        found.append(x.grad)
    assert found[0].any()
    torch.testing.assert_close(*found)


class Folding(nn.Module):
    """Its forward puts its convolution into step mode "s", once it is told to."""

    def __init__(self):
        super().__init__()
        self.body, self.folds = source(), False

    def forward(self, x):
        if not self.folds:
            return self.body(x)
        self.body[0].step_mode = self.body[1].step_mode = "s"
        y = self.body[1](self.body[0](x.flatten(0, 1)))
        return self.body[2](y.unflatten(0, x.shape[:2]))


@pytest.mark.captured
@pytest.mark.filterwarnings("ignore:sj_tac runs this Folding")
@pytest.mark.parametrize("fuse", [True, False])
def test_drives_that_a_binary_collapse_would_drop_are_an_error(fuse):
    """The neuron takes one drive of each group, and a convolution in step mode "s" makes them all."""
    policy = {"default": {"mode": "collapse", "spikes": "binary"}}
    fast = sj_tac.convert(Folding().eval(), policy, example_input=X, fuse=fuse)
    fast.folds = True
    with pytest.raises(ConversionError, match="one step of equal drives"):
        output(fast)
