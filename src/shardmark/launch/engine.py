"""What an engine is: it knows how to start the ranks of a trial somewhere.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shardmark.core.machine import Machine
from shardmark.launch.outcome import Ending
from shardmark.trials.trial import Trial

Task = Literal["measure", "capture", "judge", "links"]
"""What the ranks do: the trial itself, a few steps for `verify`, (one process) the verdicts, or
messages that tell what the links between them can do."""


Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What an engine has to know of an experiment."""

    name: str
    device: str
    """`auto`, `cuda` or `cpu`, as the experiment says."""
    trials: tuple[Trial, ...]
    key: Mapping[str, str]
    """What all nodes of the run must have in common."""
    tell: Tell

    @property
    def nodes(self) -> int:
        """The most that any trial takes."""
        return max(trial.nodes for trial in self.trials)


class Engine(Protocol):
    """Starts trials, one at a time, and leaves none of their processes behind.

    Nodes are numbered from 0, which has the controller's files.  A trial on fewer nodes than there
    are takes the first ones.
    """

    @property
    def samples(self) -> bool:
        """Whether it samples the ranks where they are; else the controller does so, here."""

    def machine(self, device: str) -> Machine:
        """What `device` (auto, cuda or cpu) means on every node: of each, the least.

        Raises `InputError` if it cannot be had, `ShardmarkError` if the nodes do not come.
        """

    def environments(self) -> list[dict[str, Any]]:
        """What the trials are measured on, by node; none where that is the controller's machine."""

    def lacks(self, nodes: int) -> str | None:
        """Why no trial on so many nodes can be started now; None if one can."""

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Prepare for trials whose ranks import these modules."""

    def prepare(self, trial: Trial) -> None:
        """Have all there that the trial needs, before its clock starts; `lacks` tells failures."""

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        """Run the trial described in the folder; `on_tick` is called a few times a second.

        All files of all ranks are in the folder when it returns, the small ones (records, progress)
        soon after they change.  Whatever happens, Ctrl-C or the loss of a node included, the
        trial's processes are gone then, on every node that can be reached.
        """

    def close(self) -> None: ...
