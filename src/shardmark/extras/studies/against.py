"""Comparison of measured rows with the figures of a published study."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from shardmark.base.cells import DEFAULT_BASELINE, title_of
from shardmark.base.metrics import METRICS
from shardmark.base.results.store import RunFolder
from shardmark.base.statistics.intervals import Estimate, estimate_mean
from shardmark.base.text import counted
from shardmark.bench.analysis.compare.comparison import (
    Comparison,
    difference_between,
    ratio_between,
)
from shardmark.bench.analysis.compare.epochs import epoch_values, epochs_of
from shardmark.bench.analysis.compare.rows import (
    STATE_METRICS,
    Row,
    can_be_disturbed,
    grouped,
    plain,
    trained,
)
from shardmark.extras.studies.study import STATE, TOTAL, Batch, Claim, Figures, Study

SPEEDUP, RELATIVE_TIME, RELATIVE_PEAK = "speedup", "relative_time", "relative_peak"
"""Over the same strategy on the study's fewest ranks; time for the same samples, and peak memory,
over those of the study's reference.  These compare between machines."""
PEAK = "peak_memory_bytes"
SAME_TRAINING = "verified: both train the same within rounding"
COUNTED = (*STATE_METRICS, STATE, "collective_bytes")
"""Metrics that are counted: one repeat has the exact value."""
TASK_KEYS = ("workload.name", "workload.model", "workload.dataset")
"""Another value of one of these is another task, of which no quality compares."""
RATE = "samples_per_second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A training with published figures, measured values, or both."""

    title: str
    world_size: int
    conditions: str
    """Values that distinguish trainings of the same strategy and number of ranks."""
    figures: Figures | None = None
    row: Row | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, Estimate | None] = field(default_factory=dict)


