"""Tables that show a comparison beside a published study, and the study's claims."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter

from shardmark.analysis.studies.against import (
    RELATIVE_TIME,
    SPEEDUP,
    TASK_KEYS,
    Against,
    ClaimPair,
    Pair,
)
from shardmark.analysis.studies.study import Claim
from shardmark.report.table.notes import left_out
from shardmark.report.table.table import Column, Columns, Table, metric_column, table_of

_ONE_SIDED = 4
"""Largest number of trainings that a note names."""
_name = partial(Column, numeric=False, names_row=True)


def against_tables(against: Against) -> tuple[Table, ...]:
    """Return the joined table of both sides, and the table of the claims if there are any."""
    study, notes = against.study, _notes(against)
    title = f"Against {study.name}: published (publ.) and measured (meas.)"
    tables = []
    if study.figures or not against.claims:
        tables.append(table_of(title, against.pairs, _trainings(against), notes))
    if against.claims:
        claim_notes = () if study.figures else notes
        tables.append(table_of(f"Claims of {study.name}", against.claims, _CLAIMS, claim_notes))
    return tuple(tables)


def _trainings(against: Against) -> Columns[Pair]:
    shown = {name for pair in against.pairs for name in pair.published}
    titles = {SPEEDUP: "speed-up", RELATIVE_TIME: f"time/{against.study.reference}"}
    ratio = partial(Column, decimals=2, estimated=True)
    columns = [
        *map(metric_column, against.metrics),
        *(ratio(key, title) for key, title in titles.items() if key in shown),
    ]
    return [
        (_name("strategy", "strategy"), attrgetter("title")),
        (_name("conditions", "conditions", names_row=False), attrgetter("conditions")),
        (Column("ranks", "ranks", names_row=True), attrgetter("world_size")),
        *(side for column in columns for side in _both_sides(column)),
    ]


def _both_sides(column: Column) -> Columns[Pair]:
    key, title = column.key, column.title
    published = replace(
        column, key=f"{key}_published", title=f"{title} publ.", estimated=False, interval=""
    )
    measured = replace(column, key=f"{key}_measured", title=f"{title} meas.", interval="±")
    return [
        (published, lambda pair: pair.published.get(key)),
        (measured, lambda pair: pair.measured.get(key)),
    ]


def _claim(pair: ClaimPair) -> str:
    claim = pair.claim
    sign = "minus" if claim.relation == "difference" else "/"
    over = " or ".join(claim.over) or "?"
    return f"{claim.metric}, {' or '.join(claim.strategies)} {sign} {over}"


def _measured_of(pair: ClaimPair) -> str | None:
    if pair.row is None or pair.base is None:
        return None
    return f"{pair.row.label} / {pair.base.label}"


def _conditions(pair: ClaimPair) -> str | None:
    return None if pair.row is None else ", ".join(map(str, pair.row.varied.values()))


def _range(claim: Claim) -> str:
    if claim.value is not None:
        return f"{claim.value:.3g}"
    if claim.low is None:
        return f"up to {claim.high:.3g}"
    return (
        f"down to {claim.low:.3g}" if claim.high is None else f"{claim.low:.3g} to {claim.high:.3g}"
    )


_CLAIMS: Columns[ClaimPair] = [
    (_name("claim", "claim"), _claim),
    (_name("measured of", "measured of"), _measured_of),
    (_name("conditions", "conditions", names_row=False), _conditions),
    (Column("ranks", "ranks"), lambda pair: pair.row.world_size if pair.row else None),
    (_name("published", "published"), lambda pair: _range(pair.claim)),
    (
        Column("measured", "meas.", decimals=2, interval="±", estimated=True),
        attrgetter("measured"),
    ),
    (_name("place", "place"), attrgetter("claim.place")),
]


def _notes(against: Against) -> tuple[str, ...]:
    """Return notes on what differs; hardware and task come first."""
    study = against.study
    task = "; ".join(text for key, text in against.differences if key in TASK_KEYS)
    other = "; ".join(text for key, text in against.differences if key not in TASK_KEYS)
    only_published = [f"{p.title} on {p.world_size}" for p in against.pairs if p.row is None]
    only_measured = [p.row.place for p in against.pairs if p.figures is None and p.row]
    notes = [
        _hardware_note(against),
        f"Another task: {task}. Loss and quality cannot be compared." if task else "",
        f"Also differs: {other}." if other else "",
        _some("Published, not measured here", only_published),
        _some("Measured, not published", only_measured) if study.figures else "",
        *left_out(against.rows),
        f"The study: {study.authors}: {study.title}.",
        f"What it does not state: docs/studies/{study.name}.md.",
    ]
    return tuple(filter(None, notes))


def _some(title: str, places: list[str]) -> str:
    more = len(places) - _ONE_SIDED
    named = [*places[:_ONE_SIDED], *([f"{more} more"] if more > 0 else [])]
    return f"{title}: {'; '.join(named)}." if named else ""


def _hardware_note(against: Against) -> str:
    """Return a note that says if seconds can be compared, or only ratios."""
    text = f"Published on {against.study.hardware}; measured on"
    if not against.measured_on:
        return f"{text} nothing: no trial ended ok."
    text += f" {against.measured_on}"
    if against.same_hardware:
        return f"{text}: the same kind of device, so seconds can be compared."
    cores = " On a CPU all ranks share the cores." if against.on_cpu else ""
    return f"{text}: only ratios can be compared.{cores}"
