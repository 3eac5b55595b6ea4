"""The tool behind docs/published.md: its checks find what is wrong, and a model that fails stops nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from spikingjelly.activation_based import layer, neuron
from support import awake, conv, frames, node, norm, only_v2
from torch import nn

import sj_tac
from benchmarks.published import building, oracle, stubs
from benchmarks.published.cases import CASES, REPOSITORIES, SAMPLES, Case
from benchmarks.published.examining import CLOSE, Row, check, count, scores
from benchmarks.published.page import page
from sj_tac.verdicts import REASONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "published.md"
RESULTS = ROOT / "benchmarks" / "results"
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


def run(*options):
    """The tool in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.published", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page and the rows of a folder with three models: one that runs, one that does not import, one that ends Python."""
    folder = tmp_path_factory.mktemp("repositories")
    models = {"cifar10": NET, "cifar10dvs": "import no_such_package", "imagenet": "exit(3)"}
    for name, text in models.items():
        (folder / "spikformer" / name).mkdir(parents=True)
        (folder / "spikformer" / name / "model.py").write_text(text)
    out = folder / "page.md"
    done = run("--repos", folder, "--seconds", 0.1, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(out.with_suffix(".json").read_text())["rows"]}
    return out.read_text(), rows, done.stdout


@pytest.mark.slow
def test_a_model_is_built_from_its_checkout_checked_and_timed(written):
    text, rows, _ = written
    row = Row(**rows["Spikformer, CIFAR10"])
    assert not row.broken
    assert not row.failures
    assert (row.convs, row.converted, row.driving, row.shared) == (2, 2, 2, 2)
    assert row.unfused == "equal"
    assert row.fused is not None
    assert row.fused <= CLOSE
    assert set(row.definition) == {"2", "3"}
    assert max(row.definition.values()) <= CLOSE
    assert row.neurons == 2
    assert row.rates[0] > 0.02
    assert set(row.ms) == {"source", "exact", "1", "2", "4"}
    assert row.rounds >= 3
    assert set(row.argmax) == set(row.spikes) == {"2", "4"}
    assert (row.affine, row.affine_shared) == (2, 2)
    # The stem's image is one frame four times: 4 x 3 x 9 multiplications at each of 32 x 32 places.
    macs = 3 * 4 * 9 * 32 * 32
    assert row.exact == {"layers": 1, "before": 4 * macs, "after": macs, "unfused": "equal"}
    assert "| `Spikformer, CIFAR10` | 2x3x32x32 | 2 | 2 | - | 2 | 100 % | 2 | 100 % | equal | equal |" in text
    assert "| `Spikformer, CIFAR10` | 4 | 1 | 0.4424 M | 0.1106 M | equal | " in text


