"""docs/results.md says what the tables say that its rows link to; docs/paper.md lays the paper's figures beside ours."""

import re
from pathlib import Path

import pytest

from benchmarks import paper_tables
from benchmarks.tables import read

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROOT = DOCS.parent
LINK = re.compile(r"\]\(([\w-]+\.md)#([\w-]+)\)")
ROWS = [line for line in (DOCS / "results.md").read_text().splitlines() if line.startswith("|") and LINK.search(line)]


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def section(page, anchor):
    """The text under a heading, up to the next one of its level or above."""
    parts = re.split(r"^(#+) (.*)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    for i in range(1, len(parts), 3):
        if slug(parts[i + 1]) == anchor:
            following = zip(parts[i + 3 :: 3], parts[i + 5 :: 3], strict=True)
            text = parts[i + 2]
            for level, more in following:
                if len(level) <= len(parts[i]):
                    break
                text += more
            return text
    raise AssertionError(f"{page} has no heading {anchor}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip(" *"))
def test_the_figures_of_a_conclusion_are_in_the_table_it_links_to(row):
    _, _, _, figures, links, _ = row.split("|")
    found = re.findall(r"-?\d+\.\d+", re.sub(r"(?<=[\d ])-> ", " ", figures))
    text = "".join(section(*link) for link in LINK.findall(links))
    assert found
    there = set(re.findall(r"(?<![\d.])-?\d+\.\d+", text))
    assert [figure for figure in found if figure not in there] == []


def cells(table, name):
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_papers_rows_stand_beside_ours():
    paper = read("paper.json")
    found = cells(paper_tables.TABLES["paper_mnist"](paper), "TAC k=4")
    # By hand: 98.78 - 97.22, 98.29 - 98.56, 98.63 - 98.78, 338.4 ms of separate calls and 252.0 of SpikingJelly for 79.7.
    assert found == [
        "TAC k=4", "98.78 ± 0.08", "+1.56", "5.3x", "98.29 ± 0.05", "-0.27", "5.1x", "98.63 ± 0.08", "-0.15", "4.2x", "3.2x",
    ]  # fmt: skip
    assert cells(paper_tables.TABLES["paper_fashion"](paper), "TCC")[-4:] == ["not run"] * 4
    dvs = cells(paper_tables.TABLES["paper_dvs_speed"](paper), "TAC-TP k=2")
    # 5 convolutions for each of 8 groups; 241.25 / 65.21 ms; 172.34 / 65.21 ms; 466.48 / 165.85 ms.
    assert dvs == ["TAC-TP k=2", "40", "57.5", "1.2x", "40", "3.7x", "2.64x", "2.81x"]
    assert cells(paper_tables.TABLES["paper_gestures"](paper), "TAC-TP k=4")[1:] == ["93.8", "-2.5", *["not run"] * 3]
    assert cells(paper_tables.TABLES["paper_operators"](paper), "FTC") == ["FTC", "0.6x", "1.17x", "0.76x"]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_the_repositorys_own_pages_lead_somewhere(name):
    """Those of docs/ are followed when the site is built."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    for address in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", text):
        path, _, anchor = address.partition("#")
        target = ROOT / path if path else ROOT / name
        assert target.exists(), address
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)}, (
                address
            )
