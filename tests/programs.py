"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any


def output_of(*words: str | Path, **options: Any) -> str:
    """Return what a program prints, which must succeed."""
    ended: subprocess.CompletedProcess[str] = subprocess.run(
        words, capture_output=True, text=True, check=False, **options
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
