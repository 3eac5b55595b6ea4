"""The site: every public name is in it, files outside docs/ come along, links that lead nowhere fail the build."""

import builtins
import importlib.util
import inspect
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import sj_tac

pytest.importorskip("mkdocs", reason='pip install "sj_tac[docs]"')
pytest.importorskip("mkdocs_jupyter", reason='pip install "sj_tac[docs]"')
import griffe
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort, PluginError

ROOT = Path(__file__).resolve().parents[2]


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"site_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = [ROOT / "docs" / name for name in ("hooks.py", "links.py")]
links = loaded(HOOKS[1])


def test_every_public_name_is_in_the_reference_and_in_its_index():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: sj_tac\.([\w.]+)$", pages, re.MULTILINE))
    functional = {f"functional.{name}" for name in sj_tac.functional.__all__}
    assert (set(sj_tac.__all__) - {"functional"}) | functional <= shown
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    returned = {"Bench", "Captured", "Diagnosis", "Evidence", "Exported", "Match", "Sensitivity"}
    assert [name for name in sj_tac.__all__ if name not in returned and f"`{name}`" not in index] == []


def described(value):
    """What a docstring says of parameters, of options by keyword and of errors, as the reference reads it."""
    docstring = griffe.Docstring(inspect.getdoc(value), lineno=1)
    names = {"parameters": set(), "other parameters": set(), "raises": set()}
    for part in docstring.parse("google", warn_missing_types=False, warnings=False):
        if part.kind.value in names:
            names[part.kind.value] |= {
                item.name if part.kind.value != "raises" else str(item.annotation) for item in part.value
            }
    return names


def options_of(value):
    """The keys that a function takes by ``**options: Unpack[...]``."""
    source = value.__init__ if inspect.isclass(value) else value
    for parameter in inspect.signature(source).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            unpacked = get_type_hints(source)[parameter.name]
            return set(get_type_hints(get_args(unpacked)[0]))
    return set()


FUNCTIONS = [getattr(sj_tac, name) for name in sj_tac.__all__ if inspect.isfunction(getattr(sj_tac, name))]
BY_HAND = [sj_tac.TAC, sj_tac.TACTP, sj_tac.KSchedule, sj_tac.functional.aggregate, sj_tac.functional.expand]


@pytest.mark.parametrize("value", [*FUNCTIONS, *BY_HAND, sj_tac.functional.fire], ids=lambda value: value.__name__)
def test_a_docstring_names_every_parameter_and_option_a_line_each(value):
    found = described(value)
    taken = inspect.signature(value).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    assert found["parameters"] == {parameter.name for parameter in taken if parameter.kind not in kinds}
    assert found["other parameters"] == options_of(value)
    for error in found["raises"]:
        kind = getattr(sj_tac.errors, error, None) or getattr(builtins, error, None)
        assert inspect.isclass(kind), f"{value.__name__} says that it raises {error}"


SETTINGS = "site_name: x\nuse_directory_urls: false\nplugins: [mkdocs-jupyter: {include: ['*.ipynb'], cache: false}]\n"


def repository(folder, page, **files):
    """A folder with docs/page.md and other files, and its MkDocs configuration."""
    (folder / "docs" / "deep").mkdir(parents=True)
    (folder / "docs" / "deep" / "page.md").write_text(page)
    (folder / "docs" / "index.md").write_text("# Home\n")
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "mkdocs.yml").write_text(SETTINGS + f"hooks: [{', '.join(map(str, HOOKS))}]\n")
    return load_config(str(folder / "mkdocs.yml"))


def test_a_file_outside_docs_comes_into_the_site_and_its_link_follows(tmp_path):
    text = "[a](../../data/a.json) [b](../../code/b.py#L3) [c](../index.md) [d](../../data)"
    config = repository(tmp_path, text, data__a_DOT_json="{}", code__b_DOT_py="pass")
    build(config)
    site = Path(config.site_dir)
    page = (site / "deep" / "page.html").read_text()
    for address in ("repository/data/a.json", "repository/code/b.py.txt#L3", "index.html", "repository/data/index.html"):
        assert f'href="../{address}"' in page
    assert (site / "repository" / "data" / "a.json").read_text() == "{}"
    assert (site / "repository" / "code" / "b.py.txt").read_text() == "pass"
    assert "<code>a.json</code>" in (site / "repository" / "data" / "index.html").read_text()


@pytest.mark.parametrize("link", ["../../data/missing.json", "../../../elsewhere.md"])
def test_a_link_to_no_file_of_the_repository_fails_the_build(link, tmp_path, caplog):
    (tmp_path / "elsewhere.md").write_text("not of the repository")
    config = repository(tmp_path / "repository", f"[a]({link})")
    with pytest.raises(Abort):
        build(config)
    assert f"docs/deep/page.md links to {link}" in caplog.text


def test_a_finished_site_fails_where_a_link_leads_nowhere(tmp_path):
    config = repository(tmp_path, "")
    site = Path(config.site_dir)
    site.mkdir()
    (site / "b.html").write_text('<h2 id="there">b</h2><a href="a.html?query=1">a</a>')
    good = '<a href="b.html#there">b</a><a href="#here" id="here">a</a><a href="https://example.org/x">x</a>'
    (site / "a.html").write_text(good)
    links.on_post_build(config)
    for text in ('<a href="c.html">', '<img src="gone.png">', '<a href="b.html#nowhere">', '<a href="#nowhere">'):
        (site / "a.html").write_text(good + text)
        with pytest.raises(PluginError, match=r"a\.html: "):
            links.on_post_build(config)
