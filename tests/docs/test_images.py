"""The pictures of the documentation are those of the stored results, and each stands on a page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.pages import PAGES

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 250_000
USED = re.compile(r"!\[([^]]*)\]\(([^)]+)\)")


def facts(svg: str) -> list[str]:
    """Return the values of a picture's marks, its title, legend and caption.

    Positions depend on the fonts of a machine, and so does which labels of an axis have room.
    """
    labels = re.findall(r'aria-label="([^"]*)" data-series', svg)
    texts = re.findall(r'<text x="[^>]*>([^<]+)</text>', svg)
    return sorted({unescape(text) for text in (*labels, *texts)})


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vl_convert", reason="needs vl-convert")
    folder = tmp_path_factory.mktemp("images")
    command = [sys.executable, "-B", str(IMAGES / "draw.py"), str(folder)]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


def test_pictures_are_those_of_the_stored_results(drawn: Path) -> None:
    made = {path.name: facts(path.read_text(encoding="utf-8")) for path in drawn.iterdir()}
    assert made.keys() == {path.name for path in IMAGES.glob("*.svg")}
    for name, expected in made.items():
        assert len(expected) >= 5, name
        found = facts((IMAGES / name).read_text(encoding="utf-8"))
        assert found == expected, f"{name} is old: run python docs/images/draw.py"


def test_picture_of_the_report_page_can_be_taken_again(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    if shutil.which("chromium") is None:
        pytest.skip("needs Debian's chromium")
    file = tmp_path / "page.png"
    command = [sys.executable, "-B", str(IMAGES / "screenshot.py"), str(file)]
    subprocess.run(command, check=True, cwd=ROOT)
    with image.open(file) as made, image.open(IMAGES / "report-page.png") as found:
        assert made.size == found.size
        assert len(made.getcolors()) > 10, "an empty page"


def test_each_picture_stands_on_a_page_with_a_description() -> None:
    used = {}
    for page in PAGES:
        for description, target in USED.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            used[path] = description
            assert path.is_file(), f"{page}: {target}"
            assert len(description) > 20, f"{page}: {target}"
    pictures = {path for path in IMAGES.iterdir() if path.suffix in (".svg", ".png")}
    assert pictures - used.keys() == set()
    assert len(pictures) >= 12
    assert [path.name for path in pictures if path.stat().st_size > MOST_BYTES] == []
