"""A Chromium for all browser tests, and the pages that they look at."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardmark.base.results.store import load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.report.page.page import write_report
from tests.browser.runs import disturbed_run, grid_run, small_run
from tests.golden.hostile import hostile_copy

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Opened = Callable[..., Any]
OPEN_ALL = "document.querySelectorAll('details').forEach((part) => part.open = true)"
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
HOSTILE = (
    "<script>alert(1)</script>\"><img src=x onerror='alert(2)'></script><!--<script>"
    "<a href='javascript:alert(5)'>x</a>'`${alert(4)}{{ 7 * 7 }}&lt;b&gt;"
)
"""Tries to be more than text."""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Ends with the last test of this folder: nothing of it is alive in other tests."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip("needs Debian's chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Watched:
    """A page with all that it said and asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", self._dialog)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def unfold(self) -> None:
        self.page.evaluate(OPEN_ALL)


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opened]:
    """`opened(path, ...)` opens the page; further values are those of a browser's context."""
    contexts = []

    def open_page(path: Path, **options: Any) -> Watched:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        watched = Watched(context.new_page())
        watched.page.goto(path.as_uri())
        return watched

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="package")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The report of a run by its name; the figures' files are left out."""
    makers = {"small": small_run, "grid": grid_run, "disturbed": disturbed_run}
    written: dict[str, Path] = {}

    def page_of(name: str) -> Path:
        if name not in written:
            folder = tmp_path_factory.mktemp(name) / "run"
            hostile_copy(folder, HOSTILE) if name == "hostile" else makers[name](folder)
            run = load_run(folder)
            out = run.path / "report.html"
            write_report([run], compare([run]), out, images=False)
            written[name] = out
        return written[name]

    return page_of


@pytest.fixture
def small_page(pages: Callable[[str], Path]) -> Path:
    return pages("small")


@pytest.fixture
def grid_page(pages: Callable[[str], Path]) -> Path:
    """96 trials: two precisions, two batches, six strategies on two and four ranks."""
    return pages("grid")


@pytest.fixture(scope="module")
def tab(browser: Browser, pages: Callable[[str], Path]) -> Iterator[Page]:
    """The small run's page, for tests that leave it as it was."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(pages("small").as_uri())
        yield page
