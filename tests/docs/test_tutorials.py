"""The tutorials: pairs of .py and .ipynb that say the same, notebooks that run here and now, outputs fit to be shown."""

import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
NAMES = ["1-first-net", "2-collapse-or-preserve", "3-fine-tune-and-back", "4-streaming"]
each = pytest.mark.parametrize("name", NAMES)


def committed(name):
    return nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)


def executed(notebook):
    """The notebook after its cells ran in a kernel of their own, in the tutorials' folder. Raises CellExecutionError."""
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(TUTORIALS)}}).execute()
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook):
    """All that the outputs say: streams, and what is displayed as text."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            yield output.get("text", "")
            yield from (value for kind, value in output.get("data", {}).items() if kind.startswith("text/"))


def check_outputs(notebook):
    """Outputs without errors, warnings, stderr, paths of a machine, or colours of a terminal."""
    for cell in code_cells(notebook):
        assert cell.execution_count, cell.source
        assert all(output.output_type != "error" and output.get("name") != "stderr" for output in cell.outputs), cell.source
    said = "\n".join(texts(notebook))
    assert said
    found = re.findall(r".*(?:Warning|Traceback|\x1b|(?<![\w.:/])/(?:[\w.-]+/)+|site-packages|[A-Z]:\\).*", said)
    assert found == []


def test_these_are_all():
    assert sorted(p.stem for p in TUTORIALS.glob("*.py")) == sorted(p.stem for p in TUTORIALS.glob("*.ipynb")) == NAMES


@each
def test_the_pair_says_the_same(name):
    told = [
        [(cell.cell_type, cell.source) for cell in notebook.cells]
        for notebook in (jupytext.read(TUTORIALS / f"{name}.py"), committed(name))
    ]
    assert len(told[0]) > 10
    assert told[0] == told[1], f"run what docs/tutorials/README.md says after editing {name}.py"


@each
def test_the_committed_outputs_can_be_shown(name):
    notebook = committed(name)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == [*range(1, len(counts) + 1)]
    check_outputs(notebook)
    assert any("image/png" in output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs)
    assert (TUTORIALS / f"{name}.ipynb").stat().st_size < 300_000


@each
@pytest.mark.exhaustive
def test_it_runs(name):
    """What the text says is asserted in the cells themselves."""
    notebook = jupytext.read(TUTORIALS / f"{name}.py")
    assert sum(cell.source.count("assert ") for cell in code_cells(notebook)) >= 3
    check_outputs(executed(notebook))


IN_A_NOTEBOOK = """
import sys, tempfile, warnings
from pathlib import Path
import matplotlib
import torch
import sj_tac
from spikingjelly.activation_based import functional, layer, neuron
conv = (layer.Conv2d(2, 4, 3), layer.BatchNorm2d(4), neuron.LIFNode())
net = torch.nn.Sequential(*conv, layer.Flatten(), layer.Linear(144, 2))
functional.set_step_mode(net, "m")
before = matplotlib.get_backend()
with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
    warnings.simplefilter("error")
    table = sj_tac.bench(net.eval(), torch.rand(4, 2, 2, 8, 8), ["preserve:2"], rounds=1)
    assert table.save(Path(folder) / "table.json").exists()
assert "preserve k=2" in str(table), str(table)
assert matplotlib.get_backend() == before and "inline" in before, before
print(sj_tac.report(sj_tac.convert(net, k=2)))
"""


def test_in_a_notebook_tables_are_text_and_nothing_warns_or_takes_the_users_plots():
    cell = nbformat.v4.new_code_cell(IN_A_NOTEBOOK)
    executed(nbformat.v4.new_notebook(cells=[cell]))
    said = {"stdout": "", "stderr": ""}
    for output in cell.outputs:
        assert output.output_type == "stream", output
        said[output.name] += output.text
    assert "1 converted" in said["stdout"]
    # Progress, every few seconds, on a slow machine.
    assert all(line.startswith("bench: ") for line in said["stderr"].splitlines())
