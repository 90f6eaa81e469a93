"""Network bytes that a strategy's definition requires, compared with the measured bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from shardmark.base.results.schema import PHASES, Phase, ProbeRecord, TrialResult
from shardmark.base.statistics.intervals import Estimate, estimate_mean
from shardmark.base.traffic import RequiredTraffic, required_fraction
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.trial.rank_metrics import measured_steps, workers_of

SENT = "network_sent_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBytes:
    """Collectives of a kind in a step of a rank."""

    kind: str
    share: float
    """Network bytes for each byte of payload, by the definition: the mean over groups of different
    sizes.  A kind that the definition does not have counts with a group of all ranks."""
    defined_bytes: float
    """Payload by the strategy's definition."""
    counted_bytes: float | None
    """Counted payload of a rank, mean over ranks and repeats; None without a probe."""
    counted_calls: float | None = None
    """Counted calls of a rank, mean over ranks and repeats."""

    @property
    def required_bytes(self) -> float:
        """Network bytes for the counted payload; an unknown kind counts its payload once."""
        return self.share * (self.counted_bytes or 0.0)


class CollectivesOfPhase(NamedTuple):
    """Counted collectives of a kind in a phase of a rank's step, means over ranks and repeats."""

    phase: Phase
    kind: str
    counted_calls: float
    counted_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOfRow:
    """Bytes of a row per training rank and step; `missing` has the reasons for None."""

    row: Row
    wire: RequiredTraffic | None
    kinds: tuple[CollectiveBytes, ...]
    phases: tuple[CollectivesOfPhase, ...]
    """Collectives by phase of the step; empty if a rank has no counts by phase."""
    counted_bytes: float | None
    """Minimum network bytes of the counted collectives."""
    interface_bytes: Estimate | None
    """Bytes sent over the interfaces of all sampled hosts in the measured windows."""
    missing: Mapping[str, str]

    @property
    def defined_bytes(self) -> float | None:
        """Network bytes by the strategy's definition."""
        return None if self.wire is None else self.wire.required_bytes


def wires_of(rows: Sequence[Row]) -> list[WireOfRow]:
    """Return defined, counted and sent bytes of every row with a trial that ended ok."""
    return [_wire_of(row) for row in rows if row.ok_trials]


def _wire_of(row: Row) -> WireOfRow:
    wire, sent = row.ok_trials[0].needed_traffic, _sent(row.ok_trials)
    probes = [rank.probe for trial in row.ok_trials for rank in workers_of(trial)]
    by_rank = [probe.collectives for probe in probes if probe and probe.collectives is not None]
    counted = bool(by_rank) and len(by_rank) == len(probes)
    sizes: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for kind, record in (item for collectives in by_rank for item in collectives.items()):
        sizes[kind] += record.payload_bytes
        calls[kind] += record.calls
    defined, required = defaultdict[str, float](float), defaultdict[str, float](float)
    for traffic in () if wire is None else wire.traffic:
        defined[traffic.kind] += traffic.payload_bytes
        required[traffic.kind] += traffic.required_bytes
    training_ranks = len(row.ok_trials[0].layout.training_ranks)

    def share_of(kind: str) -> float:
        if defined[kind]:
            return required[kind] / defined[kind]
        share = required_fraction(kind, training_ranks)
        return 1.0 if share is None else share

    kinds = tuple(
        CollectiveBytes(
            kind=kind,
            share=share_of(kind),
            defined_bytes=defined[kind],
            counted_bytes=sizes[kind] / len(by_rank) if counted else None,
            counted_calls=calls[kind] / len(by_rank) if counted else None,
        )
        for kind in dict.fromkeys((*defined, *(sizes if counted else ())))
    )
    no_formula = "no rank counted the model's parameters"
    if any(probe and probe.trained_parameters is not None for probe in probes):
        no_formula = f"there is no cost model for {row.strategy}"
    reasons = {
        "formula": None if wire else no_formula,
        "counted": None if counted else "no collectives were counted: the probe was off, or failed",
        "interfaces": None if sent else row.missing.get(SENT, "not recorded"),
    }
    return WireOfRow(
        row=row,
        wire=wire,
        kinds=kinds,
        phases=_phases(probes),
        counted_bytes=fsum(kind.required_bytes for kind in kinds) if counted else None,
        interface_bytes=sent,
        missing={name: reason for name, reason in reasons.items() if reason is not None},
    )


def _phases(probes: Sequence[ProbeRecord | None]) -> tuple[CollectivesOfPhase, ...]:
    by_rank = [probe.collectives_by_phase if probe else None for probe in probes]
    sums: dict[tuple[Phase, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for phases in by_rank:
        if phases is None:
            return ()
        for phase, kinds in phases.items():
            for kind, record in kinds.items():
                sums[phase, kind][0] += record.calls / len(by_rank)
                sums[phase, kind][1] += record.payload_bytes / len(by_rank)
    return tuple(
        CollectivesOfPhase(*place, *sums[place])
        for place in sorted(sums, key=lambda place: PHASES.index(place[0]))
    )


def _sent(trials: Sequence[TrialResult]) -> Estimate | None:
    """Return the sent bytes per worker and step; None if a trial has none."""
    values = []
    for trial in trials:
        sent, steps = trial.metrics.get(SENT), sum(map(measured_steps, workers_of(trial)))
        if sent is not None and steps:
            values.append(sent.value / steps)
    return estimate_mean(values) if values and len(values) == len(trials) else None
