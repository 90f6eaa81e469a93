"""The answer of `why`, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.parts import NAMES, Explanation, Part


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{_milliseconds(estimate.value)} ms"
    ends = f"{_milliseconds(max(0.0, estimate.low))} to {_milliseconds(estimate.high)}"
    return f"{_milliseconds(estimate.value)} ms ({ends})"


def cause_of(part: Part) -> str:
    """Describe a part without its amount."""
    place = f" ({part.place})" if part.place else ""
    if part.kind != "late_rank":
        rank = "" if part.rank is None else f" on rank {part.rank}"
        return f"{NAMES[part.kind]}{rank}{place}"
    if part.rank is None:
        return "waiting for the longest rows of each step"
    if part.lateness == "rows":
        return f"rank {part.rank} gets longer rows"
    if part.lateness == "place":
        return f"rank {part.rank} is on a slower place: its lateness stays there when ranks swap"
    phases = {"data": "its input", "forward": "its forward pass", "backward": "its backward pass"}
    untried = "" if part.lateness else ", by its rows, its place or its own work (not tried)"
    return (
        f"rank {part.rank} is late in {phases.get(part.phase or '', 'its update')}{place}{untried}"
    )


def answer_of(explanation: Explanation) -> str:
    """Return the first line: what a step takes, what of it is lost, and to what."""
    step, parts = explanation.step, explanation.parts
    head = f"{_milliseconds(step.value)} ms a step"
    more = [f"{cause_of(p)} ({_interval(p.seconds)})" for p in explanation.undecided]
    open_ = f"  Not decided by these rounds: {', '.join(more)}." if more else ""
    if explanation.unknown:
        open_ += f"  Not known: {', '.join(NAMES[kind] for kind in explanation.unknown)}."
    if not parts:
        if open_:
            return f"Nothing is shown to be lost of {head}.{open_}"
        return f"Nothing is lost of {head} that could be taken away: it computes."
    causes = [f"{_milliseconds(part.seconds.value)} {cause_of(part)}" for part in parts]
    lost = _milliseconds(explanation.lost.value)
    return f"Of {head}, {lost} are lost: {', '.join(causes)}.{open_}"


def lines_of(explanation: Explanation) -> list[str]:
    """Return the answer, its parts with intervals, what counts show, and what it rests on."""
    computing = explanation.step.value - explanation.lost.value
    lines = [answer_of(explanation), ""]
    for part in explanation.parts:
        watched = " [watched, not taken away]" if part.watched else ""
        lines.append(f"  {_interval(part.seconds)}  {cause_of(part)}{watched}")
    update = explanation.update
    of_it = f", {_interval(update)} of it the optimizer's update" if update else ""
    lines.append(f"  {_milliseconds(computing)} ms  computing{of_it}")
    total = sum(part.seconds.value for part in explanation.parts)
    if total > 1.1 * explanation.lost.value > 0:
        lines.append("  the parts overlap: together they are less than their sum")
    lines += ["", *explanation.findings] if explanation.findings else []
    lines += ["", *(f"note: {note}" for note in explanation.notes)] if explanation.notes else []
    return lines


def facts_of(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation for programs, in seconds."""
    return {
        "answer": answer_of(explanation),
        "ranks": explanation.ranks,
        "step_seconds": _ends(explanation.step),
        "lost_seconds": _ends(explanation.lost),
        "computing_seconds": explanation.step.value - explanation.lost.value,
        "update_seconds": _ends(explanation.update) if explanation.update else None,
        "parts": [_part_facts(part) for part in explanation.parts],
        "unknown": [*explanation.unknown],
        "undecided": [_part_facts(part) for part in explanation.undecided],
        "counts": {**explanation.counts, "findings": [*explanation.findings]},
        "notes": [*explanation.notes],
    }


def _part_facts(part: Part) -> dict[str, Any]:
    return {
        "kind": part.kind,
        "seconds": _ends(part.seconds),
        "rank": part.rank,
        "place": part.place,
        "of": part.lateness,
        "phase": part.phase,
        "how": "watched" if part.watched else "taken away",
        "text": cause_of(part),
    }


def _ends(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def scaling_lines(explanations: Sequence[Explanation]) -> list[str]:
    """Return a table of the parts by number of ranks: where the speed-up goes."""
    kinds = [*dict.fromkeys(part.kind for one in explanations for part in one.parts)]
    lines = ["ranks  ms a step  computing  " + "  ".join(kinds)]
    for one in explanations:
        cells = [
            _milliseconds(sum(p.seconds.value for p in one.parts if p.kind == kind))
            for kind in kinds
        ]
        computing = _milliseconds(one.step.value - one.lost.value)
        shown = "  ".join(cell.rjust(len(kind)) for cell, kind in zip(cells, kinds, strict=True))
        lines.append(f"{one.ranks:5}  {_milliseconds(one.step.value):>9}  {computing:>9}  {shown}")
    return lines
