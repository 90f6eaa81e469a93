"""Crashes of libraries inside ranks, after which a group ran again: told where a run ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

CRASHES: list[str] = []
"""Signal and logs of the ranks, of this process or of all workers."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["crashes"] = CRASHES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    CRASHES.extend(getattr(node, "workeroutput", {}).get("crashes", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for crash in CRASHES:
        terminalreporter.section("a library crashed in a rank, and its group ran again")
        terminalreporter.write_line(crash)
