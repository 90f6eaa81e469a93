"""Two workers share out a run of all tests, or of all unit tests.

Tests that start ranks or network namespaces want both cores and have time limits: one worker has
them, one after another and first of all.  The other one takes everything else, file by file, and
at the end those of ranks whose outcome depends on no clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
WORKERS = 2
ONE_AFTER_ANOTHER = (
    *("tests/distributed/", "tests/cluster/", "tests/accelerator/"),
    "tests/unit/bench/",  # network namespaces, as those of tests/cluster
)

AT_THE_END = (
    *("tests/distributed/test_detection.py", "tests/distributed/test_sharding.py"),
    *("tests/distributed/test_parameter_server.py", "tests/distributed/test_verify.py"),
)
ORDER = {"ranks": 0, "last": 2}


def scope_of(node_id: str) -> str:
    """Tests of one scope run on one worker, in their order."""
    if node_id.startswith(AT_THE_END):
        return f"last {node_id.partition('::')[0]}"
    return "ranks" if node_id.startswith(ONE_AFTER_ANOTHER) else node_id.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """None for a file or a folder: workers take a second to start, and import everything twice."""
    told = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    many = any((TESTS / "unit").is_relative_to(path.resolve()) for path in told)
    return WORKERS if many else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.get(scope_of(item.nodeid).partition(" ")[0], 1))
