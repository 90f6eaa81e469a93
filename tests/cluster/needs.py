"""Requirements of tests on several nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

import pytest

TOOLS = ("ip", "tc", "unshare", "setpriv")


@cache
def why_no_bench() -> str | None:
    """Say why network namespaces with limited links cannot be built here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install iproute2 util-linux"
    limit = "tc qdisc add dev lo root tbf rate 1mbit burst 10kb latency 9ms"
    words = ["unshare", "--net", "--uts", "sh", "-c", limit]
    tried = subprocess.run(words, check=False, capture_output=True)
    return f"no such namespaces: {tried.stderr.decode().strip()}" if tried.returncode else None


needs_bench = pytest.mark.skipif(why_no_bench() is not None, reason=why_no_bench() or "")
