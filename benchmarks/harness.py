"""Shared parts of the benchmarks: options, stored results, experiments and child processes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmark.base.results.store import RunFolder
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.local.engine import LocalEngine
from shardmark.bench.launch.local.fork_server import ENVIRONMENT
from shardmark.bench.launch.trial import TrialRunner
from shardmark.ranks.measure.system.environment import environment
from shardmark.ranks.trial import Trial

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
VERSIONS = ("torch", "torchvision", "deepspeed", "numpy")
GLOBAL_BATCH = 64
WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of short texts below a heading."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([text, *self.notes])

    def plain(self) -> str:
        lines = (self.columns, *self.rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        texts = ["  ".join(t.ljust(w) for t, w in zip(c, widths, strict=True)) for c in lines]
        return "\n".join([*(text.rstrip() for text in texts), *self.notes])


def options_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark; a benchmark adds its own."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks/{name}.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--small", action="store_true", help="a short run that shows that the benchmark works"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and Markdown")
    # Child processes import the package also where it is not installed.
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return parser


def surroundings() -> dict[str, Any]:
    """Date, machine, versions, environment variables and load at this moment."""
    current = environment(ROOT)
    # Folders belong to this machine alone.
    variables = {n: value for n, value in current["variables"].items() if not value.startswith("/")}
    return surroundings_in(current) | {"variables": variables, "load_before": current["load"]}


def surroundings_in(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Date, machine and versions in a run's environment record, without the machine's name."""
    cuda = recorded.get("cuda") or {}
    return {
        "date": recorded["date"],
        "machine": {
            "cpu": recorded["cpu"]["model"],
            "cores": recorded["cpu"]["usable_cores"],
            "memory_bytes": recorded["memory"]["total_bytes"],
            "os": recorded["os"],
            "cuda_devices": [device["name"] for device in cuda.get("devices", ())],
        },
        "versions": {
            "python": recorded["python"],
            "shardmark": recorded["shardmark"],
            **{name: recorded["packages"][name] for name in VERSIONS},
        },
        "git": recorded.get("git"),
    }


def surroundings_line(around: Mapping[str, Any]) -> str:
    """Date, machine, versions and commit on one line."""
    machine, versions, git = around["machine"], around["versions"], around["git"]
    commit = "run outside of a repository"
    if git is not None:
        commit = f"commit {git['commit'][:10]}{'+' if git['dirty'] else ''}"
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    devices = "".join(f", {name}" for name in machine["cuda_devices"])
    return (
        f"{around['date'][:10]}; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB{devices}; {libraries}; {commit}"
    )


def store(
    name: str,
    *,
    options: argparse.Namespace,
    around: Mapping[str, Any],
    bar: str,
    holds: bool,
    table: Table,
    numbers: Mapping[str, Any],
    variant: str = "",
) -> None:
    """Print the table and write `DATE-NAME[-VARIANT].json` and `.md`.

    `around` are the surroundings before the measurement.
    """
    verdict = "holds" if holds else "DOES NOT HOLD"
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python", f"benchmarks/{name}.py", *words])
    line = surroundings_line(around)
    print(f"\n{table.plain()}\n{bar}: {verdict}.\n{line}")
    labels = [name.replace("_", "-"), *filter(None, [variant]), *["small"][: options.small]]
    stem = "-".join([around["date"][:10], *labels])
    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        **around,
        "command": command,
        "bar": bar,
        "holds": holds,
        "numbers": numbers,
    }
    (options.out / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    (options.out / f"{stem}.md").write_text(
        f"# {name}\n\n{table.markdown()}\n\n**{bar}: {verdict}.**\n\n{line}\n\n`{command}`\n"
    )
    print(f"stored as {options.out / stem}.json and .md")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and interquartile range."""
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = high = values[0]
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "interquartile_range": high - low,
    }


def json_lines(file: Path | None) -> list[Any]:
    """The values in a file of JSON lines that an earlier portion of a benchmark left."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    return [json.loads(line) for line in lines]


def experiment_of(
    strategies: Sequence[str], steps: int, repeats: int, warmup_steps: int
) -> dict[str, Any]:
    """ResNet-18 on digits."""
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


@contextmanager
def trial_runner(trials: Sequence[Trial]) -> Iterator[TrialRunner]:
    """Yields a runner into a temporary folder, whose fork server has imported all libraries."""
    engine = LocalEngine()
    with tempfile.TemporaryDirectory() as folder:
        try:
            machine = engine.machine("cpu")
            modules = {name: None for trial in trials for name in trial.built_strategy.loads()}
            engine.load(list(modules), machine.device_type)
            yield TrialRunner(
                engine=engine,
                machine=machine,
                folder=RunFolder.create(Path(folder) / "run"),
                listener=ProgressListener(),
            )
        finally:
            engine.close()


def ranks_of(strategy: str) -> int:
    return 1 if strategy == "single" else 2


def threads_of(ranks: int) -> int:
    """Threads of each rank if the ranks share all cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def bare_loop_command(strategy: str, *, steps: int, out: Path) -> list[str]:
    """The `torchrun` command of `bare_loop.py`."""
    ranks = ranks_of(strategy)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"),
        *(str(BENCHMARKS / "bare_loop.py"), "--strategy", strategy, "--steps", str(steps)),
        *("--warmup", str(WARMUP_STEPS), "--global-batch", str(GLOBAL_BATCH)),
        *("--threads", str(threads_of(ranks)), "--out", str(out)),
    ]


def script_variables(ranks: int) -> dict[str, str]:
    """The environment of a bare script: that of a trial's ranks, with the same allocator."""
    variables = {"OMP_NUM_THREADS": str(threads_of(ranks)), "DS_ACCELERATOR": "cpu"}
    return {**ENVIRONMENT, **os.environ, **variables}
