"""How far each rank has come, in a memory-mapped file: one store a step, no system call."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

FORMAT = "<q"
SIZE = struct.calcsize(FORMAT)
"""Of each of two numbers: steps taken, steps in all."""


def progress_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.progress"


class Progress:
    """The writing side, in a rank."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped

    @classmethod
    @contextmanager
    def opened(cls, directory: Path, rank: int, total_steps: int) -> Iterator[Self]:
        path = progress_file(directory, rank)
        path.write_bytes(bytes(SIZE) + struct.pack(FORMAT, total_steps))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 2 * SIZE) as mapped:
            yield cls(mapped)

    def update(self, steps: int) -> None:
        """Note how many steps have been taken."""
        struct.pack_into(FORMAT, self._mapped, 0, steps)


def steps_taken(directory: Path, rank: int) -> int | None:
    """How many steps a rank has taken; None before it has begun."""
    return _number(directory, rank, place=0)


def steps_in_all(directory: Path, rank: int) -> int | None:
    """How many steps a rank is to take; None before it has begun."""
    return _number(directory, rank, place=1)


def _number(directory: Path, rank: int, *, place: int) -> int | None:
    try:
        content = progress_file(directory, rank).read_bytes()
        return int(struct.unpack_from(FORMAT, content, place * SIZE)[0])
    except (OSError, struct.error):
        return None
