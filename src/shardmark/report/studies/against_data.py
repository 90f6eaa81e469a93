"""A comparison beside a published study, for programs: JSON and CSV, base units."""

from __future__ import annotations

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.studies.against import Against, Pair
from shardmark.analysis.studies.claims import Claim, claims_of
from shardmark.analysis.studies.differences import batches, differences, machines, software
from shardmark.report.studies.against import epoch_numbers, measured_epoch, published_epoch
from shardmark.report.studies.against_notes import headline_notes
from shardmark.report.studies.against_plausibility import plausibility_json
from shardmark.report.table.columns import identity_of
from shardmark.report.table.data import (
    csv_header,
    csv_lines,
    estimate_columns,
    estimate_of,
    flat,
    format_csv,
    metrics_of,
)

_RATIOS = (
    ("speedup_over_fewest", "speedup", "measured_speedup"),
    ("relative_time", "relative_time", "measured_relative_time"),
)
"""Name for programs, attribute of the published one, attribute of the measured one."""


def against_json(against: Against) -> dict[str, object]:
    """The key `against`: the study, what differs, and each training on both sides."""
    paper = against.paper
    found = machines(against)
    return {
        "paper": paper.model_dump(mode="json", exclude={"figures"}),
        "hardware": {
            "published": found.published,
            "measured": found.measured,
            "same_kind": found.same_kind,
        },
        "differences": [
            {
                "key": one.key,
                "published": one.published,
                "measured": one.measured,
                "rows": [row.place for row in one.rows],
            }
            for one in differences(against)
        ],
        "batch_read_as": list(batches(against)),
        "software": {name: list(versions) for name, versions in software(against).items()},
        "claims": [_claim(claim) for claim in claims_of(against)],
        "plausibility": plausibility_json(against),
        "notes": list(headline_notes(against)),
        "trainings": [_training(pair, against) for pair in against.pairs],
    }


def against_csv(comparison: Comparison, against: Against) -> str:
    """The comparison's columns, then `against` and PUBLISHED_ columns; a line a training."""
    lines = []
    for pair in against.pairs:
        line: dict[str, object] = {"strategy": pair.title, "world_size": pair.world_size}
        if pair.row is not None:
            (line,) = csv_lines([pair.row])
        line["against"] = against.paper.name
        if pair.figures is not None:
            line["published_place"] = pair.figures.place
            line["published_conditions"] = dict(pair.figures.conditions)
        line |= {f"published_{name}": value for name, value in pair.published.items()}
        for name, published, measured in _RATIOS:
            line[f"published_{name}"] = getattr(pair.ratios, published)
            line |= dict(flat(name, getattr(pair.ratios, measured)))
        lines.append(line)
    names = [*against.metrics, *(name for name, *_ in _RATIOS)]
    ratios = [column for name, *_ in _RATIOS for column in estimate_columns(name)]
    own = csv_header(comparison.rows) if comparison.rows else ["strategy", "world_size"]
    columns = [f"published_{name}" for name in ("place", "conditions", *names)]
    return format_csv(lines, [*own, *ratios, "against", *columns])


def against_epochs_csv(comparison: Comparison, against: Against) -> str:
    """One line for each epoch of each training, measured and published columns."""
    keys = dict.fromkeys(key for row in comparison.rows for key in identity_of(row))
    lines: list[dict[str, object]] = []
    metrics: dict[str, None] = dict.fromkeys(against.epoch_metrics)
    for pair in against.pairs:
        for number in epoch_numbers(pair):
            line: dict[str, object] = {"strategy": pair.title, "world_size": pair.world_size}
            if pair.row is not None:
                line = identity_of(pair.row)
            line |= {"epoch": number, "against": against.paper.name}
            for name, estimate in measured_epoch(pair, number).items():
                metrics[name] = None
                line |= dict(flat(name, estimate))
            published = published_epoch(pair, number)
            lines.append(line | {f"published_{name}": published[name] for name in published})
    columns = [column for name in metrics for column in estimate_columns(name)]
    published_columns = [f"published_{name}" for name in against.epoch_metrics]
    first = list(keys) or ["strategy", "world_size"]
    return format_csv(lines, [*first, "epoch", *columns, "against", *published_columns])


def _training(pair: Pair, against: Against) -> dict[str, object]:
    figures, row = pair.figures, pair.row
    measured = {name: pair.measured.get(name) for name in against.metrics}
    return {
        "strategy": pair.title if row is None else row.strategy,
        "world_size": pair.world_size,
        "place": None if figures is None else figures.place,
        "conditions": {} if figures is None else dict(figures.conditions),
        "row": None if row is None else identity_of(row),
        "published": dict(pair.published),
        "published_training_seconds": None if figures is None else figures.training_seconds,
        "published_others": {} if figures is None else dict(figures.others),
        "measured": None if row is None else metrics_of(measured),
        "missing": {}
        if row is None
        else {name: row.missing[name] for name in measured if name in row.missing},
        "speedup_from": pair.speedup_from,
        **{
            name: {
                "published": getattr(pair.ratios, published),
                "measured": _ratio(getattr(pair.ratios, measured_name)),
            }
            for name, published, measured_name in _RATIOS
        },
        "epochs": [
            {
                "epoch": number,
                "published": published_epoch(pair, number),
                "measured": metrics_of(measured_epoch(pair, number)),
            }
            for number in epoch_numbers(pair)
        ],
    }


def _claim(claim: Claim) -> dict[str, object]:
    """Which of the paper's statements, and what was measured of it."""
    return {
        "statement": claim.statement.model_dump(mode="json"),
        "row": None if claim.row is None else identity_of(claim.row),
        "relative_to": None if claim.base is None else identity_of(claim.base),
        "measured": _ratio(claim.measured),
    }


def _ratio(estimate: Estimate | None) -> dict[str, object] | None:
    return None if estimate is None else estimate_of(estimate, "speedup")
