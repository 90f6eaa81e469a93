"""Workers share out a run of all tests, or of all unit tests.

Tests that start ranks are kept together, so that what these load is loaded once: those of several
nodes, those of a kept engine, and bare process groups.  Each of the three begins on a worker of its
own, and the rest goes file by file to whoever is free.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
WORKERS = 2
WORKERS_FOR_ALL = 3
"""Workers for all tests: one of them waits most of the time, for slow links and daemons."""
BARE_GROUPS = tuple(
    f"tests/distributed/test_{name}.py"
    for name in ("strategy_table", "network", "batch_norm", "local_steps")
)
TOGETHER = {
    "nodes": ("tests/cluster/", "tests/accelerator/"),
    "groups": BARE_GROUPS,
    "trials": ("tests/distributed/",),
}
SLOW = (
    *("tests/browser/", "tests/cluster/test_bench", "tests/cluster/test_ray.py::test_dead"),
    *("tests/cluster/test_slurm.py::test_lost", "tests/cluster/test_torchrun.py::test_slow"),
    *("tests/cluster/test_torchrun.py::test_death", "tests/unit/predict/test_public_questions"),
    *("tests/unit/predict/test_repeated_layers", "tests/distributed/test_examples"),
    "tests/unit/extras/detection/test_detection_task.py::test_detectors_of_our_own",
    *("tests/commands/test_adapters", "tests/commands/test_base_install"),
    *("tests/commands/test_package", "tests/docs/test_commands", "tests/docs/test_site"),
    *("tests/docs/test_images.py::test_picture_of", "tests/distributed/test_script.py::test_a"),
    *("tests/distributed/test_compile", "tests/distributed/test_cpu_adam"),
    *("tests/distributed/test_exported", "tests/distributed/test_fork_server"),
    *("tests/distributed/test_killed", "tests/distributed/test_large"),
    *("tests/distributed/test_local_steps", "tests/distributed/test_many_ranks"),
    *("tests/distributed/test_network", "tests/distributed/test_no_harm"),
    *("tests/distributed/test_nobody", "tests/distributed/test_outcomes"),
    *("tests/distributed/test_server_deaths", "tests/distributed/test_two_nodes"),
)
"""Beginnings of the names of tests that `pytest -m slow` runs, and the default run not."""
ORDER = {"nodes": 0, "trials": 1, "groups": 2}


def scope_of(node_id: str) -> str:
    """Tests of one scope run on one worker, in their order."""
    file = node_id.partition("::")[0]
    return next((name for name, files in TOGETHER.items() if file.startswith(files)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """None for a file or a folder: workers take a second to start, and import everything twice."""
    told = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    paths = [path.resolve() for path in told]
    if any(TESTS.is_relative_to(path) for path in paths):
        return WORKERS_FOR_ALL
    return WORKERS if any((TESTS / "unit").is_relative_to(path) for path in paths) else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")
    items.sort(key=lambda item: ORDER.get(scope_of(item.nodeid), 3))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collections need not look at millions of objects of libraries, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
