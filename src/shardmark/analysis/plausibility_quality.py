"""Published quality, and orders that a study claims, against its own tables and known weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardmark.analysis.against import Against
from shardmark.analysis.plausibility_check import Check, Examined, Finding, Side, examined
from shardmark.papers.facts import facts
from shardmark.papers.schema import Figures, Paper
from shardmark.papers.statements import Statement

SCATTERING = ("map", "map_50", "map_75", "accuracy_top1", "accuracy_top5")
"""Metrics that move up and down from epoch to epoch; a loss mostly falls."""
TRAINED = Check(
    name="quality of trained weights",
    assumption="a detector that begins from weights trained on a data set keeps, while it is"
    " trained on pictures of the same, at least half of the mAP that was published of them",
    formula="mAP >= published mAP of the weights",
    margin=0.5,
)
ORDER = Check(
    name="order that the words claim",
    assumption="the words are about the study's own table; under the same conditions, and on as"
    " many ranks where the strategy ran on several numbers of them",
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


def quality_checks(against: Against) -> tuple[Examined, ...]:
    paper = against.paper
    orders = list(_ordered(paper))
    return (
        examined(TRAINED, list(_trained(paper))),
        examined(ORDER, [_order(paper, *one) for one in orders]),
        examined(LEAD, [found for one in orders for found in _lead(*one)]),
    )


def _trained(paper: Paper) -> Iterator[Finding | None]:
    """One finding for all trainings of one model: the best epoch of the best of them decides."""
    best: dict[tuple[str, str], tuple[float, Figures]] = {}
    for figures in paper.figures:
        conditions = {**paper.conditions, **figures.conditions}
        weights = conditions.get("workload.weights")
        known = facts().detector(conditions.get("workload.model"), weights)
        values = epoch_values(figures, "map")
        if known is None or weights != conditions.get("workload.dataset") or not values:
            continue
        key = (known.name, known.weights)
        best[key] = max(best.get(key, (0.0, figures)), (max(values), figures), key=lambda x: x[0])
    for (name, weights), (value, figures) in best.items():
        known = facts().detector(name, weights)
        assert known is not None, "found above"
        if not TRAINED.contradicted(value, known.map, "at least"):
            yield None
            continue
        yield Finding(
            check=TRAINED,
            subject=f"highest mAP of all trainings ({figures.words})",
            place=figures.place,
            metric="map",
            published=value,
            side="at least",
            limit=known.map,
            basis=f"{name} with weights {weights}: {facts().detectors_source}",
            meaning="the weights detect far better before any training, and no strategy comes"
            " near: that points at the labels (their numbers, the form of the boxes) or at the"
            " evaluation, and at no strategy",
        )


def epoch_values(figures: Figures, metric: str) -> list[float]:
    """Of every epoch; of the whole training where there is no table by epoch."""
    table = figures.epochs
    by_epoch = [] if table is None else [one.get(metric) for one in table.by_number.values()]
    values = [*by_epoch, figures.value(metric)]
    return [value for value in values if value is not None]


def _ordered(paper: Paper) -> Iterator[tuple[Statement, Figures, list[Figures]]]:
    """Every claim of an order, with the training that it names and those that it is among."""
    for statement in paper.statements:
        if statement.order is None:
            continue
        for one in paper.figures:
            if one.title != statement.title or one.value(statement.about) is None:
                continue
            among = [other for other in _peers(paper, one) if other.value(statement.about)]
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


def _order(
    paper: Paper, statement: Statement, figures: Figures, among: Sequence[Figures]
) -> Finding | None:
    """The named training against the one that should have been on its other side."""
    metric = statement.about
    ordered = sorted(among, key=lambda one: one.value(metric) or 0.0)
    place = {"lowest": 0, "second lowest": 1, "highest": len(ordered) - 1}[statement.order or ""]
    rival = ordered[place]
    own, other = figures.value(metric), rival.value(metric)
    assert own is not None, "the caller looked"
    assert other is not None, "the caller looked"
    side: Side = "at most" if own > other else "at least"
    rounding = paper.half_unit(figures, metric) + paper.half_unit(rival, metric)
    if not ORDER.contradicted(own, other, side, rounding=rounding):
        return None
    return Finding(
        check=ORDER,
        subject=f"{figures.words}, called the {statement.order}",
        place=statement.place,
        metric=metric,
        published=own,
        side=side,
        limit=other,
        basis=f"{rival.words}, {rival.place}",
        meaning=f"in the study's own table the {statement.order} is {rival.title}",
    )


def _lead(
    statement: Statement, figures: Figures, among: Sequence[Figures]
) -> Iterator[Finding | None]:
    """Only for an end of the order, and where both sides have a table by epoch."""
    metric = statement.about
    if metric not in SCATTERING or statement.order == "second lowest":
        return
    sign = 1 if statement.order == "highest" else -1
    others = [one for one in among if one is not figures]
    rival = max(others, key=lambda one: sign * (one.value(metric) or 0.0))
    spans = [span for one in (figures, rival) if (span := scatter(one, metric)) is not None]
    own, other = figures.value(metric), rival.value(metric)
    if len(spans) < 2 or own is None or other is None:
        return
    lead = sign * (own - other)
    if lead < 0 or not LEAD.contradicted(lead, max(spans), "at least"):
        yield None
        return
    yield Finding(
        check=LEAD,
        subject=f"{figures.words}, called the {statement.order}: lead over {rival.title}",
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
