"""Bytes by formula, by collectives and by interfaces, from trials to the table."""

from __future__ import annotations

from collections.abc import Mapping
from math import expm1
from pathlib import Path
from typing import Any

import pytest
from tests.golden.invented import invented_rank, invented_trial

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.analysis.network.wire import wires_of
from shardmark.core.recipe import Recipe
from shardmark.core.wire import ModelSize
from shardmark.report.views.network import network_json, network_tables
from shardmark.results.schema import CollectiveRecord, ProbeRecord, RankRecord, TrialResult
from shardmark.results.store import StoredRun
from shardmark.strategies import build_strategy

PARAMETERS = 1_000_000
STEPS = 39
"""Measured ones of an invented rank."""
Payloads = Mapping[str, int] | None


def rank(number: int, payloads: Payloads, **fields: Any) -> RankRecord:
    collectives = None
    if payloads is not None:
        collectives = {
            kind: CollectiveRecord(calls=1, payload_bytes=size) for kind, size in payloads.items()
        }
    probe = ProbeRecord(collectives=collectives)
    return invented_rank(number).model_copy(update={"probe": probe, **fields})


def trial(
    strategy: str, ranks: int, payloads: Payloads, sent: float | None, repeat: int = 0
) -> TrialResult:
    """`sent` bytes for each rank and step."""
    total = None if sent is None else sent * STEPS * ranks
    needed = build_strategy(strategy, {}).wire_bytes(
        ModelSize(parameters=PARAMETERS, trained_parameters=PARAMETERS),
        Recipe(global_batch=8, steps=1),
        ranks,
    )
    made = invented_trial(
        strategy,
        ranks,
        repeat,
        metrics={"network_sent_bytes": total},
        ranks=tuple(rank(number, payloads) for number in range(ranks)),
    )
    return made.model_copy(update={"needed_traffic": needed})


def compared(*trials: TrialResult) -> Comparison:
    return compare([StoredRun(path=Path("run"), trials=trials)])


DDP = {"all_reduce": 4_000_000}
FSDP = {"all_gather": 4_000_000, "reduce_scatter": 4_000_000}


def test_a_ring_carries_what_the_formula_says() -> None:
    (found,) = wires_of(compared(trial("ddp", 2, DDP, 4.1e6)).rows)
    assert found.defined_bytes == pytest.approx(4e6)
    assert found.counted_bytes == pytest.approx(4e6)
    assert found.counted_ratio == pytest.approx(1.0)
    assert found.interface_ratio == pytest.approx(1.025)
    assert not found.missing


def test_a_library_that_asks_for_more_and_a_backend_that_sends_more() -> None:
    """DeepSpeed all-reduces where a reduce-scatter would do; gloo does so beneath FSDP."""
    zero = {"all_reduce": 4_000_000, "all_gather": 2_000_000}
    rows = compared(trial("zero-2", 2, zero, 6e6), trial("fsdp", 2, FSDP, 8e6)).rows
    backend = {one.row.strategy: one.backend_ratio for one in wires_of(rows)}
    assert backend == pytest.approx({"zero-2": 1.0, "fsdp": 8 / 6})
    ratios = {one.row.strategy: (one.counted_ratio, one.interface_ratio) for one in wires_of(rows)}
    assert ratios["zero-2"] == pytest.approx((1.5, 1.5))
    assert ratios["fsdp"] == pytest.approx((1.0, 8 / 6))


def test_a_server_s_answers_count_for_the_worker() -> None:
    payloads = {"send": 4_000_048, "receive": 4_000_000}
    server = invented_rank(2).model_copy(update={"role": "server", "probe": None, "windows": ()})
    result = trial("ps-sync", 2, payloads, 8e6)
    result = result.model_copy(update={"ranks": (*result.ranks, server)})
    (found,) = wires_of(compared(result).rows)
    assert found.defined_bytes == pytest.approx(8e6)
    assert found.counted_ratio == pytest.approx(1.0, abs=1e-4)
    assert found.interface_ratio == pytest.approx(1.0)


def test_repeats_give_an_interval() -> None:
    trials = [trial("ddp", 2, DDP, sent, n) for n, sent in enumerate((4.0e6, 4.1e6, 4.2e6))]
    (found,) = wires_of(compared(*trials).rows)
    assert found.interface_bytes is not None
    assert found.interface_bytes.n == 3
    assert found.interface_bytes.value == pytest.approx(4.1e6)
    relative = 4.303 * 1e5 / 3**0.5 / 4.1e6  # on the log scale
    assert found.interface_bytes.half_width == pytest.approx(4.1e6 * expm1(relative), rel=1e-3)


def test_a_probe_that_counted_nothing_is_told() -> None:
    (found,) = wires_of(compared(trial("fsdp", 2, None, 8e6)).rows)
    assert found.defined_bytes == pytest.approx(6e6)
    assert found.counted_bytes is None
    assert set(found.missing) == {"counted"}


def test_what_is_not_known_is_null_with_a_reason() -> None:
    """The trial's model was never counted."""
    document = network_json(network_tables(compared(invented_trial("ddp", 2))))
    (row,) = document["bytes"]
    assert row["formula_bytes"] is None
    assert row["collective_ratio"] is None
    assert "parameters" in row["missing"]["formula_bytes"]


def test_the_table() -> None:
    comparison = compared(
        trial("single", 1, {}, 0.0), trial("ddp", 2, DDP, 4.1e6), trial("fsdp", 2, FSDP, None)
    )
    table = network_tables(comparison)[0]
    assert table.cells("label") == ("ddp", "fsdp")
    assert table.cells("formula_bytes") == ("4.00", "6.00")
    assert table.cells("collective_ratio") == ("1.00", "1.00")
    assert table.cells("interface_bytes") == ("4.10", "-")
    assert table.cells("interface_ratio") == ("1.02", "-")
    notes = " ".join(table.notes)
    assert "ddp: all-reduce: 2 (n-1)/n G." in notes
    assert "interfaces: not recorded (fsdp on 2 ranks)" in notes


def test_nothing_was_sent() -> None:
    table = network_tables(compared(trial("single", 1, {}, 0.0)))[0]
    assert table.rows == ()
    assert "No trial of several ranks" in table.notes[0]
