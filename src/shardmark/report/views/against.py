"""A comparison beside a published study: one joined table, the study's claims, what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardmark.analysis.studies.against import (
    RELATIVE_TIME,
    SPEEDUP,
    TASK_KEYS,
    Against,
    ClaimPair,
    Pair,
)
from shardmark.analysis.studies.study import Claim
from shardmark.report.table.columns import metric_column
from shardmark.report.table.gaps import left_out
from shardmark.report.table.table import Column, Table, Value, table_of

_ONE_SIDED = 4
"""Trainings named that only one side has."""


def against_tables(against: Against) -> tuple[Table, ...]:
    """The joined table with what differs, then the claims where the study states some."""
    trainings = _trainings(against)
    if not against.claims:
        return (trainings,)
    claims = _claims(against)
    return (trainings, claims) if against.study.figures else (claims,)


def _trainings(against: Against) -> Table:
    """One line a training, published and measured side by side."""
    columns: list[tuple[Column, Callable[[Pair], Value]]] = [
        (_text_column("strategy"), lambda pair: pair.title),
        (_text_column("conditions"), lambda pair: pair.conditions),
        (Column(key="ranks", title="ranks", names_row=True), lambda pair: pair.world_size),
    ]
    columns += [column for name in against.metrics for column in _both(metric_column(name))]
    shown = {name for pair in against.pairs for name in pair.published}
    columns += [
        column
        for key, title in (
            (SPEEDUP, "speed-up"),
            (RELATIVE_TIME, f"time/{against.study.reference}"),
        )
        if key in shown
        for column in _both(Column(key=key, title=title, decimals=2, interval="±", estimated=True))
    ]
    title = f"Against {against.study.name}: published (publ.) and measured (meas.)"
    return table_of(title, against.pairs, columns, against_notes(against))


def _both(column: Column) -> list[tuple[Column, Callable[[Pair], Value]]]:
    """The metric's column twice, once a side."""
    published = replace(
        column, key=f"{column.key}_published", title=f"{column.title} publ.", estimated=False
    )
    measured = replace(
        column, key=f"{column.key}_measured", title=f"{column.title} meas.", interval="±"
    )
    return [
        (published, lambda pair: pair.published.get(column.key)),
        (measured, lambda pair: pair.measured.get(column.key)),
    ]


def _text_column(key: str) -> Column:
    return Column(key=key, title=key, numeric=False, names_row=key != "conditions")


def _claims(against: Against) -> Table:
    columns: list[tuple[Column, Callable[[ClaimPair], Value]]] = [
        (_text_column("claim"), lambda pair: _claim_text(pair.claim)),
        (_text_column("measured of"), _rows_text),
        (_text_column("conditions"), _varied_text),
        (Column(key="ranks", title="ranks"), lambda p: p.row.world_size if p.row else None),
        (_text_column("published"), lambda pair: _range_text(pair.claim)),
        (
            Column(key="measured", title="meas.", decimals=2, interval="±", estimated=True),
            lambda pair: pair.measured,
        ),
        (_text_column("place"), lambda pair: pair.claim.place),
    ]
    title = f"Claims of {against.study.name}"
    notes = () if against.study.figures else against_notes(against)
    return table_of(title, against.claims, columns, notes)


def _claim_text(claim: Claim) -> str:
    sign = "minus" if claim.relation == "difference" else "/"
    return f"{claim.metric}, {_one_of(claim.strategies)} {sign} {_one_of(claim.over) or '?'}"


def _one_of(strategies: tuple[str, ...]) -> str:
    return " or ".join(strategies)


def _rows_text(pair: ClaimPair) -> str | None:
    return (
        None if pair.row is None or pair.base is None else f"{pair.row.label} / {pair.base.label}"
    )


def _varied_text(pair: ClaimPair) -> str | None:
    return None if pair.row is None else ", ".join(map(str, pair.row.varied.values()))


def _range_text(claim: Claim) -> str:
    value, low, high = (
        None if end is None else f"{end:.3g}" for end in (claim.value, claim.low, claim.high)
    )
    if value is not None:
        return value
    if low is None:
        return f"up to {high}"
    return f"down to {low}" if high is None else f"{low} to {high}"


def against_notes(against: Against) -> tuple[str, ...]:
    """What differs, hardware and task first: they decide what compares at all."""
    study = against.study
    task = [each.text for each in against.differences if each.key in TASK_KEYS]
    other = [each.text for each in against.differences if each.key not in TASK_KEYS]
    stated = ", ".join(
        f"{name} {version or '(no version)'}" for name, version in study.software.items()
    )
    here = ", ".join(f"{name} {' and '.join(v)}" for name, v in against.software.items() if v)
    only_published = [f"{p.title} on {p.world_size}" for p in against.pairs if p.row is None]
    only_measured = [p.row.place for p in against.pairs if p.figures is None and p.row]
    notes = [
        _hardware_note(against),
        f"Another task: {'; '.join(task)}. Loss and quality do not compare." if task else "",
        f"Also differs: {'; '.join(other)}." if other else "",
        f"Software: published {stated}; measured {here or 'versions not recorded'}."
        if stated
        else "",
        _some("Published, not measured here", only_published),
        _some("Measured, not published", only_measured) if study.figures else "",
        *left_out(against.rows),
        f"The study: {study.citation}. What it leaves open: docs/studies/{study.name}.md.",
    ]
    return tuple(note for note in notes if note)


def _some(what: str, places: list[str]) -> str:
    if not places:
        return ""
    more = len(places) - _ONE_SIDED
    return f"{what}: {'; '.join([*places[:_ONE_SIDED], *([f'{more} more'] if more > 0 else [])])}."


def _hardware_note(against: Against) -> str:
    """Whether seconds compare, or only ratios."""
    text = f"Published on {against.study.hardware_text}; measured on"
    if not against.measured_on:
        return f"{text} nothing: no trial ended ok."
    text += f" {against.measured_on}"
    if against.same_hardware:
        return f"{text}: the same kind of device, so that seconds compare."
    cores = " On a CPU all ranks share the cores." if against.on_cpu else ""
    return f"{text}: only ratios compare.{cores}"
