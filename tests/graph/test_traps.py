"""Ways in which a captured net could be wrong, slow or loud, on three nets: traps 1 to 8."""

import copy
import re
import warnings

import pytest
import torch
from captured import (
    NETS,
    Blocks,
    X,
    agree,
    blocks,
    captures,
    code,
    fused,
    graphs,
    pair,
    pair_of,
    quickly,
    source,
    trained,
    wide,
)
from spikingjelly.activation_based import functional
from support import awake, conv, frames, node, norm, only_v2
from torch import nn

import sj_tac
from sj_tac.errors import CaptureWarning
from sj_tac.rewrites import equations
from sj_tac.rewrites.equations import nodes

pytestmark = [only_v2, pytest.mark.captured, pytest.mark.usefixtures("strict")]
every_net = quickly("sew")
each_net = quickly("dvs")


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("training", [False, True])
def test_a_captured_net_is_the_definition(name, training):
    """Trap 2 too: a BatchNorm in training mode counts its batches in place, and its neuron is fused all the same."""
    net, x = source(name)
    fast, slow = pair(net, x)
    agree(fast, slow, x, training, calls=2)
    neurons = sum(hasattr(m, "v_threshold") for m in net.modules())
    assert fused(fast) == (neurons, 0)
    assert "expand_frames" not in code(fast)


def test_1_a_checkpoint_draws_the_same_dropout_again():
    fast, slow = pair(blocks(), X)
    agree(fast, slow, X, training=True, calls=2)
    assert "checkpointed" in code(fast)
    kept = {}
    for name, net in {"checkpointed": fast, "kept": pair(blocks(checkpointed=()), X)[0]}.items():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t):
            net.train()
            functional.reset_net(net)
            net(X)
        kept[name] = sum(sizes)
    assert kept["checkpointed"] < kept["kept"]


