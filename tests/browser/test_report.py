"""The report page in Debian's Chromium, from the disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.runs import HOSTILE

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.conftest import Opened

DESK: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
}
A4_PIXELS = 680
"""Between the margins."""
MOST_BYTES = 3_000_000
MOST_SCREENS = 5
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
TEXTS = """() => [...document.querySelectorAll('.panel')].map((panel) => {
  const { left, right } = panel.getBoundingClientRect();
  const texts = [...panel.querySelectorAll('svg text')]
    .filter((one) => one.textContent.trim() && getComputedStyle(one).opacity !== '0'
      && Number(one.getAttribute('opacity') ?? 1) > 0)
    .map((one) => ({ text: one.textContent, ...one.getBoundingClientRect().toJSON() }))
    .filter((one) => one.width > 0);
  return { left, right, texts };
})"""
HIDDEN_BOXES = """() => [...document.querySelectorAll('h1, h2, dt, dd, .caution, figcaption')]
  .filter((one) => one.offsetParent && one.scrollWidth > one.clientWidth + 1
    && getComputedStyle(one).display !== 'inline')
  .map((one) => one.textContent.slice(0, 60))"""


def cells(table: Locator, title: str) -> list[str]:
    """The column's texts from top to bottom, of rows that are shown."""
    texts: list[str] = table.evaluate(
        """(table, title) => {
          const titles = [...table.tHead.rows[0].cells].map((one) => one.dataset.title);
          const place = titles.indexOf(title);
          return [...table.tBodies[0].rows].filter((row) => !row.hidden)
            .map((row) => row.cells[place].textContent);
        }""",
        title,
    )
    return texts


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("run", ["small", "grid", "disturbed"])
def test_nothing_overlaps_or_is_clipped(
    opened: Opened, run: str, size: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    watched = opened(request.getfixturevalue(f"{run}_page"), **size)
    watched.unfold()
    assert watched.page.evaluate(TOO_WIDE) == 0
    assert watched.page.evaluate(HIDDEN_BOXES) == []
    panels = watched.page.evaluate(TEXTS)
    assert len(panels) >= 10
    for panel in panels:
        texts = panel["texts"]
        assert texts
        for number, text in enumerate(texts):
            assert text["left"] >= panel["left"] - 1, text
            assert text["right"] <= panel["right"] + 1, text
            for other in texts[number + 1 :]:
                beside = text["right"] <= other["left"] + 2 or other["right"] <= text["left"] + 2
                above = text["bottom"] <= other["top"] + 4 or other["bottom"] <= text["top"] + 4
                assert beside or above, (text, other)


def test_a_grid_stays_under_five_screens(opened: Opened, grid_page: Path) -> None:
    page = opened(grid_page, **DESK).page
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height <= MOST_SCREENS * DESK["viewport"]["height"]
    assert grid_page.stat().st_size < MOST_BYTES
    assert page.locator("#table-trials tbody tr").count() == 96


@pytest.mark.parametrize("run", ["small", "grid", "disturbed"])
def test_the_first_screen_has_answers_and_picture(
    opened: Opened, run: str, request: pytest.FixtureRequest
) -> None:
    page = opened(request.getfixturevalue(f"{run}_page"), **DESK).page
    bottom = "(one) => one.getBoundingClientRect().bottom"
    assert page.locator(".card").count() >= 3
    assert page.locator(".card").nth(2).evaluate(bottom) < 900
    assert page.locator("#figure-speed-and-memory .plot").first.evaluate(bottom) < 900


def test_opens_quietly_and_loads_nothing_else(opened: Opened, small_page: Path) -> None:
    watched = opened(small_page)
    watched.unfold()
    assert watched.messages == []
    assert watched.requests == [small_page.as_uri()]
    assert watched.page.locator("h1").inner_text() == "invented"
    assert watched.page.locator("figure").count() >= 5


def test_the_table_sorts_by_pointer_and_keyboard(opened: Opened, small_page: Path) -> None:
    page = opened(small_page).page
    table = page.locator("#table-comparison")
    heading = table.locator("th", has=page.get_by_role("button", name="samples/s"))
    assert heading.get_attribute("aria-sort") == "none"
    for direction in ("descending", "ascending", "descending"):
        heading.locator("button").focus()
        page.keyboard.press("Enter")
        assert heading.get_attribute("aria-sort") == direction
        shown = cells(table, "samples/s")
        known = [float(text.split()[0]) for text in shown if text != "-"]
        assert known == sorted(known, reverse=direction == "descending")
        assert shown[-1] == "-", "what is missing comes last in both directions"
    assert len({round(value) for value in known}) > 2
    table.get_by_role("button", name="strategy").click()
    assert cells(table, "strategy") == sorted(cells(table, "strategy"))
    assert table.locator("th[aria-sort=descending], th[aria-sort=ascending]").count() == 1


def test_filters_hold_for_tables_and_figures(opened: Opened, grid_page: Path) -> None:
    page = opened(grid_page).page
    shown = "#figure-throughput [aria-roledescription=bar]:not(.off)"
    before = page.locator(shown).count()
    page.locator("select[name=strategy]").select_option("fsdp")
    page.locator("select[name=precision]").select_option("bf16")
    table = page.locator("#table-comparison")
    assert set(cells(table, "strategy")) == {"fsdp"}
    assert len(cells(table, "strategy")) == 4
    assert page.locator(shown).count() == 4 < before
    names = page.locator(shown).evaluate_all("(all) => all.map((one) => one.ariaLabel)")
    assert all(name.startswith("fsdp, ") for name in names)
    page.locator("select[name=strategy]").select_option("")
    page.locator("select[name=precision]").select_option("")
    assert page.locator(shown).count() == before


def test_the_legend_toggles_a_series(opened: Opened, small_page: Path) -> None:
    page = opened(small_page).page
    figure = page.locator("#figure-speed-and-memory")
    marks = figure.locator("[aria-roledescription=point]:not(.off)")
    before = marks.count()
    button = figure.get_by_role("button", name="ddp")
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert marks.count() == before - 2
    button.click()
    assert marks.count() == before


def test_the_pointer_names_a_mark_and_a_button_enlarges(opened: Opened, small_page: Path) -> None:
    page = opened(small_page).page
    bar = page.locator("#figure-throughput [aria-roledescription=bar]").first
    bar.hover()
    assert page.locator("#tip").inner_text() == bar.get_attribute("aria-label")
    page.locator("#figure-throughput .panel").first.hover()
    page.locator("#figure-throughput .enlarge").first.click()
    assert page.locator("#enlarged[open] svg").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#enlarged[open]").count() == 0


def test_the_theme_is_chosen_and_kept(opened: Opened, small_page: Path) -> None:
    page = opened(small_page, color_scheme="dark").page
    colours = """() => [getComputedStyle(document.body).backgroundColor,
      getComputedStyle(document.querySelector('.plot text')).fill]"""
    dark = page.evaluate(colours)
    button = page.locator("#theme")
    assert "light" in button.inner_text(), "it says what it does"
    button.click()
    light = page.evaluate(colours)
    assert light[0] == "rgb(255, 255, 255)" != dark[0]
    assert light[1] != dark[1]
    page.reload()
    assert page.evaluate(colours) == light
    assert "dark" in button.inner_text()


def test_downloads_the_comparison(opened: Opened, small_page: Path, tmp_path: Path) -> None:
    page = opened(small_page).page
    for form, start in (("CSV", "experiment,workload,strategy"), ("JSON", "{")):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Download {form}").click()
        path = tmp_path / form
        download.value.save_as(path)
        assert path.read_text().startswith(start)
        assert download.value.suggested_filename == f"invented.{form.lower()}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("run", ["small", "disturbed"])
def test_is_accessible(
    opened: Opened, run: str, scheme: str, request: pytest.FixtureRequest
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe")
    watched = opened(request.getfixturevalue(f"{run}_page"), color_scheme=scheme)
    watched.unfold()
    response = axe.Axe().run(watched.page).response
    assert any(rule["id"] == "color-contrast" for rule in response["passes"])
    assert [
        (rule["id"], node["html"], node["failureSummary"])
        for rule in response["violations"]
        for node in rule["nodes"]
    ] == []


def test_hostile_texts_stay_texts(opened: Opened, hostile_page: Path) -> None:
    watched = opened(hostile_page)
    watched.unfold()
    page = watched.page
    assert watched.dialogs == []
    assert watched.messages == []
    assert page.locator("img, iframe, object, [onerror]").count() == 0
    kinds = page.locator("script").evaluate_all("(all) => all.map((one) => one.type)")
    assert kinds.count("") == 1, "the page's own"
    assert set(kinds) == {"", "application/json"}
    assert page.locator("svg a, [href^='javascript']").count() == 0
    logs = (page.locator("#not-ok pre").first.text_content() or "").split("\n")
    reasons = page.locator("#not-ok").text_content() or ""
    for text in HOSTILE:
        assert text in logs
        assert text in reasons
    assert "last words" in logs
    assert page.locator("h1").inner_text() == HOSTILE[0] + HOSTILE[1]


def test_paper_shows_everything(opened: Opened, small_page: Path) -> None:
    watched = opened(small_page, color_scheme="dark")
    page = watched.page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": A4_PIXELS, "height": 960})
    assert page.evaluate(TOO_WIDE) == 0
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    assert watched.messages == []


def test_without_scripts_it_has_tables_and_figures(opened: Opened, small_page: Path) -> None:
    page = opened(small_page, java_script_enabled=False).page
    assert page.locator("#table-comparison tbody tr").count() == 6
    assert page.locator("#figure-throughput svg").first.is_visible()
    assert page.locator("#figure-speed-and-memory [aria-roledescription=point]").count() == 5
    assert not page.locator("#theme").is_visible()
