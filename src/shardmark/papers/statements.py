"""What a published study states beside its tables: ratios, ranges, findings in words, remarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from shardmark.papers.parts import Published


class Named(Published):
    """A strategy, or the words of a study that does not say which of several it was."""

    strategy: str | None = None
    """In this package's names; None where the study does not say which it was."""
    label: str | None = None
    """In words, for a strategy without a name."""
    any_of: tuple[str, ...] = ()
    """The strategies that the words may mean, in this package's names."""
    world_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> Named:
        if (self.strategy is None) == (self.label is None):
            raise ValueError("give exactly one of strategy and label")
        return self

    @property
    def title(self) -> str:
        title = self.strategy or self.label
        assert title is not None, "one of them is given"
        return title

    @property
    def strategies(self) -> tuple[str, ...]:
        """All that it may be."""
        return self.any_of if self.strategy is None else (self.strategy,)


class Reference(Named):
    """What a ratio is relative to."""


class Statement(Named):
    """A finding that the study states beside its tables, as a number, a range or in words."""

    about: str
    """A metric of the catalogue."""
    relative_to: Reference | None = None
    relation: Literal["ratio", "difference"] = "ratio"
    """What the number is of both sides, where it is relative."""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    approximate: bool = False
    text: str | None = None
    """For what is no number, e.g. `highest`."""
    order: Literal["lowest", "second lowest", "highest"] | None = None
    """The place that the words claim among the study's trainings."""
    conditions: Mapping[str, Any] = Field(default_factory=dict)
    hardware: str | None = None
    place: str


class Remark(Published):
    """Something to know about a figure, e.g. that it contradicts another one of the study."""

    kind: Literal["plausibility", "contradiction", "definition", "advice"]
    text: str
    place: str
    source: str | None = None