class Repeats(nn.Module):
    """A net that is handed images, and repeats them T times by itself."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.body = nn.Sequential(conv(2, 6, padding=1), norm(6), node("lif"), conv(6, 6, padding=1), norm(6), node("lif"))

    def forward(self, x):
        return self.body(self.times(x))


TIMES = {
    "repeat": lambda x: x.unsqueeze(0).repeat(6, 1, 1, 1, 1),
    "repeat to a new dimension": lambda x: x.repeat(6, 1, 1, 1, 1),
    "expand": lambda x: x.unsqueeze(0).expand(6, -1, -1, -1, -1),
}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("how", TIMES)
def test_2_a_net_that_repeats_an_image_runs_its_first_convolution_once(how, k):
    torch.manual_seed(0)
    image = X[0]
    fast, slow = pair(awake(Repeats(TIMES[how]).double().eval(), image), image, k)
    agree(fast, slow, image, calls=2)
    for found in sj_tac.report(fast).graphs:
        graph = found.rewritten[found.capture.key].graph
        rows = [nodes.shape(node)[0] for node in graph.nodes if node.target is torch.conv2d]
        assert rows == [2, 2 * 6 // k], found.code
    assert fused(fast) == (2, 0)


def test_2_a_relu_in_place_leaves_all_neurons_fused():
    fast, slow = pair(blocks(checkpointed=(), inplace=True), X, convert=every_convolution)
    agree(fast, slow, X, training=True, calls=2)
    assert fused(fast) == (3, 0)
    assert code(fast).count("aggregate(") == 2 * 1


def every_convolution(net, k, example_input):
    """Convert by name: whether a ReLU may stand in front of a neuron is the planner's to say, not the graph's."""
    from sj_tac.definition import convs, neurons
    from sj_tac.rewrites.gate import Attach, attach

    net = copy.deepcopy(net)
    of = {f"blocks.{i}.0": convs.Sharing(k, net.neurons[i]) for i in range(3)}
    neurons.swap(net)
    convs.share(net, of)
    net.register_forward_pre_hook(Attach("auto"))
    attach(net, "auto")
    return net


def test_2_what_writes_into_memory_that_others_read_is_left_where_it_is():
    class Writes(Blocks):
        def forward(self, x):
            x = self.blocks[0](x)
            held = x.flatten(1)
            x = self.neurons[0](x)
            held.mul_(2)  # behind the neuron, into what it read
            y = self.neurons[1](self.blocks[1](x) + held.view_as(x))
            held[1:] += y.flatten(1)[1:]
            return self.neurons[2](self.blocks[2](y)) + held.view_as(x)

    torch.manual_seed(0)
    fast, slow = pair(awake(Writes().double().eval(), X), X, convert=every_convolution)
    agree(fast, slow, X, calls=2)  # backward: torch refuses writes into what autograd has saved
    assert fused(fast)[0] >= 1


@every_net
def test_3_schedules_of_numbers_take_two_captures(name):
    fast, slow, x = pair_of(name)
    nodes = [[m for m in each.modules() if hasattr(m, "v_threshold")] for each in (fast, slow)]
    before = [m.v_threshold for m in nodes[0]]
    for step in range(12):
        for of in nodes:
            for m, threshold in zip(of, before, strict=True):
                m.v_threshold = threshold * (1 - 0.04 * step)
                if hasattr(m, "tau"):
                    m.tau = 2 + 0.1 * step
                m.surrogate_function.alpha = 2 + 0.1 * step
        agree(fast, slow, x, training=step % 4 == 3, rest=True)
    assert captures(fast) <= 4  # two in eval mode, two in training
    assert fused(fast)[1] == 0


@every_net
def test_4_another_k_captures_nothing(name):
    fast, slow, x = pair_of(name)
    agree(fast, slow, x)
    number = captures(fast)
    for k in (4, 1, 2, 3):
        for each in (fast, slow):
            sj_tac.set_k(each, k)
            functional.reset_net(each)
        agree(fast, slow, x)
    assert captures(fast) == number


class Breaks(nn.Module):
    """A forward that Dynamo cuts in two."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(conv(i, 6, padding=1), norm(6), node("lif")) for i in (2, 6))

    def forward(self, x):
        x = self.a(x)
        if x.sum().item() < 0:
            x = x * 0
        return self.b(x)


def test_5_nets_of_one_class_with_a_graph_break_have_graphs_of_their_own():
    torch.manual_seed(0)
    nets = [pair(awake(Breaks().double().eval(), X), X, k=k) for k in [1, 2, 3] * 2]
    for fast, slow in nets:
        agree(fast, slow, X)
        assert captures(fast) == 2, "two pieces"
    torch._dynamo.reset()  # a user's own
    for fast, slow in nets[:3]:
        agree(fast, slow, X)


