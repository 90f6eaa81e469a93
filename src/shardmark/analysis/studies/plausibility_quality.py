"""Published quality against that of the weights that a training begins from."""

from __future__ import annotations

from collections.abc import Iterator

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.facts import facts
from shardmark.analysis.studies.plausibility_check import Check, Examined, Finding, examined
from shardmark.analysis.studies.schema import Figures, Paper

KEPT = 0.5
"""Of the mAP of trained weights."""
TRAINED = Check(
    name="quality of trained weights",
    assumption="a detector that begins from weights trained on a data set keeps, while it is"
    " trained on pictures of the same, at least half of the mAP that was published of them",
    formula=f"mAP >= {KEPT:g} x published mAP of the weights",
    margin=0.0,
)


def quality_checks(against: Against) -> tuple[Examined, ...]:
    return (examined(TRAINED, list(_trained(against.paper))),)


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
        limit = KEPT * known.map
        rounding = paper.half_unit(figures, "map")
        if not TRAINED.contradicted(value, limit, "at least", rounding=rounding):
            yield None
            continue
        yield Finding(
            check=TRAINED,
            subject=f"highest mAP of all trainings ({figures.words})",
            place=figures.place,
            metric="map",
            published=value,
            side="at least",
            digit=paper.digit(figures, "map"),
            limit=limit,
            basis=f"{KEPT:g} x {known.map:.3f}, that of {name} with weights {weights}:"
            f" {facts().detectors_source}",
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
