"""Metrics of parameter servers, and trials whose workers are unequal."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import EpochRecord, ExchangeRecord, RankRecord
from shardmark.bench.analysis.trial.rank_metrics import train_loss
from tests.unit.bench.analysis.trial.trials import (
    Summarised,
    record,
    sample_lines,
    server_record,
    summarised,
    value,
)

NAMES = [name for name, metric in METRICS.items() if metric.group == "servers"]


def server(rank: int, **exchange: Any) -> RankRecord:
    counts: dict[str, Any] = {
        "pushes": 20,
        "pulls": 19,
        "updates": 20,
        "staleness": {"0": 10, "2": 6, "11": 4},
        "wait_seconds": 5.0,
    }
    return server_record(rank, exchange=ExchangeRecord(**{**counts, **exchange}))


def worker(rank: int, bound: int | None = None, **changes: Any) -> RankRecord:
    passed = ExchangeRecord(
        pushes=10, pulls=10, sent_bytes={"2": 300, "3": 100}, received_bytes={"2": 600, "3": 200}
    )
    return record(rank, exchange=passed, settings={"staleness_bound": bound}, **changes)


def served(*ranks: RankRecord) -> Summarised:
    return summarised(ranks, samples=sample_lines(ranks=4))


def test_metrics_of_servers_have_the_values_of_their_definitions() -> None:
    """The workers' windows hold six steps each; the slower one's last 6.6 s."""
    metrics, missing = served(worker(0), worker(1), server(2), server(3, wait_seconds=9.0))
    assert {name: value(metrics, name) for name in NAMES} == pytest.approx(
        {
            "staleness_mean": (2 * 6 + 11 * 4) / 20,
            "staleness_max": 11,
            "push_count": 20,
            "pull_count": 19,
            "push_bytes": 40,
            "pull_bytes": 80,
            "updates_per_second": 12 / 6.6,
            "server_wait_seconds": 0.25,
        }
    )
    assert not set(NAMES) & set(missing)


def test_gradients_used_together_are_one_update() -> None:
    metrics, _ = served(worker(0, bound=0), worker(1, bound=0), server(2))
    assert value(metrics, "updates_per_second") == pytest.approx(6 / 6.6)


def test_staleness_covers_all_servers() -> None:
    stale = ({"0": 1, "9": 1}, {"0": 1, "10": 1})
    servers = [server(rank, staleness=each) for rank, each in enumerate(stale, start=2)]
    metrics, _ = served(worker(0), worker(1), *servers)
    assert value(metrics, "staleness_max") == 10, "as a number, not as a text"
    assert value(metrics, "staleness_mean") == 19 / 4


def test_server_without_gradients_has_reasons() -> None:
    idle = worker(0).model_copy(update={"exchange": ExchangeRecord(), "windows": ()})
    metrics, missing = served(idle, server(1, pushes=0, pulls=0, staleness={}))
    for name in ("staleness_mean", "staleness_max", "push_bytes", "server_wait_seconds"):
        assert missing[name] == "no gradient reached a server"
    assert missing["updates_per_second"] == "no window was measured"
    assert value(metrics, "push_count") == 0


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        ([((0, 6), 1.0), ((0, 2), 3.0)], 1.5),  # as many samples in each step
        ([((0, 4), 1.0), ((3, 3), None)], 1.0),  # a slow worker found nothing left
        ([((0, 4), 1.0), ((0, 4), None)], "a loss was not a finite number"),
        ([((0, 0), None)], "no epoch ended"),
        ([], "no epoch ended"),
    ],
)
def test_train_loss_is_the_mean_over_all_steps_of_all_workers(
    epochs: list[tuple[tuple[int, int], float | None]], expected: float | str
) -> None:
    rest: dict[str, Any] = {"evaluation_seconds": None, "quality": None}
    ranks = [
        record(
            rank,
            epochs=(EpochRecord(epoch=0, first_step=first, end_step=end, train_loss=loss, **rest),),
        )
        for rank, ((first, end), loss) in enumerate(epochs)
    ]
    assert train_loss(ranks, 0) == expected
    assert train_loss(ranks, 1) == train_loss(ranks, -1) == "no epoch ended"


def test_epoch_of_unequal_workers_is_told_from_samples() -> None:
    """Together they took 120 samples in the 6.6 s of the slower one; an epoch is 5 steps of 8."""
    ranks = [record(0, samples=90), record(1, samples=30)]
    metrics, _ = summarised(ranks, steps_per_epoch=5, samples_per_step=8)
    assert value(metrics, "epoch_seconds") == pytest.approx(6.6 * 40 / 120)
