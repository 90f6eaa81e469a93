"""Bytes by formula, by collectives and by interfaces, from trials to the table."""

from __future__ import annotations

from collections.abc import Mapping
from math import expm1
from typing import Any

import pytest
from tests.golden.invented import invented_rank, invented_trial
from tests.unit.report_compare.runs import compared

from shardmark.analysis.network.wire import WireOfRow, wires_of
from shardmark.core.recipe import Recipe
from shardmark.core.wire import ModelSize
from shardmark.report.views.network import network_json, network_tables
from shardmark.results.schema import CollectiveRecord, ProbeRecord, RankRecord, TrialResult
from shardmark.strategies import build_strategy

PARAMETERS = 1_000_000
STEPS = 39
"""Measured ones of an invented rank."""
Payloads = Mapping[str, int] | None


def rank(number: int, payloads: Payloads) -> RankRecord:
    collectives = None
    if payloads is not None:
        collectives = {
            kind: CollectiveRecord(calls=1, payload_bytes=size) for kind, size in payloads.items()
        }
    probe = ProbeRecord(collectives=collectives)
    return invented_rank(number).model_copy(update={"probe": probe})


def trial(
    strategy: str, ranks: int, payloads: Payloads, sent: float | None, repeat: int = 0
) -> TrialResult:
    """`sent` bytes for each rank and step; a parameter server has a server beside the workers."""
    total = None if sent is None else sent * STEPS * ranks
    built = build_strategy(strategy, {})
    size = ModelSize(parameters=PARAMETERS, trained_parameters=PARAMETERS)
    serving: dict[str, Any] = {"role": "server", "probe": None, "windows": ()}
    records = [
        rank(number, payloads) if place.share else invented_rank(number).model_copy(update=serving)
        for number, place in enumerate(built.layout(ranks).ranks)
    ]
    made = invented_trial(
        strategy, ranks, repeat, metrics={"network_sent_bytes": total}, ranks=tuple(records)
    )
    needed = built.wire_bytes(size, Recipe(global_batch=8, steps=1), ranks)
    return made.model_copy(update={"needed_traffic": needed})


def wire(*trials: TrialResult) -> WireOfRow:
    (row,) = wires_of(compared(*trials).rows)
    return row


DDP = {"all_reduce": 4_000_000}
FSDP = {"all_gather": 4_000_000, "reduce_scatter": 4_000_000}
ZERO = {"all_reduce": 4_000_000, "all_gather": 2_000_000}
SERVER = {"send": 4_000_048, "receive": 4_000_000}


@pytest.mark.parametrize(
    ("strategy", "payloads", "sent", "defined", "ratios"),
    [
        pytest.param("ddp", DDP, 4.1e6, 4e6, (1.0, 1.025, 1.025), id="a ring"),
        pytest.param("zero-2", ZERO, 6e6, 4e6, (1.5, 1.5, 1.0), id="a library asks for more"),
        pytest.param("fsdp", FSDP, 8e6, 6e6, (1.0, 8 / 6, 8 / 6), id="a backend sends more"),
        pytest.param("ps-sync", SERVER, 8e6, 8e6, (1.0, 1.0, 1.0), id="answers count for workers"),
    ],
)
def test_bytes_beside_the_formula(
    strategy: str, payloads: Payloads, sent: float, defined: float, ratios: tuple[float, ...]
) -> None:
    row = wire(trial(strategy, 2, payloads, sent))
    assert row.defined_bytes == pytest.approx(defined)
    measured = (row.counted_ratio, row.interface_ratio, row.backend_ratio)
    assert measured == pytest.approx(ratios, abs=1e-4)
    assert not row.missing


def test_repeats_give_an_interval() -> None:
    row = wire(*(trial("ddp", 2, DDP, sent, n) for n, sent in enumerate((4.0e6, 4.1e6, 4.2e6))))
    assert row.interface_bytes is not None
    assert row.interface_bytes.n == 3
    assert row.interface_bytes.value == pytest.approx(4.1e6)
    relative = 4.303 * 1e5 / 3**0.5 / 4.1e6  # on the log scale
    assert row.interface_bytes.half_width == pytest.approx(4.1e6 * expm1(relative), rel=1e-3)


def test_what_is_not_known_is_null_with_a_reason() -> None:
    """A probe that counted nothing; a model that was never counted."""
    row = wire(trial("fsdp", 2, None, 8e6))
    assert row.defined_bytes == pytest.approx(6e6)
    assert (row.counted_bytes, set(row.missing)) == (None, {"counted"})
    (line,) = network_json(network_tables(compared(invented_trial("ddp", 2))))["bytes"]
    assert (line["formula_bytes"], line["collective_ratio"]) == (None, None)
    assert "parameters" in line["missing"]["formula_bytes"]


def test_the_table() -> None:
    alone = trial("single", 1, {}, 0.0)
    several = (trial("ddp", 2, DDP, 4.1e6), trial("fsdp", 2, FSDP, None))
    table = network_tables(compared(alone, *several))[0]
    for key, cells in (
        ("label", ("ddp", "fsdp")),
        ("formula_bytes", ("4.00", "6.00")),
        ("collective_ratio", ("1.00", "1.00")),
        ("interface_bytes", ("4.10", "-")),
        ("interface_ratio", ("1.02", "-")),
    ):
        assert table.cells(key) == cells
    notes = " ".join(table.notes)
    assert "ddp: all-reduce: 2 (n-1)/n G." in notes
    assert "interfaces: not recorded (fsdp on 2 ranks)" in notes
    empty = network_tables(compared(alone))[0]
    assert empty.rows == ()
    assert "No trial of several ranks" in empty.notes[0]