@pytest.mark.slow
def test_a_model_that_fails_says_why_and_stops_nothing(written):
    text, rows, told = written
    assert rows["Spikformer, CIFAR10-DVS"]["broken"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert "exit(3)" in rows["Spikformer-8-512, ImageNet"]["broken"]
    for name in ("Spikformer, CIFAR10-DVS", "Spikformer-8-512, ImageNet"):
        assert f"- `{name}` does not run: {rows[name]['broken']}" in text
    assert "3 models of 1 repositories; 1 run, 1 of these convert: 2 of 2 convolutions" in text
    assert "Spikformer, CIFAR10: 2 of 2 convert" in told
    assert "a script may print" not in told


@pytest.mark.slow
def test_a_folder_without_repositories_is_one_clear_error(tmp_path):
    done = run("--repos", tmp_path)
    assert done.returncode == 2
    assert f"no known repository in {tmp_path}" in done.stderr
    for name, owner in REPOSITORIES.items():
        assert f"git clone https://github.com/{owner} {tmp_path / name}" in done.stderr


@pytest.mark.slow
def test_only_names_models_that_are_known_and_there(tmp_path):
    (tmp_path / "TCJA").mkdir()
    assert "the models are 'Spikformer, CIFAR10', " in run("--repos", tmp_path, "--only", "Spikformer").stderr
    done = run("--repos", tmp_path, "--only", "Spikformer, CIFAR10")
    assert f"needs git clone https://github.com/ZK-Zhou/spikformer {tmp_path / 'spikformer'}" in done.stderr


def test_every_case_is_of_a_known_repository_and_has_samples():
    assert {case.repository for case in CASES.values()} == set(REPOSITORIES)
    for name, case in CASES.items():
        x = building.sample(case, 0)
        assert tuple(x.shape) == case.shape, name
        assert SAMPLES in case.shape[:2], name
        assert not torch.equal(x, building.sample(case, 1)), name
        assert torch.equal(x, building.sample(case, 0)), name
        if case.events:
            assert set(x.unique().tolist()) == {0.0, 1.0}, name
            assert 0.03 < x.mean() < 0.25, name


def test_events_drift():
    """A frame is like the one before it, a pixel further, more than like any other frame."""
    x = building.sample(Case("", "", lambda code: nn.Identity(), (2, 12, 2, 64, 64), events=True), 0)
    rates = [nn.functional.avg_pool2d(x[0, t][None], 9, 1) for t in range(12)]
    moved = nn.functional.avg_pool2d(x[0, 5].roll((1, 1), (-2, -1))[None], 9, 1)
    assert (moved - rates[6]).abs().mean() < (rates[5 - 5] - rates[11]).abs().mean()


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


def test_what_drives_a_neuron_is_found_without_sj_tac():
    reached = oracle.Reached(made(), CASE, frames(6, 2, 2, 8, 8))
    convs = {name: nodes for name, nodes in reached.neurons.items() if name != "norm"}
    assert convs == {"conv": {"lif"}, "wide": {"out"}, "narrow": {"out"}}
    assert reached.frames == {"lif": (6, 2), "out": (6, 2)}


class Ways(nn.Module):
    """One convolution on every kind of way to a neuron."""

    def __init__(self):
        super().__init__()
        kinds = ("plain", "pooled", "summed", "gated", "late", "squared", "averaged")
        self.convs = nn.ModuleDict({kind: conv(2, 3) for kind in kinds})
        self.lifs = nn.ModuleDict({kind: node("lif") for kind in kinds})
        self.first = node("lif")
        self.highest, self.mean = layer.MaxPool2d(2, step_mode="m"), layer.AvgPool2d(2, step_mode="m")

    def forward(self, x):
        x = self.first(x)
        y = {kind: conv(x) for kind, conv in self.convs.items()}
        given = {
            "plain": y["plain"],
            "pooled": self.highest(y["pooled"]),
            "summed": y["summed"] + 3 * x.sum(2, keepdim=True),
            "gated": y["gated"] * (1 + x.mean((2, 3, 4), keepdim=True)),
            "late": y["late"] * torch.arange(1.0, 7).view(6, 1, 1, 1, 1).to(x),
            "squared": y["squared"] ** 2,
            "averaged": self.mean(y["averaged"]),
        }
        return sum(self.lifs[kind](value).mean((2, 3, 4)) for kind, value in given.items())


class Own(neuron.LIFNode):
    def neuronal_charge(self, x):
        self.v = self.v + x


class Renamed(neuron.LIFNode):
    def __init__(self):
        super().__init__(tau=3.0, step_mode="m")


def test_which_ways_to_a_neuron_are_affine_is_found_without_sj_tac():
    torch.manual_seed(0)
    net, x = Ways().eval(), 3 * frames(6, 2, 2, 8, 8)
    case = Case("", "", lambda code: net, (6, 2, 2, 8, 8))
    for lif in net.lifs.values():
        lif.v_threshold = 0.2
    net.lifs["averaged"] = Own(step_mode="m")
    with oracle.in_float64():
        affine = oracle.Affine(net, case, x, oracle.Reached(net, case, x))
        assert {kind for kind in net.convs if affine(f"convs.{kind}")} == {"plain", "summed"}
        net.lifs["averaged"] = Renamed()
        affine = oracle.Affine(net, case, x, oracle.Reached(net, case, x))
        assert affine("convs.averaged")
    assert torch.get_default_dtype() == torch.float32
    assert torch.zeros(1).float().dtype == torch.float32


@pytest.mark.parametrize("folded", [False, True])
def test_shared_frames_are_the_weighted_mean_of_their_group(folded):
    x = torch.rand(5, 2, 3, dtype=torch.float64)
    got = oracle.shared(x.flatten(0, 1) if folded else x, (5, 2), 0.5, 3).reshape(5, 2, 3)
    first = (0.25 * x[0] + 0.5 * x[1] + x[2]) / 1.75
    last = (0.5 * x[3] + x[4]) / 1.5
    torch.testing.assert_close(got, torch.stack([first] * 3 + [last] * 2))


def test_an_image_that_is_repeated_later_is_left_alone():
    x = torch.rand(2, 3, 4, 4)
    assert oracle.shared(x, (5, 2), 0.5, 3) is x


def test_the_definition_sees_a_wrong_k():
    """It agrees with the source at k=1, and differs from it at k=2."""
    net, x = made(), frames(6, 2, 2, 8, 8, seed=3)
    reached = oracle.Reached(net, CASE, x)
    for k, same in ((1, True), (2, False)):
        defined = oracle.define(net, {"conv": k, "narrow": k}, reached, CASE)
        assert (oracle.difference(oracle.run(net, x), oracle.run(defined, x)) < CLOSE) is same


def test_neurons_that_decay_differently_have_no_one_definition():
    net, x = made(), frames(6, 2, 2, 8, 8)
    reached = oracle.Reached(net, CASE, x)
    reached.neurons["conv"].add("out")
    with pytest.raises(ValueError, match=r"decays \[0\.5, 0\.75"):
        oracle.define(net, {"conv": 2}, reached, CASE)


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


def test_counts_are_of_the_plan_and_of_what_drives_a_neuron():
    net, x = made(), frames(6, 2, 2, 8, 8)
    found = Row("", "", "", [])
    count(found, CASE, net, x, oracle.Reached(net, CASE, x))
    assert (found.convs, found.converted, found.driving, found.shared) == (5, 3, 3, 3)
    assert found.refused == {"NO_NEURON": 1, "NEVER_CALLED": 1}
    assert found.why["NEVER_CALLED"].startswith("never: ")
    assert (found.affine, found.affine_shared) == (3, 3)
    assert (found.linear, found.approximate) == (0, 0)


def test_decays():
    assert oracle.decay(node("if"), CASE) == 1.0
    assert oracle.decay(node("lif", tau=4.0), CASE) == 0.75
    assert oracle.decay(node("plif", tau=4.0), CASE) == pytest.approx(0.75)
    registered = Case("", "", lambda code: nn.Identity(), (), registered={"LIFNode": lambda node: 0.3})
    assert oracle.decay(node("lif"), registered) == 0.3


def test_nets_are_woken():
    torch.manual_seed(0)
    net = nn.Sequential(layer.Conv2d(2, 4, 3), layer.BatchNorm2d(4), neuron.LIFNode(v_threshold=50.0)).eval()
    for module in net:
        module.step_mode = "m"
    nn.init.zeros_(net[1].weight)
    case = Case("", "", lambda code: net, (6, 2, 2, 8, 8), events=True)
    building.wake(net, case)
    assert not net.training
    assert net[1].momentum == 0.1
    assert net[1].weight.eq(1).all()
    (rate,) = building.rates(net, case, building.sample(case, 100)).values()
    assert building.LOW <= rate <= building.HIGH


def test_scores():
    x = torch.rand(5, 2, 7)
    assert torch.equal(scores([x], 2), x.mean(0))
    assert torch.equal(scores([x.transpose(0, 1)], 2), x.mean(0))
    assert torch.equal(scores([x[0]], 2), x[0])
    assert scores([x, x], 2) is None
    assert scores([torch.rand(2, 3, 4, 4)], 2) is None


def test_stand_ins():
    x = torch.rand(2, 3, 4)
    assert torch.equal(stubs.rearrange(x, "a b c -> c a b"), x.permute(2, 0, 1))
    with pytest.raises(NotImplementedError, match="only permutes"):
        stubs.rearrange(x, "a b c -> (a b) c")
    with pytest.raises(NotImplementedError, match="only a stand-in"):
        stubs.module("timm").something(1)
    timm = stubs._timm()
    timm["timm.models.registry"].register_model(Net)
    assert isinstance(timm["timm.models"].create_model("Net", drop_block_rate=None), Net)
    sequence = torch.rand(3, 2, 2, 8, 8)
    inner = nn.Conv2d(2, 3, 3)
    assert torch.allclose(stubs.SequenceWise(inner)(sequence)[1], inner(sequence[1]), atol=1e-6)


def row(name, **more):
    base = {"repository": "TCJA", "file": "a.py", "shape": [2, 3], "convs": 4, "converted": 3, "driving": 4, "shared": 3}
    checks = {"unfused": "equal", "fused": 0.0, "definition": {"2": 0.0, "3": 0.0}}
    return Row(name=name, **(base | checks | {"refused": {"NOT_LINEAR": 1}, "rates": [0.1, 0.2]} | more))


def test_the_page_counts_what_is_right_once():
    wrong = row("wrong", unfused="DIFFERENT", fused=0.5, definition={"2": 0.1}, failures=["the definition of k=3: no"])
    again = row("right, registered", registered=True, converted=4, shared=4, refused={})
    rows = [row("right"), wrong, again, row("gone", broken="no file", converted=0, convs=0)]
    where = {"date": "2000-01-01", "cpu": "c", "threads": 1, "torch": "t", "spikingjelly": "s", "python": "p"}
    text = page(rows, {"machine": where, "seconds": 1.0, "commits": {"TCJA": "0123456789abcdef"}})
    assert "3 models of 1 repositories; 2 run, 2 of these convert: 6 of 8 convolutions. Of the 8" in text
    assert "6 convert (75 %)" in text
    assert "(`sj_tac.register_neuron`), 4 more." in text
    assert "k=1: the source's output in 2 of 3 nets" in text
    assert "gives, in 2 of 3" in text
    assert "Refused, in all: NOT_LINEAR x 2." in text
    assert "at 0123456789" in text
    assert "| `wrong` | 2x3 | 4 | 3 | NOT_LINEAR x 1 | 4 | 75 % | 0 | - | DIFFERENT / DIFFERENT (5.0e-01) |" in text
    assert "DIFFERENT (1.0e-01) / failed |" in text
    assert "- `gone` does not run: no file" in text
    assert "- `wrong`: the definition of k=3: no" in text


def test_the_page_is_of_the_newest_results_and_nothing_on_it_is_wrong():
    (newest,) = sorted(RESULTS.glob("published-*.json"))[-1:]
    result = json.loads(newest.read_text())
    rows = [Row(**row) for row in result["rows"]]
    assert page(rows, result) == PAGE.read_text()
    assert [r.name for r in rows] == list(CASES)
    ran = [r for r in rows if not r.broken and not r.registered]
    assert len(ran) == 45
    # Of what can be shared at all.
    assert sum(r.affine_shared for r in ran) >= 0.9 * sum(r.affine for r in ran)
    for r in rows:
        assert r.converted + sum(r.refused.values()) == r.convs, r.name
        assert set(r.refused) <= {reason.value for reason in REASONS}, r.name
        assert r.shared <= r.driving <= r.convs, r.name
        assert r.affine_shared <= r.affine <= r.driving, r.name
        assert not r.failures, r.name
        if r.converted:
            assert r.unfused == "equal", r.name
            assert r.fused is not None, r.name
            assert max(r.fused, *r.definition.values()) <= CLOSE, r.name
