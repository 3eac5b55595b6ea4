"""save and load where something is wrong: a clear error, the model untouched, the old file as it was, no code run."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from idioms.miniatures import OwnNeuron
from safetensors.torch import load_file, safe_open, save_file
from spikingjelly.activation_based import functional, layer
from support import at_rest, conv, csnn as awake_csnn, node
from test_saving import FRAMES, csnn
from torch import nn
from torch.nn.utils import parametrizations, prune

import sj_tac
from sj_tac.errors import CheckpointError, ConversionError, ModelTypeError, WriteError
from sj_tac.host import registry
from sj_tac.support import archive


def description(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["sj_tac"])


def with_description(path, **changes):
    save_file(load_file(path), path, {"sj_tac": json.dumps(changes)})


@pytest.fixture
def saved(tmp_path):
    """A matched net's files of both kinds."""
    fast = sj_tac.convert(csnn(), "preserve", 4)
    sj_tac.recalibrate(fast, FRAMES)
    for name in ("net.safetensors", "net.pt"):
        sj_tac.save(fast, tmp_path / name)
    return tmp_path


def refused(path, words, model=None, error=CheckpointError, **options):
    """The message; the model is as it was, in place, too."""
    options = {"example_input": FRAMES} | options
    for inplace in (False, True):
        net = csnn() if model is None else copy.deepcopy(model)
        before, classes = copy.deepcopy(net.state_dict()), [type(m) for m in net.modules()]
        with pytest.raises(error, match=words) as raised:
            sj_tac.load(path, net, inplace=inplace, **options)
        assert [type(m) for m in net.modules()] == classes
        assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
        assert "_sj_tac" not in vars(net)
        assert not net._forward_hooks
        assert not net._forward_pre_hooks
    return str(raised.value)


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt"])
def test_a_file_that_is_cut_off_anywhere(saved, name):
    whole = (saved / name).read_bytes()
    path = saved / f"cut{name[3:]}"
    for size in {0, 1, 4, 9, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut off or damaged|was not written by sj_tac.save"):
            sj_tac.load(path, csnn())
    refused(path, str(path))


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt"])
def test_a_bit_that_flipped_in_a_tensor_is_noticed(saved, name):
    """One bit of any tensor, those of the corrections among them; no other check sees it."""
    content = archive.read(saved / name)
    whole = (saved / name).read_bytes()
    assert sj_tac.load(saved / name, csnn()) is not None
    path = saved / f"flipped{name[3:]}"
    flipped = []
    for key, tensor in (*content.state.items(), *content.more.items()):
        held = tensor.numpy().tobytes()
        if whole.count(held) != 1:  # what is written twice, or a number that is found anywhere
            continue
        at = whole.index(held) + len(held) // 2
        flipped.append(key)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="is damaged: its tensors are not those that were written"):
            sj_tac.load(path, csnn())
    assert {"0.weight", "8.bias", "before:1:running_mean"} <= set(flipped)
    refused(path, str(path))


class Evil:
    def __reduce__(self):
        import os

        return os.mkdir, ("ran",)


def test_foreign_files(saved, monkeypatch):
    monkeypatch.chdir(saved)
    net = csnn()
    torch.save(net.state_dict(), "state.pt")
    refused("state.pt", r"state.pt holds keys .*was not written by sj_tac.save; load a state_dict into the model as ever")
    save_file(net.state_dict(), "state.safetensors")
    refused("state.safetensors", r"tensors alone, and was not written by sj_tac.save")
    torch.save(sj_tac.convert(net), "whole.pt")
    refused("whole.pt", "pickled objects, as torch.save.net. writes them, which are not loaded")
    torch.save({"sj_tac": "{}", "state_dict": Evil(), "more": {}}, "evil.pt")
    refused("evil.pt", "pickled objects")
    (saved / "evil.safetensors").write_bytes(pickle.dumps(Evil()))
    refused("evil.safetensors", "no file of safetensors")
    assert not (saved / "ran").exists()
    np.savez("arrays.npz", a=np.zeros(3))
    refused("arrays.npz", "cannot be read as plain tensors")
    refused("nowhere.pt", r"nowhere.pt cannot be read: .*No such file")
    refused(str(saved), "cannot be read: .*Is a directory")
    torch.save({"sj_tac": "{}", "state_dict": {"0.weight": 3}, "more": {}}, "numbers.pt")
    refused("numbers.pt", "'0.weight' is no plain, dense tensor")


