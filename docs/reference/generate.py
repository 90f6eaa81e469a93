"""Writes the pages of this folder from the program itself: `python docs/reference/generate.py`.

Another folder may be named; a test does so, and compares the pages with the stored ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from experiment_file import experiment_file
from markup import code, page, paragraphs, table

from shardmark.audit.causes import CAUSES
from shardmark.base.evidence.accepted import ACCEPTABLE, USUAL
from shardmark.base.metrics import METRICS, Metric
from shardmark.cli import app


def main(folder: Path) -> None:
    for name, make in PAGES.items():
        (folder / name).write_text(make(), encoding="utf-8")


def verbs() -> str:
    """Every verb's usage, arguments and options, as `--help` has them."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    lines = [
        "`shardmark VERB --help` prints the same; `-h` is short for `--help`, and",
        "`shardmark --version` prints the version.",
        "",
    ]
    codes = (group.help or "").partition("Exit codes:")[2]
    lines += table(("exit code", "meaning"), [(c, t) for c, t in exit_codes(codes)])
    for name, command in group.commands.items():
        context = typer.Context(command, info_name=f"shardmark {name}")
        lines += [f"## {name}", "", *paragraphs(command.help or ""), "```text"]
        given = [argument(p) for p in command.params if p.param_type_name == "argument"]
        lines += [" ".join(["shardmark", name, "[OPTIONS]", *given]), "```", ""]
        shown = [p for p in command.params if not getattr(p, "hidden", False)]
        rows = [option_row(parameter, context) for parameter in shown]
        lines += table(("argument or option", "default", "meaning"), rows) if rows else []
    return page("Verbs", lines)


def exit_codes(text: str) -> Iterator[tuple[str, str]]:
    """`0 all is well; 1 it is not.` -> its pairs."""
    for part in " ".join(text.split()).rstrip(".").split("; "):
        number, _, meaning = part.partition(" ")
        yield number, meaning


def option_row(parameter: Any, context: typer.Context) -> tuple[str, str, str]:
    """Return how a parameter of typer is written, its default and its help."""
    written, described = parameter.get_help_record(context)
    found = NOTE.search(described)
    default = found[1] if found and not found[1].startswith("x>=") else ""  # what is allowed
    if parameter.param_type_name == "argument":
        written = argument(parameter)
    shown = default if default in ("", "required") else code(default)
    return code(written), shown, NOTE.sub("", described)


NOTE = re.compile(r"  \[(?:default: )?([^]]+)]$")
"""What typer adds to a help text."""


def argument(parameter: Any) -> str:
    return f"{parameter.metavar}{'...' if parameter.nargs != 1 else ''}"


def metrics() -> str:
    """The catalogue, group by group."""
    lines = [
        "`shardmark list metrics` prints names, units and definitions from the same catalogue;",
        "[How Shardmark measures](../method/measurement.md) says how the numbers come about.",
        "A metric that could not be measured is null, with its reason beside it.",
        "",
    ]
    ordered = sorted(METRICS.values(), key=lambda metric: GROUPS.index(metric.group))
    for group, members in groupby(ordered, key=lambda metric: metric.group):
        lines += [f"## {group.capitalize()}", ""]
        lines += table(("metric", "unit", "definition"), map(metric_row, members))
    return page("Metrics", lines)


def metric_row(metric: Metric) -> tuple[str, ...]:
    facts = [OVER[metric.over]]
    facts += [f"{metric.better} is better"] if metric.better else []
    facts += [f"source: {metric.source}"] if metric.source else []
    return code(metric.name), metric.unit, f"{metric.definition} *{'; '.join(facts)}.*"


OVER = {
    "maximum": "Maximum over ranks",
    "sum": "Sum over ranks",
    "mean": "Mean over ranks",
    "trial": "Of the whole trial",
}
STAGES = {
    "ranks": "the ranks' records",
    "gradient": "a gradient that differs from one process's",
    "rates": "learning rates that differ from one process's",
    "accumulation": "the weights of a step's micro-batches, in one process too",
}


def causes() -> str:
    rows = [
        (
            code(name),
            cause.meaning,
            STAGES[cause.stage],
            "usual" if name in USUAL else "yes" if name in ACCEPTABLE else "",
        )
        for name, cause in CAUSES.items()
    ]
    text = (
        "Faults that [`shardmark audit`](../guides/is-my-script-right.md) names. "
        "`--accept CAUSE,...` accepts what a script may do on purpose; what is usual is accepted "
        "unless `--strict` is given."
    )
    header = ("name", "what is wrong", "seen in", "can be accepted")
    return page("Causes", [*paragraphs(text), *table(header, rows)])


GROUPS = tuple(dict.fromkeys(metric.group for metric in METRICS.values()))


PAGES: Mapping[str, Callable[[], str]] = {
    "verbs.md": verbs,
    "metrics.md": metrics,
    "experiment-file.md": experiment_file,
    "causes.md": causes,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
