"""What a study says in words, as it is read here, against the study's own tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.plausibility_check import Check, Examined, Finding, Side, examined
from shardmark.analysis.studies.plausibility_time import speed_ratio
from shardmark.analysis.studies.schema import Figures, Paper
from shardmark.analysis.studies.statements import Statement

SCATTERING = ("map", "map_50", "map_75", "accuracy_top1", "accuracy_top5")
"""Metrics that move up and down from epoch to epoch; a loss mostly falls."""
LEAST_LINEAR = 0.9
"""Scaling efficiency from which on growth is called linear here."""
ORDER = Check(
    name="order that the words claim",
    assumption="the words are about the study's own table, and mean the order as which they are"
    " read here; under the same conditions, and on as many ranks where the strategy ran on several"
    " numbers of them",
    formula="as many trainings below the named one as the words say",
    margin=0.0,
)
LEAD = Check(
    name="lead within the scatter",
    assumption="what one training moves from epoch to epoch, after the first, is the least that two"
    " runs of the same training differ by",
    formula="lead >= largest - smallest over the epochs after the first",
    margin=0.0,
)
LINEAR = Check(
    name="linearity that the words claim",
    assumption=f"linear means at least {LEAST_LINEAR:.0%} of the factor of devices, over the same"
    " strategy on the fewest of them",
    formula=f"speed-up / factor of devices >= {LEAST_LINEAR:g}",
    margin=0.0,
)

Ordered = tuple[Statement, Figures, list[Figures]]


def word_checks(against: Against) -> tuple[Examined, ...]:
    paper = against.paper
    orders = list(ordered(paper))
    return (
        _orders(paper, orders),
        examined(LEAD, [found for one in orders for found in _lead(*one)]),
        examined(LINEAR, list(_linear(paper))),
    )


def ordered(paper: Paper) -> Iterator[Ordered]:
    """Every claim of an order, with the training that it names and those that it is among."""
    for statement in paper.statements:
        if statement.order is None:
            continue
        for one in paper.figures:
            if one.title != statement.title or one.value(statement.about) is None:
                continue
            peers = _peers(paper, one)
            among = [other for other in peers if other.value(statement.about) is not None]
            if statement.world_size in (None, one.world_size) and len(among) > 1:
                yield statement, one, among


def _peers(paper: Paper, figures: Figures) -> list[Figures]:
    alike = [
        one
        for one in paper.figures
        if (one.conditions, one.hardware) == (figures.conditions, figures.hardware)
    ]
    several = len({one.world_size for one in alike if one.title == figures.title}) > 1
    return [one for one in alike if not several or one.world_size == figures.world_size]


def _value(figures: Figures, metric: str) -> float:
    value = figures.value(metric)
    assert value is not None, "the caller looked"
    return value


def _orders(paper: Paper, orders: Sequence[Ordered]) -> Examined:
    """Two claims that one pair of trainings contradicts are one finding."""
    found: dict[tuple[str, frozenset[int]], Finding] = {}
    for statement, figures, among in orders:
        rival = _in_place(statement, among)
        finding = _order(paper, statement, figures, rival)
        if finding is None:
            continue
        key = (statement.about, frozenset((id(figures), id(rival))))
        first = found.get(key)
        found[key] = finding if first is None else _merged(first, finding)
    return Examined(check=ORDER, figure_count=len(orders), findings=tuple(found.values()))


def _merged(first: Finding, second: Finding) -> Finding:
    places = dict.fromkeys((first.place, second.place))
    return replace(
        first,
        words=f"{first.words}; {second.subject}: {second.words}",
        place=", ".join(places),
        meaning=f"{first.meaning}, and {second.meaning}",
    )


def _in_place(statement: Statement, among: Sequence[Figures]) -> Figures:
    """The training that the table has where the words put the named one."""
    by_value = sorted(among, key=lambda one: _value(one, statement.about))
    last = len(by_value) - 1
    return by_value[{"lowest": 0, "second lowest": 1, "highest": last}[statement.order or ""]]


def _order(paper: Paper, statement: Statement, figures: Figures, rival: Figures) -> Finding | None:
    metric = statement.about
    own, other = _value(figures, metric), _value(rival, metric)
    side: Side = "at most" if own > other else "at least"
    rounding = paper.half_unit(figures, metric) + paper.half_unit(rival, metric)
    if not ORDER.contradicted(own, other, side, rounding=rounding):
        return None
    return Finding(
        check=ORDER,
        subject=f"{figures.words}, read as {statement.order}",
        words=statement.text or "",
        place=statement.place,
        metric=metric,
        published=own,
        digit=_digit(paper, figures, metric),
        limit_digit=_digit(paper, rival, metric),
        side=side,
        limit=other,
        basis=f"{rival.words}, {rival.place}",
        meaning=f"{statement.order} in the study's own table is {rival.title}",
    )


def _digit(paper: Paper, figures: Figures, metric: str) -> float | None:
    return paper.digit(figures, metric) if metric in figures.stated else None


def _lead(
    statement: Statement, figures: Figures, among: Sequence[Figures]
) -> Iterator[Finding | None]:
    """Only for an end of the order, and where both sides have a table by epoch."""
    metric = statement.about
    if metric not in SCATTERING or statement.order == "second lowest":
        return
    sign = 1 if statement.order == "highest" else -1
    others = [one for one in among if one is not figures]
    rival = max(others, key=lambda one: sign * _value(one, metric))
    spans = [span for one in (figures, rival) if (span := scatter(one, metric)) is not None]
    if len(spans) < 2:
        return
    lead = sign * (_value(figures, metric) - _value(rival, metric))
    if lead < 0 or not LEAD.contradicted(lead, max(spans), "at least"):
        yield None
        return
    yield Finding(
        check=LEAD,
        subject=f"{figures.words}, read as {statement.order}: lead over {rival.title}",
        words=statement.text or "",
        place=statement.place,
        metric=metric,
        published=lead,
        side="at least",
        limit=max(spans),
        basis=f"epochs of {figures.title} and {rival.title}, {figures.place}, {rival.place}",
        meaning="one run of each shows no order between the two",
    )


def scatter(figures: Figures, metric: str) -> float | None:
    """Largest minus smallest over the epochs after the first; None for fewer than three."""
    table = figures.epochs
    numbers = {} if table is None else table.by_number
    values = [one[metric] for epoch, one in numbers.items() if epoch > 1 and metric in one]
    return None if len(values) < 2 else max(values) - min(values)


def _linear(paper: Paper) -> Iterator[Finding | None]:
    """Every training of the named strategy on more devices than its fewest."""
    for statement in paper.statements:
        for figures in paper.figures if statement.linear else ():
            base = paper.fewest_ranks(figures)
            named = figures.title == statement.title
            if not named or statement.world_size not in (None, figures.world_size):
                continue
            speedup = speed_ratio(figures, base)
            if speedup is not None and base.world_size < figures.world_size:
                yield _linearity(statement, figures, base, speedup)


def _linearity(
    statement: Statement, figures: Figures, base: Figures, speedup: float
) -> Finding | None:
    factor = figures.world_size / base.world_size
    if not LINEAR.contradicted(speedup / factor, LEAST_LINEAR, "at least"):
        return None
    return Finding(
        check=LINEAR,
        subject=f"{figures.words} over {base.words}, read as linear",
        words=statement.text or "",
        place=statement.place,
        metric="scaling_efficiency",
        published=speedup / factor,
        side="at least",
        limit=LEAST_LINEAR,
        basis=f"{speedup:.2f} times as fast on {factor:g} times the devices, {figures.place}",
        meaning="the time falls by less than linearly",
    )
