"""The answer of a race: keep, discard, or not decided."""

from __future__ import annotations

from typing import Any

from shardmark.base.statistics.race import MOST_PAIRS, Decision
from shardmark.base.text import counted
from shardmark.bench.analysis.compare.race import Race, Racer, verdict_on

DECISIONS = KEEP, DISCARD, NOT_DECIDED = "keep", "discard", "not decided"


def race_facts(race: Race) -> list[dict[str, Any]]:
    """Describe each candidate for programs, the one to keep first."""
    best = sorted(race.racers, key=lambda racer: -racer.standing.ratio)
    order = [KEEP, NOT_DECIDED, DISCARD]
    best.sort(key=lambda racer: order.index(verdict_on(racer)))
    return [
        {
            "variant": racer.row.strategy,
            "against": race.reference.strategy,
            "decision": verdict_on(racer),
            "ratio": racer.standing.ratio if racer.standing.pairs else None,
            "low": racer.standing.low if racer.standing.is_bounded else None,
            "high": racer.standing.high if racer.standing.is_bounded else None,
            "pairs": racer.standing.pairs,
            "margin": race.margin,
            "same_training": racer.row.equivalent,
            "cause": racer.row.deviation,
            "text": _text(racer, race),
        }
        for racer in best
    ]


def _text(racer: Racer, race: Race) -> str:
    """Return a line with the decision and what it rests on."""
    result, verdict = racer.standing, verdict_on(racer)
    head = f"{verdict} {racer.row.strategy}:"
    pairs = counted(result.pairs, "pair")
    speed = f"{result.ratio:.3g}x as fast as {race.reference.strategy}, {pairs}"
    if result.is_bounded and result.high < 10:
        speed = (
            f"{result.ratio:.3f}x as fast as {race.reference.strategy} ({result.low:.3f} to "
            f"{result.high:.3f}, {pairs})"
        )
    elif not result.pairs:
        speed = f"not compared in speed: no undisturbed pair with {race.reference.strategy}"
    row, same = racer.row, racer.row.equivalent
    if not row.ok_trials:
        text = f"it does not run: {row.failed[0].reason if row.failed else 'no trial has ended'}"
    elif same is False:
        text = f"not the same training: {row.deviation}; {speed}"
    elif same is None and verdict == NOT_DECIDED and racer.decision is not Decision.UNDECIDED:
        cause = row.deviation or "it was not compared"
        text = f"whether it trains the same cannot be told ({cause}); {speed}"
    elif verdict == NOT_DECIDED:
        more = result.pairs_to_decide(race.margin)
        about = "at least" if more == MOST_PAIRS else "about"
        text = speed + ("" if more is None else f"; {about} {counted(more, 'pair')} would decide")
    elif racer.decision is Decision.SLOWER:
        text = f"slower: {speed}"
    elif racer.decision is Decision.FASTER:
        text = f"{speed}, and trains the same"
    elif verdict == KEEP:
        less = f"{100 * (1 - (racer.memory_ratio or 1)):.0f} %"
        text = f"as fast, with {less} less memory; {speed}, and trains the same"
    else:
        text = f"no difference of {100 * race.margin:g} % or more: {speed}"
    return f"{head} {text}"
