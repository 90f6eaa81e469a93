"""The site builds without a warning and needs nobody else; its reference is the program's own."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardmark
from tests import ROOT

DOCS = ROOT / "docs"
NEEDED = ("sphinx", "myst_parser", "furo")
MISSING = [name for name in NEEDED if find_spec(name) is None]
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements that a browser loads by itself, and the attribute with the address."""


class Fetches(HTMLParser):
    """Collects what a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(FETCHED.get(tag, ""))
        if address is not None:
            self.addresses.append(address)


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-E", "-W", "--keep-going", "-q"]
    return subprocess.run(
        [*command, "-d", str(site.with_suffix(".trees")), str(source), str(site)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}; pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    ended = build(DOCS, folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    return folder


def test_every_page_is_there_and_in_the_menu(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    assert "samples_per_second" in (site / "searchindex.js").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        made = page.relative_to(DOCS).with_suffix(".html")
        assert (site / made).exists()
        in_menu = f'href="{made.as_posix()}"' in start or made.name == "index.html"
        assert in_menu == (made.parent.name != "decisions" or made.name == "index.html"), made


def test_the_open_menu_is_short(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    assert len(re.findall(r'class="toctree-l1', start)) <= 35
    assert len(re.findall(r'class="caption"', start)) == 5


def test_public_names_are_described(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text(encoding="utf-8")
    names = [name for name in shardmark.__all__ if not name.startswith("_")]
    assert [name for name in names if f'id="shardmark.{name}"' not in page] == []


def test_pages_and_style_sheets_load_nothing_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        fetches = Fetches()
        fetches.feed(page.read_text(encoding="utf-8"))
        assert fetches.addresses
        assert [one for one in fetches.addresses if re.match(r"[a-z]+:|//", one)] == []
    sheets = [*site.rglob("*.css")]
    assert sheets
    for sheet in sheets:
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", text) == []


def test_reference_is_up_to_date(tmp_path: Path) -> None:
    script = DOCS / "reference" / "generate.py"
    # Where a relative PYTHONPATH means this checkout.
    command = [sys.executable, "-B", str(script), str(tmp_path)]
    subprocess.run(command, check=True, cwd=DOCS.parent)
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    stored = DOCS / "reference"
    written_by_hand = {"glossary.md", "json.md", "python.md"}
    assert made.keys() == {path.name for path in stored.glob("*.md")} - written_by_hand
    for name, text in made.items():
        found = (stored / name).read_text(encoding="utf-8")
        assert found == text, f"{name} is old: run python docs/reference/generate.py"