class Finding(StrEnum):
    """Answer of the measurements to a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "not shown"
    TOO_FEW = "cannot on so few ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPair:
    """A claim and a measured row to which it applies; None if there is no such row."""

    claim: Claim
    finding: Finding
    reason: str
    """Reason for a finding that the interval alone does not explain; otherwise empty."""
    row: Row | None = None
    base: Row | None = None
    measured: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A comparison and a study, side by side."""

    study: Study
    pairs: tuple[Pair, ...]
    """The study's trainings in its order, then what only was measured."""
    claims: tuple[ClaimPair, ...]
    rows: tuple[Row, ...] = field(repr=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The study's headline metrics, the time of an epoch first."""
        names = dict.fromkeys(name for figures in self.study.figures for name in figures.headline)
        return tuple(sorted(names, key=lambda name: name != "epoch_seconds"))

    @property
    def ratios(self) -> tuple[str, ...]:
        """The ratios that compare between machines and that the study has, other than 1 to 1."""
        return tuple(
            name
            for name in (SPEEDUP, RELATIVE_TIME, RELATIVE_PEAK)
            if any(pair.published.get(name, 1) != 1 for pair in self.pairs)
        )

    @property
    def sources(self) -> dict[str, str]:
        """Experiment of the rows -> name of the run: its folder's, if no other run has that."""
        folders = {row.experiment: row.folder for row in self.rows if row.folder is not None}
        counts = Counter(folder.name for folder in folders.values())
        return {
            experiment: folder.name if counts[folder.name] == 1 else experiment
            for experiment, folder in folders.items()
        }

    @property
    def devices(self) -> list[str]:
        """The devices of the trials that ended ok, each once; `cpu` for a CPU."""
        trials = [trial for row in self.rows for trial in row.ok_trials]
        return list(dict.fromkeys(rank.device for trial in trials for rank in trial.ranks))

    @property
    def measured_on(self) -> str:
        """The devices in words; empty if no trial ended ok."""
        texts: dict[str, dict[str, None]] = {}
        for row in self.rows:
            for trial in row.ok_trials:
                texts.setdefault(row.experiment, {}).update(
                    dict.fromkeys(_device_text(rank.device, row) for rank in trial.ranks)
                )
        named = {
            self.sources.get(name, name): ", ".join(devices) for name, devices in texts.items()
        }
        if len(named) == 1:
            return next(iter(named.values()))
        return "; ".join(f"{devices} ({name})" for name, devices in named.items())

    @property
    def on_cpu(self) -> bool:
        return "cpu" in self.devices

    @property
    def same_hardware(self) -> bool:
        """True if the study used all kinds of devices on which the rows were measured."""
        names = [name.lower() for name in self.study.device_names]
        matches = [any(name in device.lower() for name in names) for device in self.devices]
        return bool(matches) and all(matches)

    @property
    def differences(self) -> list[tuple[str, str]]:
        """Key and text of each difference: of the task first, then in the study's order."""
        values = grouped(
            ((key, published), measured)
            for pair in self.pairs
            for key, published, measured in _differing(self.study, pair)
        )
        texts = []
        for (key, published), measured_values in values.items():
            name = key.removesuffix(".name").removeprefix("workload.").removeprefix("recipe.")
            text = f"{name} published {published}, measured {' and '.join(measured_values)}"
            texts.append((key, text))
        return sorted(texts, key=lambda difference: difference[0] not in TASK_KEYS)


def set_against(comparison: Comparison, study: Study) -> Against:
    """Match strategy, ranks and the study's own conditions (its model, say); refuse nothing.

    Several measured rows may match one training of the study, for example two precisions.
    """
    rows = tuple(map(_with_derived, comparison.rows))
    measured = [row for row in rows if row.ok_trials]
    pairs: list[Pair] = []
    for figures in study.figures:
        strategies = (figures.strategy, *figures.candidates)
        matching: list[Row | None] = [
            row
            for row in measured
            if (row.strategy in strategies and row.world_size == figures.world_size)
            and _meets(row, figures.conditions)
        ]
        pairs += [_published(study, figures, row, rows) for row in matching or [None]]
    matched = {id(pair.row) for pair in pairs}
    pairs += [_measured_alone(row, rows) for row in measured if id(row) not in matched]
    claims = [pair for claim in study.claims for pair in _claim_pairs(claim, rows)]
    return Against(study=study, pairs=tuple(pairs), claims=tuple(claims), rows=rows)


def _with_derived(row: Row) -> Row:
    parts = [row.values.get(name, {}) for name in STATE_METRICS]
    last = len(epochs_of(row).epochs) - 1
    totals = {
        trial.repeat: value
        for trial in row.ok_trials
        if last >= 0 and isinstance(value := epoch_values(trial, last).get(TOTAL), float)
    }
    repeats = set.intersection(*(set(part) for part in parts))
    states = {repeat: sum(part[repeat] for part in parts) for repeat in sorted(repeats)}
    derived = {STATE: states, TOTAL: totals}
    estimates = {
        name: estimate_mean(list(values.values())) if values else None
        for name, values in derived.items()
    }
    return replace(row, values={**row.values, **derived}, metrics={**row.metrics, **estimates})


def _meets(row: Row, conditions: Mapping[str, Any]) -> bool:
    return all(row.stored(key) == value for key, value in conditions.items())


def _published(study: Study, figures: Figures, row: Row | None, rows: Sequence[Row]) -> Pair:
    """Pair a training of the study with a measured row, if there is one."""
    fewest, reference = study.fewest_ranks(figures), study.reference_of(figures)
    over, under = (None if one is None else one.headline.get(PEAK) for one in (figures, reference))
    ratios = {
        SPEEDUP: _times_as_fast(figures, fewest),
        RELATIVE_TIME: None if reference is None else _times_as_fast(reference, figures),
        RELATIVE_PEAK: over / under if over and under else None,
    }
    published = figures.headline | {name: value for name, value in ratios.items() if value}
    if row is not None:
        alone = _find(row, rows, fewest.world_size, row.strategy, same=True)
        size = row.world_size if reference is None else reference.world_size
        base = _find(row, rows, size, study.reference)
        measured = {
            **row.metrics,
            SPEEDUP: _ratio(row, alone),
            RELATIVE_TIME: _ratio(base, row),
            RELATIVE_PEAK: _ratio(row, base, PEAK),
        }
        return replace(
            _measured_alone(row, rows),
            conditions=conditions_text(row, rows, figures.conditions),
            figures=figures,
            published=published,
            measured=measured,
        )
    return Pair(
        title=figures.title,
        world_size=figures.world_size,
        conditions=", ".join(map(plain, figures.conditions.values())),
        figures=figures,
        published=published,
    )


def _measured_alone(row: Row, rows: Sequence[Row]) -> Pair:
    """Return a pair without figures and speed-up, whose baseline is another than the study's."""
    return Pair(
        title=row.label,
        world_size=row.world_size,
        conditions=conditions_text(row, rows),
        row=row,
        measured={**row.metrics, SPEEDUP: None},
    )


def conditions_text(row: Row, rows: Sequence[Row], of_study: Mapping[str, Any] = {}) -> str:
    """Return the values that distinguish the row among the rows, the study's conditions first."""
    varying = {key for key in row.varied if len({plain(r.varied.get(key)) for r in rows}) > 1}
    values = {**of_study, **{key: row.varied[key] for key in row.varied if key in varying}}
    texts = [
        plain(value) if key in TASK_KEYS else f"{title_of(key)}={plain(value)}"
        for key, value in values.items()
    ]
    return ", ".join([*texts, *([row.precision] if row.varies_precision else [])])


def _times_as_fast(above: Figures, below: Figures) -> float | None:
    """Return the ratio of speeds, by the samples per second or by the times of an epoch."""
    over, under = above.headline, below.headline
    if RATE in over and RATE in under:
        return over[RATE] / under[RATE]
    if "epoch_seconds" in over and "epoch_seconds" in under:
        return under["epoch_seconds"] / over["epoch_seconds"]
    return None


def _find(
    row: Row, rows: Sequence[Row], ranks: int, strategy: str, *, same: bool = False
) -> Row | None:
    """The comparable row of that strategy on so many ranks; with `same`, with the same options."""
    candidates = [
        other
        for other in rows
        if (other.strategy, other.world_size) == (strategy, ranks)
        and row.comparable(other)
        and not (same and (other.label != row.label or row.differing(other)))
    ]
    return min(
        candidates,
        key=lambda other: (len(row.differing(other)), len(other.strategy_options)),
        default=None,
    )


def _ratio(above: Row | None, below: Row | None, metric: str = RATE) -> Estimate | None:
    """Return the ratio of a metric; the ratio of a row to itself is 1 without an interval."""
    if above is None or below is None:
        return None
    if above is below:
        return Estimate(value=1.0, low=None, high=None, n=1) if above.values.get(metric) else None
    return ratio_between(above, below, metric)


def ratio_to_strategy(row: Row, rows: Sequence[Row], strategy: str, metric: str) -> Estimate | None:
    """Return the ratio to the comparable row of the strategy on as many ranks."""
    return _ratio(row, _find(row, rows, row.world_size, strategy), metric)


def _claim_pairs(claim: Claim, rows: Sequence[Row]) -> list[ClaimPair]:
    """Return a pair for each row of the claim and each strategy to which it is relative."""
    measured = [row for row in rows if row.ok_trials]
    about = [
        row
        for row in measured
        if row.strategy in claim.strategies and _meets(row, claim.conditions)
    ]
    if claim.nodes is not None:
        about = [row for row in about if row.nodes == claim.nodes]
    elif claim.world_size is not None:
        about = [row for row in about if row.world_size == claim.world_size]
    pairs = [
        _claim_pair(claim, row, base)
        for row in about
        for base in _bases(claim, row, measured)
        if base is not None and base is not row
    ]
    return pairs or [_unmeasured(claim, measured)]


def _bases(claim: Claim, row: Row, rows: Sequence[Row]) -> list[Row | None]:
    if claim.over_ranks is not None and not claim.over:
        return [_find(row, rows, claim.over_ranks, row.strategy, same=True)]
    ranks = claim.over_ranks or row.world_size
    return [
        _find(row, rows, 1 if strategy == DEFAULT_BASELINE else ranks, strategy)
        for strategy in claim.over
    ]


def _unmeasured(claim: Claim, measured: Sequence[Row]) -> ClaimPair:
    """Return the claim without a row: the run has too few ranks for it, or not its strategies."""
    ranks = max((row.world_size for row in measured), default=0)
    nodes = max((row.nodes for row in measured), default=0)
    needed = max(claim.world_size or 0, (claim.over_ranks or 0) + 1)
    finding, reason = Finding.OPEN, "its strategies were not measured together"
    if claim.nodes is not None and nodes < claim.nodes:
        finding, reason = Finding.TOO_FEW, f"it is about {claim.nodes} nodes, measured on {nodes}"
    elif claim.nodes is None and ranks < needed:
        finding = Finding.TOO_FEW
        reason = f"it is about {needed} ranks or more, measured on at most {ranks}"
    elif not (claim.over or claim.over_ranks):
        reason = "the study does not state to what it is relative"
    return ClaimPair(claim=claim, finding=finding, reason=reason)


def _claim_pair(claim: Claim, row: Row, base: Row) -> ClaimPair:
    measured = _measured(claim, row, base)
    finding, reason = _finding(claim, row, base, measured)
    if _is_quality(claim.metric) and _train_alike(row, base):
        reason = "; ".join(filter(None, (reason, SAME_TRAINING)))
    return ClaimPair(
        claim=claim, finding=finding, reason=reason, row=row, base=base, measured=measured
    )


def _train_alike(row: Row, base: Row) -> bool:
    """Return True if both were verified, and no batch norm or batch of a rank differs."""
    pair = (row, base)
    verified = all(r.equivalent is True or r.strategy == DEFAULT_BASELINE for r in pair)
    trials = [trial for r in pair for trial in r.ok_trials]
    shares = {trial.layout.shares for trial in trials}
    batch_norms = any(rank.probe and rank.probe.batch_norms for t in trials for rank in t.ranks)
    same_batch = row.world_size == base.world_size or not row.weak_scaling
    return verified and same_batch and (len(shares) == 1 or not batch_norms)


def _measured(claim: Claim, row: Row, base: Row) -> Estimate | None:
    """Times are those for the same samples, so that a run without whole epochs has them, too."""
    if claim.epoch is not None:
        row, base = (_at_epoch(other, claim.metric, claim.epoch) for other in (row, base))
    if claim.relation == "difference":
        return difference_between(row, base, claim.metric)
    if claim.metric == "epoch_seconds":
        return ratio_between(base, row, RATE)
    metrics = {SPEEDUP: RATE, "memory_ratio": PEAK}
    return ratio_between(row, base, metrics.get(claim.metric, claim.metric))


def _at_epoch(row: Row, metric: str, number: int) -> Row:
    """Return the row with the values that a metric has at the end of the epoch."""
    by_repeat = {
        trial.repeat: epoch_values(trial, number - 1).get(metric)
        for trial in (row.ok_trials if can_be_disturbed(metric) else trained(row.trials))
    }
    values = {repeat: value for repeat, value in by_repeat.items() if isinstance(value, float)}
    return replace(row, values={**row.values, metric: values})


def _is_quality(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].group == "quality"


def _finding(claim: Claim, row: Row, base: Row, measured: Estimate | None) -> tuple[Finding, str]:
    """Return the finding by the 95 % interval, with a reason where that does not decide."""
    if claim.least_times_ranks is not None:
        least = claim.least_times_ranks / row.devices
        if least > _range_of(claim)[1]:
            sharding = f"sharding alone leaves at least {least:.2f} on {row.devices} devices"
            return Finding.TOO_FEW, sharding
    # One seed refutes a difference of a stated size only if both trainings are the same.
    verified_equal = claim.value is not None and _train_alike(row, base)
    reason = ""
    if measured is None:
        disturbed = can_be_disturbed(claim.metric) and (row.disturbed or base.disturbed)
        reason = f"disturbed: {disturbed}" if disturbed else "no value was measured"
    elif _is_quality(claim.metric) and (row.synthetic or base.synthetic):
        reason = "synthetic data"
    elif _is_quality(claim.metric) and max(row.seeds, base.seeds) == 1 and not verified_equal:
        reason = "one seed: another one may reverse it"
    elif can_be_disturbed(claim.metric) and (sharing := _shared_cores(row, base)):
        reason = sharing
    elif claim.metric in COUNTED:
        return _by_interval(claim, measured.value, measured.value)
    elif measured.low is None or measured.high is None:
        reason = (
            f"no interval: {'the repeats differ too much' if measured.too_noisy else 'one repeat'}"
        )
    else:
        return _by_interval(claim, measured.low, measured.high)
    return Finding.OPEN, reason


def _shared_cores(row: Row, base: Row) -> str:
    """Return the reason why more ranks are no more devices: they share CPU cores; else nothing."""
    ranks = max(row.world_size, base.world_size)
    cores = _cpu_of(row).get("usable_cores")
    if row.world_size == base.world_size or cores is None or ranks <= cores * row.nodes:
        return ""
    return f"{ranks} ranks share {counted(cores, 'CPU core')}"


def _cpu_of(row: Row) -> Mapping[str, Any]:
    """Return what the run's environment says about the CPU on which the row trained; else {}."""
    on_cpu = any(rank.device == "cpu" for trial in row.ok_trials for rank in trial.ranks)
    if not on_cpu or row.folder is None:
        return {}
    return RunFolder(row.folder).read_environment().get("cpu") or {}


def _by_interval(claim: Claim, low: float, high: float) -> tuple[Finding, str]:
    """A range holds if it has the interval; a value, if it is in one that shows a difference.

    A range that ends at no difference does not include it: equal is not faster.
    """
    claimed_low, claimed_high = _range_of(claim)
    equal = 0.0 if claim.relation == "difference" else 1.0
    if claim.value is None and (high == claimed_low == equal or low == claimed_high == equal):
        return Finding.FAILS, ""
    if high < claimed_low or low > claimed_high:
        return Finding.FAILS, ""
    is_relative = claim.value is not None or equal in (claimed_low, claimed_high)
    undecided = is_relative and low <= equal <= high
    inside = claim.value is not None or (claimed_low <= low and high <= claimed_high)
    if inside and not undecided:
        return Finding.HOLDS, ""
    return Finding.OPEN, "the interval allows both"


def _range_of(claim: Claim) -> tuple[float, float]:
    """Return the ends of the claimed range."""
    if claim.value is not None:
        return claim.value, claim.value
    low = -math.inf if claim.low is None else claim.low
    return low, math.inf if claim.high is None else claim.high


def _device_text(device: str, row: Row) -> str:
    """Return the name of the device; of a CPU, its cores and model."""
    if device != "cpu" or row.folder is None:
        return device
    cpu = _cpu_of(row)
    cores, model = cpu.get("usable_cores"), cpu.get("model")
    text = "a CPU" if cores is None else counted(cores, "CPU core")
    return f"{text} ({model})" if model else text


def _differing(study: Study, pair: Pair) -> Iterable[tuple[str, str, str]]:
    """Yield the key, the published value and the measured value of each difference."""
    row = pair.row
    if row is None:
        return
    specific = {} if pair.figures is None else pair.figures.conditions
    conditions = {**study.conditions, **specific}
    same_task = row.stored("workload.name") == conditions.get("workload.name")
    for key, published in conditions.items():
        measured = row.stored(key)
        foreign = key.startswith("workload.") and key not in TASK_KEYS and not same_task
        if measured != published and not (measured is None and foreign):
            yield key, plain(published), _text(key, measured)
    for key, values in study.varied.items():
        if row.stored(key) not in values:
            yield key, " or ".join(map(plain, values)), _text(key, row.stored(key))
    if study.batch is not None:
        yield from _batch_difference(study.batch, row)


def _text(key: str, value: object) -> str:
    if value is None:
        return "all" if key.endswith("_samples") else "none"
    return plain(value)


def _batch_difference(batch: Batch, row: Row) -> Iterable[tuple[str, str, str]]:
    """Yield a difference of the batch size, counted as in the study, or in either way."""
    per_rank, total = (row.stored(f"recipe.{key}") for key in ("per_rank_batch", "global_batch"))
    factor = {"per rank": row.world_size, "all ranks": 1 / row.world_size, "not stated": 1}[
        batch.of
    ]
    batch_size, other = (total, per_rank) if batch.of == "all ranks" else (per_rank, total)
    if batch_size != batch.size and other != batch.size * factor:
        scope = "per GPU or in total is not stated" if batch.of == "not stated" else batch.of
        measured = f"{per_rank} per rank" if per_rank is not None else f"{total} over all ranks"
        yield "batch", f"{batch.size} ({scope})", measured
