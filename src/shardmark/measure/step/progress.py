"""How far each rank has come, in a memory-mapped file: one store a step, no system call."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = struct.Struct("<qqdq")
"""Steps taken, steps in all, latest loss, steps taken when that loss was written (0: never)."""
STEPS = struct.Struct("<q")
LOSS = struct.Struct("<dq")
LOSS_OFFSET = 2 * STEPS.size


def progress_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.progress"


class ProgressWriter:
    """Writes a rank's steps and losses for whoever watches, at no cost to what is measured.

    To read a loss on a GPU is to copy it to the host and to wait for the device.  So it is read
    only when a window has closed, with the device idle and the clock stopped.  On a CPU the loss is
    in memory already when the step returns, and reading it waits for nothing.
    """

    def __init__(self, mapped: mmap.mmap, losses: Sequence[Tensor], *, on_host: bool) -> None:
        self._mapped = mapped
        self._losses = losses
        self._on_host = on_host
        self._steps = 0

    @classmethod
    @contextmanager
    def opened(
        cls,
        directory: Path,
        rank: int,
        total_steps: int,
        *,
        losses: Sequence[Tensor] = (),
        on_host: bool = True,
    ) -> Iterator[Self]:
        """`losses` is the recorder's growing list; `on_host`, whether they lie in host memory."""
        path = progress_file(directory, rank)
        path.write_bytes(WHOLE.pack(0, total_steps, 0.0, 0))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), WHOLE.size) as mapped:
            yield cls(mapped, losses, on_host=on_host)

    def stepped(self, steps: int) -> None:
        """After each step, inside the window: so many steps of the training have been taken."""
        self._steps = steps
        STEPS.pack_into(self._mapped, 0, steps)
        if self._on_host:
            self._write_loss()

    def lengthen(self, total_steps: int) -> None:
        """Steps are added: there are so many now."""
        STEPS.pack_into(self._mapped, STEPS.size, total_steps)

    def window_started(self) -> None: ...

    def window_stopped(self) -> None:
        self._write_loss()

    def _write_loss(self) -> None:
        if self._losses:
            LOSS.pack_into(self._mapped, LOSS_OFFSET, self._losses[-1].item(), self._steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far one rank has come."""

    steps: int
    total_steps: int
    loss: float | None
    """The latest that the rank could write; it may be of an earlier step."""
    loss_steps: int | None
    """Steps that had been taken when it was."""


def reached(directory: Path, rank: int) -> Reached | None:
    """How far a rank has come; None before it has begun."""
    try:
        content = progress_file(directory, rank).read_bytes()
        steps, total_steps, loss, loss_steps = WHOLE.unpack(content)
    except (OSError, struct.error):
        return None
    written = loss_steps > 0
    return Reached(
        steps=steps,
        total_steps=total_steps,
        loss=loss if written else None,
        loss_steps=loss_steps if written else None,
    )
