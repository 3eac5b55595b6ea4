"""The report: numbers that can be counted by hand, plain data, a table; and its page, whatever a layer is called."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import csnn, frames, node, recorded
from torch import nn

import sj_tac
from sj_tac.errors import BatchError
from sj_tac.tuning.evidence import Evidence, Trial
from sj_tac.verdicts import Report, Verdict


def macs(conv, height, width, frames):
    kernel = conv.kernel_size[0] * conv.kernel_size[1]
    return conv.out_channels * height * width * conv.in_channels // conv.groups * kernel * frames


@pytest.mark.parametrize(("policy", "frames_after"), [("preserve", 3), ("collapse", 3), ("keep", 7)])
def test_macs_are_counted(policy, frames_after):
    net = csnn()
    report = sj_tac.plan(net, policy, 3, example_input=frames(7, 2, 2, 8, 8))
    for name, size in {"0": 8, "4": 4, "8": 2}.items():
        conv = net.get_submodule(name)
        assert report[name].macs_before == macs(conv, size, size, 7)
        assert report[name].macs_after == macs(conv, size, size, frames_after)


def test_without_an_example_there_are_no_macs():
    report = sj_tac.report(sj_tac.convert(csnn(), "preserve", 2))
    assert report["0"].macs_before is None
    assert " - " in str(report)


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
    assert [verdict.layer for verdict in report] == ["0", "4", "8"]
    assert "0" in report
    assert "none" not in report
    with pytest.raises(KeyError, match="no verdict for '5'; there are"):
        report["5"]


def test_the_table_says_what_and_why():
    text = str(sj_tac.plan(csnn(), {"rules": [{"match": "4", "mode": "keep"}]}, example_input=frames(8, 1, 2, 8, 8)))
    for words in ("layer", "status", "conv MACs/sample", "kernel", "POLICY_KEEP: the policy says keep", "cpp"):
        assert words in text
    assert "2 converted, 0 stretched, 1 kept, 0 refused; conv MACs per sample" in text
    # Each hint stands once below the table, however many layers it concerns.
    assert text.count("change the rule to convert it") == 1


WILD = "<script>alert(1)</script>\"'&{{ 7 * 7 }}</td>\u202e漢"


class Page(HTMLParser):
    """Tables by id, as rows of cells; every attribute; the texts."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.attributes, self.tags, self.texts, self.cell = {}, [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "table":
            self.rows = self.tables[dict(attributes)["id"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = None

    def handle_data(self, data):
        self.texts.append(data)
        if self.cell:
            self.rows[-1][-1] += data


def page_of(report, path):
    report.to_html(path)
    return Page(path.read_text(encoding="utf-8"))


def evidence():
    trials = (
        Trial({"a": "keep"}, "keep all", True, 0.9, 1.0, 10.0, 4_000_000),
        Trial({"a": "preserve 2"}, "preserve 2", True, 0.89, 1.8, 5.5, 2_000_000, matched="none"),
        Trial({"a": "preserve 4"}, WILD, True, 0.7, 3.0, 3.3, 1_000_000),
        Trial({"a": "collapse 4"}, "worse", True, 0.6, 2.0, 5.0, 1_000_000),
        Trial({"a": "collapse 3"}, "refused one", True, refused="not whole"),
    )
    return Evidence("fastest within 0.01", "accuracy", 0.9, trials, "preserve 2", {}, 100, 3.0, "", ("a note",), {})


def net_with_batches():
    torch.manual_seed(0)
    return csnn(), [(frames(6, 2, 2, 8, 8, seed=s), torch.tensor([0, 1])) for s in (1, 2)]


def test_it_holds_what_the_report_says(tmp_path):
    net, batches = net_with_batches()
    policy = {"version": 1, "default": {"k": 2}, "rules": [{"match": "4", "mode": "keep"}]}
    report = sj_tac.report(sj_tac.convert(net, policy, example_input=batches[0][0]), batches)
    page = page_of(report, tmp_path / "report.html")
    rows = {row[0]: row for row in page.tables["verdicts"][1:]}
    assert list(rows) == ["0", "4", "8"]
    # 4 channels, 8 x 8, 2 inputs, 9 weights, 6 frames; 3 of them behind conversion.
    assert rows["0"][1:6] == ["converted", "preserve", "2", "27.6 k", "13.8 k"]
    assert rows["4"][1] == "kept"
    assert "POLICY_KEEP" in rows["4"][8]
    assert ("style", "width: 50.0%") in page.attributes
    layers = {row[0]: row for row in page.tables["layers"][1:]}
    assert layers["0"][2:4] == ["", ""]
    assert float(layers["2"][2]) > 0
    assert "trials" not in page.tables


def test_rates_and_times_are_those_of_both_nets():
    net, batches = net_with_batches()
    fast = sj_tac.convert(net, "preserve", 3)
    with torch.no_grad():
        fast(batches[0][0])
    before = sj_tac.report(fast).to_dict(), [dict(m._memories) for m in fast.modules() if isinstance(m, neuron.BaseNode)]
    report = sj_tac.report(fast, batches, rounds=2)
    assert sj_tac.report(fast).to_dict() == before[0]
    after = [dict(m._memories) for m in fast.modules() if isinstance(m, neuron.BaseNode)]
    assert all(a["v"] is b["v"] for a, b in zip(after, before[1], strict=True))
    for index, model in enumerate((net, fast)):
        with recorded(model) as spikes, torch.no_grad():
            for x, _ in batches:
                functional.reset_net(model)
                model(x)
        found = {row.name: row[2 + index] for row in report.layers if row.rate_before is not None}
        rates = {name: torch.stack(outputs).mean().item() for name, outputs in spikes.items()}
        assert found == {name: pytest.approx(rate, abs=1e-6) for name, rate in rates.items()}
    assert any(row.rate_before != row.rate_after for row in report.layers)
    timed = [row for row in report.layers if row.ms_before is not None]
    assert {row.name for row in timed} >= {"0", "1", "2", "3", "12"}
    assert all(row.ms_before > 0 and row.ms_after > 0 for row in timed)
    assert report.to_dict()["layers"][0]["name"] == report.layers[0].name
    with pytest.raises(BatchError):
        sj_tac.report(fast, [])


def wild_report():
    verdicts = (
        Verdict(WILD, "refused", reason="NO_NEURON", detail=WILD, hint=WILD),
        Verdict("fine", "converted", "preserve", 2, WILD, macs_before=10, macs_after=5),
        Verdict("half \ud800", "kept"),
        Verdict("nothing", "converted", macs_before=0, macs_after=0),
    )
    return Report(verdicts, title=WILD, evidence=evidence(), notes=(WILD,))


def test_names_are_text_whatever_they_hold(tmp_path):
    page = page_of(wild_report(), tmp_path / "report.html")
    assert "script" not in page.tags
    assert page.tables["verdicts"][1][0] == WILD
    assert page.tables["verdicts"][3][0] == "half ?"
    assert page.tables["trials"][1][1] == WILD
    assert not [name for name, _ in page.attributes if name.startswith("on")]

    # Nothing in it needs a network.
    assert not {"img", "iframe", "object", "embed", "base"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "action", "xlink:href")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import", (tmp_path / "report.html").read_text())


def test_the_frontier_is_drawn_in_its_place(tmp_path):
    (tmp_path / "report.html").write_text("what was there before")
    page = page_of(wild_report(), tmp_path / "report.html")
    assert [row[:2] for row in page.tables["trials"][1:]] == [
        ["frontier", WILD], ["", "worse"], ["chosen", "preserve 2"], ["frontier", "keep all"],
    ]  # fmt: skip
    assert page.tags.count("circle") == 4
    xs = [float(value) for name, value in page.attributes if name == "cx"]
    ys = [float(value) for name, value in page.attributes if name == "cy"]
    # In the order of the trials, the chosen one last: speed-ups 1, 3, 2, 1.8; metrics .9, .7, .6, .89, upwards.
    assert sorted(xs) == [xs[0], xs[3], xs[2], xs[1]]
    assert sorted(ys) == [ys[0], ys[3], ys[1], ys[2]]
    # Linear, with a twentieth of room at both ends of 560 pixels, in tenths of a pixel.
    assert xs == [round(60 + 560 * (speedup - 0.9) / 2.2, 1) for speedup in (1, 3, 2, 1.8)]
    assert "refused one" not in "".join(page.texts)
