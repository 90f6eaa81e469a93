"""In what a run differs from a published study: hardware, task, recipe, batch, software."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.studies.against import Against, Pair, given
from shardmark.analysis.studies.schema import Paper
from shardmark.results.store import RunFolder

TASK_KEYS = ("workload.name", "workload.model", "workload.dataset")
"""Another value of one of these is another task, of which no quality compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What was published and measured on."""

    published: str
    measured: str
    same_kind: bool
    """Whether every device measured on is of the kind published on."""
    on_cpu: bool
    """Whether something was measured on a CPU, whose cores the ranks share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key whose value is not the study's."""

    key: str
    published: str
    measured: str
    rows: tuple[Row, ...]
    """Those that have the measured value."""


def machines(against: Against) -> Machines:
    """Says `nothing` where no trial ended ok."""
    rows = [row for row in against.rows if row.ok_trials]
    devices = {rank.device for row in rows for trial in row.ok_trials for rank in trial.ranks}
    texts = dict.fromkeys(text for row in rows for text in _measured_on(row))
    hardware = against.paper.hardware
    return Machines(
        published="; ".join(machine.text for machine in hardware),
        measured="; ".join(texts) or "nothing",
        same_kind=bool(devices)
        and all(any(machine.has(device) for machine in hardware) for device in devices),
        on_cpu="cpu" in devices,
    )


def differences(against: Against) -> tuple[Difference, ...]:
    """Keys in the study's order, the task's first; then the batch."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for pair in against.pairs:
        if pair.row is None:
            continue
        for key, published, measured in _differing(against.paper, pair):
            rows = found.setdefault((key, published, measured), [])
            if pair.row not in rows:
                rows.append(pair.row)
    ordered = sorted(found, key=lambda item: item[0] not in TASK_KEYS)
    return tuple(
        Difference(
            key=key,
            published=published,
            measured=measured,
            rows=tuple(found[key, published, measured]),
        )
        for key, published, measured in ordered
    )


def batches(against: Against) -> tuple[str, ...]:
    """How the runs read a batch size of which the study does not say what it counts."""
    batch = against.paper.batch
    if batch is None or batch.of != "not stated":
        return ()
    recipes = [row.trials[0].trial.get("recipe", {}) for row in against.rows]
    readings = {
        "per rank": any(recipe.get("per_rank_batch") == batch.size for recipe in recipes),
        "over all ranks": any(recipe.get("global_batch") == batch.size for recipe in recipes),
    }
    return tuple(reading for reading, taken in readings.items() if taken)


def software(against: Against) -> Mapping[str, tuple[str, ...]]:
    """Package -> versions measured with, of the packages that the study names."""
    found: dict[str, dict[str, None]] = {name: {} for name in against.paper.software}
    for environment in _environments(against.rows):
        packages = environment.get("packages")
        for name, versions in found.items():
            version = packages.get(name) if isinstance(packages, Mapping) else None
            if version is not None:
                versions[str(version)] = None
    return {name: tuple(versions) for name, versions in found.items()}


def _environments(rows: Iterable[Row]) -> list[dict[str, Any]]:
    folders = dict.fromkeys(row.folder for row in rows if row.folder is not None)
    return [RunFolder(folder).read_environment() for folder in folders]


def _measured_on(row: Row) -> list[str]:
    """The row's devices in words; a CPU with the cores that the run could use."""
    trial = row.ok_trials[0]
    names = {rank.device_uuid or f"rank {rank.rank}": rank.device for rank in trial.ranks}
    counts = Counter(name for name in names.values() if name != "cpu")
    texts = [f"{count} x {name}" for name, count in counts.items()]
    return [*texts, _cpu(row)] if "cpu" in names.values() else texts


def _cpu(row: Row) -> str:
    (environment,) = _environments([row]) or [{}]
    cpu = environment.get("cpu")
    cores, model = (
        (cpu.get("usable_cores"), cpu.get("model")) if isinstance(cpu, dict) else (None, None)
    )
    text = "a CPU" if cores is None else f"{cores} CPU core{'' if cores == 1 else 's'}"
    return f"{text} ({model})" if model else text


def _differing(paper: Paper, pair: Pair) -> Iterable[tuple[str, str, str]]:
    assert pair.row is not None, "the caller looked"
    trial = pair.row.trials[0].trial
    own = {} if pair.figures is None else pair.figures.conditions
    conditions = {**paper.conditions, **own}
    same_task = given(trial, "workload.name") == conditions.get("workload.name")
    for key, published in conditions.items():
        measured = given(trial, key)
        foreign = key.startswith("workload.") and key not in TASK_KEYS and not same_task
        if measured != published and not (measured is None and foreign):
            yield key, plain(published), _text(key, measured)
    for key, values in paper.varied.items():
        measured = given(trial, key)
        if measured not in values:
            yield key, " or ".join(map(plain, values)), _text(key, measured)
    if paper.batch is not None:
        yield from _batch(paper, trial, pair.row.world_size)


def _text(key: str, value: object) -> str:
    if value is None:
        return "all" if key.endswith("_samples") else "none"
    return plain(value)


def _batch(paper: Paper, trial: Mapping[str, Any], ranks: int) -> Iterable[tuple[str, str, str]]:
    batch = paper.batch
    assert batch is not None, "the caller looked"
    recipe = trial.get("recipe", {})
    per_rank, total = recipe.get("per_rank_batch"), recipe.get("global_batch")
    same: Sequence[bool] = {
        "per rank": (per_rank == batch.size, total == batch.size * ranks),
        "all ranks": (total == batch.size, per_rank == batch.size / ranks),
        "not stated": (per_rank == batch.size, total == batch.size),
    }[batch.of]
    if not any(same):
        of = "per GPU or in total is not stated" if batch.of == "not stated" else batch.of
        measured = f"{per_rank} per rank" if per_rank is not None else f"{total} over all ranks"
        yield "batch", f"{batch.size} ({of})", measured
