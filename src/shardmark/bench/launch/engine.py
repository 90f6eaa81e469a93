"""The protocol of engines, which start the ranks of a trial.  Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from shardmark.base.machine import Machine
from shardmark.base.text import canonical
from shardmark.base.version import __version__
from shardmark.bench.launch.outcome import Ending
from shardmark.ranks.measure.system.environment import package_version
from shardmark.ranks.trial import Trial

Task = Literal["measure", "capture", "compare", "links"]
"""Work of the ranks: `measure` runs the trial, `capture` a few steps for `verify`, `compare` (one
process) decides the verdicts, and `links` measures the links between ranks."""


Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """The properties of an experiment that its engine needs."""

    name: str
    device: str
    """`auto`, `cuda` or `cpu`, as the experiment says."""
    trials: tuple[Trial, ...]
    key: Mapping[str, str]
    """Properties that must be the same on all nodes of the run."""
    notify: Notify

    @property
    def nodes(self) -> int:
        """Largest number of nodes of a trial."""
        return max(trial.nodes for trial in self.trials)


class Engine(Protocol):
    """Starts trials, one at a time, and ends all of their processes.

    Node 0 has the controller's files.  A trial on fewer nodes than the engine has uses the first.
    """

    @property
    def samples(self) -> bool:
        """True if the nodes sample their ranks; otherwise the controller does so."""

    def machine(self, device: str) -> Machine:
        """Return the resources that every node has for `device` (auto, cuda or cpu).

        Raises `InputError` without such a device, `ShardmarkError` if nodes do not join.
        """

    def environments(self) -> list[dict[str, Any]]:
        """Return the environment of each node; an empty list for the controller's machine."""

    def unavailable_reason(self, nodes: int) -> str | None:
        """Return why no trial on so many nodes can be started now; None if one can."""

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Import the modules that ranks of the following trials import."""

    def prepare(self, trial: Trial) -> None:
        """Prepare everything outside the trial's timeout.

        `unavailable_reason` reports failures.
        """

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        """Run the trial described in the folder, and call `on_tick` a few times a second.

        All files of all ranks are in the folder when it returns, the small ones (records, progress)
        soon after they change.  The trial's processes have ended then on every node that can be
        reached, also after Ctrl-C or the loss of a node.
        """

    def close(self) -> None: ...


class TurnsRefusedError(Exception):
    """Trials cannot run side by side.  The message is the reason."""


OUT_OF_REACH = 3
"""Exit code of trials in turns: a stop would not reach all of a trial's processes."""


@runtime_checkable
class EngineWithTurns(Engine, Protocol):
    """An engine that also runs several trials side by side, so that they meet the same weather."""

    def run_in_turns(
        self, directories: Sequence[Path], *, trial_seconds: float, on_tick: Callable[[], None]
    ) -> list[Ending]:
        """Run the trials described in the folders, of which one computes at any time, as `run`.

        Raises `TurnsRefusedError`.
        """


def run_key(experiment: Mapping[str, Any]) -> dict[str, str]:
    """Return what must be the same on all nodes: hashes of the experiment's sections, versions."""
    sections = {
        name: hashlib.sha256(canonical(content).encode()).hexdigest()[:16]
        for name, content in experiment.items()
    }
    return sections | library_versions()


def library_versions() -> dict[str, str]:
    """Return the versions that must be the same on every node."""
    torch = str(package_version("torch"))
    return {"version of shardmark": __version__, "version of torch": torch}
