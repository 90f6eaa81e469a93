"""Comparison of measured rows with the figures of a published study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from shardmark.analysis.compare.comparison import Comparison, difference_between, ratio_between
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.studies.study import Batch, Claim, Figures, Study
from shardmark.results.store import RunFolder

SPEEDUP, RELATIVE_TIME = "speedup", "relative_time"
"""Over the same strategy on the study's fewest ranks; time for the same samples over that of the
study's reference.  These two compare between machines."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPair:
    """A claim and a measured row to which it applies; None if there is no such row."""

    claim: Claim
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
    def devices(self) -> list[str]:
        """Each once, of the trials that ended ok; `cpu` for a CPU."""
        trials = [trial for row in self.rows for trial in row.ok_trials]
        return list(dict.fromkeys(rank.device for trial in trials for rank in trial.ranks))

    @property
    def measured_on(self) -> str:
        """The devices in words; empty where no trial ended ok."""
        folders = dict.fromkeys(row.folder for row in self.rows if row.folder is not None)
        cpus = [_cpu_text(RunFolder(folder).read_environment()) for folder in folders]
        texts = [text for name in self.devices for text in (cpus if name == "cpu" else [name])]
        return "; ".join(dict.fromkeys(texts))

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
        """Key and text of each, in the study's order, the task's first; then the batch."""
        values: dict[tuple[str, str], dict[str, None]] = {}
        for pair in self.pairs:
            for key, published, measured in _differing(self.study, pair):
                values.setdefault((key, published), {})[measured] = None
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
    rows = comparison.rows
    pairs: list[Pair] = []
    for figures in study.figures:
        matching: list[Row | None] = [row for row in rows if _matches(row, figures)]
        pairs += [_published(study, figures, row, rows) for row in matching or [None]]
    matched = {id(pair.row) for pair in pairs}
    pairs += [_measured_alone(row) for row in rows if id(row) not in matched]
    claims = [pair for claim in study.claims for pair in _claim_pairs(claim, rows)]
    return Against(study=study, pairs=tuple(pairs), claims=tuple(claims), rows=rows)


def _matches(row: Row, figures: Figures) -> bool:
    if (row.strategy, row.world_size) != (figures.strategy, figures.world_size):
        return False
    return all(_value_of(row, key) == value for key, value in figures.conditions.items())


def _value_of(row: Row, key: str) -> object:
    """The trial's value of a dotted key; None where it has none."""
    value: object = row.trials[0].trial
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _published(study: Study, figures: Figures, row: Row | None, rows: Sequence[Row]) -> Pair:
    """A training of the study, with the row that was measured of it."""
    fewest, reference = study.fewest_ranks(figures), study.reference_of(figures)
    ratios = {
        SPEEDUP: _times_as_fast(figures, fewest),
        RELATIVE_TIME: None if reference is None else _times_as_fast(reference, figures),
    }
    published = figures.headline | {name: value for name, value in ratios.items() if value}
    if row is not None:
        alone = _find(row, rows, fewest.world_size, row.strategy, same=True)
        size = row.world_size if reference is None else reference.world_size
        measured = {
            **row.metrics,
            SPEEDUP: _ratio(row, alone),
            RELATIVE_TIME: _ratio(_find(row, rows, size, study.reference), row),
        }
        return replace(
            _measured_alone(row), figures=figures, published=published, measured=measured
        )
    return Pair(
        title=figures.title,
        world_size=figures.world_size,
        conditions=", ".join(map(plain, figures.conditions.values())),
        figures=figures,
        published=published,
    )


def _measured_alone(row: Row) -> Pair:
    """Without a speed-up: that of the row is over another baseline than the study's."""
    return Pair(
        title=row.label,
        world_size=row.world_size,
        conditions=", ".join(map(plain, row.varied.values())),
        row=row,
        measured={**row.metrics, SPEEDUP: None},
    )


def _times_as_fast(above: Figures, below: Figures) -> float | None:
    """From the samples per second or the times of an epoch."""
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


def _ratio(above: Row | None, below: Row | None) -> Estimate | None:
    """Return the ratio of the rates; the ratio of a row to itself is 1 without an interval."""
    if above is None or below is None:
        return None
    if above is below:
        return Estimate(value=1.0, low=None, high=None, n=1) if above.values.get(RATE) else None
    return ratio_between(above, below, RATE)


def _claim_pairs(claim: Claim, rows: Sequence[Row]) -> list[ClaimPair]:
    """Return a pair for each row of the claim and each strategy to which it is relative."""
    about = [row for row in rows if row.ok_trials and row.strategy in claim.strategies]
    if claim.nodes is not None:
        about = [row for row in about if row.nodes == claim.nodes]
    elif claim.world_size is not None:
        about = [row for row in about if row.world_size == claim.world_size]
    pairs = [
        ClaimPair(claim=claim, row=row, base=base, measured=_measured(claim, row, base))
        for row, strategy in product(about, claim.over)
        if (base := _find(row, rows, row.world_size, strategy)) is not None
    ]
    return pairs or [ClaimPair(claim=claim)]


def _measured(claim: Claim, row: Row, base: Row) -> Estimate | None:
    """Times are those for the same samples, so that a run without whole epochs has them, too."""
    if claim.relation == "difference":
        return difference_between(row, base, claim.metric)
    if claim.metric == "epoch_seconds":
        return ratio_between(base, row, RATE)
    metrics = {"speedup": RATE, "memory_ratio": "peak_memory_bytes"}
    return ratio_between(row, base, metrics.get(claim.metric, claim.metric))


def _cpu_text(environment: Mapping[str, Any]) -> str:
    cpu = environment.get("cpu") or {}
    cores, model = cpu.get("usable_cores"), cpu.get("model")
    text = "a CPU" if cores is None else f"{cores} CPU core{'' if cores == 1 else 's'}"
    return f"{text} ({model})" if model else text


def _differing(study: Study, pair: Pair) -> Iterable[tuple[str, str, str]]:
    """Key, published and measured value."""
    row = pair.row
    if row is None:
        return
    specific = {} if pair.figures is None else pair.figures.conditions
    conditions = {**study.conditions, **specific}
    same_task = _value_of(row, "workload.name") == conditions.get("workload.name")
    for key, published in conditions.items():
        measured = _value_of(row, key)
        foreign = key.startswith("workload.") and key not in TASK_KEYS and not same_task
        if measured != published and not (measured is None and foreign):
            yield key, plain(published), _text(key, measured)
    for key, values in study.varied.items():
        if _value_of(row, key) not in values:
            yield key, " or ".join(map(plain, values)), _text(key, _value_of(row, key))
    if study.batch is not None:
        yield from _batch_difference(study.batch, row)


def _text(key: str, value: object) -> str:
    if value is None:
        return "all" if key.endswith("_samples") else "none"
    return plain(value)


def _batch_difference(batch: Batch, row: Row) -> Iterable[tuple[str, str, str]]:
    """Yield a difference of the batch size, counted as in the study, or in either way."""
    per_rank, total = (
        _value_of(row, f"recipe.{key}") for key in ("per_rank_batch", "global_batch")
    )
    factor = {"per rank": row.world_size, "all ranks": 1 / row.world_size, "not stated": 1}[
        batch.of
    ]
    batch_size, other = (total, per_rank) if batch.of == "all ranks" else (per_rank, total)
    if batch_size != batch.size and other != batch.size * factor:
        scope = "per GPU or in total is not stated" if batch.of == "not stated" else batch.of
        measured = f"{per_rank} per rank" if per_rank is not None else f"{total} over all ranks"
        yield "batch", f"{batch.size} ({scope})", measured
