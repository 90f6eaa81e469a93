"""Bytes that a strategy's definition needs the network to carry, beside those that it carried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.analysis.trial.rank_metrics import measured_steps, workers_of
from shardmark.core.traffic import RequiredTraffic, required_fraction
from shardmark.results.schema import ProbeRecord, TrialResult

SENT = "network_sent_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBytes:
    """One kind of collective in a step of one rank."""

    kind: str
    share: float
    """Carried for each byte that is handed in, as the formula says; of groups of several sizes the
    mean.  By all ranks where it says nothing."""
    defined_bytes: float
    """Payload by the strategy's definition."""
    counted_bytes: float | None
    """Payload that the rank handed in, mean over ranks and repeats; None without a probe."""
    counted_calls: float | None = None
    """The same of the calls."""

    @property
    def required_bytes(self) -> float:
        """For what was counted; a kind that nothing is known of counts once."""
        return self.share * (self.counted_bytes or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOfRow:
    """One row's bytes per training rank and step; None where `missing` says why."""

    row: Row
    wire: RequiredTraffic | None
    kinds: tuple[CollectiveBytes, ...]
    counted_bytes: float | None
    """Carried for the collectives that were counted, if each moves what it must and no more."""
    interface_bytes: Estimate | None
    """Sent over the interfaces of all sampled hosts, in the measured windows."""
    missing: Mapping[str, str]

    @property
    def defined_bytes(self) -> float | None:
        """Carried by the strategy's definition."""
        return None if self.wire is None else self.wire.required_bytes

    @property
    def counted_ratio(self) -> float | None:
        """Counted over defined: what the library asks for beyond the definition."""
        return _ratio(self.counted_bytes, self.defined_bytes)

    @property
    def interface_ratio(self) -> float | None:
        """Sent over defined: what backend and protocols add, too."""
        return _ratio(self.interface_bytes, self.defined_bytes)

    @property
    def backend_ratio(self) -> float | None:
        """Sent over counted: what backend and protocols add to what the library asks for."""
        return _ratio(self.interface_bytes, self.counted_bytes)


def wires_of(rows: Sequence[Row]) -> list[WireOfRow]:
    """Formula, collectives and interfaces of each row that ended ok at least once."""
    return [_wire_of(row) for row in rows if row.ok_trials]


def _wire_of(row: Row) -> WireOfRow:
    wire, sent = row.ok_trials[0].needed_traffic, _sent(row.ok_trials)
    probes = [rank.probe for trial in row.ok_trials for rank in workers_of(trial)]
    each = [probe.collectives for probe in probes if probe and probe.collectives is not None]
    counted = bool(each) and len(each) == len(probes)
    sizes: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for kind, own in (item for collectives in each for item in collectives.items()):
        sizes[kind] += own.payload_bytes
        calls[kind] += own.calls
    defined, carried = defaultdict[str, float](float), defaultdict[str, float](float)
    for part in () if wire is None else wire.traffic:
        defined[part.kind] += part.payload_bytes
        carried[part.kind] += part.required_bytes
    everybody = len(row.ok_trials[0].layout.training_ranks)

    def share_of(kind: str) -> float:
        if defined[kind]:
            return carried[kind] / defined[kind]
        share = required_fraction(kind, everybody)
        return 1.0 if share is None else share

    kinds = tuple(
        CollectiveBytes(
            kind=kind,
            share=share_of(kind),
            defined_bytes=defined[kind],
            counted_bytes=sizes[kind] / len(each) if counted else None,
            counted_calls=calls[kind] / len(each) if counted else None,
        )
        for kind in dict.fromkeys((*defined, *(sizes if counted else ())))
    )
    reasons = {
        "formula": None if wire else _why_no_formula(row, probes),
        "counted": None if counted else "no collectives were counted: the probe was off, or failed",
        "interfaces": None if sent else row.missing.get(SENT, "not recorded"),
    }
    return WireOfRow(
        row=row,
        wire=wire,
        kinds=kinds,
        counted_bytes=fsum(kind.required_bytes for kind in kinds) if counted else None,
        interface_bytes=sent,
        missing={what: why for what, why in reasons.items() if why is not None},
    )


def _why_no_formula(row: Row, probes: Sequence[ProbeRecord | None]) -> str:
    if any(probe and probe.trained_parameters is not None for probe in probes):
        return f"there is no cost model for {row.strategy}"
    return "no rank counted the model's parameters"


def _sent(trials: Sequence[TrialResult]) -> Estimate | None:
    """Per worker and step; None where a trial does not tell."""
    values = []
    for trial in trials:
        sent, steps = trial.metrics.get(SENT), sum(map(measured_steps, workers_of(trial)))
        if sent is not None and steps:
            values.append(sent.value / steps)
    return estimate_mean(values) if values and len(values) == len(trials) else None


def _ratio(above: Estimate | float | None, below: float | None) -> float | None:
    value = above.value if isinstance(above, Estimate) else above
    return value / below if value is not None and below else None
