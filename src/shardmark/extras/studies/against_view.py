"""Tables that show a comparison beside a published study, and the study's claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from shardmark.base.cells import DEFAULT_BASELINE, ranks_and_nodes
from shardmark.base.metrics import METRICS
from shardmark.base.table.table import Column, Columns, Table, for_programs, metric_column, table_of
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.report.answers.wording import short
from shardmark.bench.report.table.notes import left_out
from shardmark.extras.studies.against import (
    RELATIVE_PEAK,
    RELATIVE_TIME,
    SPEEDUP,
    TASK_KEYS,
    Against,
    ClaimPair,
    Pair,
    conditions_text,
    set_against,
)
from shardmark.extras.studies.paper_tables import paper_tables
from shardmark.extras.studies.study import TOTAL, Claim, load_study

_ONE_SIDED = 4
"""Largest number of trainings that a note names."""
_name = partial(Column, numeric=False, names_row=True)


def study_tables(comparison: Comparison, name: str) -> tuple[Table, ...]:
    return against_tables(set_against(comparison, load_study(name)))


def against_tables(against: Against) -> tuple[Table, ...]:
    """Return the joined table of both sides, the study's own tables, and its claims."""
    study, notes = against.study, _notes(against)
    title = f"Against {study.name}: published (publ.) and measured (meas.)"
    tables = [table_of(title, against.pairs, _trainings(against), notes)] if study.figures else []
    tables += paper_tables(against)
    claims = [pair for pair in against.claims if not pair.claim.cannot_mean]
    doubtful = [pair for pair in against.claims if pair.claim.cannot_mean]
    if claims:
        claim_notes = [] if study.figures else [*notes]
        claim_notes.append("Findings are by the 95 % interval of this machine's measurements.")
        titled = f"Claims of {study.name}"
        tables.append(table_of(titled, claims, _claims(against), claim_notes))
    if doubtful:
        reasons = [*dict.fromkeys(f"{p.claim.says}: {p.claim.cannot_mean}" for p in doubtful)]
        titled = f"What {study.name} cannot mean"
        reasons += _own_scatter(doubtful)
        tables.append(table_of(titled, doubtful, _claims(against), reasons))
    return tuple(tables)


def _own_scatter(doubtful: Sequence[ClaimPair]) -> Iterator[str]:
    """Say how far repeats of one strategy differ here, in what a study says of a difference."""
    of_differences = [
        pair
        for pair in doubtful
        if pair.claim.relation == "difference" and pair.claim.epoch is None
    ]
    for metric in dict.fromkeys(pair.claim.metric for pair in of_differences):
        rows = [row for pair in of_differences for row in (pair.row, pair.base) if row is not None]
        values = [row.values.get(metric, {}).values() for row in rows]
        ranges = [max(repeats) - min(repeats) for repeats in values if len(repeats) > 1]
        column = metric_column(metric)
        if any(ranges):
            amount = f"{short(max(ranges) * column.scale)} {column.difference_unit}".rstrip()
            yield f"Here, repeats of one strategy differ by up to {amount} in {name_of(metric)}."
        elif rows:
            yield (
                "Here, one seed was trained: measure.seeds=3 shows how far the"
                f" {name_of(metric)} of one strategy differs from seed to seed."
            )


