"""Changes are raced that a script has a place for."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.bench.improve import _fitting
from shardmark.scripts.interventions import CALLS

SEEN: dict[str, Any] = {
    "shares": {"input": 0.3, "update": 0.3}, "loader": {"workers": 0}, "cores": 4, "threads": 2,
    "wrappers": ["DistributedDataParallel"], "passes": 2, "trained_bytes": 2**30, "fits": [],
}  # fmt: skip


def fitting(**changes: Any) -> list[str]:
    return [name for name, _ in _fitting(SEEN | changes, "cpu", 2)]


def test_arguments_are_raced_only_if_a_call_would_get_them() -> None:
    """An optimizer may know no fused kernel, and a script may give an argument already."""
    rest = ["no_sync", "compile", "malloc"]
    assert fitting() == rest
    every = fitting(fits=[*CALLS])
    assert {*every} == {*CALLS, *rest} - {"pin_memory"}
    assert every.count("workers") == 2, "2 and 4"
    assert fitting(fits=["bucket_view"]) == ["bucket_view", *rest]


@pytest.mark.parametrize(
    "changes", [{"wrappers": ["DistributedDataParallel", "no_sync"]}, {"passes": 1}]
)
def test_a_script_that_leaves_reductions_out_is_not_told_to(changes: dict[str, Any]) -> None:
    assert "no_sync" not in fitting(**changes)
