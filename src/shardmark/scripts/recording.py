"""Instructions for the processes of an audited script: record steps, or replay recorded ones."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

PLAN_VARIABLE = "SHARDMARK_AUDIT"
PROCESS_FILE = "process.json"
"""File beside the records that describes the interpreter of rank 0."""
STEPS = 3
"""Default number of optimizer steps that are compared."""
LONGEST_SECONDS = 900.0
"""Default time limit of each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Instructions for the hooks in the processes of one start of the script."""

    directory: str
    """Folder of the records of this start."""
    steps: int
    """Number of optimizer steps after which the script is ended."""
    until_epoch: bool = False
    """Skip the steps before the last window of the first epoch."""
    deterministic: bool = False
    """Seed all generators, and switch dropout off."""
    recorded: str | None = None
    """Folder of the ranks' records that are replayed; None to record."""
    order: tuple[int, ...] = ()
    """Ranks in the order in which their shares are put together."""
    interleaved: bool = False
    """Give the ranks' micro-batches one after another: one process takes `ranks` times as many."""
    sections: int = 1
    """Sections of the ranks' batches, whose first ones come first: 2 may hold pairs of samples."""
    revision: str = ""
    """Commit of the script's repository that this start checks out in its private copy."""
    interventions: str = ""
    """Interventions of this start, in the form of `interventions.text_of`."""
    guided: bool = False
    """Give every rank of this start its share of the records, which are of another script."""
    pairs: dict[str, str] = field(default_factory=dict)
    """Recorded name of each parameter to which a guided start gives recorded weights."""
    merged: int = 1
    """Number of successive batches that a guided start joins to one."""
    divided: int = 1
    """Number of batches that a guided start makes of one."""
    batch_norm: Literal["batch", "shares"] = "batch"
    """Rows over which batch norm takes its statistics in a replay: all, or those of each rank."""
    grows: bool = True
    """Let a replay's draws outside of the model have the rows of all ranks."""
    divided_terms: tuple[str, ...] = ()
    """Terms of the loss that a replay divides: their keys, or their numbers in its graph."""
    divisor: float = 0.0
    """Number that it divides them by; 0 for that of the ranks whose samples it gets."""
    perturbed: bool = False
    """Change the initial weights of a replay by one rounding, to see what rounding does."""
    observer: str = "shardmark.scripts.observer:Observer"
    """`module:class` of the object that the hooks call."""

    @property
    def replays(self) -> bool:
        return self.recorded is not None

    def variables(self) -> dict[str, str]:
        """Environment variables that pass the plan to the script's processes."""
        return {PLAN_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Plan:
        facts = json.loads(os.environ[PLAN_VARIABLE])
        return cls(**facts | {"order": tuple(facts["order"])})


GROWN = "grown"
"""File of a replay in which a draw had the rows of all ranks."""


def rank_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank-{rank}.pt"
