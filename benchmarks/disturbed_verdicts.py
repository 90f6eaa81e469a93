"""Checks verdicts on a disturbed machine: an experiment runs idle, and beside busy processes.

    python benchmarks/disturbed_verdicts.py [--times 10] [--repeats 4] [--steps 20] [--small]
        [--keep FILE]     measure in portions: runs in FILE are not repeated

ResNet-18 on digits trains under `single` and `ddp` on 2 ranks.  Runs of the command line alternate
between an idle machine and one with a busy process on each core.  The truth comes from all idle
trials of a machine together.  A verdict is wrong if it says faster or slower and the truth is the
opposite or a tie, or if it calls another strategy fastest than the truly fastest one.  Disturbed
trials are not repeated (`measure.max_remeasure=0`), since the busy processes would still run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import Table, experiment_of, json_lines, options_of, store, surroundings
from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.compare.verdicts import FASTER, METRIC, MIN_GAIN, NOT_DECIDED, SLOWER, TIE
from shardmark.analysis.statistics.intervals import Estimate, estimate_ratio
from shardmark.config.load import from_mapping
from shardmark.core.strict_yaml import format_yaml
from shardmark.report.answers.answers import answers
from shardmark.results.store import load_run

NAME = "disturbed_verdicts"
BASE, OTHER = "single", "ddp"
IDLE, DISTURBED = "idle", "disturbed"
BURN = "while True: sum(range(10_000))"
BAR = "Bar: no wrong verdict, and every idle run decided"


@contextmanager
def burner() -> Iterator[None]:
    """Keeps one busy process on each core."""
    processes = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(experiment: Path, out: Path, cpu: str) -> dict[str, Any]:
    """Runs the experiment by the command line; returns rates, verdict and answer."""
    subprocess.run(
        [sys.executable, "-m", "shardmark", "run", str(experiment), "--out", str(out), "--quiet"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    comparison = compare([load_run(out)])
    rows = {row.strategy: row for row in comparison.rows}
    fastest = next(each for each in answers(comparison) if each.question == "fastest")
    return {
        "cpu": cpu,
        "rates": {name: list(row.values[METRIC].values()) for name, row in rows.items()},
        "verdict": rows[OTHER].verdict,
        "fastest": {"decided": fastest.decided, "strategy": fastest.strategy, "text": fastest.text},
        "disturbed": rows[OTHER].disturbed or rows[BASE].disturbed,
        "disturbed_trials": sum(row.disturbed_trials for row in rows.values()),
    }


def truth_of(runs: list[dict[str, Any]]) -> tuple[str, Estimate]:
    """True verdict of `ddp` against `single`, and the ratio over the pairs of all idle runs."""
    rates = {name: [r for run in runs for r in run["rates"][name]] for name in (BASE, OTHER)}
    ratio = estimate_ratio(rates[OTHER], rates[BASE])
    if abs(ratio.value - 1) < MIN_GAIN:
        return TIE, ratio
    return FASTER if ratio.value > 1 else SLOWER, ratio


def is_wrong(run: dict[str, Any], truth: str) -> bool:
    best = {FASTER: OTHER, SLOWER: BASE}.get(truth)
    fastest = run["fastest"]
    claimed = fastest["strategy"] if fastest["decided"] else None
    says = run["verdict"] in (FASTER, SLOWER) and run["verdict"] != truth
    return says or (claimed is not None and claimed != best)


def is_decided(run: dict[str, Any]) -> bool:
    return run["verdict"] in (FASTER, SLOWER, TIE)


def row_of(name: str, runs: list[dict[str, Any]], truth: str) -> tuple[str, ...]:
    """A table row for the idle or disturbed runs of one machine."""
    counts = {
        "decided": sum(map(is_decided, runs)),
        "wrong": sum(is_wrong(run, truth) for run in runs),
        "not decided": sum(run["verdict"] == NOT_DECIDED for run in runs),
    }
    # Not by pairs: a row holds only undisturbed trials if there are some.
    ratios = [fmean(run["rates"][OTHER]) / fmean(run["rates"][BASE]) for run in runs]
    return (
        name,
        str(len(runs)),
        *map(str, counts.values()),
        str(sum(run["disturbed_trials"] for run in runs)),
        f"{min(ratios):.2f} to {max(ratios):.2f}",
    )


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="file that keeps each run as a line of JSON")
    options = parser.parse_args()
    times, repeats, steps = (
        (1, 2, 8) if options.small else (options.times, options.repeats, options.steps)
    )
    around = surroundings()
    mapping = experiment_of([BASE, OTHER], steps, repeats, warmup_steps=3)
    mapping["measure"] |= {"probe": False, "verify": False, "max_remeasure": 0}
    runs: dict[str, list[dict[str, Any]]] = {IDLE: [], DISTURBED: []}
    for kind, run in json_lines(options.keep):
        runs[kind].append(run)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder) / "experiment.yaml"
        from_mapping(mapping)  # reports a mistake here, once
        experiment.write_text(format_yaml(mapping))
        for time in range(times):
            for kind, beside in ((IDLE, nullcontext()), (DISTURBED, burner())):
                if time < len(runs[kind]):
                    continue
                with beside:
                    run = measured(
                        experiment, Path(folder) / f"{kind}-{time}", around["machine"]["cpu"]
                    )
                runs[kind].append(run)
                print(kind, time, json.dumps(run["fastest"]), flush=True)
                if options.keep:
                    with options.keep.open("a") as file:
                        file.write(json.dumps([kind, run]) + "\n")
    cpus = sorted({run["cpu"] for run in runs[IDLE]})
    by_cpu = {
        cpu: {kind: [run for run in runs[kind] if run["cpu"] == cpu] for kind in runs}
        for cpu in cpus
    }
    truths = {cpu: truth_of(there[IDLE]) for cpu, there in by_cpu.items()}
    wrong = sum(is_wrong(run, truths[run["cpu"]][0]) for each in runs.values() for run in each)
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=not wrong and all(map(is_decided, runs[IDLE])),
        table=Table(
            columns=(
                *("machine", "runs", "decided", "wrong", "'not decided'", "disturbed trials"),
                f"{OTHER} / {BASE}",
            ),
            rows=tuple(
                row_of(f"{cpu}, {kind}", each, truths[cpu][0])
                for cpu, there in by_cpu.items()
                for kind, each in there.items()
                if each
            ),
            notes=(
                *(
                    f"Truth on {cpu}, from all its idle trials: {OTHER} is {truth}"
                    f" ({ratio.value:.3f} of {BASE})."
                    for cpu, (truth, ratio) in truths.items()
                ),
                f"{repeats} repeats of {steps} steps a run.",
            ),
        ),
        numbers={
            "truths": {cpu: {"is": t, "ratio": ratio.value} for cpu, (t, ratio) in truths.items()},
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
