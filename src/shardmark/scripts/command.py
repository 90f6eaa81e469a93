"""Training commands as users type them, started with hooks and another number of ranks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

import yaml

from shardmark.base.errors import InputError
from shardmark.base.system.modules import find_without_import

BOOTSTRAP = Path(__file__).parent / "bootstrap"

_TABLES = yaml.safe_load(Path(__file__).with_name("launchers.yaml").read_text(encoding="utf-8"))
RANK_OPTIONS: Mapping[str, list[str]] = _TABLES["rank_options"]
LAUNCHERS: Mapping[str, list[list[str]]] = _TABLES["launchers"]
TORCHRUN_FLAGS, SHELLS, CLUSTERS = map(_TABLES.get, ("torchrun_flags", "shells", "clusters"))
WRAPPERS = {name: word.split() for word, names in _TABLES["wrappers"].items() for name in names}

RENDEZVOUS = re.compile(
    r"--(standalone|rdzv[-_]\w+|master[-_](addr|port)|main[-_](process[-_])?(ip|port|address)"
    r"|node[-_]rank|nnodes|num[-_](nodes|machines)|machine[-_]rank)"
)
"""Options that name a meeting point or machines: each start gets a meeting point of its own."""

TORCHRUN = ("-m", "torch.distributed.run")
RANKS = "{ranks}"
"""Stands in a command for the number of ranks."""
MULTI_GPU = {"--multi_gpu", "--multi-gpu"}
"""Option of accelerate, which refuses it for one process; with `--cpu` it starts one process."""

SCRIPT = re.compile(r"\.(pyc?|ipynb)$")
VARIABLE = re.compile(r"[A-Za-z_]\w*=")
PYTHON = re.compile(r"python[\d.]*")

AUTOMATIC = {"gpu", "auto", "cpu", "xpu"}
"""Numbers of ranks that torchrun chooses by the machine."""

VALUED = re.compile(
    r"-[cnpu]|--(with|python|extra|group|env-file|project|directory|package|name|prefix|cwd|unset)"
)
"""Options of wrappers whose value is the next word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """A launcher with its options, and a training script with its arguments."""

    launcher: str
    """A key of `LAUNCHERS`; `python` for a script without a launcher."""
    words: tuple[str, ...]
    """The launcher's words without the number of ranks and without a meeting point."""
    script: tuple[str, ...]
    """The script, or `-m` and a module, with the arguments."""
    ranks: int | None
    """Number of ranks in the command; None if the command names none."""
    options: tuple[str, ...] = ()
    """Wrappers and options of the launcher among `words`."""

    @property
    def text(self) -> str:
        return shlex.join(self.script)

    @property
    def names_ranks(self) -> bool:
        """True if the command says how many ranks the script starts itself, or divides by."""
        return any(RANKS in word for word in (*self.words, *self.script))

    def check_launched(self, place: str) -> None:
        """Raise `InputError` with the place if the script starts its ranks itself."""
        if self.names_ranks:
            problem = (
                f"{RANKS} is for audit: all else measures what torchrun starts, or one process"
            )
            allowed = (
                "let torchrun start the ranks, not the script (mp.spawn), and write their number"
            )
            raise InputError(place, problem, allowed)

    def with_ranks(self, ranks: int) -> list[str]:
        """Words that start the script on a number of ranks of this machine."""
        return [word.replace(RANKS, str(ranks)) for word in self._launched(ranks)]

    def _launched(self, ranks: int) -> list[str]:
        if self.launcher == "python":
            launcher = [] if self.names_ranks else [*TORCHRUN, *_meeting("torchrun", ranks)]
            return [*(self.words or (sys.executable,)), *launcher, *self.script]
        if "--cpu" in self.words or (ranks == 1 and MULTI_GPU & {*self.words}):  # one process
            words = [word for word in self.words if word not in MULTI_GPU]
            start = [sys.executable, *TORCHRUN, *_meeting("torchrun", ranks), "--no-python"]
            return [*start, *words, *_meeting(self.launcher, 1), *self.script]
        return [*self.words, *_meeting(self.launcher, ranks), *self.script]


