"""Generated tables of docs say what benchmarks/results holds; no builder of SpikingJelly's zoo is left out."""

import importlib
import inspect
import json
from pathlib import Path

import pytest
from support import only_v2

from benchmarks import results_page


def test_the_tables_are_what_the_results_say():
    blocks = []
    for path in results_page.PAGES:
        page = path.read_text()
        found = results_page.BLOCK.findall(page)
        assert results_page.generated(page) == page
        assert page.count("<!-- table") == len(found)
        blocks += found
    assert {"mnist", "fashion", "nmnist", "gestures"} <= {f.split("-")[1] for kind, f, _ in blocks if kind == "study"}
    assert {"speed", "sparsity", "agreement", "losses", "tuned", "schedule"} <= {kind for kind, _, _ in blocks}


ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "zoo.md").read_text()
NEWEST = max((ROOT / "benchmarks" / "results").glob("zoo-*.json"))
ROWS = {row["name"]: row for row in json.loads(NEWEST.read_text())["rows"]}


def builders():
    """Every function of the zoo that takes a neuron and makes a net, and the classes that have no such function."""
    kinds = ("parametric_lif_net", "sew_resnet", "spiking_resnet", "spiking_vgg", "spiking_vggws_ottt")
    modules = [importlib.import_module(f"spikingjelly.activation_based.model.{kind}") for kind in kinds]
    found = {"SNASNet", "SpikeDHS"}
    for module in (importlib.import_module("spikingjelly.activation_based.model"), *modules):
        for name in module.__all__:
            value = getattr(module, name)
            takes_neuron = callable(value) and "spiking_neuron" in inspect.signature(value).parameters
            if takes_neuron and (inspect.isfunction(value) or module is modules[0]):
                found.add(name)
    return found


@only_v2
def test_every_builder_is_in_the_table_and_on_the_page():
    from benchmarks import zoo_nets

    wanted = builders()
    assert len(wanted) > 45
    assert wanted <= set(zoo_nets.CASES)
    assert {name for name in zoo_nets.CASES if f"| `{name}` |" not in PAGE} == set()


def test_the_page_says_what_was_found():
    """The page and the result file are from one run; no net is wrong at k=1, and flips are within one in a million."""
    for name, row in ROWS.items():
        assert f"| `{name}` | {'x'.join(map(str, row['shape']))} | {row['convs']} | " in PAGE
        assert row["k1_unfused"] in ("equal", "")
        assert row["converted"] + sum(row["refused"].values()) == row["convs"]
        assert (row["k1_unfused"] == "equal") == (row["converted"] > 0)
    assert sum(row["flips"] for row in ROWS.values()) <= 1e-6 * sum(row["spikes"] for row in ROWS.values())


@only_v2
@pytest.mark.parametrize("name", ["NMNISTNet", pytest.param("max_resnet18", marks=pytest.mark.exhaustive), "SNASNet"])
def test_a_row_can_be_made_again(name):
    from benchmarks import zoo

    row = zoo.examine(name, rounds=1)
    for key in ("convs", "converted", "collapse", "k1_unfused", "failures"):
        assert getattr(row, key) == ROWS[name][key], key
