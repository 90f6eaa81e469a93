"""Metrics of parameter servers: what was stale, what waited, what was lost."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.trial.over_ranks import Found, Result, trial_value
from shardmark.core.metrics import METRICS, NO_SERVERS
from shardmark.results.schema import ExchangeRecord, RankRecord

NAMES = tuple(name for name, metric in METRICS.items() if metric.group == "servers")


def exchange_metrics(ranks: Sequence[RankRecord]) -> dict[str, Result]:
    """From the servers' records; counts and bytes are per step of a worker."""
    servers = [r.exchange for r in ranks if r.role == "server" and r.exchange is not None]
    workers = [rank for rank in ranks if rank.role == "worker"]
    if not servers:
        return dict.fromkeys(NAMES, NO_SERVERS)
    stale = {
        steps: sum(server.staleness.get(str(steps), 0) for server in servers)
        for steps in sorted({int(key) for server in servers for key in server.staleness})
    }
    gradients = sum(stale.values())
    mean = sum(steps * count for steps, count in stale.items()) / gradients if gradients else None
    first = servers[0]
    own = [rank.exchange for rank in workers if rank.exchange is not None]
    results: dict[str, Found | None] = {
        "staleness_mean": mean,
        "staleness_max": max(stale, default=None),
        "push_count": first.pushes,  # also of workers that died later
        "pull_count": first.pulls,
        "push_bytes": _per_step(own, sent=True),
        "pull_bytes": _per_step(own, sent=False),
        "updates_per_second": _updates_per_second(workers, own),
        "server_wait_seconds": first.wait_seconds / first.pushes if first.pushes else None,
        "lost_samples": first.lost_samples,
    }
    return {
        name: trial_value(value, "no gradient reached a server") for name, value in results.items()
    }


def _per_step(own: Sequence[ExchangeRecord], *, sent: bool) -> Found | None:
    pushes = sum(one.pushes for one in own)
    if not pushes:
        return None
    passed = [one.sent_bytes if sent else one.received_bytes for one in own]
    return sum(sum(by_server.values()) for by_server in passed) / pushes


def _updates_per_second(
    workers: Sequence[RankRecord], own: Sequence[ExchangeRecord]
) -> Found | None:
    """Gradients used in the windows of the workers, over the slowest one's time."""
    seconds = max((sum(w.window_seconds for w in rank.windows) for rank in workers), default=0.0)
    steps = sum(w.end_step - w.first_step for rank in workers for w in rank.windows)
    if not seconds or not own:
        return "no window was measured"
    together = workers[0].settings.get("staleness_bound") == 0
    return steps / (len(workers) if together else 1) / seconds
