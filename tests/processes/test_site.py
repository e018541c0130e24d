"""`make docs`: the pages are built without a warning, every link in them leads somewhere, and nothing is loaded from
another host."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.unit.test_docs import DOCS, ROOT


class Page(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.loaded, self.anchors = set(), set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        own = dict(attributes)
        self.anchors |= {own[name] for name in ("id", "name") if own.get(name)}
        if tag == "a" and "href" in own:
            self.links.add(own["href"])
        elif tag in ("link", "script", "img", "iframe", "source") and (place := own.get("href") or own.get("src")):
            self.loaded.add(place)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out, pages = tmp_path_factory.mktemp("site"), ROOT / "tools" / "docs_site"
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-d", out / "doctrees", "-b", "html", "-c", pages]
    command = [sys.executable, "-m", "sphinx", *options, ROOT, out / "html"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return out / "html"


def test_every_page_is_there_and_every_link_leads_somewhere(site):
    expected = {doc.relative_to(ROOT).with_suffix(".html") for doc in DOCS}
    assert expected <= {path.relative_to(site) for path in site.rglob("*.html")}
    pages = {path: Page(path) for path in site.rglob("*.html")}
    broken, links = [], 0
    for path, page in pages.items():
        for link in page.links | page.loaded:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            links += 1
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == [] and links > 500


def test_no_page_loads_anything_from_another_host(site):
    for path in site.rglob("*.html"):
        assert [place for place in Page(path).loaded if re.match("(https?:)?//", place)] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"""url\(["']?(https?:)?//|@import""", path.read_text()), path
