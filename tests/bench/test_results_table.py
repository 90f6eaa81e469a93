"""A run's comparison is stored as Markdown, JSON and a picture."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results_table import MOST_PICTURE_BYTES, main

from tests.bench.test_link_speeds import ENVIRONMENT
from tests.golden.invented import invented_trial, write_run

if TYPE_CHECKING:
    import pytest


def test_a_run_is_stored_with_a_mark_for_every_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [invented_trial(name, size) for name, size in (("single", 1), ("ddp", 2), ("ddp", 4))]
    run = write_run(tmp_path / "run", trials, environment=ENVIRONMENT)
    out, picture = tmp_path / "out", tmp_path / "picture.svg"
    words = ["", str(run), "quick", "--out", str(out), "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", words)
    main()
    assert {path.name for path in out.iterdir()} == {
        "2026-11-21-quick.json",
        "2026-11-21-quick.md",
    }
    assert len(json.loads((out / "2026-11-21-quick.json").read_text())["rows"]) == 3
    svg = picture.read_text()
    assert svg.count('aria-roledescription="point"') == 3
    assert "ddp, 4" in svg
    points = re.findall(r'<path aria[^>]*roledescription="point"[^>]*>', svg)
    assert len({re.sub(r'.* fill="([^"]*)".*', r"\1", point) for point in points}) == 2
    assert len(svg) < MOST_PICTURE_BYTES
