"""What was trained, and how, in the runs behind a table of link speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.recording import Table

from shardmark.analysis.compare.rows import Row, plain
from shardmark.core.recipe import Recipe
from shardmark.strategies import build_strategy

if TYPE_CHECKING:
    from benchmarks.cluster.link_speeds import Speed


def facts_table(speeds: Sequence[Speed], cores: int) -> Table:
    """What was trained and how: a line for each fact, with all its values where they differ."""
    rows = [(speed, cell.row) for speed in speeds for cell in speed.cells.values()]
    lines = []
    for name, value_of in _FACTS:
        values: dict[str, list[str]] = {}
        for speed, row in rows:
            value = value_of(row)
            if value:
                values.setdefault(value, []).append(speed.name)
        if values:
            lines.append((name, _joined(values)))
    namespaces = (
        "nodes",
        f"network namespaces that share the {cores} cores of one machine; a token bucket limits"
        " each one's link in both directions",
    )
    return Table(columns=("what", "value"), rows=(*lines, namespaces))


def _joined(values: Mapping[str, Sequence[str]]) -> str:
    """Values with the speeds that have them, where these differ; rows of one speed may, too."""
    if len({frozenset(names) for names in values.values()}) == 1:
        return "; ".join(values)
    return "; ".join(f"{value} ({_names(names)})" for value, names in values.items())


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _of(row: Row, part: str, key: str) -> Any:
    return (row.ok_trials[0].trial.get(part) or {}).get(key)


def _model(row: Row) -> str:
    return f"{_of(row, 'workload', 'model')}, {row.precision}"


def _data(row: Row) -> str:
    size, classes = (_of(row, "workload", key) for key in ("image_size", "classes"))
    parts = [str(_of(row, "workload", "dataset"))]
    parts += [f"{size} x {size} pixels"] * (size is not None)
    parts += [f"{classes} classes"] * (classes is not None)
    return ", ".join(parts) + (": synthetic, no quality is meant" if row.synthetic else "")


def _batch(row: Row) -> str:
    per_rank = _of(row, "recipe", "per_rank_batch")
    if per_rank is None:
        return f"{_of(row, 'recipe', 'global_batch')} samples over all ranks (strong scaling)"
    return f"{per_rank} samples on each rank (weak scaling: more ranks do more in a step)"


def _ranks(row: Row) -> str:
    return f"{row.nodes} x {row.world_size // row.nodes} training ranks, nodes x ranks on each"


def _steps(row: Row) -> str:
    steps, epochs = (_of(row, "recipe", key) for key in ("steps", "epochs"))
    length = f"{epochs} epochs" if steps is None else f"{steps} steps"
    warmup = _of(row, "measure", "warmup_steps")
    return length if warmup is None else f"{length}, of which {warmup} warm-up"


def _backend(row: Row) -> str:
    device = str(row.ok_trials[0].trial.get("device_type"))
    strategy = build_strategy(row.strategy, row.strategy_options)
    threads = _of(row, "recipe", "threads_per_rank")
    count = "" if threads is None else f", threads on each rank: {threads}"
    recipe = Recipe.model_validate(row.ok_trials[0].trial["recipe"])
    return f"{strategy.backend(device, recipe)} on {device}{count}"


_FACTS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("model", _model),
    ("data", _data),
    ("batch", _batch),
    ("ranks", _ranks),
    ("steps", _steps),
    ("repeats", lambda row: str(_of(row, "measure", "repeats") or len(row.ok_trials))),
    ("optimizer", lambda row: plain((_of(row, "recipe", "optimizer") or {}).get("name") or "")),
    ("backend", _backend),
)
