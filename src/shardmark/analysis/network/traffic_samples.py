"""The sampled counters of one trial's network: by node and interface, and by rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Literal

from pydantic_core import from_json

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.trial.over_ranks import number
from shardmark.analysis.trial.series import SHORTEST_SECONDS, OverTime, thinned
from shardmark.analysis.trial.training_metrics import slowest, windows_of
from shardmark.analysis.trial.windows import Point, Windows, counter_increase
from shardmark.core.run_files import SAMPLES_FILE
from shardmark.results.schema import RankRecord, TrialResult
from shardmark.results.store import RunFolder

Way = Literal["bytes_sent", "bytes_received"]
SENT: Way = "bytes_sent"
RECEIVED: Way = "bytes_received"
MOST_BYTES = 64 * 2**20
"""Of a raw file that is read."""
Sample = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Rate:
    """Between two readings of a counter; Unix times."""

    start: float
    end: float
    bytes_per_second: float

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When was trained, by one clock."""

    windows: Windows
    """Of the slowest worker."""
    first_step_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTrial:
    """One trial's samples, by node.  Nodes' clocks need not agree."""

    result: TrialResult
    spans: Mapping[int, Span]
    """By node, of the ranks that train there; of all where none does."""
    steps: float
    """That a worker took in its windows, mean over the workers."""
    nodes: Mapping[int, Sequence[Sample]]
    """In order of time."""

    def places(self) -> set[tuple[int, str]]:
        """Every node's interfaces."""
        return {
            (node, str(name))
            for node, samples in self.nodes.items()
            for sample in samples
            for name in _mapping(sample.get("network"))
        }

    def counted(self, node: int, interface: str, way: Way) -> list[Point]:
        """An interface's cumulative counter."""
        return [
            (_at(sample), value)
            for sample in self.nodes.get(node, ())
            if (value := _counter(sample.get("network"), interface, way)) is not None
        ]

    def interfaces_of(self, rank: RankRecord) -> set[str]:
        """Those that the rank's own connections took."""
        return {
            str(name) for _, one in self._process(rank) for name in _mapping(one.get("network"))
        }

    def rank_bytes(self, rank: RankRecord, interface: str, way: Way) -> float | None:
        """In the windows; a connection that is made later has sent nothing before."""
        points = [
            (at, _counter(one["network"], interface, way) or 0.0)
            for at, one in self._process(rank)
            if isinstance(one.get("network"), Mapping)
        ]
        increase = counter_increase(points, self.spans[rank.node].windows)
        return None if isinstance(increase, str) else increase

    def within(self, node: int, rates: Sequence[Rate]) -> list[Rate]:
        """Those of the windows."""
        spans = self.spans[node].windows.spans
        return [one for one in rates if any(a <= one.middle <= b for a, b in spans)]

    def over_time(self, node: int, rates: Sequence[Rate]) -> OverTime:
        """Seconds since the first step, to the end of the last window, evaluations included."""
        span = self.spans[node]
        start, stop = span.first_step_at, max(end for _, end in span.windows.spans)
        return thinned(
            [(r.middle - start, r.bytes_per_second) for r in rates if start <= r.middle <= stop]
        )

    def _process(self, rank: RankRecord) -> Iterator[tuple[float, Sample]]:
        """The rank's process in each sample of its node; its bytes count on over restarts."""
        for sample in self.nodes.get(rank.node, ()):
            for one in _objects(sample.get("ranks")):
                if one.get("rank") == rank.rank and (rank.resumes or one.get("pid") == rank.pid):
                    yield _at(sample), one


def sampled_trial(row: Row, result: TrialResult) -> SampledTrial | None:
    """None where there are no samples, or nothing was measured."""
    workers = [rank for rank in result.ranks if rank.role == "worker" and rank.lost is None]
    steps = sum(w.end_step - w.first_step for rank in workers for w in rank.windows)
    whole = _span(workers)
    if row.folder is None or whole is None or not steps:
        return None
    nodes: dict[int, list[Sample]] = {}
    for sample in _samples(RunFolder(row.folder).trial_folder(result.id) / SAMPLES_FILE):
        if number(sample.get("at_seconds")) is not None:
            node = sample.get("node", 0)
            nodes.setdefault(node if isinstance(node, int) else 0, []).append(sample)
    if not nodes:
        return None
    return SampledTrial(
        result=result,
        spans={
            node: _span([rank for rank in workers if rank.node == node]) or whole
            for node in {*nodes, *(rank.node for rank in result.ranks)}
        },
        steps=steps / len(workers),
        nodes={node: sorted(own, key=_at) for node, own in sorted(nodes.items())},
    )


def _span(workers: Sequence[RankRecord]) -> Span | None:
    """None where nothing was measured."""
    windows = windows_of(slowest(workers))
    began = [r.first_step_at_seconds for r in workers if r.first_step_at_seconds is not None]
    return Span(windows=windows, first_step_at=min(began)) if windows.spans and began else None


def rates_of(points: Sequence[Point]) -> list[Rate]:
    """Between readings that are not too close for a counter."""
    rates: list[Rate] = []
    if not points:
        return rates
    before, old = points[0]
    for at, value in points[1:]:
        if at - before >= SHORTEST_SECONDS:
            rates.append(Rate(before, at, max(0.0, value - old) / (at - before)))
            before, old = at, value
    return rates


def share_above(rates: Sequence[Rate], bytes_per_second: float) -> float:
    """Of the rates' time; nothing where nothing passed."""
    total = fsum(one.end - one.start for one in rates)
    above = [one.end - one.start for one in rates if one.bytes_per_second > bytes_per_second]
    return fsum(above) / total if total > 0 else 0.0


def _samples(path: Path) -> Iterable[Sample]:
    """Broken lines are left out, and nothing comes of a huge file."""
    try:
        lines = path.read_bytes().split(b"\n") if path.stat().st_size <= MOST_BYTES else []
    except OSError:
        return
    for text in lines:
        try:
            line = from_json(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def _counter(network: object, name: str, way: Way) -> float | None:
    return number(_mapping(_mapping(network).get(name)).get(way))


def _at(sample: Sample) -> float:
    at_seconds = number(sample.get("at_seconds"))
    assert at_seconds is not None, "samples without their time are left out when read"
    return at_seconds


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> list[Sample]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
