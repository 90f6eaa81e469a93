"""A stand-in for a trial's agent that `test_fork_server` forks; it imports no library."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run_agent(directory: str, task: str) -> int:
    """Says what it found, in the forked process; may then wait to be killed, with a child."""
    told = {
        "pid": os.getpid(),
        "server": os.getppid(),
        "variable": os.environ.get("SHARDMARK_TEST"),
        "frozen": gc.get_freeze_count(),
        "loaded": "colorsys" in sys.modules,
        "temporary": tempfile.mkdtemp(),
        "bad_fork": "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork(),
    }
    if task == "links":
        told["child"] = subprocess.Popen(["sleep", "60"]).pid
    part = Path(directory) / "told.part"
    part.write_text(json.dumps(told))
    part.rename(Path(directory) / "told.json")
    if task == "links":
        time.sleep(60)
    return 3
