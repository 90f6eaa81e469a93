"""Base class of interventions, and the place of the rank that they change."""

from __future__ import annotations

import json
import pickle
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it lazily

PACKAGE = str(Path(__file__).parents[2])
NAMES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "names.json").read_text())
"""Names in torch and other libraries that the hooks look for, by what they are."""
LIBRARIES = (PACKAGE, *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank of a trial, and the store over which it meets the others."""

    rank: int
    world_size: int
    store: Store

    def exchange(self, name: str, value: object, of_rank: int) -> Any:
        """Give a value to the other ranks, and wait for the one of `of_rank`."""
        self.store.set(f"{name}-{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]  # torch takes bytes
        return pickle.loads(self.store.get(f"{name}-{of_rank}"))


class Intervention:
    """Changes one thing in a rank's interpreter."""

    def __init__(self, place: Place | None, value: str = "") -> None:
        self.value = value
        if place is not None:
            self.place = place

    def install(self) -> None:
        """Prepare the change, before the script starts."""

    def stepped(self, step: int) -> None:
        """Note that so many optimizer steps have ended; called until the warm-up is over."""

    def begin(self) -> None:
        """Make the change: the warm-up is over, and all ranks are here."""

    def facts(self) -> dict[str, object]:
        """Return what was seen, for the trial's record; called when the steps are measured."""
        return {}


def replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper(original, *arguments)` in the place of a function of a class or module."""
    original = getattr(owner, name)

    @wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return wrapper(original, *arguments, **keywords)

    setattr(owner, name, call)


def is_users(frame: FrameType) -> bool:
    """True for a frame of the user's own code."""
    file = frame.f_code.co_filename
    return not file.startswith((*LIBRARIES, "<")) and "site-packages" not in file


def library_of(frame: FrameType | None) -> str:
    """Return the package by which the user's code came to this frame; empty for torch alone."""
    package = ""
    while frame is not None and not is_users(frame):
        if installed := re.search(r"(?:site|dist)-packages[/\\](\w+)", frame.f_code.co_filename):
            package = installed[1]
        frame = frame.f_back
    return "" if package == "torch" else package


def line_of(frame: FrameType | None) -> str | None:
    """Return `FILE:LINE` of the innermost frame of the user's code."""
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None:
        return None
    path, folder = Path(frame.f_code.co_filename), Path.cwd()
    return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{frame.f_lineno}"
