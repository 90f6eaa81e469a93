"""What a published study states: figures with their places, conditions, hardware, and its gaps.

Keys are those of the rest of the package (metrics of the catalogue in base units, keys of the
experiment file), so that a study can be held against a run without a translation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

MEAN_OVER_EPOCHS = frozenset({"epoch_seconds"})
"""Metrics of which a training's figure is the mean over its epochs; of all others it is the last
epoch's."""


class Published(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Hardware(Published):
    """One machine or cluster that figures were measured on."""

    name: str
    """By which figures refer to it."""
    device: str | None
    """As the study names it; None where it does not."""
    device_count: PositiveInt | None
    """On all nodes together."""
    node_count: PositiveInt | None = None
    host: str | None = None
    interconnect: str | None = None
    tokens: tuple[str, ...] = ()
    """Parts of the names of devices of the same kind, as a driver reports them, e.g. `A6000`."""

    @property
    def text(self) -> str:
        """In words, e.g. `4 x NVIDIA A6000 (Lambda Labs)`."""
        count, times = ("", "") if self.device_count is None else (f"{self.device_count} ", "x ")
        device = f"{times}{self.device}" if self.device else "GPUs of a kind not stated"
        nodes = f" on {self.node_count} nodes" if (self.node_count or 1) > 1 else ""
        return f"{count}{device}{nodes}{f' ({self.host})' if self.host else ''}"

    def has(self, device: str) -> bool:
        """Whether the device of that name is of the same kind."""
        return any(token.lower() in device.lower() for token in self.tokens)


class Batch(Published):
    """The batch size, which few studies define."""

    size: PositiveInt
    of: Literal["per rank", "all ranks", "not stated"]


class Epochs(Published):
    """A table with one line per epoch."""

    columns: tuple[str, ...]
    """`epoch` first, then metrics of the catalogue."""
    rows: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _is_a_table(self) -> Epochs:
        if self.columns[:1] != ("epoch",) or len(set(self.columns)) < len(self.columns):
            raise ValueError(f"columns are {self.columns}, not `epoch` first and each once")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} numbers in {row} for {len(self.columns)} columns")
        numbers = [row[0] for row in self.rows]
        if numbers != sorted({float(int(number)) for number in numbers if number >= 1}):
            raise ValueError(f"the epochs {numbers} do not count up in whole numbers from 1")
        return self

    @cached_property
    def by_number(self) -> Mapping[int, Mapping[str, float]]:
        """Epoch, counted from 1 -> metric -> value."""
        names = self.columns[1:]
        return {int(row[0]): dict(zip(names, row[1:], strict=True)) for row in self.rows}


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
    others: Mapping[str, float] = Field(default_factory=dict)
    """Figures that no metric of the catalogue matches, by the name and unit in the study."""

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


class Reference(Published):
    """What a ratio is relative to."""

    strategy: str
    world_size: PositiveInt | None = None


class Statement(Published):
    """A finding that the study states beside its tables, as a number, a range or in words."""

    about: str
    """A metric of the catalogue."""
    strategy: str
    world_size: PositiveInt | None = None
    relative_to: Reference | None = None
    relation: Literal["ratio", "difference"] = "ratio"
    """What the number is of both sides, where it is relative."""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    approximate: bool = False
    text: str | None = None
    """For what is no number, e.g. `highest`."""
    conditions: Mapping[str, Any] = Field(default_factory=dict)
    hardware: str | None = None
    place: str


class Remark(Published):
    """Something to know about a figure, e.g. that it contradicts another one of the study."""

    kind: Literal["plausibility", "contradiction", "definition"]
    text: str
    place: str
    source: str | None = None


class Paper(Published):
    """One study."""

    name: str
    title: str
    authors: tuple[str, ...]
    affiliation: str | None = None
    year: PositiveInt
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
        names = [name.split()[-1] for name in self.authors]
        authors = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        machines = "; ".join(machine.text for machine in self.hardware)
        return f"{authors} ({self.year}): {self.compares}; {machines}"

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
