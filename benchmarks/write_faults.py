"""Fails or kills a command at each change that it makes to files: nothing stored is lost.

    python benchmarks/write_faults.py [--every 1]

Needs strace, which lets one system call after the other fail in `run`, `report` and `export`.  The
engine of the tests, which starts no processes, stands in for the ranks of that `run`.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Table, options_of, store, surroundings
from tests.unit.bench.launch.fakes import MAPPING, FakeEngine

from shardmark.base.results.store import load_run

NAME = "write_faults"
SESSION = "shardmark.bench.launch.session"
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
RUN, TABLES = Path("runs") / "faults", Path("tables")
PAGE = RUN / "report.html"
COMMANDS = {
    "run": ["run", "experiment.yaml", "--out", str(RUN)],
    "report": ["report", str(RUN), "--no-images"],
    "export": ["export", str(RUN), "--to", "csv", "--out", str(TABLES)],
}
STRATEGIES = ["single", "ddp", "fsdp"]
Files = dict[str, bytes]


class Place(NamedTuple):
    """One system call of a command, by its name and its number among calls of that name."""

    call: str
    number: int
    reads: bool
    line: str


class Ended(NamedTuple):
    """The end of a command; `hung` if it was killed because it did not end in time."""

    exit_code: int
    output: str
    trace: str
    hung: bool


@contextmanager
def replaced() -> Iterator[None]:
    """Replace the engine of `run`, and the library of figures, whose threads shift the count."""
    with (
        mock.patch(f"{SESSION}.build_engine", side_effect=lambda *_: FakeEngine()),
        mock.patch(f"{SESSION}.environment", return_value={"host": "fake"}),
        mock.patch("vl_convert.vega_to_svg", return_value="<svg/>"),
    ):
        yield


def forked(words: Sequence[str], folder: Path, *strace: str) -> Ended:
    """Run the command under strace in a fork of this process, which has imported everything."""
    from shardmark.cli import main as command

    output, trace = folder.with_suffix(".out"), folder.with_suffix(".trace")
    trace.write_text("")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.chdir(folder)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.read(reader, 1)  # waits for strace
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
        tracer = subprocess.Popen(["strace", *options, "-o", str(trace), "-p", str(child)])
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
    code = os.waitstatus_to_exitcode(ended[1])
    return Ended(code, output.read_text(), trace.read_text(), hung)


def succeed(words: Sequence[str], folder: Path, *strace: str) -> str:
    """Run a command that must end well; return its trace."""
    ended = forked(words, folder, *strace)
    assert ended.exit_code == 0, ended.output
    return ended.trace


def places_of(words: Sequence[str], folder: Path) -> list[Place]:
    """All system calls of the command that touch the folder, in order."""
    counts: Counter[str] = Counter()
    places = []
    for line in succeed(words, folder, "-e", "trace=all").splitlines():
        call = line.partition("(")[0]
        if call not in CHANGES:
            continue
        counts[call] += 1
        paths = re.sub(r"AT_FDCWD<[^>]*>", "", line)
        inside = any(name in paths for name in (f"{folder}/", f"{folder}>", '"runs', f'"{TABLES}'))
        if inside and ("ENOENT" not in line or "O_CREAT" in line):
            places.append(Place(call, counts[call], call == "openat" and "O_RDONLY" in line, line))
    return places


def make_template(folder: Path) -> None:
    """Make a run with a stored trial, a damaged one and a missing one, its page and tables."""
    folder.mkdir()
    file = folder / "experiment.yaml"
    file.write_text(json.dumps(MAPPING))
    for words in COMMANDS.values():
        succeed(words, folder)
    for old in (folder / PAGE, *(folder / TABLES).iterdir()):
        old.write_text("the file of an earlier command")
    (log,) = folder.glob(f"{RUN}/trials/ddp-*/log.txt")
    log.write_text("cut")
    file.write_text(json.dumps(MAPPING | {"matrix": {"strategy": STRATEGIES}}))


def contents(folder: Path) -> Files:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def missing(folder: Path, expected: Files) -> list[str]:
    """Names of expected files that are absent or differ."""
    left = contents(folder)
    return [name for name, content in expected.items() if left.get(name) != content]


def problems_of_ending(ended: Ended, fault: str) -> list[str]:
    """Problems of an end that is neither success, nor a refusal, nor the injected kill."""
    problems = [f"it had not ended after {PATIENCE_SECONDS:g} s"] * ended.hung
    codes = (0, 2, *(-signal.SIGKILL,) * (fault in KILLED))
    if ended.exit_code not in codes or "Traceback" in ended.output:
        problems.append(f"exit code {ended.exit_code}: {ended.output[-400:]}")
    if ended.exit_code == 2 and "error: " not in ended.output:
        problems.append(f"refused without a reason: {ended.output!r}")
    return problems


def problems_after(verb: str, folder: Path, before: Files, expected: Files) -> list[str]:
    """Lost or incomplete files, or a run that the same command does not finish."""
    problems = []
    left = contents(folder)
    for name, content in before.items():
        if name.startswith(f"{RUN}/trials/single-") and left.get(name) != content:
            problems.append(f"lost {name}")
        if name.startswith((f"{RUN}/trials", f"{RUN}/.lock")):
            continue
        # A page names the file of the run that it could not read, and shows the rest.
        page = name == str(PAGE) and left.get(name, b"").rstrip().endswith(b"</html>")
        if not page and left.get(name) not in (content, expected.get(name)):
            problems.append(f"half of {name}")
    run = load_run(folder / RUN, verify=True)
    if verb == "run":
        problems += [f"half a trial: {d}" for d in run.damaged if "/ddp-" not in str(d)]
        problems += [f"{t.id} is {t.outcome}" for t in run.trials if t.outcome != "ok"]
    again = forked(COMMANDS[verb], folder)
    if again.exit_code != 0:
        problems.append(f"not finished by the same command: {again.output[-400:]}")
    if verb != "run":
        return problems + [f"finished without {name}" for name in missing(folder, expected)]
    run = load_run(folder / RUN, verify=True)
    outcomes = [str(trial.outcome) for trial in run.trials]
    if outcomes != ["ok"] * len(STRATEGIES) or run.damaged or run.missing:
        problems.append(f"finished with {outcomes}, {run.damaged}, {run.missing}")
    if [log.read_text() for log in (folder / RUN).glob("set-aside/*/log.txt")] != ["cut"]:
        problems.append("the damaged trial is not set aside")
    rest = [*(folder / RUN).rglob("*.tmp"), *(folder / RUN).rglob("rank-*")]
    return problems + [f"left behind: {path.relative_to(folder)}" for path in rest]


def inject_all(scratch: Path, every: int) -> tuple[dict[tuple[str, str], Counter[str]], list[str]]:
    """Inject each fault at each call of each command; return the outcomes and the problems."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    wrong: list[str] = []
    template, folder = scratch / "template", scratch / "copy"
    make_template(template)
    before = contents(template)
    for verb, words in COMMANDS.items():
        shutil.copytree(template, folder, symlinks=True)
        places, expected = places_of(words, folder), contents(folder)
        shutil.rmtree(folder)
        print(f"{verb}: {len(places)} calls", flush=True)
        for place in places[::every]:
            for fault, injection in ((READING if place.reads else WRITING) | KILLED).items():
                shutil.copytree(template, folder, symlinks=True)
                inject = f"inject={place.call}:{injection}:when={place.number}"
                ended = forked(words, folder, "-e", inject)
                hit = "(INJECTED)" in ended.trace or ended.exit_code == -signal.SIGKILL
                finished = hit and ended.exit_code == 0
                counts.setdefault((verb, fault), Counter()).update(
                    injected=+hit, refused=+(ended.exit_code == 2), finished=+finished
                )
                problems = problems_of_ending(ended, fault) + ["it was not hit"] * (not hit)
                if finished and verb != "run" and fault not in READING:
                    problems += [f"finished without {name}" for name in missing(folder, expected)]
                problems += problems_after(verb, folder, before, expected)
                wrong += [f"{verb}, {fault} at {place.line[:160]}: {text}" for text in problems]
                print(*problems, sep="\n", end="\n" * bool(problems), flush=True)
                shutil.rmtree(folder)
    return counts, wrong


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--every", type=int, default=1, help="take each N-th call alone")
    options = parser.parse_args()
    options.every = 40 if options.small else options.every
    around = surroundings()
    with tempfile.TemporaryDirectory() as name, replaced():
        counts, wrong = inject_all(Path(name), options.every)
    injected = sum(count["injected"] for count in counts.values())
    columns = ("injected", "refused", "finished")
    store(
        NAME,
        options=options,
        around=around,
        bar="Bar: nothing stored is lost, no traceback, the same command finishes",
        holds=not wrong,
        table=Table(
            columns=("command", "fault", *columns),
            rows=tuple((*key, *(str(of[name]) for name in columns)) for key, of in counts.items()),
            notes=(f"{injected} faults at single system calls. Wrong: {len(wrong)}.",),
        ),
        numbers={"faults": [[*key, of] for key, of in counts.items()], "wrong": wrong},
    )


if __name__ == "__main__":
    main()