def _trainings(against: Against) -> Columns[Pair]:
    reference = against.study.reference
    titles = {
        SPEEDUP: "speed-up",
        RELATIVE_TIME: f"time/{reference}",
        RELATIVE_PEAK: f"peak/{reference}",
    }
    ratio = partial(Column, decimals=2, estimated=True)
    headline = map(metric_column, against.metrics)
    columns = [
        *(replace(column, title="total") if column.key == TOTAL else column for column in headline),
        *(ratio(name, titles[name]) for name in against.ratios),
    ]
    return [
        *_run_column(against, attrgetter("row")),
        (_name("strategy"), attrgetter("title")),
        (_name("conditions", names_row=False), attrgetter("conditions")),
        (Column("ranks", names_row=True), attrgetter("world_size")),
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


def _run_column(against: Against, row_of: Callable[[Any], Row | None]) -> Columns[Any]:
    """Return a column with the run, if there are several."""

    def run(item: Any) -> str | None:
        row = row_of(item)
        return None if row is None else against.sources.get(row.experiment)

    return [(_name("run"), run)] if len(against.sources) > 1 else []


_NAMES = {
    "epoch_seconds": "time for the same samples",
    "samples_per_second": "throughput",
    SPEEDUP: "throughput",
    "memory_ratio": "peak memory",
    "state_bytes": "parameters, gradients and optimizer state",
    "parameter_bytes": "parameters",
    "collective_bytes": "bytes of collectives",
    "train_loss": "training loss",
    "map": "mAP",
    "accuracy_top1": "top-1 accuracy",
}
_UNITS = {SPEEDUP: "samples/s", "memory_ratio": "bytes", "state_bytes": "bytes"}


def name_of(metric: str) -> str:
    """Return the name of a claim's metric in words."""
    return _NAMES.get(metric, metric)


def quantity_of(claim: Claim) -> str:
    """Return what the claim compares, with its unit: `peak memory (bytes), ratio`."""
    unit = _UNITS.get(claim.metric) or METRICS[claim.metric].unit
    epoch = "" if claim.epoch is None else f" after epoch {claim.epoch}"
    return f"{name_of(claim.metric)} ({unit}){epoch}, {claim.relation}"


def cells_of(pair: ClaimPair, over: str = " / ") -> str:
    """Return the rows that were compared, or the strategies of the claim if none were."""
    claim, row, base = pair.claim, pair.row, pair.base
    sign = " minus " if claim.relation == "difference" else over
    if row is None or base is None:
        sides = (" or ".join(names) for names in (claim.strategies, claim.over) if names)
        size = claim.world_size
        ranks = "" if size is None else f" on {ranks_and_nodes(size, claim.nodes or 1)}"
        return sign.join(sides) + ranks
    if claim.over_ranks and not claim.over:
        return f"{row.label} on {row.world_size}{sign}{base.world_size} ranks"
    if base.strategy == DEFAULT_BASELINE:
        return f"{row.label} on {ranks_and_nodes(row.world_size, 1)}{sign}{base.label}"
    if base.world_size != row.world_size:
        places = (f"{r.label} on {ranks_and_nodes(r.world_size, 1)}" for r in (row, base))
        return sign.join(places)
    return f"{row.label}{sign}{base.label} on {ranks_and_nodes(row.world_size, 1)}"


def range_text(claim: Claim) -> str:
    """Format the claimed value or range, such as `at least 1.5`."""
    if claim.value is not None:
        return f"{claim.value:.3g}"
    if claim.low is None:
        return f"at most {claim.high:.3g}"
    return (
        f"at least {claim.low:.3g}"
        if claim.high is None
        else f"{claim.low:.3g} to {claim.high:.3g}"
    )


def _claims(against: Against) -> Columns[ClaimPair]:
    text = partial(Column, numeric=False)

    def conditions(pair: ClaimPair) -> str:
        return "" if pair.row is None else conditions_text(pair.row, against.rows)

    return [
        (_name("claim"), attrgetter("claim.says")),
        *_run_column(against, attrgetter("row")),
        (_name("cells"), cells_of),
        (text("conditions", names_row=any(map(conditions, against.claims))), conditions),
        (for_programs("ranks"), lambda pair: pair.row.world_size if pair.row else None),
        (text("finding"), attrgetter("finding")),
        (text("published"), lambda pair: range_text(pair.claim)),
        (
            Column("measured", "meas.", decimals=3, interval="to", estimated=True),
            attrgetter("measured"),
        ),
        (text("quantity"), lambda pair: quantity_of(pair.claim)),
        (text("because"), attrgetter("reason")),
        (text("place"), attrgetter("claim.place")),
        (for_programs("metric"), attrgetter("claim.metric")),
    ]


def _notes(against: Against) -> tuple[str, ...]:
    """Return notes on what differs; hardware and task come first."""
    study = against.study
    task = "; ".join(text for key, text in against.differences if key in TASK_KEYS)
    other = "; ".join(text for key, text in against.differences if key not in TASK_KEYS)
    unmeasured = [
        ", ".join(filter(None, (f"{p.title} on {p.world_size}", p.conditions)))
        for p in against.pairs
        if p.row is None
    ]
    only_measured = [p.row.place for p in against.pairs if p.figures is None and p.row]
    disturbed = [row.place for row in against.rows if row.disturbed]
    if len(disturbed) == len(against.rows):
        disturbed = disturbed and ["all rows"]
    notes = [
        _hardware_note(against),
        _some("Disturbed by other work, so that their times mean little", disturbed),
        f"Another task: {task}. Loss and quality cannot be compared." if task else "",
        f"Also differs: {other}." if other else "",
        _some("Published, not measured here", list(dict.fromkeys(unmeasured))),
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
