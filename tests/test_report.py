"""The report: numbers that can be counted by hand, plain data, and a table a person can read."""

import json

import pytest
import torch
from spikingjelly.activation_based import layer
from support import csnn, frames, node
from torch import nn

import sj_tac


def macs(conv, height, width, frames):
    kernel = conv.kernel_size[0] * conv.kernel_size[1]
    return conv.out_channels * height * width * conv.in_channels // conv.groups * kernel * frames


@pytest.mark.parametrize(("policy", "calls"), [("preserve", [3, 3, 3]), ("collapse", [3, 3, 3]), ("keep", [7, 7, 7])])
def test_macs_are_counted(policy, calls):
    net, x = csnn(), frames(7, 2, 2, 8, 8)
    report = sj_tac.plan(net, policy, 3, example_input=x)
    sizes = {"0": 8, "4": 4, "8": 2}
    for verdict, count in zip([report[name] for name in sizes], calls, strict=True):
        conv = net.get_submodule(verdict.layer)
        size = sizes[verdict.layer]
        assert verdict.macs_before == macs(conv, size, size, 7)
        assert verdict.macs_after == macs(conv, size, size, count)


def test_macs_show_once_the_net_has_seen_an_input():
    fast = sj_tac.convert(csnn(), "preserve", 2)
    assert sj_tac.report(fast)["0"].macs_before is None
    assert " - " in str(sj_tac.report(fast))
    with torch.no_grad():
        fast(frames(5, 3, 2, 8, 8))
    verdict = sj_tac.report(fast)["0"]
    assert (verdict.macs_before, verdict.macs_after) == (macs(fast[0], 8, 8, 5), macs(fast[0], 8, 8, 3))


def test_stretched_convs_count_less():
    policy = {"default": {"mode": "keep"}, "rules": [{"match": "0", "mode": "collapse", "k": 4}]}
    report = sj_tac.plan(csnn(), policy, example_input=frames(8, 1, 2, 8, 8))
    assert report["4"].status == "stretched"
    assert report["4"].macs_after * 4 == report["4"].macs_before


def test_macs_of_convs_that_stay_are_known_from_the_example():
    net = nn.Sequential(
        csnn()[:4],
        layer.SeqToANNContainer(nn.Conv2d(4, 2, 3, stride=2, groups=2), nn.ReLU()),
        node("lif"),
        layer.Conv2d(2, 3, 1, step_mode="m"),
    )
    report = sj_tac.plan(net, example_input=frames(6, 5, 2, 8, 8))
    assert report["1.0"].macs_before == report["1.0"].macs_after == 2 * 1 * 1 * 2 * 9 * 6
    assert report["3"].macs_before == 3 * 1 * 1 * 2 * 6


def test_filters_and_plain_data_agree():
    report = sj_tac.plan(csnn(), {"rules": [{"match": "4", "mode": "keep"}]})
    statuses = ("converted", "kept", "refused", "stretched")
    assert sum(len(getattr(report, status)) for status in statuses) == len(report.verdicts) == 3
    assert json.loads(report.to_json()) == report.to_dict()
    assert [v["layer"] for v in report.to_dict()["verdicts"]] == ["0", "4", "8"]
    with pytest.raises(KeyError, match="no verdict for '5'; there are"):
        report["5"]


def test_the_table_says_what_and_why():
    text = str(sj_tac.plan(csnn(), {"rules": [{"match": "4", "mode": "keep"}]}, example_input=frames(8, 1, 2, 8, 8)))
    for words in ("layer", "status", "conv MACs/sample", "kernel", "POLICY_KEEP: the policy says keep", "numba"):
        assert words in text
    assert "2 converted, 0 stretched, 1 kept, 0 refused; conv MACs per sample" in text
    # Each hint stands once below the table, however many layers it concerns.
    assert text.count("change the rule to convert it") == 1


def test_a_report_is_gone_through_and_asked_for_names():
    found = sj_tac.report(sj_tac.convert(csnn(), "preserve", 2))
    assert [verdict.layer for verdict in found] == [verdict.layer for verdict in found.verdicts]
    assert len(list(found)) > 1
    assert found.verdicts[0].layer in found
    assert "none" not in found
