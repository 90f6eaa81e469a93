"""Kills processes of runs at random moments, and looks whether anything is lost or left.

    python benchmarks/random_kills.py [--kills 1000] [--minutes M] [--seed 0] [--small]
        [--keep FILE]     measure in portions: kills that FILE has are counted, not made again

Each run has small trials, on one node or on two of the loopback, and is made by the command line.
Killed are ranks, a trial's launcher, the process that trials are forked from, node processes, the
command itself, or all of these at once.  The same command is given again until it has finished the
run.

Checked of each kill: the outcome of the trial, the reason told, and the time until it was stored.
Of each command: that no process outlives it, and that what was stored before is there unchanged.
Of each run: that its folder, its temporary files and /dev/shm hold nothing that does not belong
there, and that equal trials ended with equal weights, whoever was killed meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from recording import ROOT, Table, options_of, store, surroundings
from shardmark.config.load import from_mapping
from shardmark.core.run_files import RESULT_FILE, TRIAL_FILE
from shardmark.launch.trial_artifacts import KEPT
from shardmark.results.runs_folder import LOCK_FILE
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import RUN_FILES, load_run
from shardmark.trials.matrix import expand
from sides import add_sources_to_path

NAME = "random_kills"
WANTED = 1000
BAR = f"Bar: {WANTED} kills, every outcome right, nothing lost or left, every run finished"
MARK = "SHARDMARK_RANDOM_KILLS"
"""In the environment of all processes of a run, by which those that are left are found."""
SYNCHRONOUS = ("ddp", "fsdp", "fsdp-grad-op", "ps-sync", "fsdp1", "zro", "local-sgd", "diloco")
PAIRS = (*SYNCHRONOUS, "ps-async", "ps-bounded")
ZEROS = ("zero-0", "zero-1", "zero-2", "zero-3")
ONE_AND_FOUR = ("single", "fsdp-hybrid")
LAYERED = ("tp", "pp")
MESHES = ("fsdp-tp", "ddp-pp", "fsdp-pp", "fsdp-tp-pp")
PICTURES = {
    **{"name": "classification", "model": "tests.distributed.models:small"},
    "dataset": "digits",
}
TEXT = {
    **{"name": "language", "model": "gpt", "layers": 2, "width": 16, "heads": 2},
    **{"dataset": "text", "tokenizer": "bytes", "sequence_length": 16},
}
MATRICES = (
    (PICTURES, {"strategy": [*PAIRS], "world_size": [2]}),
    (PICTURES, {"strategy": [*ZEROS], "world_size": [2]}),
    (PICTURES, {"strategy": [*ONE_AND_FOUR], "world_size": [1, 4]}),
    (TEXT, {"strategy": [*LAYERED], "world_size": [2]}),
    (TEXT, {"strategy": [*MESHES], "world_size": [4]}),
)
"""Every strategy but `dp`, which needs CUDA devices."""
MATRIX_WEIGHTS = (6, 3, 1, 2, 2)
DETERMINISTIC = (*SYNCHRONOUS, *ZEROS, *ONE_AND_FOUR, *LAYERED, *MESHES)
VICTIM_WEIGHTS = {
    **{"rank": 60, "launcher": 16, "node": 5},
    **{"fork server": 2, "controller": 1.5, "everything": 1.5},
}
"""How often each is drawn; after all but the first two libraries are loaded again."""
STEPS, CHECKPOINT_STEPS, RESTARTS = 60, 15, 10
TRIALS = 36
"""Of a run: loading the libraries takes longer than several of them."""
SPARED = 0.5
"""Of the trials with a rank killed: nothing more is killed in them, so that some end well."""
ENDS_COMMAND = ("controller", "everything")
REASONS = {
    **{"rank": ("SIGKILL", "every worker is gone"), "node": ("was lost",)},
    **{"launcher": ("the launcher",), "fork server": ("the launcher",)},
    "controller": (),
    "everything": ("SIGKILL", "every worker is gone", "was lost", "the launcher"),
}
"""One of which is told of a trial that failed of it."""
LATEST_SECONDS = {"rank": 1.5, "launcher": 1.5}
"""A kill comes so late at most after such a process is there."""
ANY_TIME_SECONDS = 6.0
"""The same of other processes, from when they were chosen."""
END_SECONDS = 30.0
"""From a kill to the end of what it ends, on a machine with other work."""
COMMAND_SECONDS = 1800.0
POLL_SECONDS = 0.05

Processes = dict[str, list[psutil.Process]]


@dataclass(kw_only=True)
class Kill:
    """One kill and what came of it."""

    victim: str
    nodes: int
    at_seconds: float
    """Unix time."""
    trial: str | None
    """The trial under way, if there was one."""
    strategy: str | None
    came_to: str = "no trial was under way"
    end_seconds: float | None = None
    """Until the result of a trial that it ended was stored."""


def experiment(
    workload: dict[str, Any], matrix: dict[str, list[Any]], nodes: int, restarts: int
) -> dict[str, Any]:
    cells = len(matrix["strategy"])
    limits = {"trial_seconds": 300, "max_restarts": restarts, "checkpoint_steps": CHECKPOINT_STEPS}
    several = {"name": "torchrun", "hosts": ["127.0.0.1"] * nodes, "remote": "{command}"}
    return {
        "name": "random-kills",
        "workload": workload,
        "recipe": {"global_batch": 16, "steps": STEPS, "threads_per_rank": 1},
        "matrix": matrix,
        "placement": {"nodes": nodes},
        "measure": {
            **{"warmup_steps": 1, "verify": False, "probe": False, "evaluate": "never"},
            **{"link_seconds": 0, "max_remeasure": 0, "repeats": TRIALS // cells},
        },
        "limits": limits,
        "engine": several if nodes > 1 else "local",
        "device": "cpu",
    }


def processes_of(controller: psutil.Process) -> Processes:
    """Those of a command that live, by what they are."""
    found: Processes = defaultdict(list)

    def add(process: psutil.Process, kind: str) -> None:
        with suppress(psutil.Error, ProcessLookupError):
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            found[kind].append(process)
            for child in children_of(process):
                add(child, kind_of(child, kind))

    def kind_of(process: psutil.Process, parent: str) -> str:
        if parent in ("launcher", "rank"):
            return "rank"
        if parent == "fork server":  # which also asks for devices in a process of its own
            return "launcher" if os.getpgid(process.pid) == process.pid else "other"
        words = " ".join(process.cmdline())
        names = {"launch.local.fork_server": "fork server", "launch.nodes.node": "node"}
        return next((name for part, name in names.items() if part in words), "other")

    add(controller, "controller")
    return found


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """As `process.children`, which looks at all processes of the machine."""
    files = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = []
    with suppress(OSError):
        for pid in (int(word) for file in files for word in file.read_text().split()):
            with suppress(psutil.NoSuchProcess):
                children.append(psutil.Process(pid))
    return children


def marked(mark: str) -> list[psutil.Process]:
    """Those whose environment has the mark, whoever their parents are by now."""
    wanted, processes = f"{MARK}={mark}".encode(), []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if wanted in variables and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def described(process: psutil.Process) -> str:
    """A process that is left, and where it listens."""
    with suppress(psutil.Error):
        ports = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
        return f"{' '.join(process.cmdline())[:120]} (listens at {ports})"
    return f"process {process.pid}"


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return holds


class KilledRun:
    """One run, its commands, and what is found to be wrong."""

    def __init__(self, folder: Path, draw: random.Random, kills: int) -> None:
        self.kills: list[Kill] = []
        self.problems: list[str] = []
        self.weights: dict[str, set[str]] = defaultdict(set)
        """Final ones of trials that went well, by strategy and nodes."""
        self.commands = 0
        self._nodes = draw.choice((1, 2))
        ((workload, matrix),) = draw.choices(MATRICES, MATRIX_WEIGHTS)
        if "sequence_length" in workload:
            workload = workload | {"data_dir": str(folder / "texts")}
            (folder / "texts").mkdir()
            (folder / "texts" / "text.txt").write_text("A text for those who read it. " * 500)
        restarts = draw.choice((0, RESTARTS))
        content = experiment(workload, matrix, self._nodes, restarts)
        trials = expand(from_mapping(content), "cpu").trials
        self._strategies = {trial.id: trial.strategy.name for trial in trials}
        self._draw = draw
        self._left_kills = kills
        self._spared: str | None = None
        """The trial in which nothing is killed any more."""
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._file, self._log = folder / "experiment.yaml", folder / "log.txt"
        self._file.write_text(json.dumps(content))  # JSON is YAML
        self._out, self._temporary = folder / "run", folder / "temporary"
        self._temporary.mkdir()
        self._variables = {
            MARK: self._mark,
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),  # torch keeps one for all runs
        }

    def run(self) -> None:
        """Kill as often as was asked for, and finish the run."""
        before = shared_memory()
        while not self._command():
            pass
        self._check_files()
        if not wait_until(lambda: shared_memory() <= before, END_SECONDS):
            self.problems.append(f"left in /dev/shm: {sorted(shared_memory() - before)}")

    def end(self) -> None:
        """Whatever of it is under way."""
        for process in marked(self._mark):
            with suppress(psutil.Error):
                process.kill()

    def _command(self) -> bool:
        """Give the command and kill meanwhile; whether no other one has to follow."""
        words = [sys.executable, "-m", "shardmark", "run", str(self._file), "--quiet"]
        before, first_kill = self._results(), len(self.kills)
        self.commands += 1
        with self._log.open("wb") as log:
            command = subprocess.Popen(
                [*words, "--out", str(self._out)],
                env=os.environ | self._variables,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + COMMAND_SECONDS
        while command.poll() is None and time.monotonic() < deadline:
            if self._left_kills:
                self._kill(command)
            else:
                time.sleep(POLL_SECONDS)
        if command.poll() is None:
            self.problems.append(f"a command was not done after {COMMAND_SECONDS:g} s")
            self.end()
            self._left_kills = 0
        code = command.wait()
        self._check_processes(None)
        kills = self.kills[first_kill:]
        print(f"the command has ended with {code}", flush=True)
        said = self._log.read_text(errors="replace")
        if not self._is_right(code, kills) or "Traceback" in said:
            self.problems.append(f"code {code} after {kills[-3:]}: {said[-500:]}")
        trials = self._check_stored(before, kills)
        there = {trial.id for trial in trials if trial.outcome is not Outcome.UNAVAILABLE}
        finished = code in (0, 1) and self._strategies.keys() == there
        if not (finished or kills):
            self.problems.append(f"nobody disturbed the last command, and {len(there)} are there")
        return finished or not kills

    @staticmethod
    def _is_right(code: int, kills: list[Kill]) -> bool:
        """Whether the command may have ended so."""
        if any(kill.victim in ENDS_COMMAND for kill in kills):
            return code in (0, 1, -signal.SIGKILL)  # it may have been at its end
        # Where what loads the libraries is killed, the command ends with a message.
        at_start = any(k.victim in ("fork server", "node") and k.trial is None for k in kills)
        return code in (0, 1) or (code == 2 and at_start)

    def _kill(self, command: subprocess.Popen[bytes]) -> None:
        """One of the kinds of processes, drawn before it is known what there is."""
        controller = psutil.Process(command.pid)
        weights = {k: w for k, w in VICTIM_WEIGHTS.items() if self._nodes > 1 or k != "node"}
        (kind,) = self._draw.choices([*weights], [*weights.values()])
        ended = lambda: command.poll() is not None  # noqa: E731
        if kind in LATEST_SECONDS:
            wait_until(lambda: ended() or self._offers(kind, controller), COMMAND_SECONDS)
        wait_until(ended, self._draw.uniform(0, LATEST_SECONDS.get(kind, ANY_TIME_SECONDS)))
        self._check_processes(controller)
        family = processes_of(controller)
        trial = self._trial_under_way() if "launcher" in family else None
        if kind == "everything":
            victims = [process for some in family.values() for process in some]
            self._draw.shuffle(victims)
        else:
            victims = [self._draw.choice(family[kind])] if kind in family else []
        if ended() or not victims:
            return
        at_seconds = time.time()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        self._left_kills -= 1
        if kind == "rank" and self._draw.random() < SPARED:
            self._spared = trial
        print(f"{kind} of {trial or 'no trial'}", flush=True)
        self.kills.append(
            Kill(
                victim=kind,
                nodes=self._nodes,
                at_seconds=at_seconds,
                trial=trial,
                strategy=None if trial is None else self._strategies[trial],
            )
        )

    def _offers(self, kind: str, controller: psutil.Process) -> bool:
        """Whether a trial is under way that is not spared, with such a process in it."""
        trial = self._trial_under_way()
        return trial not in (None, self._spared) and kind in processes_of(controller)

    def _trial_under_way(self) -> str | None:
        """The one that was begun last, unless it has its result."""
        begun: list[tuple[float, Path]] = []
        for path in (self._out / "trials").glob(f"*/{TRIAL_FILE}"):
            with suppress(FileNotFoundError):  # it is removed once the result is there
                begun.append((path.stat().st_mtime, path.parent))
        _, last = max(begun, default=(0.0, None))
        return None if last is None or (last / RESULT_FILE).exists() else last.name

    def _results(self) -> dict[str, tuple[TrialResult, str]]:
        """What is stored, with its hash; what is damaged is a problem."""
        if not (self._out / "trials").is_dir():
            return {}
        run = load_run(self._out, verify=True)
        self.problems += [f"damaged: {damaged}" for damaged in run.damaged]
        return {trial.id: (trial, hash_of(self._out / "trials" / trial.id)) for trial in run.trials}

    def _check_stored(
        self, before: dict[str, tuple[TrialResult, str]], kills: list[Kill]
    ) -> list[TrialResult]:
        """Compare with what was stored before; judge what is new.  All results."""
        after = self._results()
        for trial_id, (trial, content) in before.items():
            if (
                trial.outcome is not Outcome.UNAVAILABLE
                and after.get(trial_id, (None, ""))[1] != content
            ):
                self.problems.append(f"{trial_id}: its result was lost or changed")
        for trial_id, (trial, content) in after.items():
            if before.get(trial_id, (None, ""))[1] != content:
                self._judge(trial, [kill for kill in kills if kill.trial == trial_id], kills)
        died = any(kill.victim in ENDS_COMMAND for kill in kills)
        for kill in kills:
            if kill.trial is not None and kill.trial not in after:
                kill.came_to = "the trial has no result, the next command ran it"
                if not died:
                    self.problems.append(f"{kill.trial}: no result after a kill: {kill}")
        return [trial for trial, _ in after.values()]

    def _judge(self, trial: TrialResult, own: list[Kill], kills: list[Kill]) -> None:
        """Whether the trial's outcome is right, of which `own` were killed meanwhile."""
        reason = trial.failure.reason if trial.failure is not None else ""
        if trial.outcome is Outcome.OK:
            lost = any(rank.lost is not None for rank in trial.ranks)
            came_to = "the trial was ok: restarted" if trial.restarts else "the trial was ok"
            came_to += ", a worker was lost" * lost
            if trial.strategy in DETERMINISTIC:
                hashes = {r.final_weights_sha256 or "" for r in trial.ranks if r.role == "worker"}
                self.weights[f"{trial.strategy} on {self._nodes}"] |= hashes
                if "" in hashes:
                    self.problems.append(f"{trial.id}: a worker tells no weights")
            right = bool(own) or not (lost or trial.restarts)
        elif trial.outcome is Outcome.FAILED:
            came_to = "the trial failed"
            right = any(part in reason for kill in own for part in REASONS[kill.victim])
        else:
            came_to = f"the trial was {trial.outcome}"
            # Of those that follow the loss of a node.
            right = trial.outcome is Outcome.UNAVAILABLE and "was lost" in reason
            right = right and any(kill.victim == "node" for kill in kills)
        if not right:
            victims = [kill.victim for kill in own]
            self.problems.append(f"{trial.id}, {victims} killed: {trial.outcome}: {reason}")
        stored = (self._out / "trials" / trial.id / RESULT_FILE).stat().st_mtime
        for kill in own:
            kill.came_to = came_to
            if trial.outcome is Outcome.FAILED:
                kill.end_seconds = stored - own[-1].at_seconds
                if kill.end_seconds > END_SECONDS:
                    self.problems.append(f"{trial.id}: it ended {kill.end_seconds:.0f} s later")

    def _check_processes(self, controller: psutil.Process | None) -> None:
        """Whether each of the run's processes is the command's, or below it."""

        def strays() -> list[psutil.Process]:
            family: list[int] = []
            with suppress(psutil.NoSuchProcess):
                if controller is not None:
                    family = [controller.pid, *(p.pid for p in controller.children(recursive=True))]
            return [process for process in marked(self._mark) if process.pid not in family]

        if not wait_until(lambda: not strays(), END_SECONDS):
            self.problems += [f"left: {described(process)}" for process in strays()]
            self.end()

    def _check_files(self) -> None:
        """Whether folders have what belongs there and nothing else."""
        left = [f"temporary {path.name}" for path in self._temporary.iterdir()]
        left += [
            path.name for path in self._out.iterdir() if path.name not in (*RUN_FILES, LOCK_FILE)
        ]
        left += [
            f"{path.parent.name}/{path.name}"
            for path in (self._out / "trials").glob("*/*")
            if path.name not in KEPT
        ]
        if left:
            self.problems.append(f"left by {self.commands} commands: {sorted(left)}")


