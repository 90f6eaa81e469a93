"""A model whose ranks die as the environment says: for trials that are restarted."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardmark.core.environment_variables import RESTART_VARIABLE
from tests.distributed.models import small
from tests.kept_engine import DEATHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """In its pass of that number, a rank of so many processes sends SIGKILL to the victim."""

    rank: int
    processes: int
    victim: int
    at_pass: int
    times: int = 1
    """How often; each leaves a file in the plan's folder, so that it is not died again."""


def plan(file: Path, folder: Path, *deaths: Death) -> str:
    """Write who is to die; the file's name, for the environment.  The folder has who died."""
    file.write_text(json.dumps({"folder": str(folder), "deaths": [asdict(d) for d in deaths]}))
    return str(file)


class Dying(nn.Module):
    """A small network; something happens to it in a forward pass for training."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.network = small(num_classes)
        self._passes = 0
        file = Path(os.environ.get(DEATHS, "no plan"))
        told: dict[str, Any] = {"folder": "", "deaths": []}
        if file.exists():
            told = json.loads(file.read_text())
        self._folder = Path(told["folder"])
        self._deaths = [Death(**death) for death in told["deaths"]]
        self._trial = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        if self._deaths:
            self._pid_file(int(os.environ["RANK"])).write_text(str(os.getpid()))

    def forward(self, pictures: Tensor) -> Tensor:
        self._passes += self.training
        for death in self._deaths if self.training else ():
            if self._passes == death.at_pass:
                self._die(death)
        logits: Tensor = self.network(pictures)
        return logits

    def _pid_file(self, rank: int) -> Path:
        return self._folder / f"{self._trial}.{rank}.pid"

    def _die(self, death: Death) -> None:
        here = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        died = len(list(self._folder.glob(f"{self._trial}.{death.rank}.*.died")))
        # Of two that die together, the launcher may end one first: it is not to die later.
        late = death.times == 1 and os.environ.get(RESTART_VARIABLE, "0") != "0"
        if here == (death.rank, death.processes) and died < death.times and not late:
            (self._folder / f"{self._trial}.{death.rank}.{died}.died").touch()
            os.kill(int(self._pid_file(death.victim).read_text()), signal.SIGKILL)


def dying(num_classes: int) -> nn.Module:
    return Dying(num_classes)
