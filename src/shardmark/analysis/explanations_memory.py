"""Why sharding saved little: what it could save at most, and what else fills the memory."""

from __future__ import annotations

from shardmark.analysis.candidates import Field
from shardmark.analysis.comparison import ratio_between
from shardmark.analysis.rows import Row
from shardmark.analysis.statistics import Estimate
from shardmark.analysis.surprise import NOTEWORTHY, Explanation, parts_of

STATE = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
ACTIVATIONS = "activations and buffers"
PEAK = "peak_memory_bytes"

HOPED_SHARE = 0.5
"""Saving less than this part of (n - 1) / n of the peak on n ranks is little."""


def memory_explanations(field: Field) -> list[Explanation]:
    """Rows that hold less state than the fullest row on as many ranks, yet save little memory."""
    found: list[Explanation] = []
    for size in sorted({row.world_size for row in field.candidates} - {1}):
        rows = [row for row in field.candidates if row.world_size == size and _known(row)]
        if len(rows) < 2:
            continue
        whole = max(rows, key=state_bytes)
        for row in rows:
            if state_bytes(row) < state_bytes(whole) * (1 - NOTEWORTHY):
                one = _explain(row, whole)
                found += [] if one is None else [one]
    return found


def state_bytes(row: Row) -> float:
    """Parameters, gradients and optimizer state of the fullest rank."""
    return sum(_value(row, name) for name in STATE)


def _known(row: Row) -> bool:
    names = (*STATE, "activation_peak_bytes", PEAK)
    return all(row.metrics.get(name) is not None for name in names)


def _value(row: Row, name: str) -> float:
    estimate = row.metrics[name]
    assert estimate is not None, "the caller looked"
    return estimate.value


def _explain(row: Row, whole: Row) -> Explanation | None:
    """None where the saving is no surprise, or is not shown to be small."""
    ratio = ratio_between(row, whole, PEAK)
    divided = 1 - 1 / row.world_size
    limit = 1 - HOPED_SHARE * divided
    if ratio is None or ratio.value <= limit or not _above(ratio, limit):
        return None
    saved = _value(whole, PEAK) - _value(row, PEAK)
    amounts = {name: _value(whole, name) - _value(row, name) for name in STATE}
    amounts[ACTIVATIONS] = _value(whole, "activation_peak_bytes") - _value(
        row, "activation_peak_bytes"
    )
    state = state_bytes(whole)
    return Explanation(
        kind="sharding saves little",
        row=row,
        other=whole,
        metric=PEAK,
        size=ratio,
        shown=ratio.low is not None,
        unit="bytes",
        difference=saved,
        parts=parts_of(amounts, saved),
        unexplained=saved - sum(amounts.values()),
        facts={
            "other_peak_bytes": _value(whole, PEAK),
            "state_bytes": state,
            "activation_bytes": _value(whole, "activation_peak_bytes"),
            "possible_bytes": state * divided,
            "saved_state_bytes": state - state_bytes(row),
        },
    )


def _above(ratio: Estimate, limit: float) -> bool:
    return ratio.low is None or ratio.low > limit
