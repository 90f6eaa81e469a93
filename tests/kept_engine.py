"""An engine of this machine for many tests: loading the libraries costs seconds each time."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from shardmark.bench.launch.local.engine import LocalEngine
from tests import ROOT


class KeptEngine(LocalEngine):
    """Outlives a run."""

    def close(self) -> None:
        """Ended by `end`."""

    def end(self) -> None:
        super().close()

    def held(self) -> dict[str, int]:
        """Count the things that trials could leave in this process and the fork server."""
        children = psutil.Process().children()
        servers = [child for child in children if "launch.local.fork" in " ".join(child.cmdline())]
        processes = [psutil.Process(), *servers]
        return {
            "file descriptors": sum(process.num_fds() for process in processes),
            "threads": sum(process.num_threads() for process in processes),
        }


@pytest.fixture(scope="session")
def kept_engine() -> Iterator[KeptEngine]:
    before = set(psutil.Process().children(recursive=True))
    made = KeptEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where the user's models are
        made.machine("cpu")
    yield made
    made.end()
    left = set(psutil.Process().children(recursive=True)) - before
    # Python's own helpers may have come meanwhile.
    assert not [one for one in left if "from multiprocessing." not in " ".join(one.cmdline())]
