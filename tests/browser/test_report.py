"""The report page in Debian's Chromium, from the disk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from tests.browser.conftest import HOSTILE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from playwright.sync_api import Locator, Page

    from tests.browser.conftest import Opened

DESK: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
}
RUNS = ("small", "grid", "disturbed")
A4_PIXELS = 680
"""Between the margins."""
MOST_BYTES = 3_500_000
MOST_SCREENS = 5
MOST_EMPTY_PIXELS = 90
"""Height of an empty band across a screenshot."""
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
TEXTS = """() => [...document.querySelectorAll('.panel')].map((panel) => {
  const { left, right } = panel.getBoundingClientRect();
  const texts = [...panel.querySelectorAll('svg text')]
    .filter((text) => text.textContent.trim() && getComputedStyle(text).opacity !== '0'
      && Number(text.getAttribute('opacity') ?? 1) > 0)
    .map((text) => ({ text: text.textContent, ...text.getBoundingClientRect().toJSON() }))
    .filter((text) => text.width > 0);
  return { left, right, texts };
})"""
CLIPPED_BOXES = """() => [...document.querySelectorAll('h1, h2, dt, dd, .caution, figcaption')]
  .filter((box) => box.offsetParent && box.scrollWidth > box.clientWidth + 1
    && getComputedStyle(box).display !== 'inline')
  .map((box) => box.textContent.slice(0, 60))"""
BOTTOMS = "(all) => all.map((element) => element.getBoundingClientRect().bottom)"
COLOURS = """() => [getComputedStyle(document.body).backgroundColor,
  getComputedStyle(document.querySelector('.plot text')).fill]"""


def cells(table: Locator, title: str) -> list[str]:
    """The column's texts from top to bottom, of rows that are shown."""
    texts: list[str] = table.evaluate(
        """(table, title) => {
          const titles = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.title);
          const place = titles.indexOf(title);
          return [...table.tBodies[0].rows].filter((row) => !row.hidden)
            .map((row) => row.cells[place].textContent);
        }""",
        title,
    )
    return texts


def overlap(text: dict[str, float], other: dict[str, float]) -> bool:
    beside = text["right"] <= other["left"] + 2 or other["right"] <= text["left"] + 2
    above = text["bottom"] <= other["top"] + 4 or other["bottom"] <= text["top"] + 4
    return not beside and not above


def empty_pixels(pixels: NDArray[np.uint8]) -> int:
    """Height of the largest band of lines that have one colour each."""
    spread = np.ptp(pixels[:, 8:-8].astype(int), axis=1)
    filled = np.flatnonzero(spread >= 8)
    return int(np.diff(filled, prepend=0, append=len(pixels)).max())


@pytest.mark.parametrize("run", RUNS)
def test_page_has_no_overlaps_clips_or_gaps(
    opened: Opened, run: str, pages: Callable[[str], Path], tmp_path: Path
) -> None:
    """Answers, picture and cautions come first; nothing overlaps, is clipped or leaves a gap."""
    watched = opened(pages(run), **DESK)
    page = watched.page
    assert page.locator(".card dt").all_inner_texts() == ["Fastest", "Memory", "Same training?"]
    picture = page.locator("#figure-speed-and-memory .plot").first
    assert picture.locator("[data-series=frontier]").count() == 1
    for part in (page.locator(".card"), page.locator(".caution"), picture):
        assert all(bottom < DESK["viewport"]["height"] for bottom in part.evaluate_all(BOTTOMS))
    for size, scheme in product((DESK, PHONE), ("light", "dark")):
        page.set_viewport_size(size["viewport"])
        page.emulate_media(color_scheme=scheme)
        screenshot = tmp_path / f"{size['viewport']['width']}-{scheme}.png"
        screenshot.write_bytes(page.screenshot(full_page=True))
        with Image.open(screenshot) as image:
            pixels = np.asarray(image.convert("L"))
        assert pixels.shape[1] == size["viewport"]["width"]
        assert (pixels[2, 2] > 200) == (scheme == "light")
        assert empty_pixels(pixels) <= MOST_EMPTY_PIXELS
    watched.unfold()
    for size in (DESK, PHONE):
        page.set_viewport_size(size["viewport"])
        assert page.evaluate(TOO_WIDE) == 0
        assert page.evaluate(CLIPPED_BOXES) == []
        panels = page.evaluate(TEXTS)
        assert len(panels) >= 10
        for panel in panels:
            texts, left, right = panel["texts"], panel["left"] - 1, panel["right"] + 1
            assert texts
            assert not [text for text in texts if text["left"] < left or text["right"] > right]
            assert not [pair for pair in combinations(texts, 2) if overlap(*pair)]