def hash_of(trial: Path) -> str:
    return hashlib.sha256((trial / RESULT_FILE).read_bytes()).hexdigest()


def kept(file: Path | None) -> list[dict[str, Any]]:
    """The runs of earlier portions."""
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def kills_of(runs: Iterable[dict[str, Any]]) -> list[Kill]:
    return [Kill(**kill) for run in runs for kill in run["kills"]]


def measured(options: Namespace) -> list[dict[str, Any]]:
    """The runs so far: those of earlier portions, and as many more as are wanted or there is time
    for.  Ctrl-C drops the one under way."""
    runs = kept(options.keep)
    deadline = time.monotonic() + 60 * options.minutes
    while (missing := options.kills - len(kills_of(runs))) > 0 and time.monotonic() < deadline:
        draw = random.Random(f"{options.seed}, run {len(runs)}")
        with tempfile.TemporaryDirectory() as folder:
            run = KilledRun(Path(folder), draw, missing)
            began = time.monotonic()
            try:
                run.run()
            except KeyboardInterrupt:
                return runs
            finally:
                run.end()
        runs.append(
            {
                "kills": [asdict(kill) for kill in run.kills],
                "problems": run.problems,
                "weights": {cell: sorted(hashes) for cell, hashes in run.weights.items()},
                "commands": run.commands,
                "seconds": time.monotonic() - began,
            }
        )
        print(f"{len(kills_of(runs))} kills, {time.monotonic() - began:.0f} s", flush=True)
        print("\n".join(run.problems), end="\n" * bool(run.problems), flush=True)
        if options.keep is not None:
            with options.keep.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    return runs


