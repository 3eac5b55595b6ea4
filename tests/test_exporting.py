"""``sj_tac.export_onnx``: the graph in onnxruntime beside SpikingJelly and the definition, and what it refuses."""

import copy
import io
import math
import os
import sys

import datasets
import definition
import nets
import numpy as np
import onnx
import onnxruntime
import pytest
import quickstart
import torch
from spikingjelly.activation_based import encoding, functional, layer
from support import ZOO, awake, conv, csnn, frames, node, norm, only_v2
from torch import nn

import sj_tac
from sj_tac import host
from sj_tac.errors import ConversionError, ExportError, InputError, StateNotExportedWarning

pytestmark = only_v2
T, N = 4, 2


def digits():
    images, _ = datasets.shipped_digits()
    return quickstart.load(nets.DigitNet(), "digits"), datasets.rate_code(images[:N], T, torch.Generator().manual_seed(1))


def events():
    return quickstart.load(nets.EventNet(), "events"), datasets.shipped_events(T)[0][:, :N].contiguous()


def paper_dvs():
    torch.manual_seed(0)
    x = frames(T, N, 2, 32, 32)
    return awake(nets.GestureNet(channels=8, size=32).eval(), x), x


def sew_resnet18():
    torch.manual_seed(0)
    net = ZOO["sew_resnet18"][0]().eval()
    functional.set_step_mode(net, "m")
    x = frames(T, N, 3, 32, 32, rate=0.3)
    return awake(net, x), x


NETS = [digits, events, paper_dvs, sew_resnet18]


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def in_onnxruntime(path, *arguments):
    """What the file computes: the first output."""
    found = session(path)
    names = [value.name for value in found.get_inputs()]
    return torch.from_numpy(found.run(None, {n: x.numpy() for n, x in zip(names, arguments, strict=True)})[0])


@torch.no_grad()
def at_rest(net, *arguments):
    functional.reset_net(net)
    out = net(*arguments)
    functional.reset_net(net)
    return out


def conv_samples(path, x):
    """Frames that go through every Conv when the file runs on x: the graph's own tensors, as onnxruntime computes them."""
    model = onnx.load(str(path))
    inputs = [node.input[0] for node in model.graph.node if node.op_type == "Conv"]
    given = model.graph.input[0].name
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(inputs) if name != given)
    run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = dict(zip([o.name for o in run.get_outputs()], run.run(None, {given: x.numpy()}), strict=True)) | {given: x}
    return [found[name].shape[0] for name in inputs]


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_file_computes_what_the_definition_does(make, k, tmp_path):
    """Beside SpikingJelly itself at k = 1, and beside preserve written out in plain PyTorch at the others."""
    source, x = make()
    fast = sj_tac.convert(source, "preserve", k, example_input=x)
    report = sj_tac.report(fast)
    own = source if k == 1 else definition.define(source, definition.settings_of(source, report))
    expected = definition.unmark(at_rest(own, x))
    path = tmp_path / "net.onnx"
    said = sj_tac.export_onnx(fast, x, path)
    out = in_onnxruntime(path, x)
    assert expected.abs().sum() > 0
    assert out.shape == expected.shape
    differing, total = said.spikes
    print(make.__name__, k, said.spikes, said.difference)
    assert total > 1000
    if differing == 0:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert differing <= 1e-4 * total
    # Once a group, and every conv once.
    convs = [name for name, m in source.named_modules() if isinstance(m, nn.Conv2d)]
    assert conv_samples(path, x) == [math.ceil(T / k) * N] * len(convs)
    assert sorted(said.convolutions) == sorted(convs)
    assert all(len(shapes) == 1 and shapes[0][0] == math.ceil(T / k) * N for shapes in said.convolutions.values())
    model = onnx.load(str(path))
    assert {node.domain for node in model.graph.node} == {""}
    assert not {"Loop", "Scan", "If"} & {node.op_type for node in model.graph.node}
    assert not model.functions
    assert b".py" not in path.read_bytes()  # lines of Python, with the paths of a machine


