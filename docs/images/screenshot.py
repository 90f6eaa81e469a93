"""Takes the picture of a report page: `python docs/images/screenshot.py [FILE.png]`.

The page is that of the newest stored run of `RUN`.  Needs Chromium.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from draw import HERE, stored_run
from PIL import Image
from playwright.sync_api import sync_playwright

from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.report.page.page import write_report

RUN = "my-texts"
WIDTH, HEIGHT = 1000, 700
COLOURS = 64
"""Colours of the file, which is a third of the size of one with all."""


def main(file: Path) -> None:
    with stored_run(RUN) as run, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.html"
        write_report([run], compare([run]), out, images=False)
        with sync_playwright() as playwright:
            path = shutil.which("chromium") or "/usr/bin/chromium"
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            tab = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1.5
            )
            tab.goto(out.resolve().as_uri())
            shot = Image.open(io.BytesIO(tab.screenshot()))
            browser.close()
    shot.convert("RGB").quantize(COLOURS).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "report-page.png")
