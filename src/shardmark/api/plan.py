"""Plans from Python: memory, time and cost on machines that nobody has."""

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
    """Predict what each strategy of the experiment needs and reaches; start none.

    `on` is a node type, so many of a card (`"h100x8"`), or a YAML file; a list compares several
    machines.  `nodes` is a number, several, or `"1..128"`, `run` a stored run to start from,
    `price_per_hour` that of one card, or of each machine's.
    `search` compares all layouts of the most ranks: `Plan.search` has the best ones, and
    `Plan.winner` the fastest as an experiment.  Experiment and overrides are those of `run`.

    Raises `InputError` for what is not known; what cannot be predicted is a row with its `reason`.
    """
    from shardmark.api.model_source import by_name
    from shardmark.config.experiment import Experiment
    from shardmark.config.load import resolve
    from shardmark.predict.models import Models
    from shardmark.predict.plan import compare_machines, parse_nodes
    from shardmark.results.runs_folder import RUNS
    from shardmark.results.store import load_run

    if not isinstance(experiment, Experiment):
        experiment = by_name(experiment, RUNS / "models")
    resolved = resolve(experiment, by_name(overrides, RUNS / "models"))
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
