"""Sets measured rows beside what a published study states of the same trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.epochs import EpochsOfRow, epochs_of
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_ratio
from shardmark.analysis.studies.schema import Figures, Paper


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The two ratios that compare between machines, published and measured."""

    speedup: float | None = None
    measured_speedup: Estimate | None = None
    """Over the same strategy on `speedup_from` ranks."""
    relative_time: float | None = None
    measured_relative_time: Estimate | None = None
    """Time for the same samples, over the reference strategy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One training: published, measured or both."""

    figures: Figures | None
    row: Row | None
    speedup_from: int | None
    """Fewest ranks of the strategy in the study; None where the study has none of it."""
    ratios: Ratios
    epochs: EpochsOfRow | None
    """Measured; None where nothing was."""

    @property
    def title(self) -> str:
        if self.row is not None:
            return self.row.label
        assert self.figures is not None, "a pair has at least one side"
        return self.figures.title

    @property
    def world_size(self) -> int:
        if self.row is not None:
            return self.row.world_size
        assert self.figures is not None, "a pair has at least one side"
        return self.figures.world_size

    @property
    def published(self) -> Mapping[str, float]:
        return {} if self.figures is None else self.figures.headline

    @property
    def measured(self) -> Mapping[str, Estimate | None]:
        return {} if self.row is None else self.row.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A comparison and a study, side by side."""

    paper: Paper
    pairs: tuple[Pair, ...]
    """The study's trainings in its order, then what only was measured."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The study's headline metrics, the time of an epoch first."""
        names = dict.fromkeys(name for pair in self.pairs for name in pair.published)
        return tuple(sorted(names, key=lambda name: name != "epoch_seconds"))

    @property
    def epoch_metrics(self) -> tuple[str, ...]:
        """Columns of the study's tables by epoch, in its order."""
        tables = [figures.epochs for figures in self.paper.figures if figures.epochs is not None]
        return tuple(dict.fromkeys(name for table in tables for name in table.columns[1:]))

    @property
    def scales(self) -> bool:
        """Whether the study has a strategy on several numbers of ranks."""
        return any(pair.world_size != pair.speedup_from for pair in self.pairs if pair.figures)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every measured row once."""
        found = {id(pair.row): pair.row for pair in self.pairs if pair.row is not None}
        return tuple(found.values())


def set_against(comparison: Comparison, paper: Paper) -> Against:
    """Match strategy, ranks and the study's own conditions (its model, say); refuse nothing.

    Several measured rows may match one training of the study, for example two precisions.
    """
    rows = comparison.rows
    pairs: list[Pair] = []
    for figures in paper.figures:
        matching: list[Row | None] = [row for row in rows if _matches(row, figures)]
        pairs += [_pair(paper, figures, row, rows) for row in matching or [None]]
    matched = {id(pair.row) for pair in pairs}
    pairs += [_pair(paper, None, row, rows) for row in rows if id(row) not in matched]
    return Against(paper=paper, pairs=tuple(pairs))


def given(trial: Mapping[str, object], key: str) -> object:
    """The trial's value of a dotted key; None where it has none."""
    found: object = trial
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _matches(row: Row, figures: Figures) -> bool:
    same = (row.strategy, row.world_size) == (figures.strategy, figures.world_size)
    return same and all(
        given(row.trials[0].trial, key) == value for key, value in figures.conditions.items()
    )


def _pair(paper: Paper, figures: Figures | None, row: Row | None, rows: Sequence[Row]) -> Pair:
    few = _few(paper, figures, row)
    reference = None if figures is None else paper.reference_of(figures)
    fewer = find_row(row, rows, few.world_size if few else None, None)
    base = find_row(row, rows, _reference_ranks(paper, reference, row), paper.reference)
    return Pair(
        figures=figures,
        row=row,
        speedup_from=None if few is None else few.world_size,
        ratios=Ratios(
            speedup=_published_ratio(figures, few),
            measured_speedup=measured_ratio(row, fewer),
            relative_time=_published_ratio(reference, figures),
            measured_relative_time=measured_ratio(base, row),
        ),
        epochs=None if row is None else epochs_of(row),
    )


def _reference_ranks(paper: Paper, reference: Figures | None, row: Row | None) -> int | None:
    """As in the study; for what only was measured, as many as it has, or the study's one number."""
    if reference is not None:
        return reference.world_size
    sizes = {one.world_size for one in paper.figures if one.strategy == paper.reference}
    if len(sizes) == 1:
        return sizes.pop()
    return None if row is None else row.world_size


def _few(paper: Paper, figures: Figures | None, row: Row | None) -> Figures | None:
    """The study's training of this strategy on the fewest ranks."""
    if figures is not None:
        return paper.fewest_ranks(figures)
    assert row is not None, "a pair has at least one side"
    same = [one for one in paper.figures if one.strategy == row.strategy]
    return min(same, key=lambda one: one.world_size, default=None)


def find_row(
    row: Row | None, rows: Sequence[Row], ranks: int | None, strategy: str | None
) -> Row | None:
    """The comparable row on so many ranks of that strategy; of the row's own where it is None."""
    if row is None:
        return None
    candidates = (
        other
        for other in rows
        if other.world_size == ranks
        and row.comparable(other)
        and (
            other.strategy == strategy
            if strategy is not None
            else other.label == row.label and not row.differing(other)
        )
    )
    return min(
        candidates,
        key=lambda other: (len(row.differing(other)), len(other.strategy_options)),
        default=None,
    )


def _published_ratio(above: Figures | None, below: Figures | None) -> float | None:
    """Of the samples per second, or of the inverse times of an epoch."""
    if above is None or below is None:
        return None
    one, other = above.headline, below.headline
    if "samples_per_second" in one and "samples_per_second" in other:
        return one["samples_per_second"] / other["samples_per_second"]
    if "epoch_seconds" in one and "epoch_seconds" in other:
        return other["epoch_seconds"] / one["epoch_seconds"]
    return None


def measured_ratio(
    above: Row | None, below: Row | None, metric: str = "samples_per_second"
) -> Estimate | None:
    """Of the metric; with an interval only where both have the same repeats.

    One row over itself is 1 by definition, and has no interval.
    """
    if above is None or below is None:
        return None
    one, other = above.values.get(metric), below.values.get(metric)
    if not one or not other or sum(other.values()) <= 0:
        return None
    if above is below:
        return Estimate(value=1.0, low=None, high=None, n=len(one))
    if one.keys() == other.keys():
        return estimate_ratio([one[repeat] for repeat in one], [other[repeat] for repeat in one])
    value = sum(one.values()) / len(one) / (sum(other.values()) / len(other))
    return Estimate(value=value, low=None, high=None, n=min(len(one), len(other)))
