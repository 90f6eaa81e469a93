"""Starts of a script that leave the user's files and processes as they were (Linux).

Every start has a supervisor: a small process that gives the script a private view of the file
systems, and that ends all of its descendants when the script or Shardmark ends, however they end.
Imports no torch.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from shardmark.base.errors import InputError
from shardmark.base.files.scratch import remove_tree, scratch_folder
from shardmark.base.system.processes import adopt_orphans, die_with_parent, end_descendants
from shardmark.base.text import listed, say
from shardmark.scripts import isolation
from shardmark.scripts.interventions.base import NAMES

NOT_ISOLATED = 97
"""Exit code of a supervisor that cannot protect the user's files; the log has the reason."""
NO_OUTPUT = "no output"
END_SECONDS = 60.0
POLL_SECONDS = 0.02
WRITTEN_FILE = "written.json"
FULL_BYTES = 2**20
"""Free space below which a disk counts as full."""
PREFIX = re.compile(r"^(\[\w+\d+\]:)?[ \t]*|[ \t]+$", re.MULTILINE)
ERROR = re.compile(
    r"(?!.*(ChildFailedError|ProcessRaisedException))[\w.]*(Error|Exception|Interrupt|Exit)\b.*"
    r"|.*(: error: |t open file|: No module)"
)
"""Lines with which Python and argparse end; torchrun and mp.spawn add an error of their own."""
FRAME = re.compile(
    r'File "(?!<|.*/(?:site-packages|bin|shardmark/(?:scripts|audit|ranks))/|.*/lib/python3)'
    r'([^"]+)", line (\d+)'
)
BAR = re.compile(r"\d%(\||\s|$)|\d+/\d+ \[|\b(it/s|s/it)\b")
"""Progress bars."""
WRITES_ARE_FINE = (
    "let it run in a container with user namespaces, or give --writes-are-fine: the script then "
    "writes to your files as it does without Shardmark"
)
TRACKERS_OFF: dict[str, str] = NAMES["variables_that_silence_trackers"]
"""Variables with which trackers send nothing; MLflow writes below the private view of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The folders of one start, and whether its writes are kept from the user's files."""

    folder: str
    """Folder that the processes share with Shardmark."""
    records: str
    """Folder inside of it, for the list of files that the start wrote."""
    upper: str | None
    """Empty folder that receives all other writes; None if the script may write to the files."""
    revision: str = ""
    """Commit that is checked out in the private copy of the working folder's repository."""
    owned: tuple[str, ...]
    """Folders that the supervisor removes if Shardmark has ended before."""


class Started:
    """A start of a script: its supervisor with all processes below it."""

    def __init__(self, log: Path, pid: int, lifeline: int) -> None:
        self.log, self._pid, self._lifeline = log, pid, lifeline
        self._code: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None if it runs longer, and is then ended.

        Raises `InputError` if the user's files cannot be protected.
        """
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until and not self._ended():
                time.sleep(POLL_SECONDS)
            code = self._code
        finally:
            self.end()
        if code == NOT_ISOLATED:
            reason = f"this machine allows no private view of the files ({self.error()})"
            raise InputError("command", reason, WRITES_ARE_FINE)
        return code

    def end(self) -> None:
        """End all processes of the start, and wait for their end."""
        if self._lifeline >= 0:
            with suppress(BrokenPipeError):
                os.write(self._lifeline, b"end")  # a later fork may keep the pipe open
            os.close(self._lifeline)
            self._lifeline = -1
        until = time.monotonic() + END_SECONDS
        while not self._ended() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def _ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def error(self) -> str:
        """The line of the output that names an error, with the script's line, or its last line."""
        text = PREFIX.sub("", self.log.read_text(errors="replace"))
        lines = [row for row in text.splitlines() if re.search(r"\w", row) and not BAR.search(row)]
        number = next((n for n, line in enumerate(lines) if ERROR.match(line)), len(lines) - 1)
        frames = [frame for line in lines[:number] if (frame := FRAME.match(line))]
        place = f" ({Path(frames[-1][1]).name}:{frames[-1][2]})" if frames else ""
        return lines[number] + place if lines else NO_OUTPUT


def start_words(
    words: Sequence[str], environment: Mapping[str, str], log: Path, protection: Protection
) -> Started:
    """Start a command.  Its words are found by the environment's PATH."""
    reading, writing = os.pipe()
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})"
    code += f"; from {__name__} import supervise_words; supervise_words()"
    facts = json.dumps(asdict(protection))
    arguments = [str(reading), str(os.getpid()), facts, *words]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-E", "-S", "-P", "-c", code, *arguments], env=dict(environment),
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, pass_fds=[reading],
            start_new_session=True,
        )  # fmt: skip
    os.close(reading)
    process.returncode = 0  # `Started` waits for it
    return Started(log, process.pid, writing)