def small(kind="plif", **more):
    torch.manual_seed(1)
    x = frames(5, N, 2, 8, 8)
    return awake(csnn(make=lambda: node(kind, **more)), x), x


@pytest.mark.parametrize(
    ("policy", "neuron_of"),
    [
        ("collapse", {}),
        ({"mode": "collapse", "spikes": "binary"}, {"kind": "lif", "v_reset": None}),
        ({"mode": "preserve", "weights": "uniform"}, {"kind": "if"}),
        ({"mode": "preserve", "weights": "learned"}, {"kind": "lif", "decay_input": False, "tau": 1.5}),
    ],
)
def test_other_policies_and_neurons_with_a_short_last_group(policy, neuron_of, tmp_path):
    source, x = small(**neuron_of)
    policy = {"version": 1, "default": policy | {"k": 2}} if isinstance(policy, dict) else policy
    fast = sj_tac.convert(source, policy, 2, example_input=x)
    expected = at_rest(fast, x)
    said = sj_tac.export_onnx(fast, x, tmp_path / "net.onnx")
    assert said.spikes[0] == 0
    torch.testing.assert_close(in_onnxruntime(tmp_path / "net.onnx", x), expected, rtol=1e-4, atol=1e-5)


def test_a_mean_pool_behind_a_count_collapse(tmp_path):
    """Its reader sees the mean of a group's steps, as in the net itself."""
    torch.manual_seed(1)
    x = frames(9, N, 2, 8, 8)
    pool, head = layer.AvgPool2d(2, step_mode="m"), layer.Linear(64, 60, step_mode="m")
    net = awake(
        nn.Sequential(conv(2, 4), norm(4), node("lif"), pool, layer.Flatten(step_mode="m"), head, node("lif")), x
    ).eval()
    fast = sj_tac.convert(net, "collapse", 2, example_input=x)
    expected = at_rest(fast, x)
    assert expected.std() > 0
    assert torch.equal(at_rest(sj_tac.convert(net, "collapse", 2, example_input=x, fuse=False), x), expected)
    sj_tac.export_onnx(fast, x, tmp_path / "net.onnx")
    torch.testing.assert_close(in_onnxruntime(tmp_path / "net.onnx", x), expected, rtol=1e-4, atol=1e-5)


def test_any_number_of_samples(tmp_path):
    source, x = small()
    fast = sj_tac.convert(source, "preserve", 2)
    said = sj_tac.export_onnx(fast, x[:, :1], tmp_path / "net.onnx", batch_dim=1)
    assert said.inputs == {"input": [5, "N", 2, 8, 8]}
    assert said.convolutions["0"] == [["3*N", 2, 8, 8]]
    for samples in (1, 2, 5):
        more = frames(5, samples, 2, 8, 8, seed=samples)
        torch.testing.assert_close(in_onnxruntime(tmp_path / "net.onnx", more), at_rest(fast, more), rtol=1e-4, atol=1e-5)


def test_torchs_own_convolutions_on_folded_frames(tmp_path):
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.lif = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), node("lif", v_threshold=0.2)

        def forward(self, clip, gain):
            steps, batch = clip.shape[:2]
            y = self.norm(self.conv(clip.flatten(0, 1) * gain))
            return self.lif(y.view(steps, batch, *y.shape[1:])), clip.mean()

    torch.manual_seed(0)
    given = frames(4, 3, 2, 6, 6), torch.tensor(1.5)
    fast = sj_tac.convert(Folded().eval(), "preserve", 2, example_input=given)
    said = sj_tac.export_onnx(fast, given, tmp_path / "net.onnx")
    assert list(said.inputs) == ["clip", "gain"]
    assert list(said.outputs) == ["output_0", "output_1"]
    assert said.convolutions == {"conv": [[6, 2, 6, 6]]}
    expected = at_rest(fast, *given)[0]
    assert 0.01 < expected.mean() < 0.9
    assert torch.equal(in_onnxruntime(tmp_path / "net.onnx", *given), expected)
    with pytest.raises(InputError, match=r"batch_dim=1 is a dimension of the one tensor"):
        sj_tac.export_onnx(fast, given, tmp_path / "other.onnx", batch_dim=1)


