"""MkDocs hook: every link of the finished site is followed, those of notebooks and docstrings too."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import PluginError


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
