"""Checks on what a training step is given: samples, random draws, learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.equivalence.evidence import Evidence
from shardmark.results.verification import Check


def equal(name: str, found: str, expected: str, where: str | None = None) -> Check:
    """A check that only equality passes."""
    return Check(
        name=name,
        holds=found == expected,
        found=found,
        expected=expected,
        tolerance=None,
        where=where,
    )


def sample_check(found: Evidence, expected: Evidence) -> Check:
    """The first step of any rank with other samples than the reference's."""
    for rank, (mine, wanted) in enumerate(zip(found.sample_ids, expected.sample_ids, strict=True)):
        for step, (ids, wanted_ids) in enumerate(zip(mine, wanted, strict=True)):
            if ids != wanted_ids:
                place = f"rank {rank}, step {step + 1}"
                return equal("sample ids", _few(ids), _few(wanted_ids), place)
    steps = len(expected.learning_rates)
    return equal("sample ids", f"equal in {steps} steps", f"equal in {steps} steps")


def draw_check(found: Evidence, expected: Evidence) -> Check:
    """The first step of any rank with other random numbers than the reference's."""
    for rank, (mine, wanted) in enumerate(zip(found.draws, expected.draws, strict=True)):
        for step, (drawn, wanted_draws) in enumerate(zip(mine, wanted, strict=True)):
            if drawn != wanted_draws:
                others = [draw for draw in drawn if draw not in wanted_draws]
                return equal(
                    "random draws",
                    f"{len(others)} other than expected" if others else f"{len(drawn)} draws",
                    f"{len(wanted_draws)} draws",
                    f"rank {rank}, step {step + 1}",
                )
    count = sum(len(drawn) for rank in expected.draws for drawn in rank)
    told = f"{count} draws are equal" if count else "the workload draws none of its own"
    return equal("random draws", told, told)


def _few(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


def rate_check(found: Evidence, expected: Evidence) -> Check:
    """The first step with another learning rate than the reference's."""
    pairs = list(zip(found.learning_rates, expected.learning_rates, strict=True))
    step = next((i for i, (mine, wanted) in enumerate(pairs) if mine != wanted), 0)
    mine, wanted = pairs[step]
    return equal("learning rate", repr(mine), repr(wanted), f"step {step + 1}")
