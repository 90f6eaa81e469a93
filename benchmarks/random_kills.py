"""Kills workers, servers and whole trials of parameter servers at random moments.

    python benchmarks/random_kills.py [--trials 60] [--seed 0]
        [--victims worker] [--strategies ps-async]

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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from recording import Table, options_of, store, surroundings
from sides import add_sources_to_path

NAME = "random_kills"
STRATEGIES = ("ps-sync", "ps-async", "ps-bounded")
VICTIMS = ("worker", "server", "everything")
LATEST_SECONDS = 10.0
LONGEST_SECONDS = 15
"""From the kill to the trial's end, where the death ends it."""


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

    def __init__(self, out: Path, seed: int, victims: Sequence[str]) -> None:
        self._out = out
        self._victims = victims
        self._random = random.Random(seed)
        self.killed: dict[str, str] = {}
        self.connected: set[str] = set()
        """Trials whose worker was killed when all ranks had found each other."""
        self._killed_at_seconds = 0.0
        self.seconds_to_end: dict[str, float] = {}

    def planned(self, *_: object) -> None: ...
    def trial_stepped(self, *_: object) -> None: ...
    def note(self, *_: object) -> None: ...
    def doing(self, *_: object) -> None: ...

    def trial_started(self, number: int, total: int, trial: Any) -> None:  # noqa: ARG002
        victim = self._random.choice(self._victims)
        pause = self._random.uniform(0.2, LATEST_SECONDS)
        worker = self._random.choice((0, 1))
        told = (trial.id, victim, pause, worker)
        threading.Thread(target=self._kill, args=told, daemon=True).start()

    def trial_ended(self, number: int, total: int, result: Any) -> None:  # noqa: ARG002
        if result.id in self.killed:
            self.seconds_to_end[result.id] = time.monotonic() - self._killed_at_seconds

    def _kill(self, trial: str, victim: str, pause: float, worker: int) -> None:
        time.sleep(pause)
        rank = 2 if victim == "server" else worker
        record = self._out / "trials" / trial / f"rank-{rank}.json"
        with suppress(OSError, ValueError, psutil.Error):
            process = psutil.Process(json.loads(record.read_text())["pid"])
            if all((record.parent / f"joined-{rank}.txt").exists() for rank in range(3)):
                self.connected.add(trial)
            if victim == "everything":
                os.killpg(os.getpgid(process.pid), signal.SIGKILL)  # the trial's group
            else:
                process.kill()
            self._killed_at_seconds = time.monotonic()
            self.killed[trial] = victim


def judged(trials: Sequence[Any], killer: Killer) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How often what was killed led to what, and every outcome that is wrong."""
    seen: Counter[tuple[str, str]] = Counter()
    wrong = []
    for result in trials:
        victim = killer.killed.get(result.id, "nobody")
        can_be_missed = victim == "worker" and result.strategy != "ps-sync"
        early = can_be_missed and result.id not in killer.connected
        fine = result.outcome == "ok" and (can_be_missed or victim == "nobody")
        # A death before all ranks were connected cannot be missed.
        named = result.outcome == "failed" and victim != "nobody" and (not can_be_missed or early)
        late = named and killer.seconds_to_end[result.id] > LONGEST_SECONDS
        if not (fine or named) or late:
            wrong.append(f"{result.id}, {victim} killed: {result.outcome}: {result.failure}")
        when = " while starting" if early else ""
        without = " without it" if any(rank.lost for rank in result.ranks) else ""
        key = (result.strategy, f"{victim}{when}")
        seen[f"{key[0]}: {key[1]}", f"{result.outcome}{without}"] += 1
    return seen, wrong


def measured(options: argparse.Namespace) -> tuple[Any, Killer, list[str]]:
    """The run, its killer, and what was left behind."""
    import shardmark
    from shardmark.config.load import from_mapping
    from shardmark.launch.controller import run_experiment

    repeats = -(-options.trials // len(options.strategies))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        killer = Killer(out, options.seed, options.victims)
        mapping = experiment(options.strategies, repeats)
        run_experiment(from_mapping(mapping), out, progress=killer)
        loaded = shardmark.load(out)
        left = [f"half-written {path.name}" for path in out.rglob("*.part*")]
        left += [f"process {p.name()}" for p in psutil.Process().children(recursive=True)]
        left += [f"damaged {damaged}" for damaged in loaded.damaged]
    return loaded, killer, left


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.small:
        options.trials = 6
    add_sources_to_path()
    around = surroundings()
    loaded, killer, left = measured(options)
    seen, wrong = judged(loaded.trials, killer)
    waited = [
        killer.seconds_to_end[trial.id]
        for trial in loaded.trials
        if trial.id in killer.seconds_to_end and trial.outcome == "failed"
    ]
    ends = f"median {median(waited):.1f} s, at most {max(waited):.1f} s" if waited else "none"
    store(
        NAME,
        options=options,
        around=around,
        bar=f"Bar: every outcome right, within {LONGEST_SECONDS} s of the kill, nothing left",
        holds=not wrong and not left,
        table=Table(
            columns=("strategy: killed", "outcome", "trials"),
            rows=tuple((*what, str(count)) for what, count in sorted(seen.items())),
            notes=(
                f"Killed in {len(killer.killed)} of {len(loaded.trials)} trials, between 0.2 and "
                f"{LATEST_SECONDS:g} s after the start. From the kill to the end of a trial it "
                f"failed: {ends}.",
                f"Wrong: {'; '.join(wrong) or 'none'}. Left behind: {', '.join(left) or 'none'}.",
            ),
        ),
        numbers={
            "outcomes": [[*what, count] for what, count in sorted(seen.items())],
            "kills": len(killer.killed),
            "seconds_to_end": waited,
        },
    )


if __name__ == "__main__":
    main()
