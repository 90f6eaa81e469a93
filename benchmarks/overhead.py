"""What measuring costs: the speed of a step under `shardmark run` over that of a bare loop.

    python benchmarks/overhead.py [--pairs 9] [--steps 65] [--strategies single ddp] [--small]

A pair is a run of one trial with all metrics on, and `bare_loop.py`: both live at the same time and
take turns of a few seconds, the other one's processes stopped meanwhile (SIGSTOP).  A machine whose
speed changes from minute to minute changes for both.  Steps that lie in one turn count; those of
the warm-up do not.  Which one goes first alternates from turn to turn, and from pair to pair.

A virtual machine may be given less than its cores, and not the same in every turn.  Therefore the
processor's time a step stands beside the ratio of speeds: both sides' processes, all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from recording import Table, options_of, spread, store, surroundings
from shardmark.core.environment_variables import ALLOCATOR
from sides import (
    GLOBAL_BATCH,
    WARMUP_STEPS,
    add_sources_to_path,
    bare_command,
    experiment_of,
    ranks_of,
    script_variables,
)

NAME = "overhead"
STRATEGIES = ("single", "ddp", "fsdp", "zero-1")
LEAST_RATIO = 0.99
UNIT = "samples/s"
TURN_SECONDS = 4.0
START_SECONDS = 180.0
SIDE_SECONDS = 900.0
Turn = tuple[float, float]
"""Unix times between which a side ran and the other was stopped."""


def check_same_settings() -> None:
    """The bare loop writes DeepSpeed's options out; they must be those of the strategy."""
    from bare_loop import SGD, ZERO
    from shardmark.core.recipe import Optimizer, Recipe
    from shardmark.strategies import build_strategy

    recipe = Recipe(global_batch=64, steps=1, optimizer=Optimizer(name="sgd", **SGD))
    ours = build_strategy("zero-1", {}).config(recipe, "cpu")
    assert ours == ZERO, f"zero-1 is set up as {ours}, the bare loop as {ZERO}"


class Side:
    """A command with all processes that it starts, which can be stopped and go on."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
        self.turns: list[Turn] = []
        self.spent: list[float] = []
        """Processor seconds of all its processes, by turn."""

    def _seconds_spent(self) -> float:
        spent: list[float] = []
        # With what their ended children had spent: else a turn in which one ends has too little.
        self._each(lambda process: spent.append(sum(process.cpu_times()[:4])))
        return sum(spent)

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            for process in (top, *top.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    act(process)

    def stop(self) -> None:
        self._each(psutil.Process.suspend)

    def go_on(self) -> None:
        self._each(psutil.Process.resume)

    def take_turn(self, seconds: float) -> None:
        before = self._seconds_spent()
        self.go_on()
        began = time.time()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.turns.append((began, time.time()))
        self.stop()
        self.spent.append(self._seconds_spent() - before)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def run_until(self, warm: Callable[[], bool]) -> None:
        """Let it start up and warm up; then it is stopped."""
        until = time.monotonic() + START_SECONDS
        while not warm():
            if not self.runs or time.monotonic() > until:
                raise SystemExit(f"did not get warm:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.02)
        self.stop()

    def finish(self) -> None:
        self.go_on()
        if self._process.wait(SIDE_SECONDS):
            raise SystemExit(f"failed:\n{self._log.read_text()[-4000:]}")

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        self._each(psutil.Process.kill)
        self._process.wait()


@contextmanager
def side(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[Side]:
    started = Side(command, log, variables)
    try:
        yield started
    finally:
        started.end()


def step_seconds(starts: Sequence[float], turns: Sequence[Turn]) -> list[list[float]]:
    """For each turn, how long its whole steps lasted, from one start to the next."""
    steps = list(itertools.pairwise(starts))[WARMUP_STEPS:]
    return [
        [after - before for before, after in steps if began <= before and after <= ended]
        for began, ended in turns
    ]


def spent_a_step(side: Side, starts: Sequence[float], turns: int) -> float:
    """Processor seconds of all its processes over the steps begun in its first turns."""
    begun = [sum(began <= at <= ended for at in starts) for began, ended in side.turns[:turns]]
    return sum(side.spent[:turns]) / sum(begun)


def measure_pair(strategy: str, pair: int, *, steps: int) -> dict[str, Any]:
    threads = threads_of(ranks_of(strategy))
    return pair_of(
        strategy,
        pair,
        experiment=experiment_of([strategy], steps, 1, WARMUP_STEPS),
        bare=lambda out: bare_command(strategy, steps=steps, threads=threads, out=out),
        threads=threads,
        a_step=GLOBAL_BATCH,
    )


def threads_of(ranks: int) -> int:
    """Of each rank."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def pair_of(
    strategy: str,
    pair: int,
    *,
    experiment: dict[str, Any],
    bare: Callable[[Path], Sequence[str]],
    threads: int,
    a_step: int,
    unit: str = UNIT,
    turn_seconds: float = TURN_SECONDS,
) -> dict[str, Any]:
    """The ratio of speeds over all turns in which both have whole steps.

    `bare` gives the other side's command, which writes into a folder what `bare_loop.py` does;
    `a_step` is what both train in a step, in the unit.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # The other side uses the cores meanwhile, which would be measured again.
        experiment["measure"] |= {"verify": False, "max_remeasure": 0}
        (folder / "overhead.yaml").write_text(yaml.safe_dump(experiment))
        (folder / "bare").mkdir()
        command = [sys.executable, "-m", "shardmark", "run", str(folder / "overhead.yaml")]
        with side([*command, "--out", str(folder / "run")], folder / "run.log", os.environ) as ours:
            ours.run_until(lambda: steps_taken(folder / "run") > WARMUP_STEPS)
            with side(
                bare(folder / "bare"), folder / "bare.log", script_variables(threads)
            ) as other:
                other.run_until((folder / "bare" / "0.warm").exists)
                first, second = (ours, other) if pair % 2 == 0 else (other, ours)
                while ours.runs and other.runs:
                    first.take_turn(turn_seconds)
                    second.take_turn(turn_seconds)
                    first, second = second, first
                ours.finish()
                other.finish()
        recorded = json.loads((folder / "run" / "environment.json").read_text())["variables"]
        report = json.loads((folder / "bare" / "0.json").read_text())
        allocator = {name: recorded[name] for name in ALLOCATOR}
        assert report.get("allocator", allocator) == allocator, "both sides have one allocator"
        told = [json.loads(line) for line in next((folder / "run").rglob("steps.jsonl")).open()]
        our_starts = [line["started_at_seconds"] for line in told if line["rank"] == 0]
        starts = report["steps_at_seconds"]
        times = {
            "shardmark": step_seconds(our_starts, ours.turns),
            "bare": step_seconds(starts, other.turns),
        }
        # In the last turn either side may have ended, and what it spent is not known.
        whole = max(1, len(ours.turns) - 1)
        spent_ratio = spent_a_step(other, starts, whole) / spent_a_step(ours, our_starts, whole)
    turns = [turn for turn in zip(*times.values(), strict=True) if all(turn)]
    means = [[statistics.fmean(seconds) for seconds in turn] for turn in turns]
    logs = [math.log(bare_seconds / our_seconds) for our_seconds, bare_seconds in means]
    ratio = math.exp(statistics.fmean(logs))
    counted = [sum(len(turn[index]) for turn in turns) for index in (0, 1)]
    speeds = [a_step / statistics.fmean(mean[index] for mean in means) for index in (0, 1)]
    print(
        f"{strategy} pair {pair}: shardmark {speeds[0]:.1f}, bare {speeds[1]:.1f} {unit}, "
        f"ratio {ratio:.4f}, by processor time {spent_ratio:.4f} "
        f"({len(turns)} turns, {counted[0]} and {counted[1]} steps)",
        flush=True,
    )
    return {
        **dict(zip(times, speeds, strict=True)),
        "ratio": ratio,
        "processor_ratio": spent_ratio,
        "steps": counted,
        "turns": [math.exp(value) for value in logs],
        "first": "shardmark" if pair % 2 == 0 else "bare",
        "allocator": allocator,
    }


def steps_taken(run: Path) -> int:
    """By rank 0 of the trial under way."""
    import struct

    for path in run.rglob("rank-0.progress"):
        with suppress(OSError, struct.error):
            return int(struct.unpack_from("<q", path.read_bytes())[0])
    return 0


def options_from(name: str, text: str | None, strategies: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a benchmark that takes pairs."""
    parser = options_of(name, text)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--steps", type=int, help="of each training, the 5 of the warm-up included")
    parser.add_argument("--strategies", nargs="+", choices=strategies, default=[*strategies])
    return parser


