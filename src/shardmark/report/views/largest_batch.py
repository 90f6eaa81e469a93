"""The largest batch of each strategy, as an answer, a table and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import lcm
from typing import Any

from shardmark.config.axes import title_of
from shardmark.core.text import as_text
from shardmark.predict.largest_batch import LargestBatch, passes_of
from shardmark.report.table.formats import Format, render_json, render_points, render_tables
from shardmark.report.table.table import BYTES, Column, Columns, Missing, Value, table_of


def render_largest(found: Sequence[LargestBatch], form: Format, width: int | None) -> str:
    """The answer, the table, what is not known; ends with a line break."""
    if form is Format.JSON:
        return render_json({"answer": [*_answer(found)], "rows": [_record(each) for each in found]})
    rows = sorted(found, key=lambda each: -(each.samples_of_step or 0))
    notes = [
        "Samples of a step, confirmed by real steps. Of a rank: recipe.per_rank_batch; ranks that"
        " divide layers share it. Peak: tensors of the fullest rank."
    ]
    table = table_of("Largest batch", rows, _columns(), notes)
    missing = [*_missing(found)]
    parts = [
        render_points([*_answer(found)], form, width),
        render_tables([table], form, width),
        render_points(missing, form, width) if missing else "",
    ]
    return "\n".join(filter(None, parts))


def _answer(found: Sequence[LargestBatch]) -> Iterator[str]:
    known = [each for each in found if each.per_rank_batch]
    if not known:
        yield "No batch was found to fit."
        return
    most = max(known, key=lambda each: each.samples_of_step or 0)
    yield (
        f"Largest: {place_of(most)}, {most.samples_of_step} samples in a step,"
        f" {most.per_rank_batch} of each rank."
    )
    pieces = lcm(*(passes_of(each.cell) for each in known))
    batches = [each.per_rank_batch or 0 for each in known]
    if min(batches) < max(batches) and (of_all := min(batches) // pieces * pieces):
        yield f"All of them fit with recipe.per_rank_batch={of_all}."


def place_of(each: LargestBatch) -> str:
    """`ddp on 2 ranks, precision bf16`."""
    varied = (f", {title_of(key)} {as_text(value)}" for key, value in each.cell.varied.items())
    return f"{each.cell.title}{''.join(varied)}"


def _columns() -> Columns[LargestBatch]:
    def share(each: LargestBatch) -> Value:
        peak = _peak(each)
        return peak if isinstance(peak, Missing) else peak / each.room_bytes

    return [
        (Column("place", "strategy", numeric=False, names_row=True), place_of),
        (
            Column("samples_of_step", "largest batch"),
            lambda each: _known(each, each.samples_of_step),
        ),
        (Column("per_rank_batch", "of a rank"), lambda each: _known(each, each.per_rank_batch)),
        (Column("predicted_batch", "predicted"), lambda each: _known(each, each.predicted_batch)),
        (Column("peak_memory_bytes", "peak", unit=BYTES), _peak),
        (Column("room_share", "of the room", unit="%", scale=100, decimals=0), share),
        (Column("tries", "tried"), lambda each: len(each.tries)),
    ]


def _peak(each: LargestBatch) -> float | Missing:
    peak = None if each.best is None else each.best.peak_bytes
    return Missing(each.reason or "nothing fits") if peak is None else peak


def _known(each: LargestBatch, value: int | None) -> Value:
    return Missing(each.reason or "nothing fits") if value is None else value


def _missing(found: Sequence[LargestBatch]) -> Iterator[str]:
    for each in found:
        if each.reason is not None:
            yield f"{place_of(each)}: {each.reason}"
        elif each.best is None:
            yield f"{place_of(each)}: not even one sample fits"
        elif each.best.samples == each.most:
            yield f"{place_of(each)}: the training set has no more samples"


def _record(each: LargestBatch) -> dict[str, Any]:
    return {
        "strategy": each.cell.strategy.name,
        "strategy_options": each.cell.strategy.options,
        "world_size": each.cell.world_size,
        "varied": each.cell.varied,
        "per_rank_batch": each.per_rank_batch,
        "samples_of_step": each.samples_of_step,
        "predicted_batch": each.predicted_batch,
        "room_bytes": each.room_bytes,
        "tries": [
            asdict(tried) | {"samples": tried.samples * passes_of(each.cell)}
            for tried in each.tries
        ],
        "reason": each.reason,
    }