def seen_of(net):
    """Everything of a net that an export might leave its traces in."""
    modules = [
        (n, m.training, [*m._forward_hooks], [*m._forward_pre_hooks], sorted(vars(m))) for n, m in net.named_modules()
    ]
    memories = {n: dict(m._memories) for n, m in net.named_modules() if isinstance(m, host.MemoryModule)}
    roles = [(r.backend, r.ran, dict(r.made)) for m in net.modules() if hasattr(r := getattr(m, "_tac", None), "made")]
    return modules, roles, sj_tac.report(net).to_dict(), [p.clone() for p in net.state_dict().values()], memories


def test_the_net_is_left_as_it_was_and_told_of_its_state(tmp_path):
    source, x = small()
    fast = sj_tac.convert(source, "preserve", 2, example_input=x)
    expected = at_rest(fast, x)
    with torch.no_grad():
        fast(x)
    numbers = torch.get_rng_state()
    before = seen_of(fast)
    with pytest.warns(StateNotExportedWarning, match="begins every run at the reset values"):
        sj_tac.export_onnx(fast, x, tmp_path / "net.onnx")
    after = seen_of(fast)
    assert after[:3] == before[:3]
    assert all(torch.equal(a, b) for a, b in zip(after[3], before[3], strict=True))
    assert all(after[4][n][key] is value for n, held in before[4].items() for key, value in held.items())
    assert torch.equal(torch.get_rng_state(), numbers)
    torch.testing.assert_close(in_onnxruntime(tmp_path / "net.onnx", x), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(at_rest(fast, x), expected)


class Deciding(nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.body, self.decide = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3)), decide

    def forward(self, x):
        return self.decide(self.body(x))


def converted(decide=lambda y: y):
    return sj_tac.convert(Deciding(decide).eval(), "preserve", 2, example_input=frames(4, N, 2, 8, 8))


class Noisy(nn.Module):
    """Random spikes in front of the net, as an encoder makes them."""

    def __init__(self):
        super().__init__()
        self.encode, self.body = encoding.PoissonEncoder("m"), nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))

    def forward(self, x):
        return self.body(self.encode(0.5 * x))


def hooked():
    net = converted()
    net.body[1].register_forward_hook(lambda module, args, out: None)
    return net


def training(name):
    net = converted()
    net.get_submodule(name).train()
    return net


def grouped():
    policy = {"version": 1, "default": {"mode": "collapse", "k": 2, "emit": "groups"}}
    return sj_tac.convert(Deciding(lambda y: y).eval(), policy, example_input=frames(4, N, 2, 8, 8))


def test_one_frame_for_each_group(tmp_path):
    torch.manual_seed(0)
    net, x = grouped(), frames(4, N, 2, 8, 8)
    expected = at_rest(net, x)
    assert expected.shape[0] == 2
    sj_tac.export_onnx(net, x, tmp_path / "net.onnx")
    torch.testing.assert_close(in_onnxruntime(tmp_path / "net.onnx", x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: training(""), ExportError, "'Deciding' is in training mode; call net.eval"),
        (lambda: training("body.1"), ExportError, "'body.1' is in training mode"),
        (hooked, ExportError, r"forward hooks of yours hang on \['body.1'\]"),
        (lambda: Deciding(lambda y: y).eval(), ConversionError, "is not a converted model"),
        (
            lambda: converted(lambda y: y if y.sum() > 3 else -y),
            ExportError,
            "torch.export cannot follow the forward of Decid",
        ),
        (lambda: converted(lambda y: torch.special.bessel_j0(y)), ExportError, "torch.onnx cannot write this net down"),
        (lambda: sj_tac.convert(Noisy().eval(), "preserve", 2), ExportError, "spikes differ between the graph and the net"),
    ],
)
def test_what_cannot_be_exported_says_so_and_writes_nothing(make, error, words, tmp_path):
    torch.manual_seed(0)
    net, path = make(), tmp_path / "net.onnx"
    path.write_text("what was there before")
    before = seen_of(net)[:3] if error is ExportError else None
    with pytest.raises(error, match=words):
        sj_tac.export_onnx(net, frames(4, N, 2, 8, 8), path)
    assert before is None or seen_of(net)[:3] == before
    assert path.read_text() == "what was there before"
    assert os.listdir(tmp_path) == ["net.onnx"]


