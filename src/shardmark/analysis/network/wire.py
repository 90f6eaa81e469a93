"""Bytes that a strategy's definition needs the network to carry, beside those that it carried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.analysis.trial.rank_metrics import measured_steps, workers_of
from shardmark.core.wire import WireBytes, carried_share
from shardmark.results.schema import TrialResult

SENT = "network_sent_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of collective in a step of one rank."""

    kind: str
    ranks: int
    """In its group, as the formula says; all of them where it says nothing."""
    defined_bytes: float
    """Payload by the strategy's definition."""
    counted_bytes: float | None
    """Payload that the rank handed in, mean over ranks and repeats; None without a probe."""
    counted_calls: float | None = None
    """The same of the calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOfRow:
    """One row's bytes per training rank and step; None where `missing` says why."""

    row: Row
    wire: WireBytes | None
    kinds: tuple[Kind, ...]
    counted_bytes: float | None
    """Carried for the collectives that were counted, if each moves what it must and no more."""
    interface_bytes: Estimate | None
    """Sent over the interfaces of all sampled hosts, in the measured windows."""
    missing: Mapping[str, str]

    @property
    def defined_bytes(self) -> float | None:
        """Carried by the strategy's definition."""
        return None if self.wire is None else self.wire.carried_bytes

    @property
    def counted_ratio(self) -> float | None:
        """Counted over defined: what the library asks for beyond the definition."""
        return _ratio(self.counted_bytes, self.defined_bytes)

    @property
    def interface_ratio(self) -> float | None:
        """Sent over defined: what backend and protocols add, too."""
        sent = self.interface_bytes
        return None if sent is None else _ratio(sent.value, self.defined_bytes)

    @property
    def backend_ratio(self) -> float | None:
        """Sent over counted: what backend and protocols add to what the library asks for."""
        sent = self.interface_bytes
        return None if sent is None else _ratio(sent.value, self.counted_bytes)


def wires_of(rows: Sequence[Row]) -> list[WireOfRow]:
    """Formula, collectives and interfaces of each row that ended ok at least once."""
    return [_wire_of(row) for row in rows if row.ok_trials]


def _wire_of(row: Row) -> WireOfRow:
    wire = row.ok_trials[0].needed_traffic
    counted, sent = _counted(row.ok_trials), _sent(row.ok_trials)
    kinds = tuple(_kinds(row, wire, counted))
    reasons = {
        "formula": "no rank counted the model's parameters" if wire is None else None,
        "counted": "no collectives were counted: the probe was off, or failed"
        if counted is None
        else None,
        "interfaces": row.missing.get(SENT, "not recorded") if sent is None else None,
    }
    return WireOfRow(
        row=row,
        wire=wire,
        kinds=kinds,
        counted_bytes=None if counted is None else fsum(map(_carried, kinds)),
        interface_bytes=sent,
        missing={what: why for what, why in reasons.items() if why is not None},
    )


def _counted(trials: Sequence[TrialResult]) -> dict[str, tuple[float, float]] | None:
    """Payload bytes and calls by kind in a step: means over all workers of all trials."""
    probes = [rank.probe for trial in trials for rank in workers_of(trial)]
    each = [probe.collectives for probe in probes if probe and probe.collectives is not None]
    if not each or len(each) < len(probes):
        return None
    sums: dict[str, tuple[float, float]] = {}
    for collectives in each:
        for kind, own in collectives.items():
            payload_bytes, calls = sums.get(kind, (0.0, 0.0))
            sums[kind] = payload_bytes + own.payload_bytes, calls + own.calls
    return {kind: (total / len(each), calls / len(each)) for kind, (total, calls) in sums.items()}


def _kinds(
    row: Row, wire: WireBytes | None, counted: Mapping[str, tuple[float, float]] | None
) -> Iterator[Kind]:
    defined = {} if wire is None else {part.kind: part for part in wire.traffic}
    everybody = len(row.ok_trials[0].layout.training_ranks)
    for kind in dict.fromkeys((*defined, *(counted or {}))):
        own = None if counted is None else counted.get(kind, (0.0, 0.0))
        yield Kind(
            kind=kind,
            ranks=defined[kind].ranks if kind in defined else everybody,
            defined_bytes=defined[kind].payload_bytes if kind in defined else 0.0,
            counted_bytes=None if own is None else own[0],
            counted_calls=None if own is None else own[1],
        )


def _carried(kind: Kind) -> float:
    """A kind that nothing is known of counts once."""
    share = carried_share(kind.kind, kind.ranks)
    return (1.0 if share is None else share) * (kind.counted_bytes or 0.0)


def _sent(trials: Sequence[TrialResult]) -> Estimate | None:
    """Per worker and step; None where a trial does not tell."""
    values = []
    for trial in trials:
        sent, steps = trial.metrics.get(SENT), sum(map(measured_steps, workers_of(trial)))
        if sent is not None and steps:
            values.append(sent.value / steps)
    return estimate_mean(values) if values and len(values) == len(trials) else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
