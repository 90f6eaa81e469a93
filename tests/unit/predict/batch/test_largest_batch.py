"""The largest batch: what is tried next, by a world in which real steps need other memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardmark.base.table.formats import Format
from shardmark.experiment.matrix import cells_of_any_size
from shardmark.predict.batch.predicted import MOST_TRIES, LargestBatch, Try, next_samples, passes_of
from shardmark.predict.batch.table import render_largest
from tests.unit.predict.test_plan import experiment

MB = 1e6
MOST = 4096
ROOM = 1000 * MB


def predicted(samples: int) -> float:
    return 100 * MB + 3 * MB * samples


def tries_in(world: Callable[[int], float], *, tells: bool = True) -> tuple[Try, ...]:
    """Batches tried where a step needs what `world` says; without `tells`, it only runs out."""
    tries: tuple[Try, ...] = ()
    while (samples := next_samples(predicted, ROOM, tries, MOST)) is not None:
        assert samples not in [each.samples for each in tries]
        needed = world(samples)
        fits = needed <= ROOM
        peak = needed if fits or tells else None
        tries = (*tries, Try(samples=samples, peak_bytes=peak, fits=fits))
    return tries


def best_of(tries: tuple[Try, ...]) -> int:
    return max((each.samples for each in tries if each.fits), default=0)


@pytest.mark.parametrize(
    "world",
    [
        predicted,
        lambda samples: predicted(samples) + 30 * MB,
        lambda samples: predicted(samples) - 30 * MB,
        lambda samples: 1.2 * predicted(samples),
        lambda samples: 0.8 * predicted(samples),
        lambda samples: 60 * MB + 3.3 * MB * samples,
    ],
    ids=["as predicted", "more", "less", "a fifth more", "a fifth less", "another line"],
)
def test_it_is_found_in_few_tries(world: Callable[[int], float]) -> None:
    tries = tries_in(world)
    truth = max(samples for samples in range(1, MOST) if world(samples) <= ROOM)
    assert len(tries) <= MOST_TRIES
    assert best_of(tries) == truth


def test_a_device_that_only_runs_out_is_approached_from_above() -> None:
    """The steps are a twentieth of the room: the result fits, and is near the limit."""
    tries = tries_in(lambda samples: 1.08 * predicted(samples), tells=False)
    truth = max(samples for samples in range(1, MOST) if 1.08 * predicted(samples) <= ROOM)
    assert len(tries) <= MOST_TRIES
    assert 0.9 * truth <= best_of(tries) <= truth


def test_nothing_fits_and_everything_fits() -> None:
    assert best_of(tries_in(lambda _: 2 * ROOM)) == 0
    (only,) = tries_in(lambda _: ROOM / 2) if predicted(MOST) <= ROOM else (None,)
    assert only is None
    assert next_samples(lambda _: 0.0, ROOM, (), 8) == 8
    fits = Try(samples=8, peak_bytes=1.0, fits=True)
    assert next_samples(lambda _: 0.0, ROOM, (fits,), 8) is None
    assert next_samples(predicted, ROOM, (), 0) is None


def test_the_answer_names_the_largest_and_what_fits_all() -> None:
    cells = {
        c.strategy.name: c for c in cells_of_any_size(experiment(["ddp", "fsdp", "pp", "tp"]))[0]
    }
    found = [
        LargestBatch(  # the same samples on every rank
            cell=cells["tp"].model_copy(update={"world_size": 2}),
            room_bytes=ROOM,
            predicted=350,
            tries=(Try(samples=350, peak_bytes=0.9 * ROOM, fits=True),),
        ),
        LargestBatch(
            cell=cells["ddp"],
            room_bytes=ROOM,
            predicted=290,
            tries=(
                Try(samples=290, peak_bytes=1.1 * ROOM, fits=False),
                Try(samples=250, peak_bytes=0.9 * ROOM, fits=True),
            ),
        ),
        LargestBatch(
            cell=cells["fsdp"].model_copy(update={"world_size": 2}),
            room_bytes=ROOM,
            most=300,
            predicted=300,
            tries=(Try(samples=300, peak_bytes=0.5 * ROOM, fits=True),),
        ),
        LargestBatch(cell=cells["pp"], room_bytes=ROOM, reason="two stages, one block"),
    ]
    text = render_largest(found, Format.TEXT, 80)
    assert text.startswith("Largest: fsdp on 2 ranks, 600 samples in a step, 300 of each rank.")
    assert "All of them fit with recipe.per_rank_batch=250." in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("ddp")] == ["2"]
    assert "pp on 1 rank: two stages, one block" in text
    assert "fsdp on 2 ranks: the training set has no more samples" in text
    as_json = render_largest(found, Format.JSON, None)
    assert '"per_rank_batch": 250' in as_json
    assert '"predicted_batch": 290' in as_json


def test_a_batch_for_all_can_be_split_by_all() -> None:
    """Micro-batches of a pipeline; what was tried counts samples of a rank, too."""
    cells = {c.strategy.name: c for c in cells_of_any_size(experiment(["ddp", "pp"]))[0]}
    found = [
        LargestBatch(
            cell=cell.model_copy(update={"world_size": 2}),
            room_bytes=ROOM,
            predicted=samples,
            tries=(Try(samples=samples, peak_bytes=0.9 * ROOM, fits=True),),
        )
        for cell, samples in ((cells["ddp"], 34), (cells["pp"], 20))
    ]
    assert passes_of(found[1].cell) == 4
    text = render_largest(found, Format.TEXT, 80)
    assert "All of them fit with recipe.per_rank_batch=32." in text
    assert '"samples": 80' in render_largest(found, Format.JSON, None)


def test_a_pipeline_takes_whole_micro_batches() -> None:
    (cell,) = cells_of_any_size(experiment(["pp"]))[0]
    placed = cell.model_copy(update={"world_size": 2})
    assert passes_of(placed) == 4
    tried = Try(samples=3, peak_bytes=1.0, fits=True)
    assert LargestBatch(cell=placed, room_bytes=ROOM, tries=(tried,)).per_rank_batch == 12
