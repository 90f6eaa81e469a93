"""Sets measured rows beside what a published study states of the same trainings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from shardmark.analysis.compare.comparison import Comparison, difference_between, ratio_between
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.studies.study import Claim, Figures, Study
from shardmark.results.store import RunFolder

SPEEDUP, RELATIVE_TIME = "speedup", "relative_time"
"""Over the same strategy on the study's fewest ranks; time for the same samples over that of the
study's reference.  These two compare between machines."""
TASK_KEYS = ("workload.name", "workload.model", "workload.dataset")
"""Another value of one of these is another task, of which no quality compares."""
RATE = "samples_per_second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One training: published, measured or both."""

    title: str
    world_size: int
    conditions: str
    """What tells trainings of one strategy and number of ranks apart."""
    figures: Figures | None
    row: Row | None
    published: Mapping[str, float]
    measured: Mapping[str, Estimate | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPair:
    """One claim and one measured row that it is about; no row where nothing was measured."""

    claim: Claim
    row: Row | None = None
    base: Row | None = None
    measured: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key whose value is not the study's."""

    key: str
    published: str
    measured: tuple[str, ...]

    @property
    def text(self) -> str:
        name = self.key.removesuffix(".name").removeprefix("workload.").removeprefix("recipe.")
        return f"{name} published {self.published}, measured {' and '.join(self.measured)}"


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
        names = dict.fromkeys(name for each in self.study.figures for name in each.headline)
        return tuple(sorted(names, key=lambda name: name != "epoch_seconds"))

    @property
    def devices(self) -> list[str]:
        """Each once, of the trials that ended ok; `cpu` for a CPU."""
        trials = [trial for row in self.rows for trial in row.ok_trials]
        return list(dict.fromkeys(rank.device for trial in trials for rank in trial.ranks))

    @property
    def measured_on(self) -> str:
        """The devices in words; empty where no trial ended ok."""
        cpus = [_cpu_text(environment) for environment in _environments(self.rows)]
        texts = [text for name in self.devices for text in (cpus if name == "cpu" else [name])]
        return "; ".join(dict.fromkeys(texts))

    @property
    def on_cpu(self) -> bool:
        return "cpu" in self.devices

    @property
    def same_hardware(self) -> bool:
        """Whether every device measured on is of a kind published on."""
        tokens = [token.lower() for each in self.study.hardware for token in each.tokens]
        known = [any(token in name.lower() for token in tokens) for name in self.devices]
        return bool(known) and all(known)

    @property
    def software(self) -> dict[str, list[str]]:
        """Package -> versions measured with, of the packages that the study names."""
        packages = [environment.get("packages") or {} for environment in _environments(self.rows)]
        return {
            name: list(dict.fromkeys(str(each[name]) for each in packages if name in each))
            for name in self.study.software
        }

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Keys in the study's order, the task's first; then the batch."""
        values: dict[tuple[str, str], dict[str, None]] = {}
        for pair in self.pairs:
            for key, published, measured in _differing(self.study, pair):
                values.setdefault((key, published), {})[measured] = None
        ordered = sorted(values, key=lambda item: item[0] not in TASK_KEYS)
        return tuple(
            Difference(key=key, published=published, measured=tuple(values[key, published]))
            for key, published in ordered
        )


def set_against(comparison: Comparison, study: Study) -> Against:
    """Match strategy, ranks and the study's own conditions (its model, say); refuse nothing.

    Several measured rows may match one training of the study, for example two precisions.
    """
    rows = comparison.rows
    pairs: list[Pair] = []
    for figures in study.figures:
        matching: list[Row | None] = [row for row in rows if _matches(row, figures)]
        pairs += [_pair(study, figures, row, rows) for row in matching or [None]]
    matched = {id(pair.row) for pair in pairs}
    pairs += [_pair(study, None, row, rows) for row in rows if id(row) not in matched]
    claims = [each for claim in study.claims for each in _claim_pairs(claim, rows)]
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


def _pair(study: Study, figures: Figures | None, row: Row | None, rows: Sequence[Row]) -> Pair:
    published: dict[str, float] = {}
    fewest, reference = None, None
    if figures is not None:
        fewest, reference = study.fewest_ranks(figures), study.reference_of(figures)
        published = figures.headline
        speedup = _published_speed(figures, fewest)
        relative_time = None if reference is None else _published_speed(reference, figures)
        named = {SPEEDUP: speedup, RELATIVE_TIME: relative_time}
        published |= {name: value for name, value in named.items() if value is not None}
    measured: dict[str, Estimate | None] = {}
    if row is not None:
        few = fewest.world_size if fewest is not None else _fewest_published(study, row)
        sizes = {each.world_size for each in study.figures if each.strategy == study.reference}
        size = reference.world_size if reference is not None else row.world_size
        if reference is None and len(sizes) == 1:
            (size,) = sizes
        measured = {
            **row.metrics,
            SPEEDUP: _ratio(row, _find(row, rows, few, row.strategy, same=True), RATE),
            RELATIVE_TIME: _ratio(_find(row, rows, size, study.reference), row, RATE),
        }
    told: Row | Figures | None = row or figures
    assert told is not None, "a pair has at least one side"
    conditions = told.varied if isinstance(told, Row) else told.conditions
    return Pair(
        title=told.label if isinstance(told, Row) else told.title,
        world_size=told.world_size,
        conditions=", ".join(map(plain, conditions.values())),
        figures=figures,
        row=row,
        published=published,
        measured=measured,
    )


def _fewest_published(study: Study, row: Row) -> int | None:
    sizes = [each.world_size for each in study.figures if each.strategy == row.strategy]
    return min(sizes, default=None)


def _published_speed(above: Figures, below: Figures) -> float | None:
    """How many times as fast, from the samples per second or the times of an epoch."""
    one, other = above.headline, below.headline
    if RATE in one and RATE in other:
        return one[RATE] / other[RATE]
    if "epoch_seconds" in one and "epoch_seconds" in other:
        return other["epoch_seconds"] / one["epoch_seconds"]
    return None


def _find(
    row: Row, rows: Sequence[Row], ranks: int | None, strategy: str, *, same: bool = False
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


def _ratio(above: Row | None, below: Row | None, metric: str) -> Estimate | None:
    """One row over itself is 1 by definition, and has no interval."""
    if above is None or below is None:
        return None
    if above is below:
        return Estimate(value=1.0, low=None, high=None, n=1) if above.values.get(metric) else None
    return ratio_between(above, below, metric)


def _claim_pairs(claim: Claim, rows: Sequence[Row]) -> list[ClaimPair]:
    """One for each measured row that the claim is about and each strategy it may be relative to."""
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
    of = {"speedup": RATE, "memory_ratio": "peak_memory_bytes"}
    return ratio_between(row, base, of.get(claim.metric, claim.metric))


def _environments(rows: Iterable[Row]) -> list[dict[str, Any]]:
    folders = dict.fromkeys(row.folder for row in rows if row.folder is not None)
    return [RunFolder(folder).read_environment() for folder in folders]


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
    own = {} if pair.figures is None else pair.figures.conditions
    conditions = {**study.conditions, **own}
    same_task = _value_of(row, "workload.name") == conditions.get("workload.name")
    for key, published in conditions.items():
        measured = _value_of(row, key)
        foreign = key.startswith("workload.") and key not in TASK_KEYS and not same_task
        if measured != published and not (measured is None and foreign):
            yield key, plain(published), _text(key, measured)
    for key, values in study.varied.items():
        if _value_of(row, key) not in values:
            yield key, " or ".join(map(plain, values)), _text(key, _value_of(row, key))
    yield from _batch_difference(study, row)


def _text(key: str, value: object) -> str:
    if value is None:
        return "all" if key.endswith("_samples") else "none"
    return plain(value)


def _batch_difference(study: Study, row: Row) -> Iterable[tuple[str, str, str]]:
    batch = study.batch
    if batch is None:
        return
    per_rank, total = (
        _value_of(row, f"recipe.{key}") for key in ("per_rank_batch", "global_batch")
    )
    as_published = {
        "per rank": (per_rank == batch.size, total == batch.size * row.world_size),
        "all ranks": (total == batch.size, per_rank == batch.size / row.world_size),
        "not stated": (per_rank == batch.size, total == batch.size),
    }[batch.of]
    if not any(as_published):
        of = "per GPU or in total is not stated" if batch.of == "not stated" else batch.of
        measured = f"{per_rank} per rank" if per_rank is not None else f"{total} over all ranks"
        yield "batch", f"{batch.size} ({of})", measured
