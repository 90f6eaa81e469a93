"""The largest batch of each strategy, as an answer, a table and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from math import lcm
from operator import attrgetter
from typing import Any

from shardmark.base.cells import title_of
from shardmark.base.table.formats import Format, render_points, render_tables
from shardmark.base.table.table import BYTES, Column, Columns, Missing, Value, table_of
from shardmark.base.text import as_text, render_json
from shardmark.predict.batch.predicted import LargestBatch, passes_of


def render_largest(batches: Sequence[LargestBatch], form: Format, width: int | None) -> str:
    """Return the answer, the table, and what is unknown; the text ends with a line break."""
    if form is Format.JSON:
        return render_json(
            {"answer": [*_answer(batches)], "rows": [_record(batch) for batch in batches]}
        )
    rows = sorted(batches, key=lambda batch: -(batch.samples_of_step or 0))
    notes = [
        "Largest batch: samples of a step, confirmed by real steps. Of a rank:"
        " recipe.per_rank_batch, which ranks that share layers have together. Peak: tensors of the"
        " fullest rank."
    ]
    table = table_of("Largest batch", rows, _columns(), notes)
    missing = [*_missing(batches)]
    parts = [
        render_points([*_answer(batches)], form, width),
        render_tables([table], form, width),
        render_points(missing, form, width) if missing else "",
    ]
    return "\n".join(filter(None, parts))


def _answer(batches: Sequence[LargestBatch]) -> Iterator[str]:
    fitting = [batch for batch in batches if batch.per_rank_batch]
    if not fitting:
        yield "No batch was found to fit."
        return
    most = max(fitting, key=lambda batch: batch.samples_of_step or 0)
    yield (
        f"Largest: {place_of(most)}, {most.samples_of_step} samples in a step,"
        f" {most.per_rank_batch} of each rank."
    )
    pieces = lcm(*(passes_of(batch.cell) for batch in fitting))
    sizes = [batch.per_rank_batch or 0 for batch in fitting]
    if min(sizes) < max(sizes) and (common := min(sizes) // pieces * pieces):
        yield f"All of them fit with recipe.per_rank_batch={common}."


def place_of(batch: LargestBatch) -> str:
    """Return the name of a cell, such as `ddp on 2 ranks, precision bf16`."""
    varied = (f", {title_of(key)} {as_text(value)}" for key, value in batch.cell.varied.items())
    return f"{batch.cell.title}{''.join(varied)}"


def _columns() -> Columns[LargestBatch]:
    def or_reason(value_of: Callable[[LargestBatch], Any]) -> Callable[[LargestBatch], Value]:
        def value_or_reason(batch: LargestBatch) -> Value:
            value: Value = value_of(batch)
            return Missing(batch.reason or "nothing fits") if value is None else value

        return value_or_reason

    peak = or_reason(lambda batch: batch.best and batch.best.peak_bytes)
    share = or_reason(
        lambda batch: (
            batch.best and batch.best.peak_bytes and batch.best.peak_bytes / batch.room_bytes
        )
    )

    return [
        (Column("place", "strategy", numeric=False, names_row=True), place_of),
        (Column("samples_of_step", "largest batch"), or_reason(attrgetter("samples_of_step"))),
        (Column("per_rank_batch", "of a rank"), or_reason(attrgetter("per_rank_batch"))),
        (Column("predicted_batch", "predicted"), or_reason(attrgetter("predicted_batch"))),
        (Column("peak_memory_bytes", "peak", unit=BYTES), peak),
        (Column("room_share", "of the room", unit="%", scale=100, decimals=0), share),
        (Column("tries", "tried"), lambda batch: len(batch.tries)),
    ]


def _missing(batches: Sequence[LargestBatch]) -> Iterator[str]:
    for batch in batches:
        if batch.reason is not None:
            yield f"{place_of(batch)}: {batch.reason}"
        elif batch.best is None:
            yield f"{place_of(batch)}: not even one sample fits"
        elif batch.best.samples == batch.most:
            yield f"{place_of(batch)}: the training set has no more samples"


def _record(batch: LargestBatch) -> dict[str, Any]:
    names = ("per_rank_batch", "samples_of_step", "predicted_batch", "room_bytes", "reason")
    return {
        "strategy": batch.cell.strategy.name,
        "strategy_options": batch.cell.strategy.options,
        "world_size": batch.cell.world_size,
        "varied": batch.cell.varied,
        **{name: getattr(batch, name) for name in names},
        "tries": [
            asdict(tried) | {"samples": tried.samples * passes_of(batch.cell)}
            for tried in batch.tries
        ],
    }
