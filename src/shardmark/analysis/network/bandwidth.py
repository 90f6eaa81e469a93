"""What passed over each interface of each node while a row trained: bytes, and how fast when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.network.traffic_samples import (
    RECEIVED,
    SENT,
    SampledTrial,
    Way,
    rates_of,
    sampled_trial,
    share_above,
)
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.analysis.trial.series import OverTime
from shardmark.analysis.trial.windows import counter_increase
from shardmark.results.schema import RankRecord

FEWEST_READINGS = 10
"""In a repeat's windows, for a peak and a busy share: fewer miss what goes on between them."""
IDLE_SHARE = 1e-3
"""An interface that carried less than this of what the busiest one did is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWay:
    """What passed over an interface in one direction; means over the repeats."""

    step_bytes: Estimate | None
    """In the time of a step, of all ranks there; None where the row's `missing` says why."""
    mean_bytes_per_second: float | None
    """In the measured windows."""
    peak_bytes_per_second: float | None
    """Between two samplings in the windows; the largest of the repeats with enough of them."""
    busy_share: float | None
    """Of the windows' time, how much went by at more than half of the repeat's peak."""
    over_time: OverTime
    """Bytes per second over seconds since the first step, of the first repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One interface of one node."""

    node: int
    name: str
    ranks: int
    """That sit on the node."""
    sent: OneWay
    received: OneWay

    @property
    def carried(self) -> float:
        """Mean bytes per second of the busier direction."""
        return max(way.mean_bytes_per_second or 0.0 for way in (self.sent, self.received))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRank:
    """What one rank's own connections carried over one interface in a step, without headers."""

    rank: int
    role: str
    node: int
    interface: str
    sent_bytes: Estimate
    received_bytes: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOfRow:
    """One row's interfaces, and its ranks where the kernel tells their bytes apart."""

    row: Row
    interfaces: tuple[Interface, ...]
    """Without those that carried next to nothing."""
    ranks: tuple[OfRank, ...]
    missing: Mapping[str, str]
    """`interfaces`, `ranks`, `peaks`: why there are none, or some are not known."""


def traffic_of(row: Row, *, repeats: int | None = None) -> TrafficOfRow:
    """From the raw samples of the trials that ended ok, or of the first `repeats` of them."""
    read = [sampled_trial(row, trial) for trial in row.ok_trials[:repeats]]
    trials = [found for found in read if found is not None]
    missing: dict[str, str] = {}
    if not trials:
        missing = dict.fromkeys(("interfaces", "ranks"), "no samples were stored")
    places = sorted({place for trial in trials for place in trial.places()})
    interfaces = [_interface(trials, node, name, missing) for node, name in places]
    most = max((one.carried for one in interfaces), default=0.0)
    ranks = _ranks(trials)
    if trials and not ranks:
        missing["ranks"] = "the samples do not tell the ranks' bytes apart"
    return TrafficOfRow(
        row=row,
        interfaces=tuple(one for one in interfaces if one.carried > IDLE_SHARE * most),
        ranks=tuple(ranks),
        missing=missing,
    )


def _interface(
    trials: Sequence[SampledTrial], node: int, name: str, missing: dict[str, str]
) -> Interface:
    return Interface(
        node=node,
        name=name,
        ranks=sum(rank.node == node for rank in trials[0].result.ranks),
        sent=_one_way(trials, node, name, SENT, missing),
        received=_one_way(trials, node, name, RECEIVED, missing),
    )


def _one_way(
    trials: Sequence[SampledTrial], node: int, name: str, way: Way, missing: dict[str, str]
) -> OneWay:
    per_step: list[float] = []
    means: list[float] = []
    readings: list[int] = []
    peaks: list[float] = []
    shares: list[float] = []
    series: list[OverTime] = []
    for trial in trials:
        points = trial.counted(node, name, way)
        windows = trial.spans[node].windows
        increase = counter_increase(points, windows)
        if isinstance(increase, str):
            missing["interfaces"] = increase
        else:
            per_step.append(increase / trial.steps)
            means.append(increase / windows.seconds)
        rates = rates_of(points)
        series.append(trial.over_time(node, rates))
        within = trial.within(node, rates)
        readings.append(len(within))
        if len(within) >= FEWEST_READINGS:
            peaks.append(max(one.bytes_per_second for one in within))
            shares.append(share_above(within, peaks[-1] / 2))
    if not peaks:
        missing["peaks"] = (
            f"at most {max(readings)} samples in the windows of a repeat, and a peak or busy share"
            f" needs {FEWEST_READINGS}: train longer, or shorten measure.sample_seconds"
        )
    return OneWay(
        step_bytes=estimate_mean(per_step) if len(per_step) == len(trials) else None,
        mean_bytes_per_second=_mean(means),
        peak_bytes_per_second=max(peaks, default=None),
        busy_share=_mean(shares),
        over_time=series[0],
    )


def _ranks(trials: Sequence[SampledTrial]) -> list[OfRank]:
    """Those that every repeat tells of."""
    found: list[OfRank] = []
    for rank in trials[0].result.ranks if trials else ():
        records = [_record(trial, rank.rank) for trial in trials]
        pairs = [(t, r) for t, r in zip(trials, records, strict=True) if r is not None]
        for name in sorted({name for trial, one in pairs for name in trial.interfaces_of(one)}):
            sent, received = ([_per_step(t, r, name, way) for t, r in pairs] for way in _WAYS)
            known = [value for value in (*sent, *received) if value is not None]
            if len(known) == 2 * len(trials):
                found.append(
                    OfRank(
                        rank=rank.rank,
                        role=rank.role,
                        node=rank.node,
                        interface=name,
                        sent_bytes=estimate_mean(known[: len(trials)]),
                        received_bytes=estimate_mean(known[len(trials) :]),
                    )
                )
    return found


_WAYS = (SENT, RECEIVED)


def _per_step(trial: SampledTrial, rank: RankRecord, name: str, way: Way) -> float | None:
    carried = trial.rank_bytes(rank, name, way)
    return None if carried is None else carried / trial.steps


def _record(trial: SampledTrial, rank: int) -> RankRecord | None:
    return next((one for one in trial.result.ranks if one.rank == rank), None)


def _mean(values: Sequence[float]) -> float | None:
    return fsum(values) / len(values) if values else None