def measure(
    name: str,
    options: argparse.Namespace,
    measure_pair: Callable[[str, int], dict[str, Any]],
    *,
    least_ratios: Mapping[str, float],
    starts: int | None = None,
    unit: str = UNIT,
) -> None:
    """Take the pairs of every strategy in turns, and store what came of them.

    With `starts`, both sides of a strategy start so often, and the pairs are all their turns.
    """
    pairs = options.pairs or (2 if options.small else 9)
    around = surroundings()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in options.strategies}
    for pair in range(starts or pairs):
        for strategy in options.strategies:
            measured[strategy].append(measure_pair(strategy, pair))
    taken = {
        name: [turn for one in found for turn in (one["turns"] if starts else [one["ratio"]])]
        for name, found in measured.items()
    }
    ratios = {name: spread(values) for name, values in taken.items()}
    medians = {
        side: {n: spread([one[side] for one in found])["median"] for n, found in measured.items()}
        for side in ("shardmark", "bare")
    }
    table = Table(
        columns=(
            *("strategy", f"shardmark {unit}", f"bare {unit}"),
            *("ratio: median", "min", "max", "IQR", "by processor time", "pairs", "steps a side"),
        ),
        rows=tuple(
            (
                name,
                f"{medians['shardmark'][name]:.1f}",
                f"{medians['bare'][name]:.1f}",
                f"{ratio['median']:.3f}",
                f"{ratio['min']:.3f}",
                f"{ratio['max']:.3f}",
                f"{ratio['interquartile_range']:.3f}",
                f"{spread([pair['processor_ratio'] for pair in measured[name]])['median']:.3f}",
                str(len(taken[name])),
                str(min(min(pair["steps"]) for pair in measured[name])),
            )
            for name, ratio in ratios.items()
        ),
    )
    bars = {
        least: [n for n in options.strategies if least_ratios[n] == least]
        for least in sorted({least_ratios[n] for n in options.strategies})
    }
    told = "; ".join(f"{least:g} for {', '.join(names)}" for least, names in bars.items())
    store(
        name,
        options=options,
        around=around,
        bar=f"Bar: the median of shardmark / bare is at least {told}",
        holds=all(ratio["median"] >= least_ratios[name] for name, ratio in ratios.items()),
        table=table,
        numbers={"ratios": ratios, "pairs": measured},
    )


def main() -> None:
    options = options_from(NAME, __doc__, STRATEGIES).parse_args()
    add_sources_to_path()
    check_same_settings()
    steps = options.steps or (25 if options.small else 75)
    measure(
        NAME,
        options,
        partial(measure_pair, steps=steps),
        least_ratios=dict.fromkeys(STRATEGIES, LEAST_RATIO),
    )


if __name__ == "__main__":
    main()
