"""`shardmark.run` of the guide's own model, which lives in no module that a rank could import."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import shardmark
from shardmark.base.results.schema import Outcome
from shardmark.bench.launch import session
from tests import ROOT
from tests.docs.pages import blocks
from tests.kept_engine import KeptEngine

if TYPE_CHECKING:
    import pytest


def test_a_model_of_a_script_is_trained(
    kept_engine: KeptEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    guide = ROOT / "docs" / "guides" / "python.md"
    (code,) = [text for _, text in blocks("python", guide) if "class Small" in text]
    definitions = code.partition("\nrun = ")[0]
    main = ModuleType("__main__")
    lines = definitions.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<script>", (len(definitions), None, lines, "<script>"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(session, "build_engine", lambda *_: kept_engine)
    exec(compile(definitions, "<script>", "exec"), vars(main))
    run = shardmark.run(
        "quickstart",
        tmp_path / "run",
        model=vars(main)["Small"],
        strategy="single",
        steps=12,
        device="cpu",
        measure={"warmup_steps": 2, "verify": False, "evaluate": "never"}
        | {"max_remeasure": 0, "repeats": 1},
    )
    (trial,) = run.trials
    assert trial.outcome is Outcome.OK
    (module,) = (tmp_path / "models").glob("Small_*.py")
    assert trial.trial["workload"]["model"] == f"{module}:Small"
    assert list(run.table()["strategy"]) == ["single"]
    assert "loading torch" in capsys.readouterr().out
