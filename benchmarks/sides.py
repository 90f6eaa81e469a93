"""The two sides that are held against each other: Shardmark's trials, and the bare script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recording import BENCHMARKS, ROOT
from shardmark.config.load import from_mapping
from shardmark.launch.listener import Silent
from shardmark.launch.local.engine import LocalEngine
from shardmark.launch.local.fork_server import ENVIRONMENT
from shardmark.launch.trial import TrialRunner
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import RunFolder
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial
from shardmark.workloads import check_data

GLOBAL_BATCH = 64
WARMUP_STEPS = 5
BARE_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """One run of the bare script."""

    samples_per_second: float
    """All ranks' samples over the slowest rank's window, as in a trial."""
    startup_seconds: float
    """From the start of `torchrun` to the first step of the last rank."""
    losses: tuple[float, ...]
    """Each rank's in the last step."""


def ranks_of(strategy: str) -> int:
    return 1 if strategy == "single" else 2


def bare_command(strategy: str, *, steps: int, threads: int, out: Path) -> list[str]:
    return script_command(
        "bare_loop.py",
        *("--strategy", strategy, "--steps", str(steps)),
        *("--warmup", str(WARMUP_STEPS), "--global-batch", str(GLOBAL_BATCH)),
        ranks=ranks_of(strategy),
        threads=threads,
        out=out,
    )


def script_command(script: str, *arguments: str, ranks: int, threads: int, out: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"),
        *(str(BENCHMARKS / script), *arguments, "--threads", str(threads), "--out", str(out)),
    ]


def script_variables(threads: int) -> dict[str, str]:
    """The environment of a bare script: that of a trial's ranks, glibc's allocator included.

    As in a run, what the user has set holds; threads are those of the ranks.
    """
    set_here = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
    return {**ENVIRONMENT, **os.environ, **set_here}


def run_bare(strategy: str, *, steps: int) -> Bare:
    """Start `torchrun benchmarks/bare_loop.py` with the threads and environment of a trial."""
    ranks = ranks_of(strategy)
    return run_script(
        "bare_loop.py",
        *("--strategy", strategy, "--steps", str(steps)),
        *("--warmup", str(WARMUP_STEPS), "--global-batch", str(GLOBAL_BATCH)),
        ranks=ranks,
        threads=max(1, len(os.sched_getaffinity(0)) // ranks),
    )


def run_script(
    script: str, *arguments: str, ranks: int, threads: int, seconds: float = BARE_SECONDS
) -> Bare:
    """Start `torchrun benchmarks/SCRIPT` with its arguments and a trial's environment."""
    with tempfile.TemporaryDirectory() as folder:
        command = script_command(script, *arguments, ranks=ranks, threads=threads, out=Path(folder))
        launched = time.time()
        done = subprocess.run(
            command,
            env=script_variables(threads),
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
        if done.returncode:
            raise SystemExit(f"{script} failed:\n{done.stdout[-4000:]}")
        reports = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    slowest = max(report["window_seconds"] for report in reports)
    return Bare(
        samples_per_second=sum(report["samples"] for report in reports) / slowest,
        startup_seconds=max(report["first_step_at_seconds"] for report in reports) - launched,
        losses=tuple(report["last_loss"] for report in reports),
    )


class Shardmark:
    """One run: trials of several strategies, each as often as there are repeats."""

    def __init__(self, runner: TrialRunner, trials: Sequence[Trial]) -> None:
        self._runner = runner
        self._trials = {(trial.strategy.name, trial.repeat): trial for trial in trials}

    def trial(self, strategy: str, repeat: int) -> TrialResult:
        result = self._runner.run(self._trials[strategy, repeat], order=repeat)
        if result.outcome is not Outcome.OK:
            raise SystemExit(f"the trial of {strategy} ended as {result.outcome}: {result.failure}")
        return result


def metric(result: TrialResult, name: str) -> float:
    found = result.metrics[name]
    assert found is not None, result.missing[name]
    return found.value


@contextmanager
def shardmark_run(
    strategies: Sequence[str], *, steps: int, repeats: int, warmup_steps: int = WARMUP_STEPS
) -> Iterator[Shardmark]:
    """ResNet-18 on digits, with all metrics on."""
    with run_of(experiment_of(strategies, steps, repeats, warmup_steps)) as run:
        yield run


@contextmanager
def run_of(mapping: Mapping[str, Any]) -> Iterator[Shardmark]:
    """A fork server that has loaded everything for the experiment, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = from_mapping(mapping)
        check_data(experiment.workload)
        engine = LocalEngine()
        try:
            machine = engine.machine("cpu")
            plan = expand(experiment, machine.device_type)
            modules = {
                module: None for trial in plan.trials for module in trial.built_strategy.loads()
            }
            engine.load(list(modules), machine.device_type)
            runner = TrialRunner(
                engine=engine,
                machine=machine,
                folder=RunFolder.create(Path(folder) / "run"),
                listener=Silent(),
            )
            yield Shardmark(runner, plan.trials)
        finally:
            engine.close()


def experiment_of(
    strategies: Sequence[str], steps: int, repeats: int, warmup_steps: int
) -> dict[str, Any]:
    return {
        "name": "benchmark",
        "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
        "recipe": {
            "global_batch": GLOBAL_BATCH,
            "steps": steps,
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
            "seed": 0,
        },
        "matrix": {"strategy": list(strategies)},
        "measure": {
            "warmup_steps": warmup_steps,
            "repeats": repeats,
            "probe": True,
            "evaluate": "never",
        },
        "limits": {"trial_seconds": 600},
        "device": "cpu",
    }


def add_sources_to_path() -> None:
    """For child processes where the package is not installed."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