def parse_command(command: Sequence[str] | str) -> ScriptCommand:
    """Split a command, in words or as one text.  Raises `InputError` for what cannot be started."""
    words = [command] if isinstance(command, str) else command
    if len(words) == 1 and not os.path.isfile(words[0]):  # noqa: PTH113 - it may be no valid path
        try:
            words = shlex.split(words[0])
        except ValueError as error:
            raise InputError(f"command {words[0]!r}", str(error), "close the quotation") from None
    wrapper, rest = _wrapper(words)
    if not rest:
        raise InputError(
            "command", "it is empty", "end with `-- torchrun --nproc-per-node 2 train.py ARGS`"
        )
    parsed = _unwrapped(rest)
    if not wrapper:
        return parsed
    name = "PYTHONPATH="
    paths = {
        word: name + os.pathsep.join(filter(None, (str(BOOTSTRAP), word.removeprefix(name))))
        for word in wrapper
        if word.startswith(name)
    }
    wrapper = tuple(paths.get(word, word) for word in wrapper)
    python = ("python",) if wrapper[0] != "env" else (sys.executable,)
    return replace(
        parsed, words=(*wrapper, *(parsed.words or python)), options=(*wrapper, *parsed.options)
    )


def _wrapper(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Split off variables and programs that start the rest of the words."""
    rest, wrapper = list(words), list[str]()
    while rest:
        name = Path(rest[0]).name
        follows = WRAPPERS.get(name)
        variables = [*takewhile(VARIABLE.match, rest)]
        if variables:
            wrapper += ["env", *variables]
            del rest[: len(variables)]
        elif name == "env" or (follows is not None and rest[1 : 1 + len(follows)] == follows):
            count = 1 + len(follows or ())
            while count < len(rest) and rest[count].startswith("-") and rest[count] != "-m":
                count += 2 if VALUED.fullmatch(rest[count]) else 1
            if name == "env":
                count += len([*takewhile(VARIABLE.match, rest[count:])])
            wrapper += rest[:count]
            del rest[:count]
        else:
            break
    return tuple(wrapper), rest


def _unwrapped(words: Sequence[str]) -> ScriptCommand:
    rest = list(words)
    name = Path(rest[0]).name
    if SCRIPT.search(rest[0]) or rest[0] in {"-m", "--module"}:
        return ScriptCommand(launcher="python", words=(), script=tuple(rest), ranks=None)
    if PYTHON.fullmatch(name):
        options = _python_options(rest)
        head, behind = rest[:options], rest[options:]
        for launcher, heads in LAUNCHERS.items():
            for _, *module in heads:
                if module and behind[: len(module)] == module:
                    count = len(module)
                    return _with_launcher(launcher, [*head, *module], behind[count:])
        if not behind or (behind[0].startswith("-") and behind[0] != "-m"):
            raise InputError("command", shlex.join(rest), "a script (NAME.py), or -m MODULE")
        return ScriptCommand(
            launcher="python", words=tuple(head), script=tuple(behind), ranks=None,
            options=tuple(head[1:]),
        )  # fmt: skip
    for launcher, heads in LAUNCHERS.items():
        for first in heads:
            if [name, *rest[1 : len(first)]] == [*first]:
                return _with_launcher(launcher, rest[: len(first)], rest[len(first) :])
    path = _console_script(rest[0])
    if path is not None:
        return ScriptCommand(launcher="python", words=(), script=(path, *rest[1:]), ranks=None)
    raise _refusal(rest)


def _python_options(words: Sequence[str]) -> int:
    """Number of words of an interpreter with its options, before `-m` or the script."""
    count = 1
    while count < len(words) and words[count].startswith("-") and words[count] not in {"-m", "-c"}:
        count += 2 if words[count] in {"-X", "-W"} else 1
    return count


def _console_script(word: str) -> str | None:
    """Path of a program that is a Python script without a suffix; None for others."""
    path = shutil.which(word)
    if path is None:
        return None
    with Path(path).open("rb") as file:
        first = file.readline(1000).decode(errors="replace")
    return path if first.startswith("#!") and "python" in first else None


def _refusal(words: Sequence[str]) -> InputError:
    """Describe a command that cannot be started, with a spelling that can."""
    name = Path(words[0]).name
    if name in CLUSTERS:
        for number in range(1, len(words)):
            with suppress(InputError):
                command = _unwrapped(words[number:])
                ranks = "" if command.ranks is not None else " --ranks N"
                return InputError(
                    "command",
                    f"it begins with {name}, and the ranks are started on this machine",
                    f"leave it out:{ranks} -- {shlex.join(words[number:])}",
                )
    script = words[1:2] if name in SHELLS else words[:1]
    if script and (name in SHELLS or script[0].endswith(".sh")):
        return InputError(
            "command",
            f"it begins with {shlex.join(words[:1])}, a shell script, which may start anything",
            f"give the training command inside of it: {_command_in(script[0])}",
        )
    return InputError(
        "command",
        f"it begins with {words[0]!r}",
        f"did you mean {words[0]}.py?"
        if Path(f"{words[0]}.py").is_file()
        else "begin with torchrun, python -m torch.distributed.run, accelerate launch, deepspeed, "
        "fabric run, python, or a script; for another program give its Python module (python -m "
        "NAME ...)",
    )


def _command_in(path: str) -> str:
    """Return the line of a shell script that starts a training, or what to look for."""
    with suppress(OSError):
        text = Path(path).read_text(errors="replace").replace("\\\n", " ")
        for line in text.splitlines():
            with suppress(ValueError, InputError):
                words = shlex.split(line, comments=True)
                _, rest = _wrapper(words)
                if rest and Path(rest[0]).name not in SHELLS and _unwrapped(rest).script:
                    return shlex.join(words)
    return "the line with torchrun, accelerate launch, deepspeed or python"


def _with_launcher(launcher: str, head: Sequence[str], rest: Sequence[str]) -> ScriptCommand:
    count = _options(rest, launcher)
    options, script = list(rest[:count]), list(rest[count:])
    ranks: int | None = None
    words: list[str] = []
    while options:
        option, equals, value = options.pop(0).partition("=")
        counts_ranks = option in RANK_OPTIONS.get(launcher, ())
        if not (counts_ranks or RENDEZVOUS.fullmatch(option)):
            words.append(option + equals + value)
            continue
        if not equals and option != "--standalone":  # which has no value
            value = options.pop(0) if options else ""
        if counts_ranks:
            ranks = None if value in AUTOMATIC else _positive(value, option)
        elif re.search(r"nnodes|num[-_](nodes|machines)", option) and value not in {"1", "1:1"}:
            raise InputError(option, value, "1: the audit runs on one machine")
    return ScriptCommand(
        launcher=launcher, words=(*head, *words), script=tuple(script), ranks=ranks,
        options=tuple(words),
    )  # fmt: skip


def _options(words: Sequence[str], launcher: str) -> int:
    """Number of words before the script or before `-m MODULE`."""
    number = 0
    while number < len(words):
        word = words[number]
        if SCRIPT.search(word) or word in {"-m", "--module"}:
            return number
        if launcher == "torchrun" and not word.startswith("-"):
            return number  # a script without a suffix, or with --no-python a program
        takes_value = launcher == "torchrun" and word not in TORCHRUN_FLAGS and "=" not in word
        number += 2 if takes_value else 1
    raise InputError(
        "command", shlex.join(words) or "no script", f"a script (NAME.py) after {launcher}"
    )


def _positive(value: str, option: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        allowed = f"a number of ranks from 1, or {', '.join(sorted(AUTOMATIC))}"
        raise InputError(option, value or "no value", allowed)
    return int(value)


def _meeting(launcher: str, ranks: int) -> list[str]:
    """Options for a number of ranks that meet where no other start does."""
    option = RANK_OPTIONS[launcher][0].replace("--num-", "--num_")
    meeting = {
        "torchrun": ["--standalone"],
        "accelerate": ["--main_process_port", "0"],
        "deepspeed": ["--master_port", str(free_port())],
        "fabric": ["--main_port", str(free_port())],
    }[launcher]
    return [*meeting, option, str(ranks)]


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def hooked_environment(hooks: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment in which every interpreter calls `module:function` after importing torch."""
    paths = [str(BOOTSTRAP), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "SHARDMARK_HOOKS": hooks,
        "SHARDMARK_PATH": str(Path(__file__).parents[2]), **variables,
    }  # fmt: skip


def check_exists(command: ScriptCommand) -> None:
    """Raise `InputError` if the command's script or module does not exist, or is a notebook."""
    first, name, *_ = *command.script, ""
    path = Path(first).expanduser()
    if path.suffix == ".ipynb":
        problem = "it is a notebook"
        allowed = f"`jupyter nbconvert --to script {shlex.quote(first)}` makes a script of it"
    elif first in {"-m", "--module"} and find_without_import(name) is None:
        problem = f"no module {name!r}"
        allowed = "name one that `python -m` finds from the current folder, such as package.train"
    elif first not in {"-m", "--module"} and not path.is_file() and shutil.which(first) is None:
        problem = f"no file {first!r} in {Path.cwd()}"
        near = get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
        allowed = f"did you mean {path.with_name(near[0])}?" if near else "give the script's path"
    else:
        return
    raise InputError(f"command {command.text!r}", problem, allowed)
