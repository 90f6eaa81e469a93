"""Kills processes of runs at random moments, and checks that nothing is lost or left behind.

    python benchmarks/random_kills.py [--kills 1000] [--minutes M] [--seed 0] [--small]
        [--keep FILE]     measure in portions: kills in FILE are counted and not repeated

Each run has small trials, on one node or on two of the loopback, and is started by the command
line.  The victims are ranks, the launcher of a trial, the process that trials are forked from, node
processes, the command itself, or all of them at once.  The same command is given again until the
run is finished.

After each command: no process outlives it, stored results are unchanged, and a trial has failed
only if one of its processes was killed, with that reason.  After each run: its folder, its
temporary files and /dev/shm hold only what belongs there.
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
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from harness import ROOT, Table, json_lines, options_of, store, surroundings
from shardmark.base.files.run_files import RESULT_FILE, TRIAL_FILE
from shardmark.base.results.runs_folder import LOCK_FILE
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import RUN_FILES, load_run
from shardmark.bench.launch.trial_artifacts import TRIAL_FILES

NAME = "random_kills"
WANTED = 1000
BAR = f"Bar: {WANTED} kills, every outcome right, nothing lost or left, every run finished"
MARK = "SHARDMARK_RANDOM_KILLS"
"""Environment variable by which all processes of a run are found."""
PAIRS = (
    *("ddp", "fsdp", "fsdp-grad-op", "ps-sync", "fsdp1", "zro", "local-sgd", "diloco"),
    *("ps-async", "ps-bounded", "zero-0", "zero-1", "zero-2", "zero-3"),
)
SMALL = "tests.distributed.models:small"
PICTURES = {"name": "classification", "model": SMALL, "dataset": "digits"}
TEXT = {
    **{"name": "language", "model": "gpt", "layers": 2, "width": 16, "heads": 2},
    **{"dataset": "text", "tokenizer": "bytes", "sequence_length": 16},
}
MATRICES = (
    (PICTURES, {"strategy": [*PAIRS], "world_size": [2]}),
    (PICTURES, {"strategy": ["single", "fsdp-hybrid"], "world_size": [1, 4]}),
    (TEXT, {"strategy": ["tp", "pp"], "world_size": [2]}),
    (TEXT, {"strategy": ["fsdp-tp", "ddp-pp", "fsdp-pp", "fsdp-tp-pp"], "world_size": [4]}),
)
"""Workload and matrix of a run: every strategy but `dp`, which needs CUDA devices."""
MATRIX_WEIGHTS = (9, 1, 2, 2)
VICTIM_WEIGHTS = {
    **{"rank": 60, "launcher": 16, "node": 5},
    **{"fork server": 2, "controller": 1.5, "everything": 1.5},
}
"""Relative frequencies; after all but the first two, the libraries are loaded again."""
ENDS_COMMAND = ("controller", "everything")
REASONS = {
    **{"rank": ("SIGKILL",), "node": ("was lost",)},
    **{"launcher": ("the launcher",), "fork server": ("the launcher",)},
    **{"controller": (), "everything": ("SIGKILL", "was lost", "the launcher")},
}
"""Texts, one of which the failure of a trial has after the kill of such a process."""
STEPS, TRIALS = 60, 36
LATEST_SECONDS = {"rank": 1.5, "launcher": 1.5}
"""Greatest delay of a kill after such a process has started; 6 s for other processes."""
END_SECONDS = 30.0
COMMAND_SECONDS = 1800.0
POLL_SECONDS = 0.05
CHILD_NAMES = {"launch.local.fork_server": "fork server", "launch.nodes.node": "node"}


def experiment_of(draw: random.Random, folder: Path, nodes: int) -> dict[str, Any]:
    ((workload, matrix),) = draw.choices(MATRICES, MATRIX_WEIGHTS)
    if workload is TEXT:
        (folder / "texts").mkdir()
        (folder / "texts" / "text.txt").write_text("A text to train on, and one to read. " * 500)
        workload = workload | {"data_dir": str(folder / "texts")}
    several = {"name": "torchrun", "hosts": ["127.0.0.1"] * nodes, "remote": "{command}"}
    return {
        "name": "random-kills",
        "workload": workload,
        "recipe": {"global_batch": 16, "steps": STEPS, "threads_per_rank": 1},
        "matrix": matrix,
        "placement": {"nodes": nodes},
        "measure": {
            **{"warmup_steps": 1, "verify": False, "probe": False, "evaluate": "never"},
            **{"link_seconds": 0, "max_remeasure": 0, "repeats": TRIALS // len(matrix["strategy"])},
        },
        "limits": {"trial_seconds": 300},
        "engine": several if nodes > 1 else "local",
        "device": "cpu",
    }


def processes_of(controller: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Living processes of a command by their role."""
    by_role: dict[str, list[psutil.Process]] = defaultdict(list)

    def role_of(process: psutil.Process, parent: str) -> str:
        if parent in ("launcher", "rank"):
            return "rank"
        if parent == "fork server":  # it also looks for devices in a process without a group
            return "launcher" if os.getpgid(process.pid) == process.pid else "other"
        words = " ".join(process.cmdline())
        return next((role for module, role in CHILD_NAMES.items() if module in words), "other")

    def add(process: psutil.Process, role: str) -> None:
        with suppress(psutil.Error, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE:
                by_role[role].append(process)
                for child in process.children():
                    add(child, role_of(child, role))

    add(controller, "controller")
    return by_role


def marked(mark: str) -> list[psutil.Process]:
    """Living processes with the mark in their environment, whatever their parents are."""
    variable, processes = f"{MARK}={mark}".encode(), []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if variable in variables and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return holds


class KilledRun:
    """One run with its commands, the kills, and the problems that were found."""

    def __init__(self, folder: Path, draw: random.Random, kills: int) -> None:
        self.kills: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.commands = 0
        self._draw, self._kills_left = draw, kills
        self._nodes = draw.choice((1, 2))
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._file, self._log = folder / "experiment.yaml", folder / "log.txt"
        self._file.write_text(json.dumps(experiment_of(draw, folder, self._nodes)))
        self._out, self._temporary = folder / "run", folder / "temporary"
        self._temporary.mkdir()
        self._variables = {
            MARK: self._mark,
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        }

    def run(self) -> None:
        """Kill processes, and give the command until it has finished the run."""
        before = shared_memory()
        while not self._command():
            pass
        known = (*RUN_FILES, LOCK_FILE)
        left = [path.name for path in self._temporary.iterdir()]
        left += [path.name for path in self._out.iterdir() if path.name not in known]
        trial_files = (self._out / "trials").glob("*/*")
        left += [
            f"{path.parent.name}/{path.name}"
            for path in trial_files
            if path.name not in TRIAL_FILES
        ]
        self.problems += [f"left after {self.commands} commands: {sorted(left)}"] * bool(left)
        if not wait_until(lambda: shared_memory() <= before, END_SECONDS):
            self.problems.append(f"left in /dev/shm: {sorted(shared_memory() - before)}")

    def end(self) -> None:
        """Kill all processes of the run."""
        for process in marked(self._mark):
            with suppress(psutil.Error):
                process.kill()

    def _command(self) -> bool:
        """Give the command and kill meanwhile; return whether the run is finished."""
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
            if self._kills_left:
                self._kill(command)
            else:
                time.sleep(POLL_SECONDS)
        if command.poll() is None:
            self.problems.append(f"a command was not done after {COMMAND_SECONDS:g} s")
            self._kills_left = 0
            self.end()
        code, kills = command.wait(), self.kills[first_kill:]
        if not wait_until(lambda: not marked(self._mark), END_SECONDS):
            left = [" ".join(process.cmdline())[:120] for process in marked(self._mark)]
            self.problems.append(f"left by a command: {left}")
            self.end()
        output = self._log.read_text(errors="replace")
        # A kill while the libraries are loaded ends the command with a message and code 2.
        ends = any(kill["victim"] in ENDS_COMMAND for kill in kills)
        early = any(kill["victim"] in ("fork server", "node") for kill in kills)
        codes = (0, 1, *(-signal.SIGKILL,) * ends, *(2,) * early)
        if code not in codes or "Traceback" in output:
            self.problems.append(f"code {code} after {kills[-3:]}: {output[-500:]}")
        self._check_results(before, kills, ends)
        return code in (0, 1) or not kills

    def _kill(self, command: subprocess.Popen[bytes]) -> None:
        """Kill one process, or all; the role is drawn before it is known which exist."""
        controller = psutil.Process(command.pid)
        weights = {r: w for r, w in VICTIM_WEIGHTS.items() if self._nodes > 1 or r != "node"}
        (role,) = self._draw.choices([*weights], [*weights.values()])

        def ended() -> bool:
            return command.poll() is not None

        if role in LATEST_SECONDS:
            wait_until(lambda: ended() or role in processes_of(controller), COMMAND_SECONDS)
        wait_until(ended, self._draw.uniform(0, LATEST_SECONDS.get(role, 6.0)))
        by_role = processes_of(controller)
        trial = self._current_trial() if "launcher" in by_role else None
        victims = [process for members in by_role.values() for process in members]
        if role != "everything":
            victims = [self._draw.choice(by_role[role])] if role in by_role else []
        if ended() or not victims:
            return
        killed_at_seconds = time.time()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        self._kills_left -= 1
        print(f"{role} of {trial or 'no trial'}", flush=True)
        kill = {"victim": role, "nodes": self._nodes, "trial": trial}
        kill |= {"at_seconds": killed_at_seconds, "came_to": "no trial was running"}
        self.kills.append(kill)

    def _current_trial(self) -> str | None:
        """Id of the trial that was begun last, unless it has its result."""
        begun: list[tuple[float, Path]] = []
        for path in (self._out / "trials").glob(f"*/{TRIAL_FILE}"):
            with suppress(FileNotFoundError):  # it is removed once the result is stored
                begun.append((path.stat().st_mtime, path.parent))
        _, last = max(begun, default=(0.0, None))
        return None if last is None or (last / RESULT_FILE).exists() else last.name

    def _results(self) -> dict[str, tuple[TrialResult, str]]:
        """Stored results with the hash of their files."""
        if not (self._out / "trials").is_dir():
            return {}
        run = load_run(self._out, verify=True)
        self.problems += [f"damaged: {damaged}" for damaged in run.damaged]
        return {trial.id: (trial, self._digest(trial)) for trial in run.trials}

    def _digest(self, trial: TrialResult) -> str:
        content = (self._out / "trials" / trial.id / RESULT_FILE).read_bytes()
        return hashlib.sha256(content).hexdigest()

    def _check_results(
        self,
        before: dict[str, tuple[TrialResult, str]],
        kills: list[dict[str, Any]],
        command_killed: bool,
    ) -> None:
        after = self._results()
        for name, (trial, digest) in before.items():
            same = after.get(name, (None, ""))[1] == digest
            if trial.outcome is not Outcome.UNAVAILABLE and not same:
                self.problems.append(f"{name}: its result was lost or changed")
        for name, (trial, digest) in after.items():
            if before.get(name, (None, ""))[1] != digest:
                self._check_outcome(trial, [k for k in kills if k["trial"] == name], kills)
        for kill in kills:
            if kill["trial"] is not None and kill["trial"] not in after:
                kill["came_to"] = "the trial has no result, the next command ran it"
                if not command_killed:
                    self.problems.append(f"no result after {kill}")

    def _check_outcome(
        self, trial: TrialResult, trial_kills: list[dict[str, Any]], kills: list[dict[str, Any]]
    ) -> None:
        reason = trial.failure.reason if trial.failure is not None else ""
        lost = trial.outcome is Outcome.UNAVAILABLE and "was lost" in reason
        right = {
            Outcome.OK: True,
            Outcome.FAILED: any(t in reason for k in trial_kills for t in REASONS[k["victim"]]),
            Outcome.UNAVAILABLE: lost and any(kill["victim"] == "node" for kill in kills),
        }.get(trial.outcome, False)
        if not right:
            self.problems.append(f"{trial.id}: {trial.outcome}: {reason}, kills {trial_kills}")
        stored = (self._out / "trials" / trial.id / RESULT_FILE).stat().st_mtime
        for kill in trial_kills:
            kill["came_to"] = f"the trial ended as {trial.outcome}"
            if trial.outcome is Outcome.FAILED:
                kill["end_seconds"] = stored - trial_kills[-1]["at_seconds"]
                if kill["end_seconds"] > END_SECONDS:
                    self.problems.append(f"{trial.id}: ended {kill['end_seconds']:.0f} s later")


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--kills", type=int, default=WANTED, help="kills in FILE included")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for this portion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="file that keeps each run as a line of JSON")
    options = parser.parse_args()
    options.kills = 10 if options.small else options.kills
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # also in the background of a shell
    around = surroundings()
    runs = json_lines(options.keep)
    deadline = time.monotonic() + 60 * options.minutes
    while time.monotonic() < deadline:
        missing = options.kills - sum(len(run["kills"]) for run in runs)
        if missing <= 0:
            break
        with tempfile.TemporaryDirectory() as folder:
            run = KilledRun(Path(folder), random.Random(f"{options.seed}, {len(runs)}"), missing)
            try:
                run.run()
            finally:
                run.end()
        runs.append({"kills": run.kills, "problems": run.problems, "commands": run.commands})
        print(f"{len(run.kills)} kills", *run.problems, sep="\n", flush=True)
        if options.keep is not None:
            with options.keep.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    kills = [kill for run in runs for kill in run["kills"]]
    problems = [problem for run in runs for problem in run["problems"]]
    rows = []
    for victim, nodes in sorted({(kill["victim"], kill["nodes"]) for kill in kills}):
        members = [kill for kill in kills if (kill["victim"], kill["nodes"]) == (victim, nodes)]
        counts = Counter(kill["came_to"] for kill in members)
        outcomes = "; ".join(f"{text}: {count}" for text, count in counts.most_common())
        seconds = [kill["end_seconds"] for kill in members if "end_seconds" in kill]
        end = f"{median(seconds):.1f} ({max(seconds):.1f})" if seconds else ""
        rows.append((victim, str(nodes), str(len(members)), outcomes, end))
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=len(kills) >= WANTED and not problems,
        table=Table(
            columns=("killed", "nodes", "kills", "outcomes", "s to the end: median (most)"),
            rows=tuple(rows),
            notes=(
                f"{len(kills)} kills in {len(runs)} runs of {sum(r['commands'] for r in runs)}"
                " commands.",
                f"Wrong, lost or left: {'; '.join(problems) or 'nothing'}.",
            ),
        ),
        numbers={"kills": len(kills), "problems": problems, "runs": runs},
    )


if __name__ == "__main__":
    main()