def test_what_the_file_says_of_itself(saved):
    path = saved / "net.safetensors"
    good = description(path)
    assert good["layers"]["0"] == {
        "mode": "preserve", "k": 4, "weights": "decay", "normalize": True, "spikes": "count", "merged": 1, "stretch": 1
    }  # fmt: skip
    # A file of format 1 has no checksum.
    with_description(path, **({k: v for k, v in good.items() if k != "checksum"} | {"format": 1}))
    assert sj_tac.load(path, csnn()) is not None
    with_description(path, **(good | {"format": 3, "versions": {"sj_tac": "9.9"}}))
    refused(path, "of format 3, written by sj_tac 9.9; this is sj_tac .* pip install --upgrade")
    for changes, words in (
        ({"format": "1"}, "wrong at 'format'"),
        ({"layers": 3}, "wrong at 'layers'"),
        ({"tied": {"0.weight": ["nowhere", True]}}, "'0.weight' is to be 'nowhere', which it does not have"),
        ({"tied": {"unknown": ["0.weight", True]}}, r"the model has no \['unknown'\]"),
        ({"corrected": {"1": {"by": "match", "moved": False, "names": ["nothing"]}}}, "does not fit; damaged"),
        ({"corrected": {"nowhere": {"by": "match", "moved": False, "names": ["weight"]}}}, "does not fit; damaged"),
        ({"frozen": ["0"]}, "'0' is no BatchNorm"),
        ({"extra": {"0.weight": 3}}, "'0.weight' is a tensor in one of them alone"),
        ({"layers": {}}, "layer '0' is converted, or runs behind a collapse, in one of them alone"),
    ):
        with_description(path, **(good | changes))
        refused(path, words)
    with_description(path, **(good | {"policy": {"rules": [{"match": "0", "k": 10**9}]}}))
    refused(path, r"the policy in .*net.safetensors: rules\[0\].k is 1000000000", error=sj_tac.errors.PolicyError)
    expanded = csnn()
    expanded.register_buffer("shift", torch.ones(1).expand(3))
    sj_tac.save(sj_tac.convert(expanded), path)
    refused(path, "'shift' of the model is expanded", expanded)
    # Strides that are none are not followed.
    sj_tac.save(sj_tac.convert(csnn()), path)
    good = description(path)
    with_description(path, **(good | {"strides": {"0.weight": [10**12, 1, 1, 1], "4.weight": [-1], "8.weight": []}}))
    assert sj_tac.load(path, csnn())[0].weight.is_contiguous()
    for text in ("", "[]", "[" * 100_000):
        save_file(load_file(path), path, {"sj_tac": text})
        refused(path, "it is damaged")


def test_models_that_are_others(saved):
    path = saved / "net.safetensors"
    refused(path, r"'0.weight' is \[4, 2, 3, 3\] there, and \[5, 2, 3, 3\] in the model", awake_csnn(channels=5))
    longer = csnn()
    longer.append(layer.Linear(3, 3, step_mode="m"))
    refused(path, r"does not fit this Sequential: it has no \['15.weight', '15.bias'\]", longer)
    shorter = csnn()[:12]
    refused(path, r"the model has no \['12.bias', '12.weight'\]", shorter)
    for change, words in (
        (lambda net: setattr(net[2], "v_threshold", 7.0), "'2' has v_threshold=.*, and this model v_threshold=7.0"),
        (lambda net: setattr(net[2], "tau", 3.0), "'2' has tau=2.0, and this model tau=3.0"),
        (lambda net: setattr(net[5], "eps", 0.5), "'5' has eps=1e-05, and this model eps=0.5"),
        (lambda net: net.__setitem__(6, node("if", v_threshold=net[6].v_threshold)), "has neuron='LIFNode'"),
        (lambda net: setattr(net[3], "ceil_mode", True), "'3' has ceil_mode=False"),
    ):
        net = csnn()
        change(net)
        refused(path, words, net)
    single = csnn()
    functional.set_step_mode(single, "s")
    refused(path, "does not run on example_input", single, error=ConversionError)
    net = csnn()
    with pytest.raises(ConversionError, match="cannot be converted again"):
        sj_tac.load(path, sj_tac.convert(net))
    with pytest.raises(ModelTypeError, match="got str"):
        sj_tac.load(path, "net")
    with pytest.raises(CheckpointError, match=r"'0.weight' of the model is on the meta device; model.to_empty"):
        sj_tac.load(path, csnn().to("meta"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'strict'"):
        sj_tac.load(path, net, strict=False)


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path, monkeypatch):
    path, fast = tmp_path / "net.safetensors", sj_tac.convert(csnn(), "preserve", 2)
    sj_tac.save(fast, path)
    before = path.read_bytes()

    def fails(words, net, error=CheckpointError, to=path):
        with pytest.raises(error, match=words or None):
            sj_tac.save(net, to)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    fails("the suffix says what is written: .safetensors", fast, to=tmp_path / "net.ckpt")
    fails("not a converted model", csnn(), ConversionError)
    fails("got str", "net", ModelTypeError)
    outer = nn.Sequential(sj_tac.convert(csnn()))
    fails("its module '0' is: call save on that", outer, ConversionError)
    fails("on the meta device", copy.deepcopy(fast).to("meta"))
    late = copy.deepcopy(fast)
    parametrizations.weight_norm(late[4])
    fails("layer '4' was parametrized after it was converted", late)
    replaced = copy.deepcopy(fast)
    replaced[4] = conv(4, 4, bias=False)
    fails("layer '4' was converted, and another module stands there now", replaced)
    lazy = copy.deepcopy(fast)
    lazy.append(nn.LazyLinear(3))
    fails("has no shape yet; run the net once", lazy)
    wide = copy.deepcopy(fast)
    wide.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex128))
    fails("safetensors has no dtype torch.complex128; write a .pt instead", wide)
    sparse = copy.deepcopy(fast)
    sparse.register_buffer("rare", torch.zeros(2).to_sparse())
    fails("'rare' is a tensor of layout torch.sparse_coo", sparse)
    named = copy.deepcopy(fast)
    named.register_module("sj_tac:x", nn.Linear(2, 2))
    fails("begins with 'sj_tac:'", named)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    fails("No space left", fast, WriteError)


