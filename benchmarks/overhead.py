"""What measuring costs: the speed of a step under `shardmark run` over that of a bare loop.

    python benchmarks/overhead.py [--pairs 9] [--steps 65] [--strategies single script] [--small]

A pair is a run of one trial with all metrics on, and `bare_loop.py`.  Both live at the same time
and take turns of a few seconds, while the processes of the other side are stopped (SIGSTOP), so
that a machine whose speed changes from minute to minute changes for both.  Steps inside one turn
count, those of the warm-up do not.  The side that goes first alternates.

A virtual machine may get less than its cores, and not the same share in every turn.  Therefore the
ratio of the processor time of a step, over all processes of each side, stands beside the ratio of
speeds.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from harness import (
    BENCHMARKS,
    GLOBAL_BATCH,
    WARMUP_STEPS,
    Table,
    bare_loop_command,
    experiment_of,
    options_of,
    ranks_of,
    script_variables,
    spread,
    store,
    surroundings,
)
from shardmark.base.system.environment_variables import ALLOCATOR

NAME = "overhead"
SCRIPT = "script"
"""The bare loop itself with ddp, run by Shardmark as a script: what its hooks cost."""
STRATEGIES = ("single", "ddp", "fsdp", "zero-1", SCRIPT)
LEAST_RATIO = 0.99
TURN_SECONDS = 4.0
UNTIMED_STEPS = 10
"""Steps of a script beyond those that are measured, enough for those that count."""
START_SECONDS = 180.0
SIDE_SECONDS = 900.0
Turn = tuple[float, float]
"""Unix times between which a side ran while the other one was stopped."""


def check_same_settings() -> None:
    """Assert that the DeepSpeed options of the bare loop are those of the strategy."""
    from bare_loop import SGD, ZERO
    from shardmark.base.recipe import Optimizer, Recipe
    from shardmark.ranks.strategies import build_strategy

    recipe = Recipe(global_batch=64, steps=1, optimizer=Optimizer(name="sgd", **SGD))
    config = build_strategy("zero-1", {}).config(recipe, "cpu")
    assert config == ZERO, f"zero-1 is set up as {config}, the bare loop as {ZERO}"


class Side:
    """A command with all processes that it starts, which can be stopped and resumed."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
        self.turns: list[Turn] = []
        self.processor_seconds: list[float] = []
        """Processor time of all processes, by turn."""

    def _for_all_processes(self, act: Callable[[psutil.Process], None]) -> None:
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            for process in (top, *top.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    act(process)

    def _processor_seconds(self) -> float:
        seconds: list[float] = []
        # Includes ended children: otherwise a turn in which one ends has too little.
        self._for_all_processes(lambda process: seconds.append(sum(process.cpu_times()[:4])))
        return sum(seconds)

    def stop(self) -> None:
        self._for_all_processes(psutil.Process.suspend)

    def resume(self) -> None:
        self._for_all_processes(psutil.Process.resume)

    def take_turn(self, seconds: float) -> None:
        before = self._processor_seconds()
        self.resume()
        began = time.time()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.turns.append((began, time.time()))
        self.stop()
        self.processor_seconds.append(self._processor_seconds() - before)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def run_until(self, is_warm: Callable[[], bool]) -> None:
        """Let it start and warm up, then stop it."""
        until = time.monotonic() + START_SECONDS
        while not is_warm():
            if not self.runs or time.monotonic() > until:
                raise SystemExit(f"it did not warm up:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.02)
        self.stop()

    def finish(self) -> None:
        self.resume()
        if self._process.wait(SIDE_SECONDS):
            raise SystemExit(f"it failed:\n{self._log.read_text()[-4000:]}")

    def kill(self) -> None:
        self._for_all_processes(psutil.Process.kill)
        self._process.wait()

    def step_seconds(self, starts: Sequence[float]) -> list[list[float]]:
        """For each turn, the durations of the steps that lie inside it."""
        steps = list(itertools.pairwise(starts))[WARMUP_STEPS:]
        return [
            [after - before for before, after in steps if began <= before and after <= ended]
            for began, ended in self.turns
        ]

    def processor_seconds_per_step(self, starts: Sequence[float], turns: int) -> float:
        begun = sum(began <= at <= ended for began, ended in self.turns[:turns] for at in starts)
        return sum(self.processor_seconds[:turns]) / begun


@contextmanager
def side(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[Side]:
    started = Side(command, log, variables)
    try:
        yield started
    finally:
        started.kill()


def measure_pair(strategy: str, pair: int, *, steps: int) -> dict[str, Any]:
    """The ratio of speeds over all turns in which both sides have complete steps."""
    experiment = experiment_of([strategy], steps, 1, WARMUP_STEPS)
    bare_strategy = "ddp" if strategy == SCRIPT else strategy
    # The other side uses the cores meanwhile, which would be measured again.
    experiment["measure"] |= {"verify": False, "max_remeasure": 0}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run, bare = folder / "run", folder / "bare"
        bare.mkdir()
        if strategy == SCRIPT:
            (folder / "hooked").mkdir()
            more = bare_loop_command("ddp", steps=steps + UNTIMED_STEPS, out=folder / "hooked")
            script = shlex.join(more[more.index(str(BENCHMARKS / "bare_loop.py")) :])
            experiment |= {
                "workload": {"name": "script"},
                "recipe": {"steps": steps},
                "matrix": {"variant": {SCRIPT: script}, "world_size": [ranks_of(strategy)]},
            }
        (folder / "overhead.yaml").write_text(yaml.safe_dump(experiment))
        words = ["run", str(folder / "overhead.yaml"), "--out", str(run)]
        command = [sys.executable, "-m", "shardmark", *words]
        bare_command = bare_loop_command(bare_strategy, steps=steps, out=bare)
        bare_variables = script_variables(ranks_of(strategy))
        with side(command, folder / "run.log", os.environ) as ours:
            ours.run_until(lambda: steps_taken(run) > WARMUP_STEPS)
            with side(bare_command, folder / "bare.log", bare_variables) as other:
                other.run_until((bare / "0.warm").exists)
                order = [ours, other] if pair % 2 == 0 else [other, ours]
                while ours.runs and other.runs:
                    for one in order:
                        one.take_turn(TURN_SECONDS)
                    order.reverse()
                ours.finish()
                other.finish()
        recorded = json.loads((run / "environment.json").read_text())["variables"]
        report = json.loads((bare / "0.json").read_text())
        allocator = {name: recorded[name] for name in ALLOCATOR}
        assert report["allocator"] == allocator, "both sides have the same allocator"
        lines = [json.loads(line) for line in next(run.rglob("steps.jsonl")).open()]
    our_starts = [line["started_at_seconds"] for line in lines if line["rank"] == 0]
    bare_starts = report["steps_at_seconds"]
    # In the last turn a side may have ended, and its processor time is not known.
    count = max(1, len(ours.turns) - 1)
    processor_ratio = other.processor_seconds_per_step(
        bare_starts, count
    ) / ours.processor_seconds_per_step(our_starts, count)
    by_turn = zip(ours.step_seconds(our_starts), other.step_seconds(bare_starts), strict=True)
    turns = [turn for turn in by_turn if all(turn)]
    means = [[statistics.fmean(seconds) for seconds in turn] for turn in turns]
    logs = [math.log(bare_seconds / our_seconds) for our_seconds, bare_seconds in means]
    result = {
        **{
            name: GLOBAL_BATCH / statistics.fmean(mean[index] for mean in means)
            for index, name in enumerate(("shardmark", "bare"))
        },
        "ratio": math.exp(statistics.fmean(logs)),
        "processor_ratio": processor_ratio,
        "steps": [sum(len(turn[index]) for turn in turns) for index in (0, 1)],
        "turns": [math.exp(value) for value in logs],
        "first": "shardmark" if pair % 2 == 0 else "bare",
        "allocator": allocator,
    }
    print(f"{strategy} pair {pair}: ratio {result['ratio']:.4f}", flush=True)
    return result


def steps_taken(run: Path) -> int:
    """Steps that rank 0 of the current trial has taken so far."""
    for path in run.rglob("rank-0.progress"):
        with suppress(OSError, struct.error):
            return int(struct.unpack_from("<q", path.read_bytes())[0])
    return 0


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--steps", type=int, help="steps of each training, 5 of warm-up included")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=[*STRATEGIES])
    options = parser.parse_args()
    check_same_settings()
    pairs = options.pairs or (2 if options.small else 9)
    steps = options.steps or (25 if options.small else 75)
    around = surroundings()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in options.strategies}
    for pair in range(pairs):
        for strategy in options.strategies:
            measured[strategy].append(measure_pair(strategy, pair, steps=steps))
    ratios = {name: spread([pair["ratio"] for pair in of]) for name, of in measured.items()}

    def row(name: str) -> tuple[str, ...]:
        speeds = [spread([pair[side] for pair in measured[name]]) for side in ("shardmark", "bare")]
        ratio = [ratios[name][key] for key in ("median", "min", "max", "interquartile_range")]
        processor = spread([pair["processor_ratio"] for pair in measured[name]])
        return (
            name,
            *(f"{speed['median']:.1f}" for speed in speeds),
            *(f"{value:.3f}" for value in (*ratio, processor["median"])),
            str(pairs),
            str(min(min(pair["steps"]) for pair in measured[name])),
        )

    store(
        NAME,
        options=options,
        around=around,
        bar=f"Bar: the median of shardmark / bare is at least {LEAST_RATIO:g} for every strategy",
        holds=all(ratio["median"] >= LEAST_RATIO for ratio in ratios.values()),
        table=Table(
            columns=(
                *("strategy", "shardmark samples/s", "bare samples/s"),
                *("ratio: median", "min", "max", "IQR", "by processor time", "pairs"),
                "steps a side",
            ),
            rows=tuple(map(row, ratios)),
        ),
        numbers={"ratios": ratios, "pairs": measured},
    )


if __name__ == "__main__":
    main()
