"""Training commands as users type them, started with hooks and another number of ranks."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from shardmark.core.errors import InputError

BOOTSTRAP = Path(__file__).parent / "bootstrap"

RANK_OPTIONS = {
    "torchrun": ("--nproc-per-node", "--nproc_per_node"),
    "accelerate": ("--num-processes", "--num_processes"),
    "deepspeed": ("--num-gpus", "--num_gpus", "--num_accelerators"),
}
"""Options of launchers with the number of ranks; the first spelling is shown to users."""

RENDEZVOUS = re.compile(
    r"--(standalone|rdzv[-_]\w+|master[-_](addr|port)|main[-_]process[-_](ip|port)|node[-_]rank"
    r"|nnodes|num[-_](nodes|machines)|machine[-_]rank)"
)
"""Options that name a meeting point or machines: each start gets a meeting point of its own."""

FLAGS = {"--standalone"}
"""Options among them without a value."""

TORCHRUN = ("-m", "torch.distributed.run")
MULTI_GPU = {"--multi_gpu", "--multi-gpu"}
"""Option of accelerate, which refuses it for one process; with `--cpu` it starts one process."""

SCRIPT = re.compile(r"\.pyc?$")
VARIABLE = re.compile(r"[A-Za-z_]\w*=")
PYTHON = re.compile(r"python[\d.]*")

LAUNCHERS = {
    "torchrun": (
        ("torchrun",),
        ("python", "-m", "torch.distributed.run"),
        ("python", "-m", "torch.distributed.launch"),
    ),
    "accelerate": (("accelerate", "launch"), ("python", "-m", "accelerate.commands.launch")),
    "deepspeed": (("deepspeed",),),
    "python": (("python",),),
}
"""First words of commands by launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """A launcher with its options, and a training script with its arguments."""

    launcher: str
    """`torchrun`, `accelerate`, `deepspeed`, or `python` for a script without a launcher."""
    words: tuple[str, ...]
    """The launcher's words without the number of ranks and without a meeting point."""
    script: tuple[str, ...]
    """The script, or `-m` and a module, with the arguments."""
    ranks: int | None
    """Number of ranks in the command; None if the command names none."""

    @property
    def text(self) -> str:
        return shlex.join(self.script)

    def with_ranks(self, ranks: int) -> list[str]:
        """Words that start the script on a number of ranks of this machine."""
        if self.launcher == "python":
            python = self.words or (sys.executable,)
            return [*python, *TORCHRUN, *_meeting("torchrun", ranks), *self.script]
        words = list(self.words)
        if "--cpu" in words or (ranks == 1 and MULTI_GPU & {*words}):  # starts one process
            words = [word for word in words if word not in MULTI_GPU]
            start = [sys.executable, *TORCHRUN, *_meeting("torchrun", ranks), "--no-python"]
            return [*start, *words, *_meeting(self.launcher, 1), *self.script]
        return [*words, *_meeting(self.launcher, ranks), *self.script]


def parse_command(words: Sequence[str]) -> ScriptCommand:
    """Split a command into launcher and script.  Raises `InputError` for what cannot be started."""
    rest = list(words)
    if not rest:
        raise InputError(
            "command", "it is empty", "end with `-- torchrun --nproc-per-node 2 train.py ARGS`"
        )
    variables = [*takewhile(VARIABLE.match, rest)]
    if variables:
        command = parse_command(rest[len(variables) :])
        return replace(command, words=("env", *variables, *(command.words or (sys.executable,))))
    if SCRIPT.search(rest[0]):
        return ScriptCommand(launcher="python", words=(), script=tuple(rest), ranks=None)
    first = "python" if PYTHON.fullmatch(Path(rest[0]).name) else Path(rest[0]).name
    for launcher, heads in LAUNCHERS.items():
        for head in heads:
            if [first, *rest[1 : len(head)]] == [*head]:
                return _with_launcher(launcher, rest[: len(head)], rest[len(head) :])
    raise InputError(
        "command",
        f"it begins with {rest[0]!r}",
        "begin with torchrun, python -m torch.distributed.run, accelerate launch, deepspeed, "
        "python, or a script",
    )


def _with_launcher(launcher: str, head: Sequence[str], rest: Sequence[str]) -> ScriptCommand:
    count = _options(rest, launcher)
    options, script = list(rest[:count]), list(rest[count:])
    ranks: int | None = None
    words: list[str] = []
    while options:
        option, equals, value = options.pop(0).partition("=")
        counts_ranks = option in RANK_OPTIONS.get(launcher, ())
        if launcher == "python" or not (counts_ranks or RENDEZVOUS.fullmatch(option)):
            words.append(option + equals + value)
            continue
        if not equals and option not in FLAGS:
            value = options.pop(0) if options else ""
        if counts_ranks:
            ranks = _positive(value, option)
        elif re.fullmatch(r"--(nnodes|num[-_](nodes|machines))", option) and value not in {
            "1",
            "1:1",
        }:
            raise InputError(option, value, "1: the audit runs on one machine")
    return ScriptCommand(
        launcher=launcher, words=(*head, *words), script=tuple(script), ranks=ranks
    )


def _options(words: Sequence[str], launcher: str) -> int:
    """Number of words before the script or before `-m MODULE`."""
    for number, word in enumerate(words):
        if SCRIPT.search(word) or word in {"-m", "--module"}:
            return number
    raise InputError(
        "command", shlex.join(words) or "no script", f"a script (NAME.py) after {launcher}"
    )


def _positive(value: str, option: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise InputError(option, value, "a number of ranks from 1")
    return int(value)


def _meeting(launcher: str, ranks: int) -> list[str]:
    """Options for a number of ranks that meet where no other start does."""
    option = RANK_OPTIONS[launcher][0].replace("--num-", "--num_")
    meeting = {
        "torchrun": ["--standalone"],
        "accelerate": ["--main_process_port", "0"],
        "deepspeed": ["--master_port", str(free_port())],
    }[launcher]
    return [*meeting, option, str(ranks)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def hooked_environment(hooks: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment in which every interpreter calls `module:function` after importing torch."""
    paths = [str(BOOTSTRAP), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SHARDMARK_HOOKS": hooks,
        "SHARDMARK_PATH": str(Path(__file__).parents[2]),
        **variables,
    }