def supervise_words() -> NoReturn:
    """Supervise a command, which the arguments of this process name."""
    lifeline, parent, facts, *words = sys.argv[1:]

    def execute() -> None:
        try:
            os.execvp(words[0], words)
        except OSError as error:
            say(f"FileNotFoundError: {words[0]}: {error.strerror}", error=True)
            os._exit(127)

    _supervise(int(lifeline), int(parent), Protection(**json.loads(facts)), execute)


def start_fork(main: Callable[[], None], log: Path, protection: Protection) -> Started:
    """Start a function in a process forked from this one, which must have a single thread."""
    reading, writing = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(writing)
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with Path(os.devnull).open("rb") as empty:
                os.dup2(empty.fileno(), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _supervise(reading, parent, protection, main)
        finally:
            os._exit(1)
    os.close(reading)
    return Started(log, pid, writing)


def _supervise(
    lifeline: int, parent: int, protection: Protection, main: Callable[[], None]
) -> NoReturn:
    """Run `main` in a child; end this process with its exit code once no descendant is left.

    `lifeline` is a pipe's end that can be read when the parent has ended or asks for the end.
    """
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    supervisor = os.getpid()
    receiving, sending = socket.socketpair()
    child = os.fork()
    if child == 0:
        _run_protected(supervisor, lifeline, sending, protection, main)
    sending.close()
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.poll()
    ended, status = os.waitpid(child, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if ended else -signal.SIGKILL
    end_descendants()
    if protection.upper is not None:
        upper = Path(protection.upper)
        places, descriptors, *_ = socket.recv_fds(receiving, 2**16, isolation.MOST_IN_MEMORY)
        in_memory = dict(zip(os.fsdecode(places).split("\0"), descriptors, strict=False))
        files = [str(path) for path in isolation.written(upper, in_memory)]
        is_full = shutil.disk_usage(upper).free < FULL_BYTES
        remove_tree(upper)
        with suppress(OSError):
            facts = json.dumps({"files": files, "is_full": is_full})
            (Path(protection.records) / WRITTEN_FILE).write_text(facts)
    if os.getppid() != parent:
        for folder in protection.owned:
            remove_tree(Path(folder))
    os._exit(code if code >= 0 else 128 - code)


def _run_protected(
    supervisor: int,
    lifeline: int,
    sending: socket.socket,
    protection: Protection,
    main: Callable[[], None],
) -> NoReturn:
    """Enter the private view of the files, send its layers in memory, and run `main`."""
    code = 1
    try:
        os.close(lifeline)
        die_with_parent(supervisor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if protection.upper is not None:
            layers = isolation.enter(Path(protection.upper), [Path(protection.folder)])
            socket.send_fds(sending, [os.fsencode("\0".join(layers))], [*layers.values()])
            for descriptor in layers.values():
                os.close(descriptor)
        sending.close()
        isolation.check_out(protection.revision)
        code = _exit_code_of(main)
    except isolation.IsolationError as error:
        say(str(error), error=True)
        code = NOT_ISOLATED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _written_facts(records: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((records / WRITTEN_FILE).read_text())
    except FileNotFoundError:
        return {}
    except ValueError:  # it had no room for this file either
        return {"is_full": True, "files": []}
    return facts


def filled_disk(records: Path) -> bool:
    """True if the start whose records are in this folder left no room for its writes."""
    return bool(_written_facts(records).get("is_full"))


def described_writes(records: Path) -> str:
    """Describe in a line where a start wrote, for the folder of its records."""
    facts = _written_facts(records)
    if not facts:
        return "the script wrote to your files, which --writes-are-fine allows"
    paths, folder = map(Path, facts["files"]), Path.cwd()
    names = [str(p.relative_to(folder) if p.is_relative_to(folder) else p) for p in paths]
    wrote = f"{listed(names)} to a private copy, now removed" if names else "no file"
    return f"your files are unchanged; the script wrote {wrote}"


def _exit_code_of(main: Callable[[], None]) -> int:
    """Run `main` and what it registered for the end of the interpreter, and nothing of others."""
    atexit._clear()
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            say(end.code, error=True)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    return code


def isolation_refusal() -> InputError | None:
    """Return why the user's files cannot be protected here; None if they can."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        upper = stack.enter_context(scratch_folder(away_from=Path.cwd())) / "upper"
        upper.mkdir()
        protection = Protection(folder=str(folder), records=str(folder), upper=str(upper), owned=())
        try:
            start_words(["true"], os.environ, folder / "log.txt", protection).wait(END_SECONDS)
        except InputError as error:
            return error
    return None