def test_pruned_nets_go_into_models_that_are_pruned_alike(tmp_path):
    """Pruned weights are computed, so that such a net cannot be copied: convert and load in place."""
    source = csnn()
    prune.l1_unstructured(source[4], "weight", 0.5)
    fast = sj_tac.convert(source, "preserve", 2, inplace=True)
    wanted = at_rest(fast, FRAMES)
    sj_tac.save(fast, tmp_path / "net.safetensors")
    refused(tmp_path / "net.safetensors", r"it has no \['4.weight'\]; the model has no \['4.weight_mask', '4.weight_orig'")
    model = csnn()
    prune.random_unstructured(model[4], "weight", 0.3)
    with pytest.raises(ConversionError, match="inplace=True"):
        sj_tac.load(tmp_path / "net.safetensors", model)
    again = sj_tac.load(tmp_path / "net.safetensors", model, inplace=True)
    assert again is model
    assert torch.equal(at_rest(again, FRAMES), wanted)
    assert torch.equal(again[4].weight_mask, fast[4].weight_mask)


@pytest.mark.parametrize(("kind", "other"), [(float, torch.tensor), (torch.tensor, float)])
def test_thresholds_that_are_tensors_are_compared(kind, other, tmp_path):
    def build(threshold):
        net = csnn()
        net[2].v_threshold = threshold
        return net

    sj_tac.save(sj_tac.convert(build(kind(0.15)), k=2), tmp_path / "net.pt")
    with pytest.raises(CheckpointError, match=r"'2' has v_threshold=0.15\d*, and this model v_threshold=0.4"):
        sj_tac.load(tmp_path / "net.pt", build(other(0.4)))
    assert sj_tac.load(tmp_path / "net.pt", build(other(0.15)))[2].v_threshold == pytest.approx(0.15)


def test_a_pickled_net_whose_neurons_are_not_registered_here(monkeypatch):
    """Weights would be those of another neuron, and the report would say that all is as it was."""
    net = nn.Sequential(layer.Conv2d(2, 4, 3, step_mode="m"), OwnNeuron()).eval()
    monkeypatch.setattr(registry, "_NEURONS", dict(registry._NEURONS))
    sj_tac.register_neuron(OwnNeuron, decay=0.7)
    held = pickle.dumps(sj_tac.convert(net, k=2, example_input=torch.rand(4, 2, 2, 8, 8)))
    assert sj_tac.report(pickle.loads(held)).converted
    del registry._NEURONS[OwnNeuron]
    with pytest.raises(
        ConversionError, match=r"layer '0' .*OwnNeuron, which is not registered in this process.*register_neuron"
    ):
        pickle.loads(held)
