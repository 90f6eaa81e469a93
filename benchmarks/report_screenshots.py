"""Pictures of a run's report page at desktop and phone width, as the README shows them.

`python benchmarks/report_screenshots.py RUN [--out docs/images] [--dark] [--full]`
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import sync_playwright

from shardmark.cli import main as shardmark

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = "/usr/bin/chromium"
MOST_BYTES = 400_000
SIZES = {"desktop": (1400, 1000), "phone": (390, 844)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of a run's report page.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--dark", action="store_true", help="the dark theme")
    parser.add_argument(
        "--full", action="store_true", help="the whole page, unfolded, however large"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        code = shardmark(["report", str(given.run), "--out", str(page), "--no-images"])
        if code:
            raise SystemExit(code)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"], headless=True
            )
            for name in SIZES:
                out = given.out / f"report-{name}{'-dark' if given.dark else ''}.png"
                photograph(browser, page, name, out, dark=given.dark, full=given.full)
            browser.close()


def photograph(
    browser: Browser, page: Path, name: str, out: Path, *, dark: bool, full: bool
) -> None:
    """One picture of the page's top, or of all of it; stops if it is too large for a document."""
    width, height = SIZES[name]
    options: dict[str, Any] = {"color_scheme": "dark" if dark else "light"}
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    tab = context.new_page()
    tab.goto(page.as_uri())
    if full:
        tab.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    tab.screenshot(path=out, full_page=full)
    context.close()
    size_bytes = out.stat().st_size
    print(f"{out}: {size_bytes / 1000:.0f} kB")
    if not full and size_bytes > MOST_BYTES:
        raise SystemExit(f"{out} is larger than {MOST_BYTES / 1000:.0f} kB")


if __name__ == "__main__":
    main()
