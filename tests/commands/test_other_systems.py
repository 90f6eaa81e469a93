"""Plans, lists and comparisons use no module or function that only Linux or Unix has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

RUN = str(ROOT / "tests" / "golden" / "v1")
BLOCKED = """
import importlib.abc, os, sys

BLOCKED = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

for name in BLOCKED & sys.modules.keys():
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
for name in ("fork", "getuid", "sched_getaffinity", "sched_setaffinity"):
    delattr(os, name)
from shardmark.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["list", "strategies"],
        ["compare", RUN],
        pytest.param(["plan", "resnet50", "--on", "4xa10g"], marks=pytest.mark.slow),
        pytest.param(["report", RUN, "--out", "page.html"], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_a_verb_needs_nothing_of_linux(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", BLOCKED, *words]
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr.count("blocked")) == (0, 0), ended.stderr
    assert ended.stdout
