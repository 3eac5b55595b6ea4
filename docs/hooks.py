"""MkDocs hooks: files that pages name outside docs/ come into the site, and links of the finished site are followed.

A link such as ``../benchmarks/results/x.json`` works where the repository is read. In the site it leads to a copy under
``repository/``. A file that is missing, and a link of the finished site that leads nowhere, fail the build.
"""

import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

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
    for page in files.documentation_pages():
        if page.src_uri.endswith(".md"):
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


class _Page(HTMLParser):
    """What a page of the site has to be led to, and where it leads."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links |= {given[name] for name in ("href", "src") if given.get(name)}


def on_post_build(config):
    site = Path(config.site_dir).resolve()
    pages = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("/"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else None
            if not target.exists() or (parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    if broken:
        raise PluginError("links of the site lead nowhere: " + "; ".join(broken[:20]))
