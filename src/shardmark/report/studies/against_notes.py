"""What a reader must know before comparing a run with a published study."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.differences import (
    TASK_KEYS,
    Difference,
    Machines,
    batches,
    differences,
    machines,
    software,
)
from shardmark.analysis.studies.schema import Paper
from shardmark.analysis.studies.statements import Remark, Statement
from shardmark.report.studies.against_labels import label
from shardmark.report.table.gaps import left_out, where

MOST_PLACES = 6


def headline_notes(against: Against) -> tuple[str, ...]:
    """Hardware and task first: they decide what compares at all."""
    paper = against.paper
    return (
        *difference_notes(against),
        *_one_sided(against),
        *left_out(against.rows),
        *_gaps(against),
        *_definitions(against),
        *_stated(paper),
        *([f"The study does not say: {'; '.join(paper.unknown)}."] if paper.unknown else []),
        *map(_remark, paper.remarks),
        f"The study: {paper.citation}.",
    )


def _remark(remark: Remark) -> str:
    text = f"{remark.text} ({remark.place})."
    return f"{text} There the study contradicts itself." if remark.kind == "contradiction" else text


def difference_notes(against: Against) -> tuple[str, ...]:
    """In what the run and the study differ, and whether seconds and quality then compare."""
    found = differences(against)
    return (
        hardware_note(machines(against)),
        *_task(found),
        *_other_differences(found, against),
        *_batch(against),
        *_software(against),
    )


def hardware_note(found: Machines) -> str:
    """Whether seconds compare, or only ratios."""
    text = f"Published on {found.published}; measured on {found.measured}"
    if found.measured == "nothing":
        return f"{text}: no trial ended ok."
    if found.same_kind:
        return (
            f"{text}: the same kind of device, so that seconds compare, as far as the rest agrees."
        )
    text += ": other hardware, so that seconds and bytes do not compare, and only ratios do."
    if found.on_cpu:
        text += (
            " On a CPU the ranks share its cores: more ranks bring no more hardware, and the"
            " speed-up says nothing about more GPUs."
        )
    return text


def _task(found: Sequence[Difference]) -> list[str]:
    task = [one for one in found if one.key in TASK_KEYS]
    if not task:
        return []
    return [
        f"Another task: {_listed(task)}. Loss and quality do not compare, and ratios only show"
        " whether the strategies behave alike."
    ]


def _other_differences(found: Sequence[Difference], against: Against) -> list[str]:
    """Those that not every row has are named with their rows."""
    other = [one for one in found if one.key not in TASK_KEYS]
    everywhere = [one for one in other if len(one.rows) == len(against.rows)]
    notes = [f"Also differs: {_listed(everywhere)}."] if everywhere else []
    for one in other:
        if one not in everywhere:
            places = "; ".join(row.place for row in one.rows)
            notes.append(f"Differs for {places}: {_listed([one])}.")
    return notes


def _listed(found: Sequence[Difference]) -> str:
    """By the last part of the key, each with both values."""
    by_key: dict[tuple[str, str], list[str]] = {}
    for one in found:
        by_key.setdefault((one.key, one.published), []).append(one.measured)
    return "; ".join(
        f"{_name(key)} published {published}, measured {' and '.join(measured)}"
        for (key, published), measured in by_key.items()
    )


def _name(key: str) -> str:
    return key.removesuffix(".name").removeprefix("workload.").removeprefix("recipe.")


def _batch(against: Against) -> list[str]:
    batch = against.paper.batch
    readings = batches(against)
    if batch is None or not readings:
        return []
    return [
        f"The study's batch of {batch.size} is read as {batch.size} {' and as '.join(readings)}; it"
        " does not say which."
    ]


def _software(against: Against) -> list[str]:
    paper, measured = against.paper, software(against)
    if not paper.software:
        return []
    published = [f"{name} {version or '(no version)'}" for name, version in paper.software.items()]
    found = [f"{name} {' and '.join(all_)}" for name, all_ in measured.items() if all_]
    here = ", ".join(found) or "versions not recorded"
    return [f"Software: published {', '.join(published)}; measured {here}."]


def _one_sided(against: Against) -> list[str]:
    """Why cells are blank."""
    if not against.paper.figures:
        return ["The study states no figures of single trainings, but claims: see below."]
    published = [pair.figures.words for pair in against.pairs if pair.figures and not pair.row]
    measured = [pair.row.place for pair in against.pairs if pair.row and not pair.figures]
    return [
        *([f"Published, not measured here: {_some(published)}."] if published else []),
        *([f"Measured, not published: {_some(measured)}."] if measured else []),
    ]


def _some(places: Sequence[str]) -> str:
    """The first of many: the table has them all."""
    more = len(places) - MOST_PLACES
    shown = places if more <= 1 else [*places[:MOST_PLACES], f"and {more} more"]
    return "; ".join(shown)


def _gaps(against: Against) -> list[str]:
    """Headline metrics that rows which ended ok lack, by reason."""
    places: dict[str, list[str]] = {}
    for row in against.rows:
        for name in against.metrics if row.ok_trials else ():
            if row.metrics.get(name) is None:
                reason = row.missing.get(name, "not recorded")
                places.setdefault(f"{label(name)}: {reason}", []).append(row.place)
    number = len([row for row in against.rows if row.ok_trials])
    return [f"Not measured{where(found, number)}: {text}." for text, found in places.items()]


def _definitions(against: Against) -> list[str]:
    """How the two sides of a column come about."""
    notes = []
    if "epoch_seconds" in against.metrics:
        notes.append(
            "Time of an epoch: published, the mean over the epochs; measured, from the steps after"
            " the warm-up, without evaluation."
        )
    if any(figures.epochs is not None for figures in against.paper.figures):
        notes.append("Loss and quality are those of the last epoch.")
    if against.scales:
        notes.append("Speedup is over the same strategy on the fewest ranks of the study.")
    if "peak_memory_bytes" in against.metrics:
        notes.append("Peaks are in GB of 10^9 bytes on both sides.")
    if not against.paper.figures:
        return notes
    return [
        *notes,
        f"Ratios, speedup and time / {against.paper.reference} (time for the same samples):"
        " published, from the study's own figures; measured, from samples per second.",
    ]


def _stated(paper: Paper) -> list[str]:
    """The ratios that the study itself gives."""
    ratios = [
        statement
        for statement in paper.statements
        if statement.relative_to is not None and statement.value is not None
    ]
    return [f"The study states: {'; '.join(map(_ratio, ratios))}."] if ratios else []


def _ratio(statement: Statement) -> str:
    base = statement.relative_to
    assert base is not None, "the caller looked"
    about = f"{label(statement.about)} of {statement.words}"
    over = "" if base.title == statement.title else f" {base.title}"
    over += "" if base.world_size is None else f" {base.world_size}"
    sign = "~" if statement.approximate else ""
    return f"{about} over{over}: {sign}{statement.value:g} ({statement.place})"
