"""Where programs are found that a library calls, ninja above all."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def tool_path() -> str:
    """PATH with this Python's own programs first: a virtual environment need not be activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
