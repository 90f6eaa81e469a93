"""Predictions of memory, time and cost on other machines, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmark.config.experiment import Experiment
    from shardmark.predict.plan import Plan


def plan(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    on: str | Sequence[str],
    *,
    nodes: int | str | Sequence[int] = 1,
    run: str | Path | None = None,
    price_per_hour: float | Sequence[float] | None = None,
    search: bool = False,
    **overrides: Any,
) -> Plan:
    """Predict memory, speed and cost of each strategy of the experiment; run nothing.

    `on` is a node type, a number of cards (`"h100x8"`), or a YAML file; a list compares several
    machines.  `nodes` is a number, a list, or `"1..128"`; `run` is a stored run of the model that
    calibrates the prediction; `price_per_hour` is the price of one card, or a list of one price for
    each machine.  `search` compares all layouts of the largest number of ranks: `Plan.search` has
    the best ones, and `Plan.winner` the fastest as an experiment.  Experiment and overrides are
    those of `run`.

    Raises `InputError` for unknown hardware; a strategy without a prediction is a row with its
    `reason`.
    """
    from shardmark.api.model_source import resolve_experiment
    from shardmark.predict.models import Models
    from shardmark.predict.plan import compare_machines, parse_nodes
    from shardmark.results.store import load_run

    resolved = resolve_experiment(experiment, overrides)
    counts = nodes if isinstance(nodes, str | int) else ",".join(map(str, nodes))
    prices = [price_per_hour] if isinstance(price_per_hour, int | float) else price_per_hour or ()
    return compare_machines(
        resolved,
        [str(on)] if isinstance(on, str | Path) else [*map(str, on)],
        parse_nodes(str(counts)),
        Models(),
        run=None if run is None else load_run(Path(run).expanduser()),
        prices_per_hour=prices,
        search=search,
    )
