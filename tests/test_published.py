"""The tool behind docs/published.md: its checks find what is wrong, and a model that fails stops nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import awake, conv, frames, node, norm, only_v2
from torch import nn

import sj_tac
from benchmarks.published import oracle
from benchmarks.published.cases import CASES, Case
from benchmarks.published.examining import CLOSE, Row, check
from benchmarks.published.page import page

ROOT = Path(__file__).resolve().parents[1]
pytestmark = only_v2

# A repository of our own, in the shape of one that is known: an image repeated, time folded into the batch.
NET = """
import torch
from torch import nn
from spikingjelly.clock_driven.neuron import MultiStepLIFNode
from timm.models.layers import DropPath, to_2tuple
from timm.models.registry import register_model

print("a script may print")


class Net(nn.Module):
    def __init__(self, T, img_size_h, in_channels, num_classes):
        super().__init__()
        self.T, self.size = T, to_2tuple(img_size_h)
        self.stem, self.stem_bn = nn.Conv2d(in_channels, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.stem_lif = MultiStepLIFNode(tau=2.0, detach_reset=True, backend="cupy")
        self.conv, self.bn = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.lif = MultiStepLIFNode(tau=2.0, detach_reset=True, backend="cupy")
        self.drop, self.head = DropPath(0.1), nn.Linear(6, num_classes)

    def forward(self, x):
        x = x.unsqueeze(0).repeat(self.T, 1, 1, 1, 1)
        T, B, C, H, W = x.shape
        x = self.stem_lif(self.stem_bn(self.stem(x.flatten(0, 1))).reshape(T, B, -1, H, W))
        x = self.lif(self.bn(self.conv(x.flatten(0, 1))).reshape(T, B, -1, H, W))
        return self.head(self.drop(x).flatten(3).mean(3).mean(0))


@register_model
def spikformer(T, img_size_h, in_channels, num_classes, **more):
    return Net(T, img_size_h, in_channels, num_classes)
"""


@pytest.mark.exhaustive
def test_models_are_built_checked_and_timed_and_one_that_fails_stops_nothing(tmp_path):
    """A folder with three models: one that runs, one that does not import, one that ends Python."""
    models = {"cifar10": NET, "cifar10dvs": "import no_such_package", "imagenet": "exit(3)"}
    for name, text in models.items():
        (tmp_path / "spikformer" / name).mkdir(parents=True)
        (tmp_path / "spikformer" / name / "model.py").write_text(text)
    out = tmp_path / "page.md"
    command = [sys.executable, "-m", "benchmarks.published", "--repos", tmp_path, "--seconds", "0.1", "--out", out]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(out.with_suffix(".json").read_text())["rows"]}
    row, text = Row(**rows["Spikformer, CIFAR10"]), out.read_text()
    assert not row.broken
    assert not row.failures
    assert (row.convs, row.converted, row.driving, row.shared, row.affine, row.affine_shared) == (2,) * 6
    assert row.unfused == "equal"
    assert row.fused is not None
    assert max(row.fused, *row.definition.values()) <= CLOSE
    assert set(row.definition) == {"2", "3"}
    assert row.rates[0] > 0.02
    assert "| `Spikformer, CIFAR10` | 2x3x32x32 | 2 | 2 | - | 2 | 100 % | 2 | 100 % | equal | equal |" in text
    assert rows["Spikformer, CIFAR10-DVS"]["broken"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert "exit(3)" in rows["Spikformer-8-512, ImageNet"]["broken"]
    assert "3 models of 1 repositories; 1 run, 1 of these convert: 2 of 2 convolutions" in text


class Net(nn.Module):
    """Two convolutions behind each other, a branch into a product with a gate, and a head that drives nothing."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.lif = conv(2, 3), norm(3), node("lif")
        self.wide, self.narrow, self.out = conv(3, 3), conv(3, 3), node("plif", tau=4.0)
        self.head, self.never = conv(3, 2), conv(3, 3)

    def forward(self, x):
        x = self.lif(self.norm(self.conv(x)))
        return self.head(self.out(self.narrow(self.wide(x))))


CASE = Case("", "", lambda code: Net(), (6, 2, 2, 8, 8))


def made():
    torch.manual_seed(0)
    return awake(Net().eval(), frames(6, 2, 2, 8, 8))


def test_the_definition_sees_a_wrong_k():
    """It agrees with the source at k=1, and differs from it at k=2."""
    net, x = made(), frames(6, 2, 2, 8, 8, seed=3)
    reached = oracle.Reached(net, CASE, x)
    for k, same in ((1, True), (2, False)):
        defined = oracle.define(net, {"conv": k, "narrow": k}, reached, CASE)
        assert (oracle.difference(oracle.run(net, x), oracle.run(defined, x)) < CLOSE) is same


@pytest.mark.parametrize("wrong", [False, True])
def test_a_conversion_that_is_wrong_is_called_different(monkeypatch, wrong):
    net, x = made(), frames(6, 2, 2, 8, 8, seed=3)
    convert = sj_tac.convert

    def other(*args, **more):
        fast = convert(*args, **more)
        if wrong:
            with torch.no_grad():
                fast.narrow.weight.mul_(1.5)
        return fast

    monkeypatch.setattr(sj_tac, "convert", other)
    found = Row("", "", "", [])
    check(found, CASE, net, x, oracle.Reached(net, CASE, x))
    assert not found.failures
    assert found.unfused == ("DIFFERENT" if wrong else "equal")
    assert found.fused is not None
    assert set(found.definition) == {"2", "3"}
    for value in (found.fused, *found.definition.values()):
        assert (value > CLOSE) is wrong


def test_the_page_is_of_the_newest_results_and_nothing_on_it_is_wrong():
    (newest,) = sorted((ROOT / "benchmarks" / "results").glob("published-*.json"))[-1:]
    result = json.loads(newest.read_text())
    rows = [Row(**row) for row in result["rows"]]
    assert page(rows, result) == (ROOT / "docs" / "published.md").read_text()
    assert [r.name for r in rows] == list(CASES)
    ran = [r for r in rows if not r.broken and not r.registered]
    assert len(ran) == 45
    # Of what can be shared at all.
    assert sum(r.affine_shared for r in ran) >= 0.9 * sum(r.affine for r in ran)
    for r in rows:
        assert r.converted + sum(r.refused.values()) == r.convs, r.name
        assert r.shared <= r.driving <= r.convs, r.name
        assert r.affine_shared <= r.affine <= r.driving, r.name
        assert not r.failures, r.name
        if r.converted:
            assert r.unfused == "equal", r.name
            assert r.fused is not None, r.name
            assert max(r.fused, *r.definition.values()) <= CLOSE, r.name
