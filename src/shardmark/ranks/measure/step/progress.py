"""Progress of each rank in a memory-mapped file: one store for each step, no system call."""

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

RECORD = struct.Struct("<qqdq")
"""Steps so far, total steps or 0, latest loss, steps when that loss was written (0: never)."""
STEPS = struct.Struct("<q")
LOSS = struct.Struct("<dq")
LOSS_OFFSET = 2 * STEPS.size


def progress_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.progress"


class ProgressWriter:
    """Writes a rank's steps and losses for other processes, without slowing measured steps.

    Reading a loss on a GPU copies it to the host and waits for the device.  It is therefore read
    only after a window, with the device idle and the clock stopped.  On a CPU the loss is in memory
    when the step returns.
    """

    def __init__(
        self, mapped: mmap.mmap, losses: Sequence[Tensor | None], *, on_host: bool
    ) -> None:
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
        losses: Sequence[Tensor | None] = (),
        on_host: bool = True,
    ) -> Iterator[Self]:
        """Open the file of a rank; `on_host` is true if the losses are in host memory."""
        path = progress_file(directory, rank)
        path.write_bytes(RECORD.pack(0, total_steps, 0.0, 0))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), RECORD.size) as mapped:
            yield cls(mapped, losses, on_host=on_host)

    def stepped(self, steps: int) -> None:
        """Called after every step with the number of steps so far; does not wait for the device."""
        self._steps = steps
        STEPS.pack_into(self._mapped, 0, steps)
        if self._on_host:
            self._write_loss()

    def lengthen(self, total_steps: int) -> None:
        """Set the number of total steps after some were added."""
        STEPS.pack_into(self._mapped, STEPS.size, total_steps)

    def window_started(self) -> None: ...

    def window_stopped(self) -> None:
        self._write_loss()

    def _write_loss(self) -> None:
        if self._losses and (loss := self._losses[-1]) is not None:
            LOSS.pack_into(self._mapped, LOSS_OFFSET, loss.item(), self._steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """Number of steps and latest loss of one rank."""

    steps: int
    total_steps: int
    loss: float | None
    """The latest loss that the rank could write; it may be that of an earlier step."""
    loss_steps: int | None
    """Number of steps when the loss was written."""


def read_progress(directory: Path, rank: int) -> RankProgress | None:
    """Read the progress of a rank; None before it has begun."""
    try:
        content = progress_file(directory, rank).read_bytes()
        steps, total_steps, loss, loss_steps = RECORD.unpack(content)
    except (OSError, struct.error):
        return None
    written = loss_steps > 0
    return RankProgress(
        steps=steps,
        total_steps=total_steps,
        loss=loss if written else None,
        loss_steps=loss_steps if written else None,
    )
