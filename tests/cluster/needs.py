"""What tests on several nodes need of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess


def why_no_bench() -> str | None:
    """Why no network namespaces can be built here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install iproute2 util-linux"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], check=False, capture_output=True)
    if tried.returncode:
        return f"no namespaces here: {tried.stderr.decode().strip()}"
    return None
