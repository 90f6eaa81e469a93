"""Checks for strategies that do not guarantee the numerics of the reference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from shardmark.base.evidence.captures import Capture, equal
from shardmark.base.evidence.checks import Check
from shardmark.base.layout import Shard
from shardmark.base.results.schema import ExchangeRecord, RankRecord
from shardmark.ranks.train.record import weights_sha256
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import build_workload
from shardmark.ranks.workloads.base import BatchPlan


def guarantee_checks(
    capture: Capture, trial: Trial, steps: int, ranks: Sequence[RankRecord]
) -> tuple[Check, ...]:
    """Check initial weights, samples and use of gradients against the strategy's guarantee."""
    not_finite = sum(not math.isfinite(loss) for rank in capture.losses for loss in rank)
    return (
        *_input_checks(capture, trial, steps),
        *_gradient_checks(trial, steps, ranks),
        equal("losses that are not finite", str(not_finite), "0"),
    )


def _input_checks(capture: Capture, trial: Trial, steps: int) -> Iterator[Check]:
    workload = build_workload(trial.workload, trial.recipe.seed)
    expected = weights_sha256(sorted(workload.build_model().named_parameters()))
    hashes = ", ".join(sorted({sha[:12] for sha in capture.initial_sha256}))
    yield equal("initial weights", hashes, expected[:12])

    plan = BatchPlan(global_batch=trial.batch_per_step, seed=trial.recipe.seed)
    shares = trial.layout.shares
    expected_ids: list[tuple[int, ...]] = []
    for index in range(shares):
        batches = workload.batches(plan, Shard(index=index, count=shares))
        expected_ids += (next(batches).sample_ids for _ in range(steps))
    counts = Counter(ids for rank in capture.sample_ids for ids in rank)
    total = counts.total()
    once = sum(counts[ids] == 1 for ids in expected_ids) if total == len(expected_ids) else total
    yield equal("shares that were trained on once", str(once), str(len(expected_ids)))


def _gradient_checks(trial: Trial, steps: int, ranks: Sequence[RankRecord]) -> Iterator[Check]:
    """Check that each server uses the gradient of every step of every worker once."""
    gradients = str(steps * trial.layout.shares)
    for rank in ranks:
        if rank.role != "server":
            continue
        exchange = rank.exchange or ExchangeRecord()
        location = f"rank {rank.rank}"
        yield equal("gradients used once", str(exchange.updates), gradients, location)
        recorded = str(sum(exchange.staleness.values()))
        yield equal("gradients whose staleness is known", recorded, gradients, location)
        bound = _largest_staleness(trial)
        if rank.rank == trial.layout.server_ranks[0] and bound is not None:
            stalest = max(map(int, exchange.staleness), default=0)
            yield Check(
                name="staleness within the bound",
                holds=stalest <= bound,
                found=float(stalest),
                expected=0.0,
                tolerance=float(bound),
                where=location,
            )


def _largest_staleness(trial: Trial) -> int | None:
    """Return how many gradients of other workers the bound allows between a pull and a push.

    When a worker pulls after c pushes, all others have made at least c - s pushes; when it pushes
    next, at most c + s + 1.  So each of the others pushes at most 2 s + 1 times in between.
    """
    bound = trial.built_strategy.settings(trial.recipe).get("staleness_bound")
    return (2 * bound + 1) * (trial.layout.shares - 1) if isinstance(bound, int) else None
