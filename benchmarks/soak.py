"""One run of many small trials: whether it comes to hold more and more of anything.

    python benchmarks/soak.py [--trials 500] [--small]

After each trial: file descriptors, threads and resident memory of the command and of the process
that trials are forked from, processes of the run whoever their parents are, temporary files, and
entries in /dev/shm.  Every trial has to end well.
A line is laid through each by least squares, the first fifth of the trials left out.  Ctrl-C ends
the run; what was measured by then is stored.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
from scipy import stats

from random_kills import MARK, MATRICES, experiment, marked, shared_memory
from recording import ROOT, Table, options_of, store, surroundings
from shardmark.config.load import from_mapping
from shardmark.launch.controller import run_experiment
from shardmark.launch.listener import Silent
from shardmark.results.schema import Outcome, TrialResult
from sides import add_sources_to_path

NAME = "soak"
RESULT_BYTES = 80_000
"""A result takes 69,000 in memory, and the command keeps them until its last repeat is chosen."""
BAR = (
    "Bar: every trial is ok; over all of them, counts grow by less than 1, memory by less than"
    f" 10 %, beside {RESULT_BYTES // 1000} kB for each result that the command keeps (upper ends of"
    " the slopes' 95 % intervals)"
)
STEPS = 4


class Watcher(Silent):
    """Looks at the processes after each trial."""

    def __init__(self, temporary: Path) -> None:
        self.series: dict[str, list[int]] = {}
        self.outcomes: list[Outcome] = []
        self._temporary = temporary
        self._shared = shared_memory()
        self._began = time.monotonic()

    def trial_ended(self, number: int, total: int, result: TrialResult) -> None:
        self.outcomes.append(result.outcome)
        if result.failure is not None:
            print(f"{result.id}: {result.outcome}: {result.failure.reason}", flush=True)
        own = psutil.Process()
        processes = marked(os.environ[MARK])
        readings = {
            "processes": len(processes),
            "temporary files": len([*self._temporary.rglob("*")]),
            "/dev/shm": len(shared_memory() - self._shared),
        }
        (fork_server,) = (process for process in processes if process.ppid() == own.pid)
        for name, process in (("command", own), ("fork server", fork_server)):
            readings[f"{name}: file descriptors"] = process.num_fds()
            readings[f"{name}: threads"] = process.num_threads()
            readings[f"{name}: bytes"] = process.memory_info().rss
        for name, value in readings.items():
            self.series.setdefault(name, []).append(value)
        if number % 50 == 0:
            print(f"{number} of {total}, {time.monotonic() - self._began:.0f} s", flush=True)


def growth_of(values: list[int]) -> tuple[float, float]:
    """Over all trials, by the slope of those after the first fifth; and its upper end."""
    settled = values[len(values) // 5 :]
    if len(set(settled)) == 1:
        return 0.0, 0.0
    line = stats.linregress(range(len(settled)), settled)
    half = line.stderr * stats.t.ppf(0.975, len(settled) - 2)
    return float(line.slope) * len(values), float(line.slope + half) * len(values)


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--trials", type=int, default=500)
    options = parser.parse_args()
    if options.small:
        options.trials = 20
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background of a shell
    add_sources_to_path()
    os.chdir(ROOT)  # where the model is
    around = surroundings()
    matrix = MATRICES[0]
    mapping = experiment(matrix, nodes=1, restarts=0)
    mapping["recipe"] |= {"steps": STEPS}
    mapping["measure"] |= {"repeats": -(-options.trials // len(matrix["strategy"]))}
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / "temporary"
        temporary.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        os.environ[MARK] = f"soak-{os.getpid()}"  # of the children, and of theirs
        watcher = Watcher(temporary)
        with suppress(KeyboardInterrupt):
            run_experiment(from_mapping(mapping), Path(folder) / "run", progress=watcher)
    rows, numbers, holds = [], {}, True
    for name, values in watcher.series.items():
        unit = 2**20 if name.endswith("bytes") else 1
        growth, most = growth_of(values)
        allowed = 0.1 * median(values) if unit > 1 else 1.0
        allowed += RESULT_BYTES * len(values) * (name == "command: bytes")
        holds &= most < allowed
        shown = (values[0], median(values), values[-1], growth, most, allowed)
        rows.append((name.replace("bytes", "MiB"), *(f"{value / unit:.4g}" for value in shown)))
        numbers[name] = {"values": values, "growth": growth, "most_growth": most}
    trials = len(watcher.outcomes)
    ok = sum(outcome is Outcome.OK for outcome in watcher.outcomes)
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=holds and ok == trials >= options.trials,
        table=Table(
            columns=("", "first", "median", "last", "growth", "at most", "allowed"),
            rows=tuple(rows),
            notes=(f"{trials} trials in one run, {ok} of them ok; no trial is under way.",),
        ),
        numbers={"trials": trials, "ok": ok, "series": numbers},
    )


if __name__ == "__main__":
    main()
