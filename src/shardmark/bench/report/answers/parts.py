"""The parts of a step, in the answer of `why` and in a comparison, for people and programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from shardmark.base.statistics.intervals import Estimate
from shardmark.base.table.formats import render_tables
from shardmark.base.table.table import Column, Columns, Table, Value, table_of
from shardmark.base.text import counted, listed
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.step_time import division_of
from shardmark.bench.analysis.parts import FEW_ROUNDS, NAMES, Division, Part
from shardmark.bench.report.answers.wording import name, short
from shardmark.bench.report.table.comparison import fastest_first
from shardmark.bench.report.table.row_columns import table_by_row

if TYPE_CHECKING:
    from shardmark.bench.analysis.taken_away import Explanation


def _milliseconds(seconds: float) -> str:
    return short(max(0.0, round(1000 * seconds, 3)))  # noise may make a part less than nothing


def _interval(estimate: Estimate) -> str:
    ends = (estimate.low, estimate.high)
    low, high = (None if end is None else _milliseconds(end) for end in ends)
    return f"{_milliseconds(estimate.value)} ms" + (f" ({low} to {high})" if low and high else "")


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
    if part.known_by == "measured":
        return f"the others wait for rank {part.rank}"
    phases = {"data": "its input", "forward": "its forward pass", "backward": "its backward pass"}
    phases |= {"own_code": "its own code between the passes"}
    untried = "" if part.lateness else "; not tried: by its samples, its place or its own work"
    return (
        f"rank {part.rank} is late in {phases.get(part.phase or '', 'its update')}{place}{untried}"
    )


def answer_of(explanation: Explanation) -> str:
    """Return the first line: what a step takes, what of it is lost, and to what."""
    step, parts = explanation.step, explanation.parts
    rank = " on 1 rank" if explanation.ranks == 1 else ""
    rounds = f" in {counted(step.n, 'round')}" if step.n <= FEW_ROUNDS else ""
    head = f"{_milliseconds(step.value)} ms a step{rank}{rounds}"
    more = [f"{cause_of(p)} ({_interval(p.seconds)})" for p in explanation.undecided]
    open_ = f"  Not decided by these rounds: {', '.join(more)}." if more else ""
    if explanation.unknown:
        open_ += f"  Not known: {', '.join(NAMES[kind] for kind in explanation.unknown)}."
    if needed := explanation.needed:
        counted_ = " without a fault" if explanation.counts["collectives"] else ""
        open_ = f"; {_milliseconds(needed.seconds.value)} are communication{counted_}.{open_}"
    else:
        open_ = f".{open_}"
    if not parts:
        if needed or open_ != "." or step.low is None:
            return f"Nothing is shown to be lost of {head}{open_}"
        return f"Of {head}, nothing is lost that could be taken away: all of it is computing."
    causes = [f"{_milliseconds(part.seconds.value)} {cause_of(part)}" for part in parts]
    lost = _milliseconds(explanation.lost.value)
    return f"Of {head}, {lost} are lost: {', '.join(causes)}{open_}"


def lines_of(explanation: Explanation) -> list[str]:
    """Return the answer, its parts with intervals, what counts show, and what it rests on."""
    lines = [answer_of(explanation), ""]
    for part in explanation.parts:
        watched = " [watched, not taken away]" if part.known_by == "watched" else ""
        lines.append(f"  {_interval(part.seconds)}  {cause_of(part)}{watched}")
    if needed := explanation.needed:
        counts = explanation.counts
        calls = sum(record["calls"] for record in counts["collectives"].values())
        sent_bytes, rate = counts["sent_bytes"], counts["link_bytes_per_second"]
        text = (
            f"{counted(round(calls), 'collective')}, {sent_bytes / 1e6:.3g} MB, for which the link "
            f"alone would take {_milliseconds(sent_bytes / rate)} ms"
        )
        text = text if calls else "the script ended before its collectives were counted"
        lines.append(f"  {_interval(needed.seconds)}  communication: {text}")
    update = explanation.update
    of_it = f", {_interval(update)} of it the optimizer's update" if update else ""
    open_ = ", with what is not decided" if explanation.undecided or explanation.unknown else ""
    lines.append(f"  {_milliseconds(explanation.computing_seconds)} ms  computing{open_}{of_it}")
    total = sum(part.seconds.value for part in explanation.all_parts)
    if total > 1.1 * (explanation.step.value - explanation.computing_seconds):
        lines.append("  the parts overlap: together they are less than their sum")
    lines += ["", *explanation.findings] if explanation.findings else []
    lines += ["", *(f"note: {note}" for note in explanation.notes)] if explanation.notes else []
    return lines


def facts_of(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation for programs, in seconds."""
    needed = explanation.needed
    return {
        "answer": answer_of(explanation),
        "ranks": explanation.ranks,
        **division_facts(explanation),
        "lost_seconds": _ends(explanation.lost),
        "communication_seconds": _ends(needed.seconds) if needed else None,
        "counts": {**explanation.counts, "findings": [*explanation.findings]},
        "notes": [*explanation.notes],
    }


