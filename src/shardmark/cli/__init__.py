"""The command line, with one file for each verb.  Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardmark.base.errors import ShardmarkError
from shardmark.base.files.storage import REMEDIES
from shardmark.base.text import say
from shardmark.base.version import __version__
from shardmark.cli.audit import audit
from shardmark.cli.batch import batch
from shardmark.cli.compare import compare
from shardmark.cli.doctor import doctor
from shardmark.cli.export import export
from shardmark.cli.init import init
from shardmark.cli.list import list_, schema
from shardmark.cli.plan import plan
from shardmark.cli.report import report
from shardmark.cli.run import run
from shardmark.cli.time import time
from shardmark.cli.verify import verify
from shardmark.cli.why import explain_step

BAD_INPUT = 2
INTERRUPTED = 130

QUESTIONS: dict[str, dict[str, Callable[..., None]]] = {
    "Your script": {"audit": audit, "time": time, "why": explain_step},
    "Many strategies": {"run": run, "verify": verify, "batch": batch},
    "Machines that you do not have": {"plan": plan},
    "Results": {"compare": compare, "report": report, "export": export},
    "Set-up": {"init": init, "doctor": doctor, "list": list_, "schema": schema},
}
"""Verbs by what they are for."""
LONGEST = 200
"""Letters of a verb's first sentence."""


class _ByQuestion(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (typer's)
        width = max(map(len, self.commands))
        for question, verbs in QUESTIONS.items():
            with formatter.section(question):
                texts = {name: self.commands[name].get_short_help_str(LONGEST) for name in verbs}
                formatter.write_dl([(name.ljust(width), text) for name, text in texts.items()])


app = typer.Typer(
    cls=_ByQuestion,
    name="shardmark",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        say(f"shardmark {__version__}")
        raise typer.Exit


@app.callback()
def _shardmark(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Compare strategies of distributed training for your model on your machines.

    Exit codes: 0 every trial has an outcome and none failed or timed out; 1 some did, or a loss is
    not finite, or `compare --regression` shows a regression; 2 bad input; 130 interrupted.
    """


COMMAND_FOLLOWS = ("audit", "why")
"""Verbs whose command follows their options."""
for _verbs in QUESTIONS.values():
    for _name, _verb in _verbs.items():
        _settings = {"allow_interspersed_args": False} if _name in COMMAND_FOLLOWS else None
        app.command(_name, context_settings=_settings)(_verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.  A user's mistake is printed as a message."""
    code = _exit_code_of(None if arguments is None else [*arguments])
    if code == BAD_INPUT:
        _say_other_verb(*(sys.argv[1:] if arguments is None else arguments))
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would flush once more at exit, and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a closed pipe is no error
            return _report(error)
    return code


OTHER_VERBS = {"run": "time", "verify": "audit", "audit": "verify", "time": "run", "why": "run"}
"""The verb of scripts for each verb of experiments, and the other way round."""


def _say_other_verb(verb: str = "", *words: str) -> None:
    """After a failure, name the verb that takes what this one was given, if it looks like that."""
    from shardmark.scripts.command import LAUNCHERS

    firsts = [word.split()[0] for word in words if word.strip()]
    presets = {path.name for path in files("shardmark.experiment").joinpath("presets").iterdir()}
    scripts = [w for w in firsts if "=" not in w and (w.endswith(".py") or w in LAUNCHERS)]
    experiments = [w for w in firsts if w.endswith((".yaml", ".yml")) or f"{w}.yaml" in presets]
    takes_scripts = verb in QUESTIONS["Your script"]
    unfit, fit = (experiments, scripts) if takes_scripts else (scripts, experiments)
    if verb in OTHER_VERBS and unfit and not fit:
        kind = "an experiment" if takes_scripts else "a script"
        say(f"{unfit[0]} is {kind}: shardmark {OTHER_VERBS[verb]} takes {kind}", error=True)
    elif verb == "time" and "--" not in words and {*words} & {*LAUNCHERS, "-m"}:
        say("put `--` before a command of several words, or quotation marks around it", error=True)


def _exit_code_of(arguments: list[str] | None) -> int:
    try:
        app(arguments, prog_name="shardmark")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ShardmarkError as error:
        say(*f"error: {error}".split("\n"), error=True)
        return BAD_INPUT
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        return _report(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _report(error: OSError) -> int:
    place = error.filename or "standard output"
    remedy = REMEDIES.get(error.errno or 0, "write elsewhere")
    say(f"error: {place}: {error.strerror}; {remedy}", error=True)
    return BAD_INPUT
