"""What a published study states beside its tables: ratios, ranges, findings in words, remarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from shardmark.analysis.studies.parts import Published


class Named(Published):
    """A strategy, or the words of a study that does not say which of several it was."""

    strategy: str | None = None
    """In this package's names; None where the study does not say which it was."""
    label: str | None = None
    """In words, for a strategy without a name."""
    any_of: tuple[str, ...] = ()
    """The strategies that the words may mean, in this package's names."""
    world_size: PositiveInt | None = None
    nodes: PositiveInt | None = None
    """Machines, where the words are about them: what is measured on as many is then held against
    the words, on however many ranks."""

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

    @property
    def words(self) -> str:
        """With its ranks and nodes, where they are stated."""
        counts = ((self.world_size, "rank"), (self.nodes, "node"))
        parts = [f"{count} {of}{'' if count == 1 else 's'}" for count, of in counts if count]
        return f"{self.title} on {' of '.join(parts)}" if parts else self.title


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
    """For what is no number: the study's finding in few words, close to its own."""
    order: Literal["lowest", "second lowest", "highest"] | None = None
    """As which place among the study's trainings the words are read."""
    linear: bool = False
    """Whether the words are read as: the time falls as the number of devices grows."""
    conditions: Mapping[str, Any] = Field(default_factory=dict)
    hardware: str | None = None
    place: str

    @model_validator(mode="after")
    def _reads_words(self) -> Statement:
        if (self.order is not None or self.linear) and self.text is None:
            raise ValueError("order and linear say how a text is read; there is no text")
        return self


class Remark(Published):
    """Something to know about a figure, e.g. that it contradicts another one of the study."""

    kind: Literal["contradiction", "definition", "advice"]
    text: str
    place: str
    source: str | None = None
