"""The cause of a deviation: read off, or the variation of the reference that repeats it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shardmark.core.recipe import Recipe
from shardmark.equivalence.evidence import Array, Evidence
from shardmark.equivalence.hypotheses import EXPLAINED, Explanation, explanations
from shardmark.equivalence.parity import (
    TINY,
    Tolerances,
    checks_of,
    first_deviation,
    norm,
)
from shardmark.equivalence.variation import Variation
from shardmark.results.verification import Cause, Check

Run = Callable[[Variation], Evidence]
"""The evidence of the reference with a variation."""


def cause_of(
    found: Evidence,
    checks: Sequence[Check],
    tolerances: Tolerances,
    *,
    recipe: Recipe,
    run: Run,
    whole_batch: Callable[[], Evidence],
) -> Cause:
    """The cause of the first check that does not hold, or what could be excluded."""
    first = first_deviation(found, checks, tolerances)
    place = f" ({first.where})" if first.where else ""
    start = f"{first.name}{place}"
    plain = _plain(found, first, tolerances)
    if plain is not None:
        return Cause(text=plain[0], evidence=plain[1], first_deviation=start)
    best: tuple[float, Explanation] | None = None
    for explanation in explanations(found, first, tolerances.reference, recipe):
        varied = _as_expected(run(explanation.variation), tolerances)
        left = _deviation(checks_of(found, varied), explanation.compares)
        before = _deviation(checks, explanation.compares)
        explained = before > 1 and left <= max(1.0, explanation.needs * before)
        if explained and (best is None or left < best[0]):
            best = (left, explanation)
    if best is not None:
        left, explanation = best
        before = _deviation(checks, explanation.compares)
        return Cause(
            text=explanation.text,
            evidence=f"the reference trained so differs by {left:.3g} tolerances; "
            f"trained as defined, by {before:.3g}",
            setting=explanation.setting,
            first_deviation=start,
        )
    return _by_elimination(
        found, first, start=start, tolerances=tolerances, run=run, whole_batch=whole_batch
    )


def _as_expected(reference: Evidence, tolerances: Tolerances) -> Tolerances:
    """The same tolerances around another reference: disturbed runs move along."""
    base = tolerances.reference
    moved = [_moved(run, base, reference) for run in tolerances.disturbed]
    return replace(tolerances, reference=reference, disturbed=moved)


def _moved(run: Evidence, base: Evidence, to: Evidence) -> Evidence:
    return Evidence(
        initial_sha256=to.initial_sha256,
        sample_ids=to.sample_ids,
        draws=to.draws,
        losses=tuple(
            tuple(t + (r - b) for r, b, t in zip(*three, strict=True))
            for three in zip(run.losses, base.losses, to.losses, strict=True)
        ),
        learning_rates=to.learning_rates,
        optimizer_steps=to.optimizer_steps,
        tensors={
            part: {n: to.tensors[part][n] + (a - base.tensors[part][n]) for n, a in named.items()}
            for part, named in run.tensors.items()
        },
        buffers=tuple(
            {n: t[n] + (a - b[n]) for n, a in r.items()}
            for r, b, t in zip(run.buffers, base.buffers, to.buffers, strict=True)
        ),
        quality={
            name: None
            if value is None or base.quality[name] is None or to.quality[name] is None
            else to.quality[name] + (value - base.quality[name])  # type: ignore[operator]
            for name, value in run.quality.items()
        },
        samples_evaluated=to.samples_evaluated,
    )


def _deviation(checks: Sequence[Check], compared: frozenset[str] | None) -> float:
    """The largest deviation in tolerances, of the checks that have one."""
    return max(
        check.in_tolerances
        for check in checks
        if check.in_tolerances is not None and (compared is None or check.name in compared)
    )


def _plain(found: Evidence, first: Check, tolerances: Tolerances) -> tuple[str, str] | None:
    """Causes that can be read off without a trial."""
    expected = tolerances.reference
    if first.name == "initial weights":
        shas = dict(enumerate(sha[:12] for sha in found.initial_sha256))
        return "different initial weights", (
            f"hash by rank {shas}, the seed's {expected.initial_sha256[0][:12]}"
        )
    if first.name == "learning rate":
        return "different learning rate", f"{first.found} where the recipe gives {first.expected}"
    if first.name == "random draws":
        return "different random draws (proposal sampling)", (
            f"{first.where}: {first.found}, expected {first.expected}; weights and samples are "
            "the same"
        )
    if first.name == "sample ids":
        return _samples(found, expected)
    if first.name == "buffers":
        return _other_rank(found, tolerances)
    return None


def _other_rank(found: Evidence, tolerances: Tolerances) -> tuple[str, str] | None:
    """Whether rank 0 has another rank's buffers, which are then evaluated."""
    for rank, buffers in enumerate(tolerances.reference.buffers):
        off = [
            norm(found.buffers[0].get(name, np.float32(0)) - buffer)
            / max(tolerances.buffer(rank, name), TINY)
            for name, buffer in buffers.items()
        ]
        if rank > 0 and off and max(off) <= 1:
            return (
                f"buffers are not synchronised: rank {rank}'s are evaluated, not rank 0's",
                f"rank 0 reports rank {rank}'s buffers to {max(off):.3g} tolerances",
            )
    return None