@pytest.mark.parametrize("how", ["set_stance", "disable", "error_on_recompile"])
@each_net
def test_5_what_a_user_asks_of_dynamo(name, how):
    fast, slow, x = pair_of(name)
    if how == "set_stance":
        with torch.compiler.set_stance("force_eager"):
            agree(fast, slow, x)
    elif how == "disable":
        with torch._dynamo.config.patch(disable=True):
            agree(fast, slow, x)
    else:
        agree(fast, slow, x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            agree(fast, slow, x, rest=True)


@pytest.mark.exhaustive
def test_6_two_processes_train_a_net_that_is_sent_to_them_in_one_graph(tmp_path):
    """Trap 10 too: the net is pickled for processes that are spawned. Their gradients: tests/test_distributed.py."""
    torch.manual_seed(0)
    net = wide().eval()
    assert sum(p.numel() * p.element_size() for p in net.parameters()) > 30e6
    fast = sj_tac.convert(net, "preserve", 2, example_input=frames(4, 2, 2, 4, 4))
    found = torch.multiprocessing.get_context("spawn").Manager().dict()
    torch.multiprocessing.spawn(trained, (fast, str(tmp_path / "store"), found), nprocs=2)
    assert dict(found) == {0: (5, 0), 1: (5, 0)}


@pytest.mark.parametrize("way", ["torch.compile(net)", "a function", "fullgraph", "export"])
@each_net
def test_7_the_users_own_compile_on_top_is_right(name, way):
    net, x = source(name)
    fast, slow = pair(net, x)
    calls = {
        "torch.compile(net)": lambda: torch.compile(fast, backend="eager"),
        "a function": lambda: torch.compile(lambda x: fast(x), backend="eager"),
        "fullgraph": lambda: torch.compile(lambda x: fast(x), backend="eager", fullgraph=True),
        "export": lambda: torch.export.export(fast, (x,)).module(),
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attribute")  # torch.export of voltages, as of the source's
        wanted = slow(x)
        assert wanted.abs().mean() > 0.02
        assert torch.equal(calls[way]()(x), wanted)


@each_net
def test_7_the_nets_own_compile_method_says_that_it_changes_nothing(name):
    net, x = source(name)
    fast, slow = pair(net, x)
    with pytest.warns(CaptureWarning, match=re.escape("call torch.compile(net)")):
        fast.compile(backend="eager")
    agree(fast, slow, x)
    assert captures(fast) == 1
    back = sj_tac.restore(fast, inplace=True)
    back.compile(backend="eager")
    assert back._compiled_call_impl is not None, "the method is torch's again"


@each_net
def test_8_an_error_in_an_equation_is_a_warning_and_the_definition(name, monkeypatch):
    def broken(graph):
        for _ in equations.fuse.each(graph):
            raise RuntimeError("a fault of ours")

    monkeypatch.setattr(equations, "ORDER", (*equations.ORDER[:4], broken))
    fast, slow, x = pair_of(name)
    with pytest.raises(Exception, match="a fault of ours"):
        fast(x)
    monkeypatch.setenv("SJ_TAC_STRICT", "0")
    functional.reset_net(fast)
    torch._dynamo.reset()
    with pytest.warns(CaptureWarning, match="equation broken, layer .*a fault of ours"):
        agree(fast, slow, x)
    assert graphs(fast)[-1].problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(fast, slow, x)


def test_8_an_error_behind_checkpoints_is_not_told_of_them(monkeypatch):
    """The graphs inside a checkpointed block are rewritten first, and were fine."""

    def broken(graph):
        for at in equations.fuse.each(graph):
            if at.op == "output" and any(n.op == "get_attr" for n in graph.nodes):
                raise RuntimeError("a fault of ours")

    monkeypatch.setattr(equations, "ORDER", (*equations.ORDER, broken))
    monkeypatch.setenv("SJ_TAC_STRICT", "0")
    fast, slow = pair(blocks(checkpointed=(0,)), X)
    with pytest.warns(CaptureWarning, match="equation broken, layer unknown, at output"):
        agree(fast, slow, X, training=True)


def test_8_a_forward_that_dynamo_fails_on_runs_as_it_is_defined(monkeypatch):
    """SpikingJelly's reset_net keeps a dictionary by weak references, for which Dynamo writes code that fails."""

    class Resets(Blocks):
        def forward(self, x):
            functional.reset_net(self)
            return super().forward(x)

    monkeypatch.setenv("SJ_TAC_STRICT", "0")
    torch.manual_seed(0)
    fast, slow = pair(awake(Resets(checkpointed=()).double().eval(), X), X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agree(fast, slow, X, calls=2)
    assert sum(w.category is CaptureWarning and "Dynamo's own code failed" in str(w.message) for w in caught) <= 1


def test_8_a_forward_that_asks_whether_it_is_compiled_is_told_no(monkeypatch):
    class Asks(Blocks):
        def forward(self, x):
            return super().forward(x * 0 if torch.compiler.is_compiling() else x)

    monkeypatch.setenv("SJ_TAC_STRICT", "0")
    torch.manual_seed(0)
    fast, slow = pair(awake(Asks(checkpointed=()).double().eval(), X), X)
    with pytest.warns(CaptureWarning, match="asks whether torch compiles it"):
        agree(fast, slow, X, calls=2)