@pytest.mark.parametrize(
    ("run", "size", "scheme"),
    [
        ("small", DESK, "light"),
        ("small", PHONE, "dark"),
        ("grid", DESK, "light"),
        ("disturbed", PHONE, "dark"),
    ],
)
def test_contrast_and_keyboard_by_axe(
    opened: Opened, run: str, size: dict[str, Any], scheme: str, pages: Callable[[str], Path]
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe")
    watched = opened(pages(run), color_scheme=scheme, **size)
    page = watched.page
    watched.unfold()
    if (run, scheme) != ("small", "light"):  # what is folded is more of the same
        page.evaluate("document.querySelector('#more').remove()")
    response = axe.Axe().run(page).response
    assert any(rule["id"] == "color-contrast" for rule in response["passes"])
    assert [
        (rule["id"], node["html"], node["failureSummary"])
        for rule in response["violations"]
        for node in rule["nodes"]
    ] == []


def test_a_disturbed_run_decides_nothing_and_says_why(
    opened: Opened, pages: Callable[[str], Path]
) -> None:
    page = opened(pages("disturbed"), **DESK).page
    assert "open" in (page.locator(".card").first.get_attribute("class") or "")
    assert "95 % of the CPU" in page.locator(".caution").first.inner_text().replace("\xa0", " ")
    points = page.locator("#figure-speed-and-memory [aria-roledescription=point]")
    faint = points.evaluate_all("(all) => all.map((point) => point.getAttribute('fill-opacity'))")
    series = points.evaluate_all("(all) => all.map((point) => point.dataset.series)")
    assert {name for name, each in zip(series, faint, strict=True) if each != "1"} == {"ddp"}


def test_a_grid_stays_under_five_screens(opened: Opened, grid_page: Path) -> None:
    page = opened(grid_page, **DESK).page
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height <= MOST_SCREENS * DESK["viewport"]["height"]
    assert grid_page.stat().st_size < MOST_BYTES
    assert page.locator("#table-trials tbody tr").count() == 96
    marks = page.locator("#figure-speed-and-memory [aria-roledescription=point]")
    assert marks.count() == 48, "one a cell"


def test_page_has_no_errors_and_loads_no_other_file(opened: Opened, small_page: Path) -> None:
    watched = opened(small_page)
    watched.unfold()
    assert watched.messages == []
    assert watched.requests == [small_page.as_uri()]
    assert watched.page.locator("h1").inner_text() == "invented"
    assert watched.page.locator("figure").count() >= 5


def test_the_table_sorts_by_pointer_and_keyboard(tab: Page) -> None:
    table = tab.locator("#table-comparison")
    heading = table.locator("th", has=tab.get_by_role("button", name="samples/s"))
    for direction in ("descending", "ascending", "descending"):
        heading.locator("button").focus()
        tab.keyboard.press("Enter")
        assert heading.get_attribute("aria-sort") == direction
        shown = cells(table, "samples/s")
        known = [float(text.split()[0]) for text in shown if text != "-"]
        assert known == sorted(known, reverse=direction == "descending")
        assert shown[-1] == "-", "what is missing comes last in both directions"
    assert len({round(value) for value in known}) > 2
    table.get_by_role("button", name="strategy").click()
    assert cells(table, "strategy") == sorted(cells(table, "strategy"))
    assert table.locator("th[aria-sort=descending], th[aria-sort=ascending]").count() == 1


def test_everything_is_reached_by_the_tab_key(opened: Opened, small_page: Path) -> None:
    page = opened(small_page).page
    wanted = page.locator("button:visible, a[href]:visible, summary:visible, [tabindex]:visible")
    reached = []
    for _ in range(wanted.count()):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.outerHTML"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert reached == wanted.evaluate_all("(all) => all.map((element) => element.outerHTML)")


def test_filters_hold_for_tables_and_figures(opened: Opened, grid_page: Path) -> None:
    page = opened(grid_page).page
    shown = page.locator("#figure-throughput [aria-roledescription=bar]:visible")
    values = page.locator("#figure-throughput .plot [aria-roledescription='text mark']:visible")
    before = shown.count()
    assert values.count() == before
    page.locator("select[name=strategy]").select_option("fsdp")
    page.locator("select[name=precision]").select_option("bf16")
    table = page.locator("#table-comparison")
    assert cells(table, "strategy") == ["fsdp"] * 4
    assert shown.count() == values.count() == 4 < before
    names = shown.evaluate_all("(all) => all.map((bar) => bar.ariaLabel)")
    assert all(name.startswith("fsdp, ") for name in names)
    assert page.locator("#figure-throughput .panel:visible").count() == 2, "those of bf16"
    for axis in ("strategy", "precision"):
        page.locator(f"select[name={axis}]").select_option("")
    assert shown.count() == before


def test_the_legend_toggles_a_series(tab: Page) -> None:
    figure = tab.locator("#figure-speed-and-memory")
    marks = figure.locator("[aria-roledescription=point]:visible")
    before = marks.count()
    button = figure.get_by_role("button", name="ddp")
    button.focus()
    tab.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert marks.count() == before - 2
    button.click()
    assert marks.count() == before


def test_the_pointer_names_a_mark(tab: Page) -> None:
    bar = tab.locator("#figure-throughput [aria-roledescription=bar]").first
    bar.hover()
    assert tab.locator("#tip").inner_text() == bar.get_attribute("aria-label")


def test_theme_button_shows_the_theme(opened: Opened, small_page: Path) -> None:
    page = opened(small_page, color_scheme="dark").page
    button, dark = page.locator("#theme"), page.evaluate(COLOURS)
    assert button.inner_text() == "Use light theme"
    button.click()
    light = page.evaluate(COLOURS)
    assert light[0] == "rgb(255, 255, 255)" != dark[0]
    assert light[1] != dark[1]
    assert button.inner_text() == "Use dark theme"
    page.reload()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(COLOURS) == light
    assert button.inner_text() == "Use dark theme"


def test_downloads_the_comparison(tab: Page, tmp_path: Path) -> None:
    for form, start in (("CSV", "experiment,workload,strategy"), ("JSON", "{")):
        with tab.expect_download() as download:
            tab.get_by_role("button", name=f"Download {form}").click()
        path = tmp_path / form
        download.value.save_as(path)
        assert path.read_text().startswith(start)
        assert download.value.suggested_filename == f"invented.{form.lower()}"


def test_hostile_texts_stay_texts(opened: Opened, pages: Callable[[str], Path]) -> None:
    watched = opened(pages("hostile"))
    watched.unfold()
    page = watched.page
    assert watched.dialogs == []
    assert watched.messages == []
    assert page.locator("img, iframe, object, [onerror]").count() == 0
    kinds = page.locator("script").evaluate_all("(all) => all.map((script) => script.type)")
    assert kinds.count("") == 1, "the page's own"
    assert set(kinds) == {"", "application/json"}
    assert page.locator("svg a, [href^='javascript']").count() == 0
    for place in ("#not-ok pre", "#not-ok", "#table-comparison", "h1"):
        assert HOSTILE in (page.locator(place).first.text_content() or ""), place


def test_printed_page_shows_all_parts(opened: Opened, small_page: Path) -> None:
    watched = opened(small_page, color_scheme="dark")
    page = watched.page
    page.emulate_media(media="print")
    assert page.locator("#table-ranks").is_visible()
    assert page.locator("#figure-step-time .plot").first.is_visible()
    assert page.evaluate(COLOURS)[0] == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": A4_PIXELS, "height": 960})
    assert page.evaluate(TOO_WIDE) == 0
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="screen")
    assert not page.locator("#table-ranks").is_visible()
    assert watched.messages == []


def test_without_scripts_it_has_tables_and_figures(opened: Opened, small_page: Path) -> None:
    page = opened(small_page, java_script_enabled=False).page
    assert page.locator("#table-comparison tbody tr").count() == 6
    assert page.locator("#figure-throughput svg").first.is_visible()
    assert page.locator("#figure-speed-and-memory [aria-roledescription=point]").count() == 5
    assert not page.locator("#theme").is_visible()


def test_ticks_of_counts_are_whole(tab: Page) -> None:
    for figure in ("scaling", "train-loss"):
        axis = tab.locator(f"#figure-{figure} .plot").first
        labels = axis.locator("[aria-label^='X-axis'] .role-axis-label text").all_text_contents()
        assert [str(int(label)) for label in labels] == labels != []
