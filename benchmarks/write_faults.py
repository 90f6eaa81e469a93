"""Fails or kills a command at each change that it makes to files: nothing stored is lost.

    python benchmarks/write_faults.py [--every 1]

Needs strace, which lets one system call after the other fail in `run`, `report` and `export`.  An
engine without processes stands in for the ranks of that `run`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Table, add_sources_to_path, options_of, store, surroundings

NAME = "write_faults"
READING = {"I/O error": "error=EIO", "no right": "error=EACCES", "no descriptors": "error=EMFILE"}
WRITING = {"disk full": "error=ENOSPC", "I/O error": "error=EIO", "read-only": "error=EROFS"}
KILLED = {"killed": "signal=KILL"}
CHANGES = (
    *("openat", "write", "pwrite64", "ftruncate", "fsync", "mkdir", "mkdirat", "rename"),
    *("renameat", "renameat2", "unlink", "unlinkat", "rmdir", "symlink", "symlinkat"),
)
CALLS = ",".join(f"?{call}" for call in CHANGES)
"""Calls to trace; strace skips those that this machine lacks."""
PATIENCE_SECONDS = 60.0
RUN = Path("runs") / "faults"
PAGE = RUN / "report.html"
TABLES = Path("tables")
COMMANDS = {
    "run": ["run", "experiment.yaml", "--out", str(RUN)],
    "report": ["report", str(RUN), "--no-images"],
    "export": ["export", str(RUN), "--to", "csv", "--out", str(TABLES)],
}

EXPERIMENT: dict[str, Any] = {
    "name": "faults",
    "workload": {"name": "classification", "model": "tiny_model:net", "dataset": "digits"},
    "recipe": {"global_batch": 8, "steps": 120, "optimizer": {"name": "sgd", "lr": 0.01}},
    "matrix": {"strategy": ["single", "ddp", "fsdp"]},
    "measure": {"warmup_steps": 1, "repeats": 1, "verify": False, "evaluate": "never"},
    "device": "cpu",
}
MODEL = """
from torch import nn

