"""MkDocs hooks: files that pages name outside docs/ come into the site.

A link such as ``../benchmarks/results/x.json`` works where the repository is read. In the site it leads to a copy under
``repository/``. A file that is missing fails the build. Links of notebooks, which MkDocs does not know, are led on likewise.
"""

import posixpath
import re
from pathlib import Path
from urllib.parse import unquote

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

HREF = re.compile(r'(?<=href=")(?![a-z]+:|#|/)[^"#]+')
LINK = re.compile(r"(?<=\]\()(?:\.\./)+[^)\s#]+")
SHOWN_AS_TEXT = (".cu", ".md", ".py", ".sh", ".yaml")  # a browser would download them, MkDocs would make pages of some


def _outside(uri, docs, link):
    """The path in the repository that a link leads to, where that lies outside docs/; else None."""
    path = (docs / posixpath.dirname(uri) / link).resolve()
    if path.is_relative_to(docs):
        return None
    if not path.exists() or not path.is_relative_to(docs.parent):
        raise PluginError(f"docs/{uri} links to {link}, which is no file of the repository")
    return path.relative_to(docs.parent)


def _address(path, folder):
    return f"repository/{path}/index.md" if folder else f"repository/{path}" + ".txt" * (path.suffix in SHOWN_AS_TEXT)


def _listing(root, path):
    names = sorted(p.name + "/" * p.is_dir() for p in (root / path).iterdir() if not p.name.startswith(("_", ".")))
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\nIn the repository:\n\n" + "".join(f"- `{n}`\n" for n in names)


def on_files(files, config):
    docs = Path(config.docs_dir).resolve()
    found = set()
    for page in files:
        if page.src_uri.endswith((".md", ".ipynb")):
            found |= {_outside(page.src_uri, docs, link) for link in LINK.findall(page.content_string)} - {None}
    for path in sorted(found):
        source = docs.parent / path
        content = {"content": _listing(docs.parent, path)} if source.is_dir() else {"abs_src_path": str(source)}
        files.append(File.generated(config, _address(path, source.is_dir()), **content))
    return files


def on_page_markdown(markdown, page, config, files):
    docs, here = Path(config.docs_dir).resolve(), posixpath.dirname(page.file.src_uri)

    def address(match):
        path = _outside(page.file.src_uri, docs, match[0])
        return posixpath.relpath(_address(path, (docs.parent / path).is_dir()), here or ".") if path else match[0]

    return LINK.sub(address, markdown)


def on_page_content(html, page, config, files):
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    docs, here = Path(config.docs_dir).resolve(), posixpath.dirname(page.file.src_uri)

    def address(match):
        link = unquote(match[0])
        path = _outside(page.file.src_uri, docs, link)
        inside = posixpath.normpath(posixpath.join(here, link))
        file = files.get_file_from_path(_address(path, (docs.parent / path).is_dir()) if path else inside)
        return file.url_relative_to(page.file) if file else match[0]

    return HREF.sub(address, html)