def _samples(found: Evidence, expected: Evidence) -> tuple[str, str]:
    for step in range(len(expected.learning_rates)):
        mine = [i for rank in found.sample_ids for i in rank[step]]
        wanted = [i for rank in expected.sample_ids for i in rank[step]]
        if mine == wanted:
            continue
        repeated = sorted(i for i, count in Counter(mine).items() if count > 1)
        if repeated and len(set(wanted)) == len(wanted):
            return "repeated samples", (
                f"step {step + 1} takes {len(repeated)} samples more than once: {repeated[:8]}"
            )
        same = sorted(mine) == sorted(wanted)
        what = "the same samples, shared out otherwise" if same else "other samples"
        return "different batch shares", f"step {step + 1} has {what}"
    return "different batch shares", "ranks' shares are exchanged"


def _by_elimination(
    found: Evidence,
    first: Check,
    *,
    start: str,
    tolerances: Tolerances,
    run: Run,
    whole_batch: Callable[[], Evidence],
) -> Cause:
    """What remains when no variation reproduces the numbers."""
    expected = tolerances.reference
    whole = whole_batch()
    gradient = found.tensors.get("gradient", {})
    before = _distance(gradient, expected.tensors["gradient"])
    after = _distance(gradient, whole.tensors["gradient"])
    if after < EXPLAINED * before:
        return Cause(
            text="batch norm takes its statistics over all ranks (synchronised batch norm)",
            evidence=f"the gradient is {after / before:.2g} times as far from one device's on the "
            "whole batch as from the definition's",
            first_deviation=start,
        )
    if first.name == "losses" and first.where is not None and first.where.endswith("step 1"):
        drawn = run(Variation(seed_offset=1))
        spread = abs(drawn.losses[0][0] - expected.losses[0][0])
        if spread > tolerances.loss(0, 0):
            return Cause(
                text="different random draws (dropout, proposal sampling)",
                evidence=f"weights and samples are the same, and other draws alone move the "
                f"reference's first loss by {spread:.3g}; the strategy's differs by "
                f"{abs(found.losses[0][0] - expected.losses[0][0]):.3g}",
                first_deviation=start,
            )
    return Cause(
        text="no known explanation reproduces the numbers",
        evidence="tried: scale, averaging, clipping, weight decay, precision, skipped steps, "
        "random draws, buffers",
        first_deviation=start,
    )


def _distance(mine: object, wanted: object) -> float:
    pairs: list[tuple[Array, Array]] = [(mine[n], wanted[n]) for n in wanted if n in mine]  # type: ignore[attr-defined, index, operator]
    return float(np.sqrt(sum(norm(a - b) ** 2 for a, b in pairs)))
