"""Each layer alone: the figures against their definitions, refusals as entries, table, JSON and heat map."""

import json

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import csnn, frames, no_collapse, recorded, time_by_k
from torch import nn

import sj_tac
from sj_tac.errors import BatchError, ConversionError, ModelTypeError, PolicyError

X = frames(6, 16, 2, 8, 8, dtype=torch.float64)  # two batches of 8 are one of 16, to a digit that moves no spike
LABELS = torch.arange(16) % 3


@pytest.fixture(scope="module")
def found():
    return sj_tac.sensitivity(
        csnn().double(), [(X[:, :8], LABELS[:8]), (X[:, 8:], LABELS[8:])], ks=(1, 2, 3), rounds=1, progress=False
    )


@torch.no_grad()
def outputs_and_rates(net):
    functional.reset_net(net)
    with recorded(net, neuron.BaseNode) as spikes:
        out = net(X).mean(0)
    functional.reset_net(net)
    return out, {name: (s[0].mean().item(), s[0][0, 0].numel()) for name, s in spikes.items()}


def test_every_layer_at_every_k_and_mode(found):
    assert [(e.layer, e.mode, e.k) for e in found.effects] == [
        (name, mode, k) for name in ("0", "4", "8") for mode in ("preserve", "collapse") for k in (1, 2, 3)
    ]
    assert (found.samples, found.steps, found.rounds) == (16, 6, 1)
    assert found.source_ms > 0


def test_k1_changes_nothing(found):
    for effect in found.effects:
        if effect.k == 1:
            assert (effect.disagreement, effect.drift) == (0, 0)
            assert effect.kl == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("name", "mode", "k"), [("0", "preserve", 3), ("4", "preserve", 2), ("8", "collapse", 3)])
def test_the_figures_are_their_definitions(found, name, mode, k):
    source = csnn().double()
    fast = sj_tac.convert(source, {"default": {"mode": "keep"}, "rules": [{"match": name, "mode": mode, "k": k}]})
    (out, rates), (got, changed) = outputs_and_rates(source), outputs_and_rates(fast)
    effect = next(e for e in found.effects if (e.layer, e.mode, e.k) == (name, mode, k))
    assert effect.disagreement == pytest.approx((out.argmax(1) != got.argmax(1)).double().mean().item())
    kl = torch.nn.functional.kl_div(got.log_softmax(1), out.log_softmax(1), log_target=True, reduction="batchmean")
    assert effect.kl == pytest.approx(max(0, kl.item()), rel=1e-6, abs=1e-12)
    moved = sum(abs(changed[n][0] - rate) * count for n, (rate, count) in rates.items())
    assert effect.drift == pytest.approx(moved / sum(rate * count for rate, count in rates.values()), rel=1e-6, abs=1e-9)
    assert effect.kl > 0


def test_milliseconds_saved_and_speed_up_say_the_same(found):
    for effect in found.effects:
        assert (effect.ms_saved > 0) == (effect.speedup > 1)


def test_table_json_and_heat_map(found, tmp_path):
    assert "predictions changed" in str(found)
    picture = found.save(tmp_path / "layers.json")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "layers.json").read_text())["effects"]) == 18


def test_a_layer_that_refuses_a_mode_is_an_entry_with_the_reason(tmp_path, monkeypatch):
    time_by_k(monkeypatch)
    net = no_collapse().double()
    found = sj_tac.sensitivity(net, X, ks=(2,), rounds=1, progress=False)
    refused = [e for e in found.effects if e.refused]
    assert [(e.layer, e.mode) for e in refused] == [("0", "collapse")]
    assert "COLLAPSE_FOLDED" in refused[0].refused
    assert "refused" in str(found)
    found.save(tmp_path / "x.json")


def test_bad_input():
    net = csnn().double()
    with pytest.raises(ConversionError, match="no convolution of Sequential can be converted"):
        sj_tac.sensitivity(nn.Sequential(layer.Conv2d(2, 3, 3, step_mode="m")), X.float(), progress=False)
    with pytest.raises(ModelTypeError):
        sj_tac.sensitivity("net", X)
    for message, options in (
        (r"modes=\('preserv',\): 'preserv' is none; did you mean 'preserve'", {"modes": ("preserv",)}),
        (r"ks=\(8, 16\): none is at most T = 6", {"ks": (8, 16)}),
        ("k is 0", {"ks": (0,)}),
        ("rounds=0", {"rounds": 0}),
    ):
        with pytest.raises(PolicyError, match=message):
            sj_tac.sensitivity(net, X, **options)
    with pytest.raises(BatchError, match=r"pass decode="):
        sj_tac.sensitivity(net[:4], X, ks=(2,), progress=False)


def test_decode_makes_scores_of_any_output():
    # The mean over T of a map of spikes, pooled: four "classes".
    decode = {"decode": lambda out: out.mean(0).mean((2, 3))}
    found = sj_tac.sensitivity(csnn().double()[:4], X, (2,), ("preserve",), rounds=1, progress=False, **decode)
    assert found.effects[0].kl > 0
