"""The answer of `why`, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmark.base.statistics.intervals import Estimate
from shardmark.base.text import counted
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
        return f"rank {part.rank} gets samples that take longer"
    if part.lateness == "place":
        return f"rank {part.rank} is on a slower place: its lateness stays there when ranks swap"
    phases = {"data": "its input", "forward": "its forward pass", "backward": "its backward pass"}
    phases |= {"own_code": "its own code between the passes"}
    untried = "" if part.lateness else "; not tried: by its samples, its place or its own work"
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
    if needed := explanation.needed:
        open_ = f"; {_milliseconds(needed.seconds.value)} are communication without a fault.{open_}"
    else:
        open_ = f".{open_}"
    if not parts:
        if needed or open_ != ".":
            return f"Nothing is shown to be lost of {head}{open_}"
        return f"Nothing is lost of {head} that could be taken away: it computes."
    causes = [f"{_milliseconds(part.seconds.value)} {cause_of(part)}" for part in parts]
    lost = _milliseconds(explanation.lost.value)
    return f"Of {head}, {lost} are lost: {', '.join(causes)}{open_}"


def lines_of(explanation: Explanation) -> list[str]:
    """Return the answer, its parts with intervals, what counts show, and what it rests on."""
    lines = [answer_of(explanation), ""]
    for part in explanation.parts:
        watched = " [watched, not taken away]" if part.watched else ""
        lines.append(f"  {_interval(part.seconds)}  {cause_of(part)}{watched}")
    if needed := explanation.needed:
        counts = explanation.counts
        calls = sum(record["calls"] for record in counts["collectives"].values())
        lines.append(
            f"  {_interval(needed.seconds)}  communication: {counted(round(calls), 'collective')}, "
            f"{counts['sent_bytes'] / 1e6:.3g} MB, for which the link alone would take "
            f"{_milliseconds(counts['sent_bytes'] / counts['link_bytes_per_second'])} ms"
        )
    update = explanation.update
    of_it = f", {_interval(update)} of it the optimizer's update" if update else ""
    lines.append(f"  {_milliseconds(explanation.computing_seconds)} ms  computing{of_it}")
    total = sum(part.seconds.value for part in parts_and_needed(explanation))
    if total > 1.1 * (explanation.step.value - explanation.computing_seconds):
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
        "computing_seconds": explanation.computing_seconds,
        "update_seconds": _ends(explanation.update) if explanation.update else None,
        "communication_seconds": _ends(explanation.needed.seconds) if explanation.needed else None,
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


def parts_and_needed(explanation: Explanation) -> list[Part]:
    """Return the parts, and the communication that is none."""
    return [*explanation.parts, *([explanation.needed] if explanation.needed else [])]


def scaling_lines(explanations: Sequence[Explanation]) -> list[str]:
    """Return a table of the parts by number of ranks: where the speed-up goes."""
    parts = [parts_and_needed(one) for one in explanations]
    kinds = [*dict.fromkeys(part.kind for of_one in parts for part in of_one)]
    lines = ["ranks  ms a step  computing  " + "  ".join(kinds).replace("_", " ")]
    for one, of_one in zip(explanations, parts, strict=True):
        cells = [
            _milliseconds(sum(p.seconds.value for p in of_one if p.kind == kind)) for kind in kinds
        ]
        computing = _milliseconds(one.computing_seconds)
        shown = "  ".join(cell.rjust(len(kind)) for cell, kind in zip(cells, kinds, strict=True))
        lines.append(f"{one.ranks:5}  {_milliseconds(one.step.value):>9}  {computing:>9}  {shown}")
    return lines
