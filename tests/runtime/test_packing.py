"""Convolutions of small maps with weights that stay in oneDNN's layout: the same bits, whatever becomes of the weights."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from packing_cases import CHANNELS, convs, found, frames, packed, settled, source
from spikingjelly.activation_based import functional, neuron, surrogate
from straight_cases import compare
from torch import nn

import sj_tac
from sj_tac.runtime import packing

pytestmark = pytest.mark.skipif(packing._onednn() is None, reason="this build of torch has no oneDNN")


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"groups": 2}, {"dilation": 2, "padding": 2}, {"kernel_size": 1, "padding": 0}], ids=str
)
def test_the_same_bits_as_the_definition(k, options):
    net, x = packed(k, **options)
    assert compare(net, x) > 0.02
    others = [frames(5), frames(6, 3), frames(6, 2, size=6)]
    settled(net, *others)
    for other in (*others, x):
        assert compare(net, other) > 0.02


def test_shapes_that_take_turns_share_one_pack():
    net, x = packed()
    before = [conv._tac.packing.pack for conv in convs(net)]
    other = frames(6, 4)
    settled(net, other, x)
    assert [conv._tac.packing.pack for conv in convs(net)] == before
    assert found(net) == [{packing.PACKS}] * 3
    compare(net, other)


def test_contiguous_nets_and_large_maps_run_as_they_did():
    net = sj_tac.convert(source().to(memory_format=torch.contiguous_format), "preserve", 2)
    x = frames(last=False)
    assert not any(packing.PACKS in kinds for kinds in found(settled(net, x)))
    assert all(conv._tac.packing.pack is None for conv in convs(net))
    compare(net, x)
    net = sj_tac.convert(source(), "preserve", 1)
    assert not any(packing.PACKS in kinds for kinds in found(settled(net, frames(4, 4, size=16))))


def write_one(conv):
    conv.weight.data[3, 1, 0, 2] += 1.0


def turn_signs(conv):
    conv.weight.data.neg_()


def swap(conv):
    conv.weight.data[0], conv.weight.data[1] = conv.weight.data[1].clone(), conv.weight.data[0].clone()


def through_numpy(conv):
    conv.weight.detach().numpy()[0] *= 1.5


def in_place(conv):
    with torch.no_grad():
        conv.weight.mul_(1.25)


def other_data(conv):
    conv.weight.data = conv.weight.data * 0.75


def other_parameter(conv):
    conv.weight = nn.Parameter(conv.weight.detach() * 0.75)


def loaded(conv):
    conv.load_state_dict({"weight": torch.randn(conv.weight.shape) * 0.1})


def assigned(conv):
    conv.load_state_dict({"weight": torch.randn(conv.weight.shape) * 0.1}, assign=True)


def with_bias(conv):
    conv.bias = nn.Parameter(torch.rand(CHANNELS) * 0.3)


def dilated(conv):
    conv.dilation, conv.padding = (2, 2), (2, 2)


def in_groups(conv):
    conv.groups, conv.weight = 2, nn.Parameter(conv.weight.detach()[:, : CHANNELS // 2].clone())
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)


def contiguous(conv):
    conv.weight.data = conv.weight.data.contiguous()


EDITS = [
    write_one, turn_signs, swap, through_numpy, in_place, other_data, other_parameter, loaded, assigned, with_bias, dilated,
    in_groups, contiguous,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_what_becomes_of_a_layer_is_seen(edit):
    net, x = packed()
    with torch.no_grad():
        before = net(x).clone()
        edit(convs(net)[1])
        functional.reset_net(net)
        after = net(x).clone()
    assert edit is contiguous or not torch.equal(before, after)
    for _ in range(3):  # plain; laid out anew; tried, where it is a call of another kind
        compare(net, x)


def test_weights_that_are_other_ones_in_every_call_are_never_read_from_an_old_pack():
    net, x = packed()
    for _ in range(6):
        for conv in convs(net):
            conv.weight.data.add_(torch.randn(conv.weight.shape) * 0.02)
        compare(net, x)


def test_a_step_of_an_optimizer_between_two_calls():
    net, x = packed()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(3):
        functional.reset_net(net)
        net(x).mean().backward()
        optimizer.step()
        compare(net, x)
        compare(net, x)
    assert packing.PACKS in found(net)[1]


def test_who_differentiates_never_runs_from_a_pack(monkeypatch):
    net, x = packed()
    monkeypatch.setattr(packing, "_run", lambda *_: pytest.fail("it has no backward"))
    net(x).sum().backward()
    assert all(conv.weight.grad is not None for conv in convs(net))


def test_a_kind_of_call_whose_bits_are_others_runs_as_it_did(monkeypatch):
    run = packing._run
    monkeypatch.setattr(packing, "_run", lambda *arguments: run(*arguments) * (1 + 1e-6))
    net = settled(sj_tac.convert(source(), "preserve", 2), frames())
    assert found(net) == [{packing.PLAIN}] * 3
    assert all(conv._tac.packing.pack is None for conv in convs(net))


def test_other_strides_are_another_result(monkeypatch):
    run = packing._run
    monkeypatch.setattr(packing, "_run", lambda *arguments: run(*arguments).contiguous())
    net = settled(sj_tac.convert(source(), "preserve", 2), frames())
    assert found(net) == [{packing.PLAIN}] * 3


@pytest.mark.parametrize("refused", [0, 1], ids=["lay out", "convolve"])
def test_a_build_of_torch_that_refuses(monkeypatch, refused):
    def refuses(*_):
        raise RuntimeError("could not create a primitive")

    there = list(packing._onednn())
    there[refused] = refuses
    monkeypatch.setattr(packing, "_onednn", lambda: packing._OneDNN(*there))
    net = settled(sj_tac.convert(source(), "preserve", 2), frames())
    assert found(net) == [{packing.PLAIN}] * 3
    compare(net, frames())
    monkeypatch.setattr(packing, "_onednn", lambda: None)
    net = settled(sj_tac.convert(source(), "preserve", 2), frames())
    assert found(net) == [{packing.PLAIN}] * 3


@pytest.mark.parametrize("setting", ["threads", "onednn"])
def test_settings_of_torchs_that_change_its_convolutions(setting):
    net, x = packed()
    threads = torch.get_num_threads()
    try:
        if setting == "threads":
            torch.set_num_threads(threads + 1)
        else:
            torch.backends.mkldnn.set_flags(False)
        for _ in range(3):
            compare(net, x)
        assert len(convs(net)[0]._tac.packing.calls) == 2
        if setting == "onednn":
            assert packing.PLAIN in found(net)[0]
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.set_flags(True)


def test_copies_start_anew_and_nothing_is_saved():
    net, x = packed()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert all(conv._tac.packing.pack is None and not conv._tac.packing.calls for conv in convs(other))
        compare(settled(other, x), x)
    assert not any("pack" in key for key in net.state_dict())


def test_a_net_that_is_given_back_holds_no_pack():
    net, _ = packed()
    pack = weakref.ref(convs(net)[0]._tac.packing)
    restored = sj_tac.restore(net)
    del net
    gc.collect()
    assert pack() is None
    assert not any(hasattr(m, "_tac") for m in restored.modules())


def test_under_another_default_device():
    net, x = sj_tac.convert(source(), "preserve", 2), frames()
    with torch.device("meta"):
        settled(net, x)
    assert found(net) == [set()] * 3  # a default device is a mode of torch's functions
    assert packing.PACKS in found(settled(net, x))[0]
    compare(net, x)


def test_the_random_numbers_of_the_caller_stay_what_they_are():
    net, x = sj_tac.convert(source(), "preserve", 2), frames()
    before = torch.get_rng_state()
    assert packing.PACKS in found(settled(net, x))[0]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_reference_backend_is_plain_torch():
    net = settled(sj_tac.convert(source(), "preserve", 2, backend="reference"), frames())
    assert not any(packing.PACKS in kinds for kinds in found(net))


def test_packs_of_inference_mode_serve_outside_of_it():
    net, x = sj_tac.convert(source(), "preserve", 2), frames()
    with torch.inference_mode():
        for _ in range(3):
            functional.reset_net(net)
            net(x)
    compare(net, x)
    assert found(net) == [{packing.PACKS}] * 3


def test_threads_that_share_a_layer():
    net, x = packed(1)
    conv, folded = convs(net)[0], x.flatten(0, 1)
    with torch.no_grad():
        wanted = torch.conv2d(folded, conv.weight, None, 1, 1)
    failed = []

    def call():
        for _ in range(50):
            with torch.no_grad():
                y = packing.convolve(conv, folded)
            if y is not None and not torch.equal(y, wanted):
                failed.append(y)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        conv._tac.packing.pack = None
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("k", [1, 2])
def test_layers_of_another_dtype(k):
    net, x = sj_tac.convert(source(), "preserve", k, dtype=torch.bfloat16), frames()
    with torch.no_grad():
        wanted = net(x).clone()
        settled(net, x)
        assert torch.equal(net(x), wanted)
    assert packing.PACKS in set().union(*found(net))
    with torch.no_grad():
        convs(net)[1].weight.data.neg_()
        functional.reset_net(net)
        changed = net(x).clone()
        settled(net, x)
        assert torch.equal(net(x), changed)
    assert not torch.equal(changed, wanted)


class Folded(nn.Module):
    """torch's own convolution on frames that were folded, as many published transformers have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
        self.norm.running_var.uniform_(0.02, 0.1)
        self.node = neuron.LIFNode(surrogate_function=surrogate.ATan(), step_mode="m")
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        steps, batch = x.shape[:2]
        y = self.norm(self.conv(x.flatten(0, 1)))
        return self.node(y.reshape(steps, batch, *y.shape[1:]))


def test_folded_frames():
    x = frames()
    net = settled(sj_tac.convert(Folded().eval(), "preserve", 2, example_input=x), x)
    assert found(net) == [{packing.PACKS}]
    assert compare(net, x) > 0.02
    convs(net)[0].weight.data.neg_()
    compare(net, x)
    compare(net, frames(5, 3))
