"""docs/zoo.md: no builder of SpikingJelly's zoo is left out, and what it says of a net is what the net does."""

import inspect
import json
from pathlib import Path

import pytest
from support import only_v2

from sj_tac.verdicts import REASONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "zoo.md").read_text()
pytestmark = only_v2


def builders():
    """Every function of the zoo that takes a neuron and makes a net, and the classes that have no such function."""
    from spikingjelly.activation_based import model
    from spikingjelly.activation_based.model import (
        parametric_lif_net,
        sew_resnet,
        spiking_resnet,
        spiking_vgg,
        spiking_vggws_ottt,
    )

    found = {"SNASNet", "SpikeDHS"}
    for module in (model, parametric_lif_net, sew_resnet, spiking_resnet, spiking_vgg, spiking_vggws_ottt):
        for name in module.__all__:
            value = getattr(module, name)
            takes_neuron = callable(value) and "spiking_neuron" in inspect.signature(value).parameters
            if takes_neuron and (inspect.isfunction(value) or module is parametric_lif_net):
                found.add(name)
    return found


def test_every_builder_is_in_the_table_and_on_the_page():
    from benchmarks import zoo_nets

    wanted = builders()
    assert len(wanted) > 45
    assert wanted <= set(zoo_nets.CASES)
    assert {name for name in zoo_nets.CASES if f"| `{name}` |" not in PAGE} == set()


def test_the_page_says_what_was_found():
    """The page and the result file are from one run; no net is wrong at k=1, and flips are within one in a million."""
    (newest,) = sorted((ROOT / "benchmarks" / "results").glob("zoo-*.json"))[-1:]
    rows = {row["name"]: row for row in json.loads(newest.read_text())["rows"]}
    for name, row in rows.items():
        assert f"| `{name}` | {'x'.join(map(str, row['shape']))} | {row['convs']} | " in PAGE
        assert row["k1_unfused"] in ("equal", "")
        assert row["converted"] + sum(row["refused"].values()) == row["convs"]
        assert (row["k1_unfused"] == "equal") == (row["converted"] > 0)
        assert set(row["refused"]) <= {r.value for r in REASONS}
    assert sum(row["flips"] for row in rows.values()) <= 1e-6 * sum(row["spikes"] for row in rows.values())
    # Every convolution of these nets: chains, and the residual forms beside them.
    counts = {"spiking_resnet18": 20, "spiking_resnet50": 53, "sew_resnet34": 36, "ms_resnet18": 21, "spiking_vgg16_bn": 13}
    assert {name: rows[name]["converted"] for name in counts} == counts


@pytest.mark.parametrize("name", ["NMNISTNet", "max_resnet18", "SNASNet"])
def test_a_row_can_be_made_again(name):
    from benchmarks import zoo

    row = zoo.examine(name, rounds=1)
    (newest,) = sorted((ROOT / "benchmarks" / "results").glob("zoo-*.json"))[-1:]
    known = next(r for r in json.loads(newest.read_text())["rows"] if r["name"] == name)
    for key in ("convs", "converted", "refused", "collapse", "collapse_refused", "k1_unfused", "traced", "failures"):
        assert getattr(row, key) == known[key], key
