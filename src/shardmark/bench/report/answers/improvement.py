"""The answer of `time --improve`: what made a script faster, and what to change in it."""

from __future__ import annotations

from typing import Any

from shardmark.bench.analysis.compare.race import verdict_on
from shardmark.bench.analysis.improvement import Improvement
from shardmark.bench.report.answers.race import race_facts


def improvement_lines(improvement: Improvement) -> list[str]:
    """Return the answer, a line for each thing that was tried, and the patch."""
    lines = [answer_of(improvement), ""]
    lines += [f"  {facts['text']}" for facts in race_facts(improvement.race)]
    if improvement.patch or improvement.snippets:
        patch = improvement.patch.rstrip("\n").split("\n")
        lines += ["", "To change:", *improvement.snippets, *patch]
    return lines


def answer_of(improvement: Improvement) -> str:
    """Return the first line: how much faster the fastest set is, and by what."""
    unfit = improvement.unfit
    racers = {racer.row.strategy: racer for racer in improvement.race.racers}
    open_ = [name for name, racer in racers.items() if verdict_on(racer) == "not decided"]
    disturbed = next((r.row.disturbed for r in racers.values() if r.row.disturbed), None)
    cause = f" (trials were disturbed: {disturbed})" if disturbed else ""
    more = f"  Not decided: {', '.join(open_)}{cause}." if open_ else ""
    more += f"  Not tried, for want of a place or use: {', '.join(unfit)}." if unfit else ""
    if not improvement.best:
        shown = [name for name in racers if name not in open_]
        text = f" (tried: {', '.join(shown)})" if shown else ""
        return f"Nothing is shown to be faster and to train the same{text}.{more}"
    result = racers[improvement.best].standing
    speed = f"{result.ratio:.2f}x ({result.low:.2f} to {result.high:.2f})"
    return f"{speed} with {improvement.best}, which trains the same.{more}"


def improvement_facts(improvement: Improvement) -> dict[str, Any]:
    """Return the improvement for programs."""
    return {
        "answer": answer_of(improvement),
        "kept": [*improvement.interventions],
        "tried": race_facts(improvement.race),
        "patch": improvement.patch,
        "snippets": [*improvement.snippets],
    }
