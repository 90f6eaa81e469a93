"""Parts of a published study: its machines, its batch, a table by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator


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