def net(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, padding=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )
"""


class PlayedRanks:
    """An engine that writes the files of ranks without computing anything."""

    samples = False

    def machine(self, device: str) -> Any:  # noqa: ARG002
        from shardmark.core.machine import Machine

        return Machine(device_type="cpu", device_count=0, cores=2)

    def environments(self) -> list[dict[str, Any]]:
        return []

    def unavailable_reason(self, nodes: int) -> None: ...
    def load(self, modules: Sequence[str], device_type: str) -> None: ...
    def prepare(self, trial: Any) -> None: ...
    def close(self) -> None: ...

    def run(self, directory: Path, *, on_tick: Callable[[], None], **_: Any) -> Any:
        from shardmark.core.run_files import rank_file, rank_steps_file
        from shardmark.launch.outcome import Ending
        from shardmark.results.files import write_atomically
        from shardmark.results.schema import RankRecord, WindowRecord
        from shardmark.trials.trial import Trial

        on_tick()
        trial = Trial.model_validate_json((directory / "trial.json").read_text())
        window = WindowRecord(first_step=1, end_step=2, started_at_seconds=1.0, window_seconds=1.0)
        for rank in range(trial.layout.processes):
            record = RankRecord(
                rank=rank,
                role="worker",
                host="played",
                pid=os.getpid(),
                device="cpu",
                threads=1,
                first_step_at_seconds=1.0,
                windows=(window,),
                samples=8,
            )
            step = {"rank": rank, "step": 1, "measured": True, "step_seconds": 0.5, "loss": 1.0}
            write_atomically(directory / rank_steps_file(rank), f"{json.dumps(step)}\n".encode())
            write_atomically(directory / rank_file(rank), record.model_dump_json().encode())
            log = directory / "logs" / "run" / "attempt_0" / str(rank) / "stdout.log"
            log.parent.mkdir(parents=True)
            log.write_text("hello\n")
        on_tick()
        return Ending(status="exited", agent_exit_code=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One system call of a command, by its name and its number among calls of that name."""

    call: str
    number: int
    reads: bool
    shown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command."""

    exit_code: int
    printed: str
    traced: str = ""
    hung: bool = False
    """True if it was killed because it did not end in time."""


@contextmanager
def played() -> Iterator[None]:
    """Replace the engine of `run`, and the library of figures, whose threads shift the count."""
    import vl_convert

    from shardmark.launch import session

    before = session.build_engine, session.environment, vl_convert.vegalite_to_svg
    session.build_engine = lambda *_: PlayedRanks()
    session.environment = lambda: {"host": "played"}
    vl_convert.vegalite_to_svg = lambda *_, **__: "<svg/>"
    try:
        yield
    finally:
        session.build_engine, session.environment, vl_convert.vegalite_to_svg = before


def forked(words: Sequence[str], folder: Path, *strace: str) -> Ended:
    """Run the command under strace in a fork of this process, which has imported everything."""
    from shardmark.cli import main as command

    printed, traced = folder.with_suffix(".out"), folder.with_suffix(".trace")
    traced.write_text("")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.chdir(folder)
        descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.read(reader, 1)  # until strace has come
        code = 99
        try:
            code = command(words)
        except BaseException as error:  # as Python would
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    os.close(reader)
    tracer = None
    if strace:
        options = ["-qq", "-y", "-s", "200", "-e", f"trace={CALLS}", *strace]
        tracer = subprocess.Popen(["strace", *options, "-o", str(traced), "-p", str(child)])
        status = Path(f"/proc/{child}/status")
        while "\nTracerPid:\t0" in status.read_text():
            assert tracer.poll() is None, "strace may not trace here"
            time.sleep(0.002)
    os.write(writer, b"x")
    os.close(writer)
    deadline, hung = time.monotonic() + PATIENCE_SECONDS, False
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if hung := time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    if tracer is not None:
        tracer.wait()
    return Ended(
        exit_code=os.waitstatus_to_exitcode(ended[1]),
        printed=printed.read_text(),
        traced=traced.read_text(),
        hung=hung,
    )


def places_of(words: Sequence[str], folder: Path) -> list[Place]:
    """All system calls of the command that touch the folder, in order."""
    ended = forked(words, folder, "-e", "trace=all")
    assert ended.exit_code == 0, ended.printed
    counts: Counter[str] = Counter()
    places = []
    for line in ended.traced.splitlines():
        call = line.partition("(")[0]
        if call not in CHANGES:
            continue
        counts[call] += 1
        inside = re.sub(r"AT_FDCWD<[^>]*>", "", line)
        own = any(name in inside for name in (f"{folder}/", f"{folder}>", '"runs', f'"{TABLES}'))
        missing = "ENOENT" in line and "O_CREAT" not in line
        if own and not missing:
            reads = call == "openat" and "O_RDONLY" in line
            places.append(Place(call=call, number=counts[call], reads=reads, shown=line))
    return places


def prepared(folder: Path) -> None:
    """Make a run with a stored trial, a damaged one and a missing one, its page and tables."""
    folder.mkdir()
    (folder / "tiny_model.py").write_text(MODEL)
    file = folder / "experiment.yaml"
    file.write_text(json.dumps(EXPERIMENT | {"matrix": {"strategy": ["single", "ddp"]}}))
    for words in COMMANDS.values():
        ended = forked(words, folder)
        assert ended.exit_code == 0, ended.printed
    for made in (folder / PAGE, *(folder / TABLES).iterdir()):
        made.write_text("an earlier command's")  # else it could not be seen who made it
    (log,) = folder.glob(f"{RUN}/trials/ddp-*/log.txt")
    log.write_text("cut")
    file.write_text(json.dumps(EXPERIMENT))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def missing(folder: Path, expected: dict[str, bytes]) -> list[str]:
    """Names of expected files that are absent or differ."""
    left = contents(folder)
    return [name for name, content in expected.items() if left.get(name) != content]


def problems_of_ending(ended: Ended, injection: str) -> list[str]:
    """Problems of an end that is neither success, nor a refusal, nor the injected kill."""
    problems = []
    if ended.hung:
        problems.append(f"it had not ended after {PATIENCE_SECONDS:g} s")
    codes = (0, 2, *(-signal.SIGKILL,) * (injection in KILLED.values()))
    if ended.exit_code not in codes or "Traceback" in ended.printed:
        problems.append(f"exit code {ended.exit_code}: {ended.printed[-400:]}")
    if ended.exit_code == 2 and "error: " not in ended.printed:
        problems.append(f"refused without a reason: {ended.printed!r}")
    return problems


def problems_after(
    verb: str, folder: Path, before: dict[str, bytes], expected: dict[str, bytes]
) -> list[str]:
    """Lost or incomplete files, or a run that the same command does not finish."""
    from shardmark.results.store import load_run

    problems = []
    stored = next(name for name in before if name.startswith(f"{RUN}/trials/single-"))
    trial = str(Path(stored).parent)
    left = contents(folder)
    for name, content in before.items():
        if name.startswith(trial) and left.get(name) != content:
            problems.append(f"lost {name}")
        if name.startswith((f"{RUN}/trials", f"{RUN}/.lock")):
            continue
        told = left.get(name, b"")
        # A page says which file of the run it could not read, and shows the rest.
        page = name == str(PAGE) and told.rstrip().endswith(b"</html>")
        if not page and told not in (content, expected.get(name)):
            problems.append(f"half of {name}")
    if verb == "run":
        run = load_run(folder / RUN, verify=True)
        known = "/ddp-"
        problems += [f"half a trial: {d}" for d in run.damaged if known not in str(d)]
        problems += [f"{t.id} is {t.outcome}" for t in run.trials if t.outcome != "ok"]
    again = forked(COMMANDS[verb], folder)
    if again.exit_code != 0:
        problems.append(f"not finished by the same command: {again.printed[-400:]}")
    if verb != "run":
        problems += [f"finished without {name}" for name in missing(folder, expected)]
    after = load_run(folder / RUN, verify=True)
    if verb == "run":
        trials = [str(trial.outcome) for trial in after.trials]
        if trials != ["ok"] * 3 or after.damaged or after.missing:
            problems.append(f"finished with {trials}, {after.damaged}, {after.missing}")
        asides = [*(folder / RUN).glob("set-aside/*/log.txt")]
        if [log.read_text() for log in asides] != ["cut"]:
            problems.append(f"the damaged trial is not set aside: {asides}")
        left_over = [*(folder / RUN).rglob("*.tmp"), *(folder / RUN).rglob("rank-*")]
        problems += [f"left behind: {path.relative_to(folder)}" for path in left_over]
    return problems


@dataclass(slots=True)
class Tally:
    """Outcomes of one kind of fault in one command."""

    injected: int = 0
    refused: int = 0
    carried_on: int = 0


def inject_all(scratch: Path, every: int) -> tuple[dict[tuple[str, str], Tally], list[str]]:
    """Inject each fault at each call of each command; return the outcomes and the problems."""
    tallies: dict[tuple[str, str], Tally] = {}
    wrong: list[str] = []
    template = scratch / "template"
    prepared(template)
    for verb, words in COMMANDS.items():
        counted = scratch / "counted"
        shutil.copytree(template, counted, symlinks=True)
        before = contents(template)
        places = places_of(words, counted)
        expected = contents(counted)
        shutil.rmtree(counted)
        print(f"{verb}: {len(places)} calls", flush=True)
        for place in places[::every]:
            for fault, injection in ((READING if place.reads else WRITING) | KILLED).items():
                folder = scratch / "counted"
                shutil.copytree(template, folder, symlinks=True)
                inject = f"inject={place.call}:{injection}:when={place.number}"
                ended = forked(words, folder, "-e", inject)
                tally = tallies.setdefault((verb, fault), Tally())
                hit = "(INJECTED)" in ended.traced or ended.exit_code == -signal.SIGKILL
                tally.injected += hit
                tally.refused += ended.exit_code == 2
                tally.carried_on += hit and ended.exit_code == 0
                found = problems_of_ending(ended, injection) + ["it was not hit"] * (not hit)
                if ended.exit_code == 0 and verb != "run" and injection not in READING.values():
                    found += [f"it went on without {name}" for name in missing(folder, expected)]
                found += problems_after(verb, folder, before, expected)
                wrong += [f"{verb}, {fault} at {place.shown[:160]}: {each}" for each in found]
                for each in wrong[len(wrong) - len(found) :]:
                    print(each, flush=True)
                shutil.rmtree(folder)
    return tallies, wrong


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--every", type=int, default=1, help="take each N-th call alone")
    options = parser.parse_args()
    options.every = 40 if options.small else options.every
    add_sources_to_path()
    around = surroundings()
    with tempfile.TemporaryDirectory() as name, played():
        tallies, wrong = inject_all(Path(name), options.every)
    injected = sum(tally.injected for tally in tallies.values())
    store(
        NAME,
        options=options,
        around=around,
        bar="Bar: nothing stored is lost, no traceback, the same command finishes",
        holds=not wrong,
        table=Table(
            columns=("command", "fault", "times", "refused", "went on"),
            rows=tuple(
                (*key, str(tally.injected), str(tally.refused), str(tally.carried_on))
                for key, tally in tallies.items()
            ),
            notes=(f"{injected} faults at single system calls. Wrong: {len(wrong)}.",),
        ),
        numbers={
            "faults": [[*key, asdict(tally)] for key, tally in tallies.items()],
            "wrong": wrong,
        },
    )


if __name__ == "__main__":
    main()
