"""`shardmark list`: what there is, one line each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated

import typer

from shardmark.core.errors import InputError


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="strategies, workloads, models, datasets, metrics, experiments or studies",
        ),
    ],
) -> None:
    """List what there is, one line each."""
    lines = listing(kind)
    width = max((len(name) for name in lines), default=0)
    for name, line in lines.items():
        typer.echo(f"{name.ljust(width)}  {line}".rstrip())


def listing(kind: str) -> Mapping[str, str]:
    """Name -> one line about it.  Raises `InputError` for an unknown kind."""
    if kind not in _KINDS:
        near = get_close_matches(kind, _KINDS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError("list", f"unknown kind {kind!r}", f"allowed: {', '.join(_KINDS)}{hint}")
    return _KINDS[kind]()


def _strategies() -> Mapping[str, str]:
    from shardmark.strategies import STRATEGIES, fixed_options, strategy_class

    lines = {}
    for name in STRATEGIES:
        fixed = [f"{key}={value}" for key, value in fixed_options(name).items() if key != "name"]
        summary = _summary(strategy_class(name))
        lines[name] = f"{summary} [{', '.join(fixed)}]" if fixed else summary
    return lines


def _workloads() -> Mapping[str, str]:
    from shardmark.workloads import WORKLOADS

    return {name: _summary(options) for name, options in WORKLOADS.items()}


def _models() -> Mapping[str, str]:
    from shardmark.workloads.detection.options import DETECTORS
    from shardmark.workloads.models import MODELS, OTHER_MODELS

    return {**MODELS, **DETECTORS, **OTHER_MODELS}


def _datasets() -> Mapping[str, str]:
    from shardmark.workloads.datasets import DATASETS

    return DATASETS


def _metrics() -> Mapping[str, str]:
    from shardmark.core.metrics import METRICS

    return {name: f"[{metric.unit}] {metric.definition}" for name, metric in METRICS.items()}


def _experiments() -> Mapping[str, str]:
    from shardmark.config.load import presets

    return presets()


def _studies() -> Mapping[str, str]:
    from shardmark.analysis.studies.study import studies

    return studies()


def _summary(described: type) -> str:
    """The first line of the docstring."""
    return (inspect.getdoc(described) or "").partition("\n")[0]


_KINDS: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "strategies": _strategies,
    "workloads": _workloads,
    "models": _models,
    "datasets": _datasets,
    "metrics": _metrics,
    "experiments": _experiments,
    "studies": _studies,
}