def division_facts(division: Division) -> dict[str, Any]:
    """Return a divided step for programs, in seconds."""
    return {
        "step_seconds": _ends(division.step),
        "computing_seconds": division.computing_seconds,
        "update_seconds": _ends(division.update) if division.update else None,
        "parts": [_part_facts(part) for part in division.parts],
        "undecided": [_part_facts(part) for part in division.undecided],
        "unknown": [*division.unknown],
    }


def _part_facts(part: Part) -> dict[str, Any]:
    return {
        "kind": part.kind, "seconds": _ends(part.seconds), "rank": part.rank, "place": part.place,
        "of": part.lateness, "phase": part.phase, "how": part.known_by, "text": cause_of(part),
    }  # fmt: skip


def _ends(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def parts_table(comparison: Comparison) -> Table | None:
    """Return a table of the rows' steps by part; None if no part of any is shown."""
    rows = fastest_first(comparison.rows)
    divided = [(row, division) for row in rows if (division := division_of(row))]
    divisions = [division for _, division in divided]
    if not any(division.parts for division in divisions):
        return None
    late = ((row, part) for row, one in divided for part in one.parts if part.rank is not None)
    notes = [f"{name(row)}: {cause_of(part)}." for row, part in late]
    unknown = [kind for one in divisions for kind in one.unknown]
    undecided = [part.kind for one in divisions for part in one.undecided]
    reasons = {"was not measured": unknown, "these repeats do not decide": undecided}
    for reason, kinds in reasons.items():
        if names := dict.fromkeys(NAMES[kind] for kind in kinds):
            notes.append(f"Computing includes what {reason}: {listed([*names])}.")
    return table_by_row("Where a step's time goes", divided, _columns(divisions), notes)


def scaling_lines(explanations: Sequence[Explanation]) -> list[str]:
    """Return a table of the parts by number of ranks: where the speed-up goes."""
    ranks = Column("ranks"), attrgetter("ranks")
    notes = ["The numbers of ranks ran one after another; `shardmark time` has the speed-up."]
    first, *more = sorted(explanations, key=attrgetter("ranks"))
    least = (first.step.low or 0.0) * first.ranks
    if any(least > (one.step.high or float("inf")) * one.ranks for one in more):
        notes.insert(
            0, "More ranks gain more than their number: the machine may have been less busy."
        )
    table = table_of("", explanations, [ranks, *_columns(explanations)], notes)
    return render_tables([table]).rstrip().split("\n")


def _columns(divisions: Sequence[Division]) -> Columns[Division]:
    """Return columns of the step, the rest of it, and the parts that are shown."""
    shown = {part.kind for one in divisions for part in one.all_parts}
    kinds = [kind for kind in NAMES if kind in shown]

    def column(key: str, title: str) -> Column:
        return Column(key, title, unit="ms", scale=1e3, interval="±")

    def seconds(division: Division, kind: str) -> Value:
        values = [part.seconds for part in division.all_parts if part.kind == kind]
        return values[0] if len(values) == 1 else sum(one.value for one in values) or None

    columns: list[tuple[Column, Callable[[Division], Value]]] = [
        (column("step", "step"), attrgetter("step")),
        (column("computing", "computing"), attrgetter("computing_seconds")),
        (column("update", "of which update"), attrgetter("update")),
    ]
    of_kinds = ((column(k, k.replace("_", " ")), partial(seconds, kind=k)) for k in kinds)
    return [*columns, *of_kinds]
