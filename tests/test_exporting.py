"""``sj_tac.export_onnx``: the graph in onnxruntime beside SpikingJelly and the definition, and what it refuses."""

import copy
import io
import math
import os
import sys

import definition
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from spikingjelly.activation_based import layer
from support import at_rest, awake, conv, frames, node, norm, only_v2, zoo
from torch import nn

import sj_tac
from sj_tac import host
from sj_tac.errors import ConversionError, ExportError, InputError, StateNotExportedWarning

pytestmark = only_v2
T, N = 4, 2


def small(kind="plif", **more):
    """Two convolutions and a Linear layer behind pools, and three frames: the last group of two is a short one."""
    torch.manual_seed(1)
    x = frames(3, N, 2, 12, 12)
    modules = conv(2, 4, bias=False), norm(4), node(kind, **more), layer.MaxPool2d(2, step_mode="m")
    modules += conv(4, 4), norm(4), node(kind, **more), layer.AvgPool2d(2, step_mode="m")
    modules += layer.Flatten(step_mode="m"), layer.Linear(36, 30, step_mode="m"), node(kind, **more)
    return awake(nn.Sequential(*modules).eval(), x), x


def in_onnxruntime(path, *arguments):
    """What the file computes: the first output."""
    found = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in found.get_inputs()]
    return torch.from_numpy(found.run(None, {n: x.numpy() for n, x in zip(names, arguments, strict=True)})[0])


def conv_samples(path, x):
    """Frames that go through every Conv when the file runs on x: the graph's own tensors, as onnxruntime computes them."""
    model = onnx.load(str(path))
    inputs = [node.input[0] for node in model.graph.node if node.op_type == "Conv"]
    given = model.graph.input[0].name
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(inputs) if name != given)
    run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = dict(zip([o.name for o in run.get_outputs()], run.run(None, {given: x.numpy()}), strict=True)) | {given: x}
    return [found[name].shape[0] for name in inputs]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("make", [small, pytest.param(lambda: zoo("sew_resnet18"), marks=pytest.mark.exhaustive)])
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
    assert total > 1000
    if differing == 0:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert differing <= 1e-3 * total
    # Once a group, and every conv once.
    convs, samples = [name for name, m in source.named_modules() if isinstance(m, nn.Conv2d)], math.ceil(len(x) / k) * N
    assert conv_samples(path, x) == [samples] * len(convs)
    assert sorted(said.convolutions) == sorted(convs)
    assert all(len(shapes) == 1 and shapes[0][0] == samples for shapes in said.convolutions.values())
    model = onnx.load(str(path))
    assert {node.domain for node in model.graph.node} == {""}
    assert not {"Loop", "Scan", "If"} & {node.op_type for node in model.graph.node}
    assert not model.functions
    assert b".py" not in path.read_bytes()  # lines of Python, with the paths of a machine
    assert convs[0] in str(said)
    assert f"{differing:,} of {total:,} spikes differ" in " ".join(str(said).split())
    assert said.to_dict()["inputs"] == {next(iter(said.inputs)): list(x.shape)}


@pytest.mark.parametrize(
    ("settings", "neuron_of"),
    [
        ({"mode": "collapse"}, {}),  # what reads an average pool behind it sees the mean of a group's steps
        ({"mode": "collapse", "spikes": "binary", "emit": "groups"}, {"kind": "lif", "v_reset": None}),
        pytest.param({"weights": "learned"}, {"kind": "if"}, marks=pytest.mark.exhaustive),
    ],
)
def test_other_policies_and_neurons_with_a_short_last_group(settings, neuron_of, tmp_path):
    source, x = small(**neuron_of)
    fast = sj_tac.convert(source, {"version": 1, "default": settings | {"k": 2}}, example_input=x)
    expected = at_rest(fast, x)
    assert expected.std() > 0
    assert expected.shape[0] == (1 if "emit" in settings else 3)  # two convolutions, 3 -> 2 -> 1
    said = sj_tac.export_onnx(fast, x, tmp_path / "net.onnx", tolerance=0.01)
    if said.spikes[0] == 0:
        torch.testing.assert_close(in_onnxruntime(tmp_path / "net.onnx", x), expected, rtol=1e-4, atol=1e-5)


class Deciding(nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.body, self.decide = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3)), decide

    def forward(self, x):
        return self.decide(self.body(x))


HALF = {"rules": [{"match": "body.0", "dtype": "bfloat16"}]}


def converted(decide=lambda y: y, policy="preserve", **more):
    torch.manual_seed(0)
    return sj_tac.convert(Deciding(decide).eval(), policy, 2, example_input=frames(4, N, 2, 8, 8), **more)


