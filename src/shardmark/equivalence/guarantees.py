"""What a strategy that guarantees less than the reference's mathematics is held to instead."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from shardmark.core.shares import Shard
from shardmark.equivalence.capture import Capture
from shardmark.equivalence.compare import equal
from shardmark.results.schema import ExchangeRecord, RankRecord
from shardmark.results.verification import Check
from shardmark.train.record import weights_sha256
from shardmark.trials.trial import Trial
from shardmark.workloads import build_workload
from shardmark.workloads.base import BatchPlan


def guarantee_checks(
    capture: Capture, trial: Trial, steps: int, ranks: Sequence[RankRecord]
) -> tuple[Check, ...]:
    """Whether it started, was fed and used its gradients as it guarantees."""
    not_finite = sum(not math.isfinite(loss) for rank in capture.losses for loss in rank)
    return (
        *_given(capture, trial, steps),
        *_used(trial, steps, ranks),
        equal("losses that are no finite number", str(not_finite), "0"),
    )


def _given(capture: Capture, trial: Trial, steps: int) -> Iterator[Check]:
    workload = build_workload(trial.workload, trial.recipe.seed)
    expected = weights_sha256(sorted(workload.build_model().named_parameters()))
    hashes = ", ".join(sorted({sha[:12] for sha in capture.initial_sha256}))
    yield equal("initial weights", hashes, expected[:12])

    plan = BatchPlan(global_batch=trial.batch_per_step, seed=trial.recipe.seed)
    shares = trial.layout.shares
    wanted: list[tuple[int, ...]] = []
    for index in range(shares):
        batches = workload.batches(plan, Shard(index=index, count=shares))
        wanted += (next(batches).sample_ids for _ in range(steps))
    mine = Counter(ids for rank in capture.sample_ids for ids in rank)
    once = sum(mine[ids] == 1 for ids in wanted) if mine.total() == len(wanted) else mine.total()
    yield equal("shares that were trained on once", str(once), str(len(wanted)))


def _used(trial: Trial, steps: int, ranks: Sequence[RankRecord]) -> Iterator[Check]:
    """Every worker's every step is one gradient, used once by each server."""
    gradients = str(steps * trial.layout.shares)
    for rank in ranks:
        if rank.role != "server":
            continue
        exchange = rank.exchange or ExchangeRecord()
        where = f"rank {rank.rank}"
        yield equal("gradients used once", str(exchange.updates), gradients, where)
        known = sum(exchange.staleness.values())
        yield equal("gradients whose staleness is known", str(known), gradients, where)
        bound = _largest_staleness(trial)
        if rank.rank == trial.layout.server_ranks[0] and bound is not None:
            stalest = max(map(int, exchange.staleness), default=0)
            yield Check(
                name="staleness within the bound",
                holds=stalest <= bound,
                found=float(stalest),
                expected=0.0,
                tolerance=float(bound),
                where=where,
            )


def _largest_staleness(trial: Trial) -> int | None:
    """Gradients of others that the bound allows between a worker's pull and its push.

    At its pull after c pushes of its own, nobody had under c - s pushes; at its next push nobody
    has over c + s + 1.  So each of the others makes at most 2 s + 1.
    """
    bound = trial.built_strategy.settings(trial.recipe).get("staleness_bound")
    return (2 * bound + 1) * (trial.layout.shares - 1) if isinstance(bound, int) else None
