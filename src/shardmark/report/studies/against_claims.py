"""A study's claims beside what was measured of them, as a table, and its findings in words."""

from __future__ import annotations

from shardmark.analysis.compare.rows import plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.claims import Claim, claims_of
from shardmark.analysis.studies.statements import Statement
from shardmark.report.studies.against_labels import label
from shardmark.report.table.sections import (
    Section,
    variant_cells,
)
from shardmark.report.table.sections import (
    TextColumn as Column,
)
from shardmark.report.table.sections import (
    TextTable as Table,
)
from shardmark.report.table.table import number

PERCENT = 100
NOT_STATED = "what it is relative to is not stated"


def claims_sections(against: Against) -> tuple[Section, ...]:
    """None for a study whose tables say all."""
    claims = claims_of(against)
    if not claims:
        return ()
    variants = iter(variant_cells([claim.row for claim in claims if claim.row is not None]))
    texts = [None if claim.row is None else next(variants) for claim in claims]
    columns = [
        Column(title="claim", cells=tuple(_about(one.statement) for one in claims), numeric=False),
        Column(title="meas. of", cells=tuple(map(_rows, claims)), numeric=False),
        Column(title="variant", cells=tuple(text or "" for text in texts), numeric=False),
        Column(title="ranks", cells=tuple(_ranks(one) for one in claims)),
        Column(title="nodes", cells=tuple(_nodes(one) for one in claims)),
        Column(title="publ.", cells=tuple(_range(one.statement) for one in claims)),
        Column(title="meas.", cells=tuple(_shown(one.statement, one.measured) for one in claims)),
    ]
    shown = tuple(column for column in columns if any(column.cells))
    title = f"Claims of {against.paper.name}: published (publ.) and measured (meas.)"
    return (Section(title=title, table=Table(columns=shown, notes=_notes(claims))),)


def words_sections(against: Against) -> tuple[Section, ...]:
    """What the study says without a number, a note each; none where it says nothing so."""
    notes = tuple(
        f"{one.words}{_conditions(one)}, {label(one.about)}: {one.text} ({one.place})."
        for one in against.paper.statements
        if one.text is not None
    )
    if not notes:
        return ()
    title = f"Findings of {against.paper.name} in words"
    return (Section(title=title, table=Table(columns=(), notes=notes)),)


def _conditions(statement: Statement) -> str:
    return "".join(f", {plain(value)}" for value in statement.conditions.values())


def _about(statement: Statement) -> str:
    name = label(statement.about)
    relative = statement.relative_to
    if relative is None:
        return f"{name}, {statement.title} / ?"
    sign = "minus" if statement.relation == "difference" else "/"
    points = " (points)" if statement.relation == "difference" else ""
    return f"{name}, {statement.title} {sign} {relative.title}{points}"


def _rows(claim: Claim) -> str:
    """The strategies measured, where the study leaves open which they were."""
    if claim.row is None or claim.base is None or not _open(claim.statement):
        return ""
    return f"{claim.row.label} / {claim.base.label}"


def _open(statement: Statement) -> list[str]:
    """What each name without a strategy may be."""
    return [
        f"{one.title} is {' or '.join(one.any_of)}"
        for one in (statement, statement.relative_to)
        if one is not None and one.any_of
    ]


def _ranks(claim: Claim) -> str:
    if claim.row is not None:
        return str(claim.row.world_size)
    return "" if claim.statement.world_size is None else str(claim.statement.world_size)


def _nodes(claim: Claim) -> str:
    """Of a claim that is about nodes."""
    stated = claim.statement.nodes
    if stated is None:
        return ""
    return str(stated if claim.row is None else claim.row.nodes)


def _range(statement: Statement) -> str:
    low, high = (
        None if end is None else _stated(statement, end) for end in (statement.low, statement.high)
    )
    if statement.value is not None:
        sign = "~" if statement.approximate else ""
        return f"{sign}{_stated(statement, statement.value)}"
    if low is None:
        return f"up to {high}"
    return f"down to {low}" if high is None else f"{low} to {high}"


def _stated(statement: Statement, value: float) -> str:
    """Without decimals that the study does not state."""
    if statement.relation == "difference":
        return f"{round(value * PERCENT, 1):g}"
    return f"{round(value, 2):g}"


def _number(statement: Statement, value: float) -> str:
    if statement.relation == "difference":
        return number(value * PERCENT, decimals=1)
    return number(value, decimals=2)


def _shown(statement: Statement, found: Estimate | None) -> str:
    if found is None:
        return ""
    text = _number(statement, found.value)
    if found.half_width is None:
        return text
    difference = statement.relation == "difference"
    return f"{text} ±{found.half_width * (PERCENT if difference else 1):.{1 if difference else 2}f}"


def _notes(claims: tuple[Claim, ...]) -> tuple[str, ...]:
    statements = list(dict.fromkeys(_about(claim.statement) for claim in claims))
    places: dict[str, list[str]] = {about: [] for about in statements}
    for claim in claims:
        place = claim.statement.place
        if place not in places[_about(claim.statement)]:
            places[_about(claim.statement)].append(place)
    told = [f"{about}: {'; '.join(found)}" for about, found in places.items()]
    names = dict.fromkeys(text for claim in claims for text in _open(claim.statement))
    unsaid = [about for about in statements if about.endswith(" ?")]
    return (
        f"Where the study claims it: {'. '.join(told)}.",
        *([f"Blank: {', '.join(unsaid)}: {NOT_STATED}."] if unsaid else []),
        *([f"Which it was, the study does not say: {'; '.join(names)}."] if names else []),
        "Claims as the study words them, over all of its models and machines: a measured ratio"
        " outside the range refutes nothing where hardware or task differ.",
    )
