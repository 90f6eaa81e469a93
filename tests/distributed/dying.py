"""A model whose ranks die as the environment says: for trials that are restarted."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardmark.core.environment_variables import RESTART_VARIABLE
from tests.distributed.models import small
from tests.kept_engine import DEATHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """In its step of that number, a rank of so many processes sends SIGKILL to the victim."""

    rank: int
    processes: int
    victim: int
    at_step: int
    times: int = 1
    """How often; each leaves a file in the plan's folder, so that it is not died again."""


def plan(file: Path, folder: Path, *deaths: Death) -> str:
    """Write who is to die; the file's name, for the environment.  The folder has who died."""
    file.write_text(json.dumps({"folder": str(folder), "deaths": [asdict(d) for d in deaths]}))
    return str(file)


class Dying(nn.Module):
    """Something happens to the network in a forward pass for training."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._seeds: set[int] = set()  # one for each step, whatever its micro-batches
        file = Path(os.environ.get(DEATHS, "no plan"))
        told: dict[str, Any] = {"folder": "", "deaths": []}
        if file.exists():
            told = json.loads(file.read_text())
        self._folder = Path(told["folder"])
        self._deaths = [Death(**death) for death in told["deaths"]]
        self._trial = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        if self._deaths:
            self._pid_file(int(os.environ["RANK"])).write_text(str(os.getpid()))

    def forward(self, given: Tensor) -> Tensor:
        if self.training:
            self._seeds.add(torch.initial_seed())
        for death in self._deaths if self.training else ():
            if len(self._seeds) == death.at_step:
                self._die(death)
        out: Tensor = self.network(given)
        return out

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
    return Dying(small(num_classes))


class Layers:
    """A task whose layers and sequences can be divided, and cut into stages."""

    def model(self) -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        return nn.Sequential(nn.Linear(16, 32), *map(Dying, blocks), nn.Linear(32, 10))

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:  # noqa: ARG002
        return {"*.network.0": "column", "*.network.2": "row"}

    def sequence_plan(self, model: nn.Module) -> dict[str, str]:  # noqa: ARG002
        return {"*.network.0": "after", "*.network.2": "before"}

    def sequence_part(
        self, batch: tuple[Tensor, Tensor], index: int, count: int
    ) -> tuple[Tensor, ...]:
        return tuple(each.chunk(count, dim=1)[index] for each in batch)

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        """Four positions of 16 numbers, and a class of each."""
        drawn = torch.Generator().manual_seed(7)
        classes = torch.arange(4)
        return [
            (torch.randn(4, 16, generator=drawn), (classes + index) % 10) for index in range(320)
        ]

    def validation_data(self) -> list[tuple[Tensor, Tensor]]:
        return self.train_data()[:40]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        inputs, labels = batch
        outputs = model(inputs).flatten(0, 1)
        total = functional.cross_entropy(outputs, labels.flatten(), reduction="sum")
        return total / 4, labels.numel() / 4