def test_other_wrong_input(tmp_path, monkeypatch):
    net, x = converted(), frames(4, N, 2, 8, 8)
    with pytest.raises(InputError, match="takes tensors as the example"):
        sj_tac.export_onnx(net, (x, 3), tmp_path / "a")
    with pytest.raises(InputError, match="takes tensors as the example"):
        sj_tac.export_onnx(net, np.zeros(3), tmp_path / "a")
    with pytest.raises(InputError, match="batch_dim=5"):
        sj_tac.export_onnx(net, x, tmp_path / "a", batch_dim=5)
    fixed = converted(lambda y: y.reshape(4, 2, -1))
    with pytest.raises(ExportError, match=r"batch_dim=1 wants a forward that does not ask for N's number"):
        sj_tac.export_onnx(fixed, x, tmp_path / "a", batch_dim=1)
    for name in ("onnx", "onnxscript", "onnxruntime"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=rf'{name} is missing.*pip install "sj_tac\[onnx\]"'):
                sj_tac.export_onnx(net, x, tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_graph_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    """The comparison itself: a threshold that moves between the net's call and the exporter's."""
    net, x = converted(), frames(4, N, 2, 8, 8)
    real = torch.export.export

    def moved(probed, *args, **kwargs):
        probed.net.body[2].v_threshold = 0.9
        return real(probed, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", moved)
    with pytest.raises(ExportError, match=r"spikes differ between the graph and the net, first in neuron 'body.2'"):
        sj_tac.export_onnx(net, x, tmp_path / "net.onnx")
    assert os.listdir(tmp_path) == []
    sj_tac.export_onnx(net, x, tmp_path / "net.onnx", tolerance=1.0)
    assert not torch.equal(in_onnxruntime(tmp_path / "net.onnx", x), at_rest(net, x))


def test_it_prints_a_table_and_plain_data(tmp_path):
    said = sj_tac.export_onnx(converted(), frames(4, N, 2, 8, 8), tmp_path / "net.onnx")
    assert "body.0" in str(said)
    assert "spikes differ" in str(said)
    assert said.to_dict()["inputs"] == {"x": [4, N, 2, 8, 8]}


# ---- other ways out ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_traces_with_torch_jit_is_told_what_to_use():
    net, x = converted(), frames(4, N, 2, 8, 8)
    with pytest.raises(ExportError, match=r"use sj_tac.export_onnx, or torch.export.export"):
        torch.jit.trace(net, (x,))
    with pytest.raises(ExportError, match=r"use sj_tac.export_onnx, or torch.export.export"):
        torch.onnx.export(net, (x,), io.BytesIO(), dynamo=False)
    expected = at_rest(net, x)
    assert torch.equal(at_rest(copy.deepcopy(net), x), expected)


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_torch_export_saves_and_loads(tmp_path):
    """As docs/export.md has it: without operators of sj_tac the file needs torch alone."""
    source, x = small()
    net = sj_tac.convert(source, "preserve", 2, backend="reference")
    functional.reset_net(net)
    with torch.no_grad():
        program = torch.export.export(net, (x,), strict=False)
    assert not [n for n in program.graph.nodes if "sj_tac" in str(n.target)]
    convs = [n for n in program.graph.nodes if "conv" in str(n.target)]
    assert [n.args[0].meta["val"].shape[0] for n in convs] == [3 * N] * 3
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(loaded(x), at_rest(net, x), rtol=1e-5, atol=1e-6)
