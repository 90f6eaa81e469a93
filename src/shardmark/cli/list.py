"""`shardmark list` and `schema`: strategies, models, metrics and other names; all keys."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Container, Mapping
from typing import Annotated

import typer

from shardmark.base.errors import InputError
from shardmark.base.text import say, say_text
from shardmark.cli.arguments import FormatOption, TextOrJson

SCHEMA = "schema"
KINDS = {
    "strategies": "strategies of distributed training, with their fixed options",
    "workloads": "tasks: classification, detection, language, your own",
    "models": "models by name",
    "datasets": "data sets by name",
    "metrics": "metrics with unit and definition",
    "experiments": "presets that `shardmark run NAME` runs",
    "studies": "published studies that `compare` shows beside your run",
    SCHEMA: "JSON schema of the experiment file, for editors",
}


def list_(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS)}; without it, these kinds.")
    ] = "",
    form: FormatOption = TextOrJson.TEXT,
) -> None:
    """List the names of strategies, models, metrics and other kinds, one a line."""
    if kind == SCHEMA:
        schema()
        return
    lines = listing(kind)
    if form is TextOrJson.JSON:
        from shardmark.base.text import render_json

        entries = [{"name": name, "description": line} for name, line in lines.items()]
        say_text(render_json({"kind": kind or "kinds", "entries": entries}))
        return
    width = max((len(name) for name in lines), default=0)
    for name, line in lines.items():
        say(f"{name.ljust(width)}  {line}".rstrip())


def schema() -> None:
    """Print the JSON schema of the experiment file, for editors."""
    from shardmark.experiment.experiment import experiment_schema

    say(*json.dumps(experiment_schema(), indent=2).split("\n"))


def listing(kind: str) -> Mapping[str, str]:
    """Return the names of a kind, or of all kinds, with a description of each.

    Raises `InputError` for an unknown kind.
    """
    from shardmark.base.metrics import METRICS
    from shardmark.base.system.plugins import by_name
    from shardmark.experiment.load import presets
    from shardmark.experiment.messages import choices
    from shardmark.experiment.tasks import TASKS
    from shardmark.ranks.workloads import PLUGINS, options_class
    from shardmark.ranks.workloads.configurations import PREFIX, shipped
    from shardmark.ranks.workloads.datasets import DATASETS
    from shardmark.ranks.workloads.models import OTHER_MODELS

    if kind not in KINDS and kind:
        raise InputError("list", f"unknown kind {kind!r}", choices(kind, tuple(KINDS)))
    tasks = {name: _summary(options) for name, options in TASKS.items()}
    models = {name: line for task in TASKS.values() for name, line in task.models.items()}
    models |= {
        f"{PREFIX}{name}": f"sizes alone, {model['parameters'] / 1e6:,.0f} M parameters"
        for name, model in shipped().items()
    }
    listings: dict[str, Mapping[str, str]] = {
        "": KINDS,
        "strategies": _strategies(),
        "workloads": tasks | _plugins(PLUGINS, TASKS, options_class),
        "models": {**models, **OTHER_MODELS},
        "datasets": DATASETS,
        "metrics": {
            name: f"[{metric.unit}] {metric.definition}" for name, metric in METRICS.items()
        },
        "experiments": presets(),
        "studies": by_name("shardmark.extras.studies.study:studies")(),
    }
    return listings[kind]


def _strategies() -> dict[str, str]:
    from shardmark.ranks.strategies import PLUGINS, STRATEGIES, fixed_options, strategy_class

    lines = {}
    for name in STRATEGIES:
        fixed = [f"{key}={value}" for key, value in fixed_options(name).items() if key != "name"]
        lines[name] = _summary(strategy_class(name)) + (f" [{', '.join(fixed)}]" if fixed else "")
    return lines | _plugins(PLUGINS, STRATEGIES, strategy_class)


def _plugins(
    group: str, built_in: Container[str], class_of: Callable[[str], type]
) -> dict[str, str]:
    """Return the names that other packages register, with a description or an import error."""
    from shardmark.base.system.plugins import plugin_names

    lines = {}
    for name in plugin_names(group):
        if name not in built_in:
            try:
                lines[name] = _summary(class_of(name))
            except InputError as error:
                lines[name] = str(error)
    return lines


def _summary(described: type) -> str:
    """Return the first line of the docstring."""
    return (inspect.getdoc(described) or "").partition("\n")[0]
