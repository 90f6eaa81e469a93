"""Options of a training script: its command.  Imports no torch."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from shardmark.base.errors import InputError
from shardmark.ranks.workloads.options import WorkloadOptions

if TYPE_CHECKING:
    from shardmark.scripts.command import ScriptCommand


class ScriptOptions(WorkloadOptions):
    """A training script of your own, unchanged."""

    verified_samples: ClassVar[int] = 0

    name: Literal["script"] = "script"
    command: str = ""
    """Script and the arguments that all variants share: `train.py --data DIR`, or `python -m
    package.module`.  Without it, every variant is a complete command."""
    until_exit: bool = False
    """Measure until the script ends.  By default it is ended after the steps that are needed."""
    writes_are_fine: bool = False
    """Let the script write to your files.  By default it writes to a private copy."""

    @model_validator(mode="after")
    def _decides_its_data(self) -> Self:
        for key in WorkloadOptions.model_fields.keys() - {"name"}:
            if getattr(self, key) != WorkloadOptions.model_fields[key].default:
                raise ValueError(f"{key} is set, which the script decides; leave it out")
        return self

    @property
    def data_name(self) -> str:
        return "the script's data"

    def with_arguments(self, arguments: str) -> str:
        """Return the command of a variant.

        One that begins with @COMMIT runs in that commit, one with %NAME,... under interventions.
        """
        *signs, rest = _split(arguments)
        return " ".join(filter(None, (*signs, self.command, rest)))

    @property
    def revision(self) -> str:
        """Commit of the repository in which the command runs; empty for the files as they are."""
        return _split(self.command)[0].removeprefix("@")

    @property
    def interventions(self) -> str:
        """Interventions under which the command runs, in the form of `text_of`."""
        return _split(self.command)[1]

    def parsed(self) -> ScriptCommand:
        """Return script and arguments.  Raises `InputError` for a command that cannot be run."""
        from shardmark.scripts.command import parse_command

        command = parse_command(_split(self.command)[2])
        command.check_launched(f"command {self.command!r}")
        if command.launcher != "python" or len(command.words) > 1:
            raise InputError(
                f"command {self.command!r}",
                f"it begins with `{shlex.join(command.words)}`, and Shardmark itself starts ranks",
                "begin with the script (NAME.py), or with python -m; world_size is the number of"
                " ranks",
            )
        return command

    def user_modules(self) -> tuple[str, ...]:
        """Return the script, which is named by its file or its module."""
        try:
            words = self.parsed().script
        except InputError:
            return ()  # `check_data` reports it
        return words[1:2] if words[0] == "-m" else words[:1]


def _split(command: str) -> tuple[str, str, str]:
    """Split off the commit and the interventions that a command may begin with."""
    signs = re.match(r"(@[0-9a-f]{40}(?:\s+|$))?(%[\w=+,]+(?:\s+|$))?", command)
    assert signs is not None, "all parts may be missing"
    revision, interventions = ((signs[n] or "").strip() for n in (1, 2))
    return revision, interventions, command[signs.end() :]
