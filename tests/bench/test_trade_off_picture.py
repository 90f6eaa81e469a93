"""The README's picture is drawn from a stored result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.trade_off_picture import MOST_BYTES, main

from shardmark.analysis.compare.comparison import compare
from shardmark.report.table.comparison import comparison_json
from shardmark.results.store import load_run
from tests.golden.invented import invented_trial, write_run


def test_every_cell_is_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [
        invented_trial("single", 1),
        *(invented_trial("ddp", 2, precision=p, id=p) for p in ("fp32", "bf16")),
        *(invented_trial("fsdp", size) for size in (2, 4)),
    ]
    comparison = compare([load_run(write_run(tmp_path / "run", trials))])
    stored, out = tmp_path / "stored.json", tmp_path / "docs" / "picture.svg"
    stored.write_text(json.dumps(comparison_json(comparison), default=str))
    command = ["", str(stored), "--where", "precision=fp32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    main()
    svg = out.read_text()
    assert svg.count('aria-roledescription="point"') == 4
    assert "fsdp, 4" in svg
    assert len(svg) < MOST_BYTES
    monkeypatch.setattr(sys, "argv", [*command, "--where", "precision=fp64"])
    with pytest.raises(SystemExit, match="no such row"):
        main()
