"""Kills workers, servers and whole trials of parameter servers at random moments.

    python benchmarks/random_kills.py [--trials 50] [--seed 0]

Every trial must end with the right outcome, within seconds, and leave no process and no result
half written: a worker that can be missed (`ps-async`, `ps-bounded`) leaves the others training, any
other death fails the trial.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from sides import add_sources_to_path

STRATEGIES = ("ps-sync", "ps-async", "ps-bounded")
VICTIMS = ("worker", "server", "everything")
LONGEST_SECONDS = 30


def experiment(strategies: list[str], repeats: int) -> dict[str, Any]:
    return {
        "name": "random-kills",
        "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
        "recipe": {"global_batch": 16, "steps": 30, "optimizer": {"name": "sgd", "lr": 0.01}},
        "matrix": {"strategy": strategies, "world_size": [2]},
        "measure": {"warmup_steps": 1, "verify": False, "repeats": repeats, "evaluate": "end"},
        "limits": {"trial_seconds": 120},
        "device": "cpu",
    }


class Killer:
    """Told of each trial by the controller; kills once, a random while after it has begun."""

    def __init__(self, out: Path, seed: int) -> None:
        self._out = out
        self._random = random.Random(seed)
        self.killed: dict[str, str] = {}

    def planned(self, *_: object) -> None: ...
    def trial_stepped(self, *_: object) -> None: ...
    def trial_ended(self, *_: object) -> None: ...
    def note(self, *_: object) -> None: ...

    def trial_started(self, number: int, total: int, trial: Any) -> None:  # noqa: ARG002
        victim = self._random.choice(VICTIMS)
        pause = self._random.uniform(0.2, 5.0)
        worker = self._random.choice((0, 1))
        told = (trial.id, victim, pause, worker)
        threading.Thread(target=self._kill, args=told, daemon=True).start()

    def _kill(self, trial: str, victim: str, pause: float, worker: int) -> None:
        time.sleep(pause)
        rank = 2 if victim == "server" else worker
        record = self._out / "trials" / trial / f"rank-{rank}.json"
        with suppress(OSError, ValueError, psutil.Error):
            process = psutil.Process(json.loads(record.read_text())["pid"])
            if victim == "everything":
                os.killpg(os.getsid(process.pid), signal.SIGKILL)  # the launcher's session
            else:
                process.kill()
            self.killed[trial] = victim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    add_sources_to_path()
    import shardmark
    from shardmark.experiment.load import from_mapping
    from shardmark.launch.controller import run_experiment

    repeats = -(-options.trials // len(STRATEGIES))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        killer = Killer(out, options.seed)
        run_experiment(from_mapping(experiment(list(STRATEGIES), repeats)), out, progress=killer)
        loaded = shardmark.load(out)
        halves = [str(path) for path in out.rglob("*.part*")]
        left = [p.cmdline() for p in psutil.Process().children(recursive=True)]
    seen: Counter[str] = Counter()
    wrong = []
    for result in loaded.trials:
        victim = killer.killed.get(result.id, "nobody")
        lost = [rank.rank for rank in result.ranks if rank.lost is not None]
        missed = victim == "worker" and result.strategy != "ps-sync"
        fine = result.outcome == "ok" and (missed or victim == "nobody")
        # A death before all ranks were connected cannot be missed.
        named = result.outcome == "failed" and victim != "nobody"
        if not (fine or named) or result.total_seconds > LONGEST_SECONDS:
            wrong.append((result.id, victim, str(result.outcome), result.failure))
        seen[
            f"{result.strategy}, {victim} killed: {result.outcome}{' without it' * bool(lost)}"
        ] += 1
    for line, count in sorted(seen.items()):
        print(f"{count:3} x {line}")
    print(f"killed in {len(killer.killed)} of {len(loaded.trials)} trials")
    print(
        f"wrong outcomes: {wrong or 'none'}; processes left: {left or 'none'}; "
        f"half-written files: {halves or 'none'}; damaged results: {list(loaded.damaged) or 'none'}"
    )


if __name__ == "__main__":
    main()