class Turned(Deciding):
    """Frames [N, T, ...] come in, and spikes go out so."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(("kind", "batch_dim"), [(Deciding, 1), (Turned, 0)])
def test_any_number_of_samples(kind, batch_dim, tmp_path):
    def given(samples):
        return frames(5, samples, 2, 8, 8, seed=samples).transpose(1, batch_dim).contiguous()

    torch.manual_seed(0)
    fast = sj_tac.convert(kind(lambda y: y).eval(), "preserve", 2, example_input=given(N))
    said = sj_tac.export_onnx(fast, given(1), tmp_path / "net.onnx", batch_dim=batch_dim)
    assert said.inputs == {"x": [5, "N", 2, 8, 8] if batch_dim else ["N", 5, 2, 8, 8]}
    assert said.convolutions["body.0"] == [["3*N", 2, 8, 8]]
    for samples in (1, 2, 5):
        expected = at_rest(fast, given(samples))
        assert (in_onnxruntime(tmp_path / "net.onnx", given(samples)) != expected).float().mean() < 0.005
        assert 0.01 < expected.mean() < 0.9


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
    assert (in_onnxruntime(tmp_path / "net.onnx", *given) != expected).float().mean() < 0.005
    with pytest.raises(InputError, match=r"batch_dim=1 is a dimension of the one tensor"):
        sj_tac.export_onnx(fast, given, tmp_path / "other.onnx", batch_dim=1)


def seen_of(net):
    """What of a net an export might leave its traces in."""
    modules = [(n, m.training, [*m._forward_hooks], sorted(vars(m))) for n, m in net.named_modules()]
    return modules, sj_tac.report(net).to_dict()


def test_the_net_is_left_as_it_was_and_told_of_its_state(tmp_path):
    net, x = converted(), frames(4, N, 2, 8, 8)
    expected = at_rest(net, x)
    with torch.no_grad():
        net(x)
    numbers, before, state = torch.get_rng_state(), seen_of(net), copy.deepcopy(net.state_dict())
    memories = {n: dict(m._memories) for n, m in net.named_modules() if isinstance(m, host.MemoryModule)}
    with pytest.warns(StateNotExportedWarning, match="begins every run at the reset values"):
        sj_tac.export_onnx(net, x, tmp_path / "net.onnx")
    assert seen_of(net) == before
    torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
    assert all(net.get_submodule(n)._memories[key] is value for n, held in memories.items() for key, value in held.items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert (in_onnxruntime(tmp_path / "net.onnx", x) != expected).float().mean() < 0.005
    assert torch.equal(at_rest(net, x), expected)


def hooked():
    net = converted()
    net.body[1].register_forward_hook(lambda module, args, out: None)
    return net


def training(name):
    net = converted()
    net.get_submodule(name).train()
    return net


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: training(""), ExportError, "'Deciding' is in training mode; call net.eval"),
        (lambda: training("body.1"), ExportError, "'body.1' is in training mode"),
        (hooked, ExportError, r"forward hooks of yours hang on \['body.1'\]"),
        (lambda: converted(policy=HALF, backend="reference"), ExportError, "'body.0' computes in torch.bfloat16"),
        (lambda: Deciding(lambda y: y).eval(), ConversionError, "is not a converted model"),
        (lambda: converted(lambda y: y if y.sum() > 3 else -y), ExportError, "torch.export cannot follow the forward of"),
        (lambda: converted(lambda y: torch.special.bessel_j0(y)), ExportError, "torch.onnx cannot write this net down"),
        (lambda: converted(lambda y: y + torch.rand(1)), ExportError, "outputs differ by .*, and no spike does"),
    ],
)
def test_what_cannot_be_exported_says_so_and_writes_nothing(make, error, words, tmp_path):
    net, path = make(), tmp_path / "net.onnx"
    path.write_text("what was there before")
    before = seen_of(net) if error is ExportError else None
    with pytest.raises(error, match=words):
        sj_tac.export_onnx(net, frames(4, N, 2, 8, 8), path)
    assert before is None or seen_of(net) == before
    assert path.read_text() == "what was there before"
    assert os.listdir(tmp_path) == ["net.onnx"]


def test_other_wrong_input(tmp_path, monkeypatch):
    net, x = converted(), frames(4, N, 2, 8, 8)
    for wrong in ((x, 3), np.zeros(3)):
        with pytest.raises(InputError, match="takes tensors as the example"):
            sj_tac.export_onnx(net, wrong, tmp_path / "a")
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
    said = sj_tac.export_onnx(net, x, tmp_path / "net.onnx", tolerance=1.0)
    out, expected = in_onnxruntime(tmp_path / "net.onnx", x), at_rest(net, x)
    assert said.spikes[1] == expected.numel()
    assert abs(said.spikes[0] - (out != expected).sum()) <= 3  # the net beside its definition, on any processor
    assert said.difference == 1.0


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("fuse", [True, False])
def test_what_traces_with_torch_jit_is_told_what_to_use(fuse):
    net, x = converted(fuse=fuse), frames(4, N, 2, 8, 8)
    with pytest.raises(ExportError, match=r"use sj_tac.export_onnx, or torch.export.export"):
        torch.jit.trace(net, (x,))
    with pytest.raises(ExportError, match=r"use sj_tac.export_onnx, or torch.export.export"):
        torch.onnx.export(net, (x,), io.BytesIO(), dynamo=False)


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_torch_export_saves_and_loads(tmp_path):
    """As docs/export.md has it: without operators of sj_tac the file needs torch alone."""
    source, x = small()
    net = sj_tac.convert(source, "preserve", 2, backend="reference")
    with torch.no_grad():
        program = torch.export.export(net, (x,), strict=False)
    assert not [n for n in program.graph.nodes if "sj_tac" in str(n.target)]
    convs = [n for n in program.graph.nodes if "conv" in str(n.target)]
    assert [n.args[0].meta["val"].shape[0] for n in convs] == [2 * N] * 2
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(loaded(x), at_rest(net, x), rtol=1e-5, atol=1e-6)
