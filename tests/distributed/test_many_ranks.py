"""Cost models hold on more ranks than a machine has: one of them runs in a fake group."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.measure.step.collectives import CollectiveCounter
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies.base import RankContext, Server
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import TaskOptions, build_workload
from tests.distributed.captures import recipe, trial
from tests.distributed.one_of_many import batches_of, one_of_many
from tests.distributed.ranks import run_ranks
from tests.distributed.strategy_table import (
    ADAMW,
    BF16,
    LARGE_GPT,
    UNTIED,
    WIDE,
    counted_cell,
    language,
    written_texts,
)

WARMUP_STEPS = 4
"""An even number, so that rounds of two steps are whole; DDP builds its buckets in the first."""
SECOND_STAGE = 3
"""A rank of the second stage on every mesh here: of two stages, with two tensor ranks or none."""
Counts = dict[str, tuple[float, float]]
"""Calls and bytes by collective."""
WITH_PICTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("ddp", "zro", "fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp1")},
    "local-sgd": {"period_steps": 2},
    "diloco": {"period_steps": 2},
}
APPROXIMATE = {
    "zro": 0.002,  # ranks that update nothing broadcast a value
    "fsdp1": 0.01,  # the root is gathered once
    **dict.fromkeys(("fsdp-tp", "ddp-pp", "fsdp-pp", "fsdp-tp-pp"), 0.005),  # stages are unequal
}
"""Relative errors of bytes; those of all other rows are exact."""
OTHER_CALLS = ("fsdp1", "fsdp-tp", "ddp-pp", "fsdp-pp", "fsdp-tp-pp")
"""Rows whose numbers of calls are approximations."""
LOSS_BYTES = 8
"""Ranks with the same samples send a loss, which no cost model counts."""


def trials_on(folder: Path, ranks: int) -> dict[str, Trial]:
    replicas, pairs = max(1, ranks // 8), ranks // 2
    meshes: dict[str, dict[str, int]] = {
        "fsdp-tp": {"data": replicas, "shard": 4, "tensor": 2},
        "ddp-pp": {"data": pairs, "pipeline": 2},
        "fsdp-pp": {"data": replicas, "shard": 4, "pipeline": 2},
        "fsdp-tp-pp": {"data": replicas, "shard": 2, "pipeline": 2, "tensor": 2},
        "ulysses": {"data": pairs, "sequence": 2},
        "fsdp-ulysses": {"shard": pairs, "sequence": 2},
    }
    common = {"global_batch": None, "per_rank_batch": 4}
    cases: dict[str, tuple[dict[str, Any], TaskOptions, dict[str, Any]]] = {
        **{name: ({}, WIDE, options) for name, options in WITH_PICTURES.items()},
        "fsdp, bf16": (BF16, WIDE, {}),
        **{
            name: (ADAMW, language(folder, **LARGE_GPT | UNTIED), {"mesh": mesh})
            for name, mesh in meshes.items()
        },
    }
    return {
        name: trial(
            name.partition(",")[0],
            recipe(**common | changes),
            ranks=ranks,
            workload=workload,
            **options,
        )
        for name, (changes, workload, options) in cases.items()
    }


def counted(process: RankContext, folder: Path, ranks: int) -> dict[str, tuple[Counts, Cell]]:
    """Count a step of every trial, as rank 0 or, in the second process, on the second stage."""
    return {
        name: counted_step(of, SECOND_STAGE * process.rank)
        for name, of in trials_on(folder, ranks).items()
        if process.rank == 0 or of.layout.pipeline > 1
    }


def counted_step(of: Trial, rank: int) -> tuple[Counts, Cell]:
    """Collectives of a step, after some that warm up, and the sizes of the cost model."""
    with one_of_many(rank, of.world_size) as context:
        workload = build_workload(of.workload, of.recipe.seed)
        worker = of.built_strategy.start(workload, of.recipe, context)
        assert not isinstance(worker, Server)
        batches, steps = batches_of(of, workload), worker.round_steps()
        for _ in range(WARMUP_STEPS):
            worker.step(next(batches), NoSpans())
        with CollectiveCounter() as counter:
            for _ in range(steps):
                worker.step(next(batches), NoSpans())
        counts = {
            kind: (record.calls / steps, record.payload_bytes / steps)
            for kind, record in counter.probe_fields()["collectives"].items()
        }
        return counts, counted_cell(of, workload, worker)


@pytest.fixture(scope="module", params=[8, 1024])
def on_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = written_texts(tmp_path_factory.mktemp("texts"))
    directory = tmp_path_factory.mktemp("ranks")
    places = run_ranks(counted, folder, request.param, world_size=2, directory=directory)
    return trials_on(folder, request.param), places


@pytest.mark.parametrize("name", trials_on(Path(), 8))
def test_a_rank_of_many_sends_the_bytes_of_the_cost_model(
    on_ranks: tuple[dict[str, Trial], list[dict[str, tuple[Counts, Cell]]]], name: str
) -> None:
    """Bytes are the mean over the ranks of a pipeline."""
    trials, places = on_ranks
    counts = [place[name][0] for place in places if name in place]
    _, cell = places[0][name]
    expected: dict[str, tuple[float, float]] = {}
    for part in cost_model(trials[name].built_strategy).library_traffic(cell):
        calls, payload = expected.get(part.kind, (0.0, 0.0))
        once = part.calls / part.every_steps
        expected[part.kind] = calls + once, payload + part.payload_bytes
    for kind in {*expected}.union(*counts):
        calls, payload = (fmean(of.get(kind, (0, 0))[at] for of in counts) for at in (0, 1))
        expected_calls, expected_payload = expected.get(kind, (0.0, 0.0))
        tolerance = APPROXIMATE.get(name, 0.0)
        assert payload == pytest.approx(expected_payload, rel=tolerance, abs=LOSS_BYTES), kind
        if name not in OTHER_CALLS:
            assert calls == pytest.approx(expected_calls, abs=1), kind
