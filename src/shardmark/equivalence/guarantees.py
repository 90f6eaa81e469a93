"""What a strategy that promises less than the reference's mathematics is held to instead."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from shardmark.core.shares import Shard
from shardmark.equivalence.evidence import Evidence
from shardmark.results.schema import ExchangeRecord, RankRecord
from shardmark.results.verification import Cause, Check, Verdict
from shardmark.train.identity import weights_sha256
from shardmark.trials.trial import Trial
from shardmark.workloads.base import BatchPlan


def check_guarantee(
    found: Evidence, trial: Trial, steps: int, ranks: Sequence[RankRecord], *, guarantee: str
) -> Verdict:
    """Whether it started, was fed and used its gradients as it promises.

    The result is neither equivalent nor not, unless a guarantee is broken.
    """
    checks = (*_given(found, trial, steps), *_used(trial, steps, ranks), _finite(found))
    broken = [check for check in checks if not check.holds]
    cause = None
    if broken:
        cause = Cause(
            text=f"the guarantee is broken: {broken[0].name}",
            evidence=f"found {broken[0].found}, expected {broken[0].expected}",
            first_deviation=broken[0].name,
        )
    return Verdict(
        id=trial.id,
        strategy=trial.strategy.name,
        strategy_options=trial.strategy.options,
        world_size=trial.world_size,
        precision=trial.recipe.precision,
        varied=trial.varied,
        equivalent=False if broken else None,
        checks=checks,
        cause=cause,
        guarantee=guarantee,
    )


def _given(found: Evidence, trial: Trial, steps: int) -> tuple[Check, ...]:
    workload = trial.workload.build(trial.recipe.seed)
    expected = weights_sha256(dict(workload.build_model().named_parameters()))
    plan = BatchPlan(global_batch=trial.batch_per_step, seed=trial.recipe.seed)
    wanted: list[tuple[int, ...]] = []
    for index in range(trial.world_size):
        batches = workload.batches(plan, Shard(index=index, count=trial.world_size))
        wanted += (next(batches).sample_ids for _ in range(steps))
    mine = Counter(ids for rank in found.sample_ids for ids in rank)
    once = sum(mine[ids] == 1 for ids in wanted) if mine.total() == len(wanted) else mine.total()
    hashes = ", ".join(sorted({sha[:12] for sha in found.initial_sha256}))
    return (
        _equal("initial weights", hashes, expected[:12]),
        _equal("shares that were trained on once", str(once), str(len(wanted))),
    )


def _used(trial: Trial, steps: int, ranks: Sequence[RankRecord]) -> tuple[Check, ...]:
    """Every worker's every step is one gradient, used once by each server."""
    gradients = steps * trial.world_size
    checks = []
    for rank in ranks:
        exchange = rank.exchange
        if rank.role != "server":
            continue
        exchange = exchange or ExchangeRecord()
        who = f"rank {rank.rank}"
        told = sum(exchange.staleness.values())
        checks += [
            _equal("gradients used once", str(exchange.updates), str(gradients), who),
            _equal("gradients whose staleness is known", str(told), str(gradients), who),
        ]
        if rank.rank == trial.world_size and (bound := _largest_staleness(trial)) is not None:
            stalest = max(map(int, exchange.staleness), default=0)
            checks.append(
                Check(
                    name="staleness within the bound",
                    holds=stalest <= bound,
                    found=float(stalest),
                    expected=0.0,
                    tolerance=float(bound),
                    where=who,
                )
            )
    return tuple(checks)


def _largest_staleness(trial: Trial) -> int | None:
    """Gradients of others that the bound allows between a worker's pull and its push.

    At its pull after c pushes of its own, nobody had under c - s pushes; at its next push nobody
    has over c + s + 1.  So each of the others makes at most 2 s + 1.
    """
    strategy = trial.built_strategy
    bound = strategy.settings(trial.recipe).get("staleness_bound")
    return (2 * bound + 1) * (trial.world_size - 1) if isinstance(bound, int) else None


def _finite(found: Evidence) -> Check:
    count = sum(not math.isfinite(loss) for rank in found.losses for loss in rank)
    return _equal("losses that are no finite number", str(count), "0")


def _equal(name: str, found: str, expected: str, where: str | None = None) -> Check:
    return Check(
        name=name,
        holds=found == expected,
        found=found,
        expected=expected,
        tolerance=None,
        where=where,
    )
