"""Why sharding saved little: what it could save at most, and where memory went instead."""

from __future__ import annotations

from shardmark.analysis.advise.candidates import Field
from shardmark.analysis.compare.comparison import ratio_between
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.surprise import Explanation, parts_of
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.studies.plausibility_sizes import SHARDED, SMALLEST_GROUP

KINDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_state_bytes",
}
ACTIVATIONS = "activations and buffers"
NAMES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
PEAK = "peak_memory_bytes"
YARDSTICK = "ddp"
"""Every rank holds everything, and all else is as in the sharding strategies."""

HOPED_SHARE = 0.5
"""Saving less than this part of (n - 1) / n of the peak on n ranks is little."""


def memory_explanations(field: Field) -> list[Explanation]:
    """Rows that shard, and yet save little memory against `ddp` on as many ranks."""
    known = [row for row in field.candidates if row.world_size > 1 and _known(row)]
    found = []
    for row in known:
        whole = next((one for one in known if _is_yardstick(one, row)), None)
        if whole is not None and SHARDED.get(row.strategy):
            found.append(_explain(row, whole))
    return [one for one in found if one is not None]


def shards(row: Row) -> int:
    """Over how many ranks the row's strategy divides one copy."""
    if row.strategy == "fsdp-hybrid":
        return int(row.strategy_options.get("shard_group", SMALLEST_GROUP))
    return row.world_size


def _is_yardstick(one: Row, row: Row) -> bool:
    same = one.world_size == row.world_size and not one.differing(row)
    return same and one.strategy == YARDSTICK and not one.strategy_options


def _known(row: Row) -> bool:
    names = (*KINDS.values(), "activation_peak_bytes", PEAK)
    return all(row.metrics.get(name) is not None for name in names)


def _value(row: Row, name: str) -> float:
    estimate = row.metrics[name]
    assert estimate is not None, "the caller looked"
    return estimate.value


def _explain(row: Row, whole: Row) -> Explanation | None:
    """None where the saving is no surprise, or is not shown to be small."""
    ratio = ratio_between(row, whole, PEAK)
    divided = 1 - 1 / shards(row)
    limit = 1 - HOPED_SHARE * divided
    if ratio is None or ratio.value <= limit or not _above(ratio, limit):
        return None
    saved = _value(whole, PEAK) - _value(row, PEAK)
    names = {NAMES[kind]: name for kind, name in KINDS.items()}
    names[ACTIVATIONS] = "activation_peak_bytes"
    amounts = {label: _value(whole, name) - _value(row, name) for label, name in names.items()}
    sharded = sum(_value(whole, KINDS[kind]) for kind in SHARDED[row.strategy])
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
            "sharded_bytes": sharded,
            "possible_bytes": sharded * divided,
        },
    )


def _above(ratio: Estimate, limit: float) -> bool:
    return ratio.low is None or ratio.low > limit
