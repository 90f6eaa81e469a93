"""Fixtures that the tests of all engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.cluster import namespaces
from benchmarks.cluster.bench import Bench, bench

from tests import ROOT
from tests.cluster.one_machine import one  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start there: the user's model is in it."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session", autouse=True)
def _secret_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes that are given the same command find the same one, as in a shared home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("SHARDMARK_SECRET", raising=False)
        yield


@pytest.fixture
def nodes() -> Iterator[Bench]:
    """Two of them, which share no network but one link."""
    with bench(nodes=2) as made:
        yield made
        left = [namespaces.processes(node.namespace) for node in made.nodes]
    assert left == [[], []], "no process is left on any node"
