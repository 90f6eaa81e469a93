"""The benchmark of a step's options, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_options_are_measured(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "step_options.py"
    command = [sys.executable, str(script), "--small", "--out", str(tmp_path)]
    command += ["--model", "tests.distributed.models:small"]
    command += ["--options", "compile: blocks", "channels_last", "foreach"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (file,) = tmp_path.glob("*-step-options-small.json")
    stored = json.loads(file.read_text())
    # Not whether the bar holds: this model has dropout, which draws for pictures as they lie.
    assert len(stored["numbers"]) == 4
    for name, option in stored["numbers"].items():
        assert option["ratio"]["median"] > 0, name
        assert (option["compile_seconds"] > 0) is name.startswith("compile")