def rows_of(kills: list[Kill]) -> list[tuple[str, ...]]:
    """What came of the kills of each kind on one node and on two."""
    groups: dict[tuple[str, int], list[Kill]] = defaultdict(list)
    for kill in kills:
        groups[kill.victim, kill.nodes].append(kill)
    rows = []
    for (victim, nodes), members in sorted(groups.items()):
        counts = Counter(kill.came_to for kill in members)
        told = "; ".join(f"{what}: {count}" for what, count in counts.most_common())
        ends = [kill.end_seconds for kill in members if kill.end_seconds is not None]
        seconds = f"{median(ends):.1f} ({max(ends):.1f})" if ends else ""
        rows.append((victim, str(nodes), str(len(members)), told, seconds))
    return rows


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--kills", type=int, default=WANTED, help="those of FILE among them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for this portion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="file that keeps each run as a line of JSON")
    options = parser.parse_args()
    if options.small:
        options.kills = 10
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.default_int_handler)  # also in the background of a shell
    add_sources_to_path()
    around = surroundings()
    runs = measured(options)
    kills = kills_of(runs)
    problems = [problem for run in runs for problem in run["problems"]]
    weights: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for cell, hashes in run["weights"].items():
            weights[cell].update(hashes)
    problems += [f"{cell}: {len(h)} different weights" for cell, h in weights.items() if len(h) > 1]
    by_strategy = Counter(kill.strategy for kill in kills if kill.strategy is not None)
    told = ", ".join(f"{name} {count}" for name, count in by_strategy.most_common())
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=len(kills) >= WANTED and not problems,
        table=Table(
            columns=("killed", "nodes", "kills", "what came of it", "s to the end: median (most)"),
            rows=tuple(rows_of(kills)),
            notes=(
                f"{len(kills)} kills in {len(runs)} runs of {sum(r['commands'] for r in runs)}"
                f" commands. {by_strategy.total()} hit a trial: {told}.",
                f"Wrong, lost or left: {'; '.join(problems) or 'nothing'}.",
            ),
        ),
        numbers={
            "kills": len(kills),
            "hit": by_strategy.total(),
            "problems": problems,
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
