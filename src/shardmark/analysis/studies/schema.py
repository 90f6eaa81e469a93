"""What a published study states: figures with their places, conditions, hardware, and its gaps.

Keys are those of the rest of the package (metrics of the catalogue in base units, keys of the
experiment file), so that a study can be held against a run without a translation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from statistics import fmean
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from shardmark.analysis.studies.parts import Batch, Epochs, Hardware, Published
from shardmark.analysis.studies.statements import Remark, Statement

MEAN_OVER_EPOCHS = frozenset({"epoch_seconds"})
"""Metrics of which a training's figure is the mean over its epochs; of all others it is the last
epoch's."""


class Figures(Published):
    """What the study states of one training."""

    strategy: str | None
    """In this package's names; None where the study does not say which technique it was."""
    label: str | None = None
    """In words, for a strategy without a name."""
    world_size: PositiveInt
    conditions: Mapping[str, Any] = Field(default_factory=dict)
    """Dotted key -> value, for what varies between the trainings beside strategy and ranks."""
    hardware: str | None = None
    """Name of the machine; None for the study's first."""
    place: str
    """Section and table."""
    metrics: Mapping[str, float] = Field(default_factory=dict)
    """Metric of the catalogue -> value, in base units."""
    epochs: Epochs | None = None
    training_seconds: float | None = None
    """Of the whole training, as the study counts it; `total_seconds` of the catalogue counts
    more."""
    others: Mapping[str, float] = Field(default_factory=dict)
    """Figures that no metric of the catalogue matches, by the name and unit in the study."""
    rounding: Mapping[str, float] = Field(default_factory=dict)
    """Metric -> unit of its last printed digit, where it is not the study's."""

    def value(self, metric: str) -> float | None:
        """The training's figure; `total_seconds` as the study counts it."""
        if metric == "total_seconds" and self.training_seconds is not None:
            return self.training_seconds
        return self.headline.get(metric)

    @property
    def stated(self) -> frozenset[str]:
        """Metrics that are printed as they are, and not computed from the epochs here."""
        means = MEAN_OVER_EPOCHS - self.metrics.keys()
        total = {"total_seconds"} if self.training_seconds is not None else set()
        return frozenset({*self.headline, *total} - means)

    @property
    def title(self) -> str:
        return self.strategy or self.label or "strategy not stated"

    @property
    def words(self) -> str:
        """The training in words, for a note."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return ", ".join([f"{self.title} on {ranks}", *map(str, self.conditions.values())])

    @cached_property
    def headline(self) -> Mapping[str, float]:
        """The training's figures: as stated, else from the epochs (mean of the times, last of the
        others)."""
        found: dict[str, float] = {}
        if self.epochs is not None and self.epochs.rows:
            for index, name in enumerate(self.epochs.columns[1:], start=1):
                values = [row[index] for row in self.epochs.rows]
                found[name] = fmean(values) if name in MEAN_OVER_EPOCHS else values[-1]
        return {**found, **self.metrics}


class Paper(Published):
    """One study."""

    name: str
    title: str
    authors: tuple[str, ...]
    """Empty where the study names none."""
    affiliation: str | None = None
    year: PositiveInt | None
    """None where the study bears no date and none is known."""
    kind: str
    """Report, poster, article ..."""
    compares: str
    """What was compared on what task, in a few words."""
    preset: str | None = None
    """The experiment of this package that repeats it."""
    conditions: Mapping[str, Any]
    """Dotted key of the experiment file -> value, for all trainings."""
    varied: Mapping[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Dotted key -> values, where the study does not say which claim is of which."""
    batch: Batch | None
    """None where no batch size is stated."""
    hardware: tuple[Hardware, ...] = Field(min_length=1)
    software: Mapping[str, str | None] = Field(default_factory=dict)
    """Package -> version as stated; None where no version is."""
    reference: str
    """Strategy that the others are related to."""
    figures: tuple[Figures, ...] = ()
    statements: tuple[Statement, ...] = ()
    unknown: tuple[str, ...] = ()
    """What the study does not say and a comparison would need, each a noun phrase."""
    rounding: Mapping[str, float] = Field(default_factory=dict)
    """Metric -> unit of its last printed digit."""
    remarks: tuple[Remark, ...] = ()

    @model_validator(mode="after")
    def _names_hold(self) -> Paper:
        known = {machine.name for machine in self.hardware}
        named = {item.hardware for item in self.figures}
        named |= {item.hardware for item in self.statements}
        for name in named - known - {None}:
            raise ValueError(f"no hardware is named {name!r}")
        trainings = [
            (item.title, item.world_size, item.hardware, tuple(sorted(item.conditions.items())))
            for item in self.figures
        ]
        if len(set(trainings)) < len(trainings):
            raise ValueError("two figures are of the same training")
        return self

    @property
    def summary(self) -> str:
        """Authors, year, what was compared, and on what."""
        names = [name.split()[-1] for name in self.authors]
        authors = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
        machines = "; ".join(machine.text for machine in self.hardware)
        return f"{authors or self._nameless} ({self.dated}): {self.compares}; {machines}"

    @property
    def citation(self) -> str:
        authors = ", ".join(self.authors) or self._nameless
        return f"{authors}: {self.title} ({self.dated})"

    @property
    def dated(self) -> str:
        return "no date" if self.year is None else str(self.year)

    @property
    def _nameless(self) -> str:
        return f"authors not stated{f', {self.affiliation}' if self.affiliation else ''}"

    def digit(self, figures: Figures, metric: str) -> float | None:
        """Unit of the figure's last printed digit, in the metric's; None where it is not known."""
        return {**self.rounding, **figures.rounding}.get(metric)

    def half_unit(self, figures: Figures, metric: str) -> float:
        """By how much rounding may have moved the printed figure, either way."""
        return (self.digit(figures, metric) or 0.0) / 2

    def machine(self, figures: Figures | None) -> Hardware:
        """What the figures were measured on."""
        name = None if figures is None else figures.hardware
        return next((one for one in self.hardware if one.name == name), self.hardware[0])

    def fewest_ranks(self, figures: Figures) -> Figures:
        """The same strategy under the same conditions on the fewest ranks."""
        return min(
            (one for one in self.figures if _alike(one, figures) and one.title == figures.title),
            key=lambda one: one.world_size,
        )

    def reference_of(self, figures: Figures) -> Figures | None:
        """The reference under the same conditions: at as many ranks, else on the fewest."""
        return min(
            (
                one
                for one in self.figures
                if _alike(one, figures) and one.strategy == self.reference
            ),
            key=lambda one: (one.world_size != figures.world_size, one.world_size),
            default=None,
        )


def _alike(one: Figures, other: Figures) -> bool:
    return one.conditions == other.conditions and one.hardware == other.hardware
