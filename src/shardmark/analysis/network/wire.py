"""Bytes that a strategy's definition needs the network to carry, beside those that it carried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.core.wire import WireBytes, carried_share
from shardmark.results.schema import CollectiveRecord, RankRecord, TrialResult

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
    missing: dict[str, str] = {}
    wire = row.ok_trials[0].needed_traffic
    if wire is None:
        missing["formula"] = "no rank counted the model's parameters"
    counted = _counted(row.ok_trials)
    if counted is None:
        missing["counted"] = "no collectives were counted: the probe was off, or failed"
    kinds = _kinds(row, wire, counted, _counted(row.ok_trials, "calls"))
    sent = _sent(row.ok_trials)
    if sent is None:
        missing["interfaces"] = row.missing.get(SENT, "not recorded")
    return WireOfRow(
        row=row,
        wire=wire,
        kinds=kinds,
        counted_bytes=None if counted is None else _carried(kinds),
        interface_bytes=sent,
        missing=missing,
    )


def _workers(trial: TrialResult) -> list[RankRecord]:
    return [rank for rank in trial.ranks if rank.role == "worker" and rank.lost is None]


def _counted(
    trials: Sequence[TrialResult], field: Literal["payload_bytes", "calls"] = "payload_bytes"
) -> dict[str, float] | None:
    """Payload bytes, or calls, by kind in a step: mean over all workers of all trials."""
    found: list[Mapping[str, CollectiveRecord]] = []
    for trial in trials:
        for rank in _workers(trial):
            if rank.probe is None or rank.probe.collectives is None:
                return None
            found.append(rank.probe.collectives)
    if not found:
        return None
    kinds = dict.fromkeys(kind for one in found for kind in one)
    return {
        kind: fsum(getattr(one[kind], field) for one in found if kind in one) / len(found)
        for kind in kinds
    }


def _kinds(
    row: Row,
    wire: WireBytes | None,
    counted: Mapping[str, float] | None,
    calls: Mapping[str, float] | None,
) -> tuple[Kind, ...]:
    defined = {} if wire is None else {one.kind: one for one in wire.traffic}
    everybody = len(row.ok_trials[0].layout.training_ranks)
    return tuple(
        Kind(
            kind=kind,
            ranks=defined[kind].ranks if kind in defined else everybody,
            defined_bytes=defined[kind].payload_bytes if kind in defined else 0.0,
            counted_bytes=None if counted is None else counted.get(kind, 0.0),
            counted_calls=None if calls is None else calls.get(kind, 0.0),
        )
        for kind in dict.fromkeys((*defined, *(counted or {})))
    )


def _carried(kinds: Sequence[Kind]) -> float:
    """Kinds that nothing is known of count once."""
    total = []
    for one in kinds:
        share = carried_share(one.kind, one.ranks)
        total.append((1.0 if share is None else share) * (one.counted_bytes or 0.0))
    return fsum(total)


def _sent(trials: Sequence[TrialResult]) -> Estimate | None:
    values = []
    for trial in trials:
        sent = trial.metrics.get(SENT)
        steps = sum(
            window.end_step - window.first_step
            for rank in _workers(trial)
            for window in rank.windows
        )
        if sent is None or steps == 0:
            return None
        values.append(sent.value / steps)
    return estimate_mean(values) if values else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
