"""A published study: figures of single trainings and claimed ratios, each with its place.

Keys are those of the rest of the package (metrics of the catalogue in base units, keys of the
experiment file), so that a study can be held against a run without a translation.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from shardmark.base.errors import InputError
from shardmark.base.files.strict_yaml import parse_yaml
from shardmark.experiment.messages import nearest

FOLDER = "shardmark.extras.studies"
STATE, TOTAL = "state_bytes", "elapsed_seconds"
DERIVED = (STATE, TOTAL)
"""Metrics of studies that are computed for a row: parameters, gradients and optimizer state of the
fullest rank, and the training time of all epochs without evaluations."""


class _Stated(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Batch(_Stated):
    """The batch size, which few studies define."""

    size: PositiveInt
    of: Literal["per rank", "all ranks", "not stated"]


class Figures(_Stated):
    """Figures that the study states for a training."""

    strategy: str | None
    """The name in this package; None where the study does not say which technique it was."""
    candidates: tuple[str, ...] = ()
    """Strategies that it may have been, if the study does not say which."""
    label: str | None = None
    """The study's title of the training, for example of a column."""
    world_size: PositiveInt
    conditions: Mapping[str, Any] = Field(default_factory=dict)
    """Dotted key -> value, for what varies between the trainings beside strategy and ranks."""
    place: str
    """Section and table."""
    metrics: Mapping[str, float] = Field(default_factory=dict)
    """Metric of the catalogue or of `DERIVED` -> value, in base units."""
    epochs: Mapping[str, tuple[float, ...]] = Field(default_factory=dict)
    """Metric -> value of every epoch."""

    @property
    def title(self) -> str:
        return self.strategy or self.label or "strategy not stated"

    @property
    def headline(self) -> dict[str, float]:
        """Stated values, or values of the epochs: the mean time, and the last of other metrics."""
        from_epochs = {
            name: fmean(values) if name == "epoch_seconds" else values[-1]
            for name, values in self.epochs.items()
        }
        return {**from_epochs, **self.metrics}


class Claim(_Stated):
    """A ratio or difference of two strategies that the study states or that its tables have."""

    says: str
    """The statement in our words."""
    metric: str
    strategies: tuple[str, ...] = Field(min_length=1)
    """Several where the study leaves open which it was."""
    over: tuple[str, ...] = ()
    """Strategies to which it is relative; empty if the study does not state them."""
    over_ranks: PositiveInt | None = None
    """Ranks of the strategy to which it is relative, if these are others: a speed-up."""
    conditions: Mapping[str, Any] = Field(default_factory=dict)
    """Dotted key -> value of the trainings to which it applies."""
    epoch: PositiveInt | None = None
    """Epoch at whose end the metric is compared; None for the value of the training."""
    relation: Literal["ratio", "difference"] = "ratio"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    world_size: PositiveInt | None = None
    nodes: PositiveInt | None = None
    """Machines, where the study speaks of them: then rows on as many count, on any ranks."""
    least_times_ranks: float | None = None
    """Smallest possible ratio times the ranks: sharding divides the state, and nothing else."""
    cannot_mean: str = ""
    """Reason for which the statement cannot mean what it says; empty if it can."""
    place: str


class TableColumn(_Stated):
    """A metric in the study's unit."""

    metric: str
    title: str
    unit: str = ""
    scale: float = 1.0
    """Factor from the base unit."""
    decimals: NonNegativeInt


class PaperTable(_Stated):
    """Layout of a table of the study."""

    title: str
    lines: Literal["epochs", "trainings", "blocks"]
    """A line for each epoch or training, or a block of lines for each metric, with a column for
    each training."""
    strategies: tuple[str, ...] = ()
    """Strategies in the table; empty for all."""
    columns: tuple[TableColumn, ...] = Field(min_length=1)


class Advice(_Stated):
    """A line of the study's table of recommendations."""

    strategies: tuple[str, ...]
    best_for: str
    when: str


class Study(_Stated):
    """A published study; `docs/studies/` discusses its gaps and its arithmetic."""

    name: str
    title: str
    authors: str
    """Full names, or a text that says that none is named."""
    cited: str
    """Short form with the year: `Lamsal (2025)`."""
    compares: str
    """Short description of the comparison and its task."""
    preset: str
    """The experiment of this package that repeats it."""
    conditions: Mapping[str, Any]
    """Dotted key of the experiment file -> value, for all trainings."""
    varied: Mapping[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Dotted key -> values, where the study does not say which claim is of which."""
    batch: Batch | None
    hardware: str
    """Hardware as the study states it, e.g. `4 x NVIDIA A6000 (Lambda Labs)`."""
    device_names: tuple[str, ...] = ()
    """Parts of the names of such devices, as a driver reports them, e.g. `A6000`."""
    reference: str
    """Strategy that the others are related to."""
    figures: tuple[Figures, ...] = ()
    claims: tuple[Claim, ...] = ()
    tables: tuple[PaperTable, ...] = ()
    advice: tuple[Advice, ...] = ()

    @property
    def summary(self) -> str:
        """Authors, year, what was compared, and on what."""
        return f"{self.cited}: {self.compares}; {self.hardware}"

    def fewest_ranks(self, figures: Figures) -> Figures:
        """The same strategy under the same conditions on the fewest ranks."""
        key = figures.title, figures.conditions
        same = [other for other in self.figures if (other.title, other.conditions) == key]
        return min(same, key=lambda other: other.world_size)

    def reference_of(self, figures: Figures) -> Figures | None:
        """The reference under the same conditions: at as many ranks, else on the fewest."""
        key = self.reference, figures.conditions
        same = [other for other in self.figures if (other.strategy, other.conditions) == key]
        size = figures.world_size
        return min(
            same, key=lambda other: (other.world_size != size, other.world_size), default=None
        )


def study_names() -> tuple[str, ...]:
    names = (entry.name for entry in files(FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_study(name: str, option: str = "--view study") -> Study:
    """The study of that name.  Raises `InputError`, with the nearest names, for any other."""
    names = study_names()
    if name not in names:
        allowed = f"allowed are {', '.join(names)}{nearest(name, names, count=3)}"
        raise InputError(option, f"there is no study {name!r}", allowed)
    text = files(FOLDER).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return Study.model_validate(parse_yaml(text, f"study {name}"))


def studies() -> dict[str, str]:
    """Name -> authors, year, what was compared and on what, on one line."""
    return {name: load_study(name).summary for name in study_names()}
