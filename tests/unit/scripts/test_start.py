"""A start says in a file what it wrote, and whether the disk was full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardmark.scripts import start
from shardmark.scripts.start import WRITTEN_FILE, described_writes, filled_disk


@pytest.mark.parametrize("text", ["", '{"is_full": fal'])
def test_a_start_without_room_for_its_facts_has_filled_the_disk(text: str, tmp_path: Path) -> None:
    assert not filled_disk(tmp_path)
    (tmp_path / WRITTEN_FILE).write_text(text)
    assert filled_disk(tmp_path)
    assert described_writes(tmp_path).startswith("your files are unchanged")


def test_a_supervisor_needs_no_installed_package() -> None:
    """It starts without site-packages, and the package may be installed elsewhere (`pip -e`)."""
    folder = Path(start.__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import {start.__name__}"
    subprocess.run([sys.executable, "-E", "-S", "-P", "-c", code], check=True)
