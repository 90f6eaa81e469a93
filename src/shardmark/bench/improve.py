"""Finds what makes a script faster without a change of what it trains.  Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.results.store import is_run, load_run
from shardmark.base.statistics.race import Decision
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.compare.race import Race, race_of, verdict_on
from shardmark.bench.analysis.improvement import FIRST, SNIPPETS, Improvement, patch_of
from shardmark.bench.analysis.taken_away import WORTH_A_TRY
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.launch.session import RunSession
from shardmark.bench.why import looked_at
from shardmark.experiment.experiment import Experiment
from shardmark.scripts.interventions import CALLS, SAVINGS, text_of

WORKERS = (2, 4, 8)
FEW_WORKERS = 4
"""Number of workers that is tried even with fewer cores: some of them wait for files."""
PREFETCHED, BUCKET_MB = 8, 100
DDP_BUCKET_BYTES = 25 * 2**20
PAIRS_OF_RACES = (3, 30, 60)
"""Most pairs of an intervention after each of three races: of all, of the better half, together."""
COUNTS = {"workers", "threads"}
"""Interventions whose variants are named with their values."""
ON_REQUEST = {"compile"}
"""Interventions that are tried only if they are named: each trial compiles for a minute."""
RACED_ALONE = 0.7
"""Share of the budget for the race of single interventions; the rest is for them together."""


def improve(
    experiment_of: Callable[[Mapping[str, str], int], Experiment],
    command: str,
    world_size: int,
    path: Path,
    *,
    only: Sequence[str],
    budget_seconds: float,
    listener: ProgressListener,
) -> Improvement:
    """Race the interventions that fit a script, then those that were faster together.

    Raises `InputError` for an unknown name of `only`, or if nothing fits the script.
    """
    began = time.monotonic()
    for name in only:
        if name not in SAVINGS:
            raise InputError("--only", f"found {name!r}", f"allowed are {', '.join(SAVINGS)}")
    ends_at_seconds = began + budget_seconds * RACED_ALONE
    with looked_at(command, world_size, path / "look", ends_at_seconds, listener) as rounds:
        seen, device_type = rounds.samples.seen[0], rounds.session.runner.machine.device_type
        trial_seconds = rounds.longest_seconds
    fitting = {
        f"{value} {name}" if name in COUNTS else name: {name: value}
        for name, value in _fitting(seen, device_type, world_size)
        if (name in only if only else name not in ON_REQUEST)
    }
    if not fitting:
        allowed = "found are its loader, optimizer, wrappers and convolutions, and none is slow"
        raise InputError("command", "no intervention of --improve fits it", allowed)
    variants = {FIRST: "", **{name: text_of(one) for name, one in fitting.items()}}

    def race(share: float, names: Collection[str], most_pairs: int) -> Race:
        """Measure variants until they are decided, then compare what the fast ones train."""
        left = budget_seconds * share - (time.monotonic() - began)
        experiment = experiment_of({name: variants[name] for name in names}, most_pairs)
        options = RunOptions(budget_seconds=left)
        if left < trial_seconds and is_run(path / "race"):
            return _race(path / "race", experiment)
        with RunSession.open(experiment, path / "race", options, listener) as session:
            session.run()
            result = _race(path / "race", experiment)
            fast = {r.row.strategy for r in result.racers if r.decision is Decision.FASTER}
            trials = (t for t in session.plan.trials if t.strategy.name in fast and not t.repeat)
            session.verify([*trials])
        return _race(path / "race", experiment)

    result = race(RACED_ALONE, variants, PAIRS_OF_RACES[0])
    # More pairs for the better half: few decide something, and many of each take too long.
    ranked = [racer.row.strategy for racer in result.racers]
    finalists = ranked[: max(2, (len(ranked) + 1) // 2)]
    result = race(RACED_ALONE, [FIRST, *finalists], PAIRS_OF_RACES[1])
    faster = _fastest_of_each(result, fitting)
    if len(faster) > 1:
        finalists.append(together := " and ".join(faster))
        fitting[together] = {key: value for name in faster for key, value in fitting[name].items()}
        variants[together] = text_of(fitting[together])
    if len(faster) > 1 or any(verdict_on(racer) == "not decided" for racer in result.racers):
        result = race(1.0, [FIRST, *finalists], PAIRS_OF_RACES[2])
    best = next((racer.row for racer in result.racers if verdict_on(racer) == "keep"), None)
    chosen = {} if best is None else fitting[best.strategy]
    places: dict[str, dict[str, Any]] = {}
    for record in best.ok_trials[0].ranks if best is not None else ():
        for facts in record.settings.get("seen", {}).values():
            for place, call in facts.get("places", {}).items():
                for kind, arguments in call.items():
                    places.setdefault(place, {}).setdefault(kind, {}).update(arguments)
    patch, missing = patch_of(places)
    snippets = [SNIPPETS[name].format(chosen[name]) for name in chosen if name in SNIPPETS]
    return Improvement(
        race=result, interventions=tuple(chosen), best="" if best is None else best.strategy,
        patch=patch, snippets=(*snippets, *missing),
        unfit=tuple(name for name in only if not any(name in one for one in fitting.values())),
    )  # fmt: skip


def _race(path: Path, experiment: Experiment) -> Race:
    """Return the race as far as it has come, the fastest first."""
    result = race_of(compare([load_run(path)]).rows, FIRST, experiment.measure.repeats.margin or 0)
    if result is None:
        raise InputError("--budget", "too short to compare two trials", "give it more time")
    racers = sorted(result.racers, key=lambda racer: -racer.standing.ratio)
    return replace(result, racers=tuple(racers))


def _fitting(seen: Mapping[str, Any], device_type: str, world_size: int) -> list[tuple[str, str]]:
    """Return interventions that the script has a place for, with their values."""
    shares, wrappers, cuda = seen["shares"], seen["wrappers"], device_type == "cuda"
    loader, cores = seen.get("loader", {}), seen["cores"] // world_size
    loads = bool(loader) and shares.get("input", 0.0) >= WORTH_A_TRY
    workers = loader["workers"] if loads else max(WORKERS)
    updates = shares.get("update", 0.0) >= WORTH_A_TRY
    replicas = "DistributedDataParallel" in wrappers and "no_sync" not in wrappers
    convolves = "Conv2d" in wrappers
    fits = {
        **{("workers", str(n)): workers < n <= max(FEW_WORKERS, cores) for n in WORKERS},
        ("prefetch", str(PREFETCHED)): loads, ("pin_memory", ""): cuda, ("fused", ""): updates,
        ("foreach", ""): updates, ("set_to_none", ""): True, ("bucket_view", ""): True,
        ("bucket_mb", str(BUCKET_MB)): seen["trained_bytes"] > DDP_BUCKET_BYTES,
        ("keep_unsharded", ""): True,
        ("no_sync", str(seen["passes"])): replicas and seen["passes"] > 1,
        ("compile", ""): "compile" not in wrappers, ("channels_last", ""): convolves,
        ("cudnn_benchmark", ""): convolves and cuda,
        ("threads", str(cores)): not cuda and seen["threads"] < cores, ("tf32", ""): cuda,
        ("malloc", ""): not cuda,
    }  # fmt: skip
    return [
        (name, value)
        for (name, value), is_fitting in fits.items()
        if is_fitting and (name in seen["fits"] or name not in CALLS)
    ]


def _fastest_of_each(race: Race, fitting: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the variants to keep, one for each intervention and for each kind of update."""
    faster: dict[str, str] = {}
    for racer in race.racers:
        if verdict_on(racer) == "keep":
            name = racer.row.strategy
            (intervention,) = fitting[name]
            faster.setdefault({"foreach": "fused"}.get(intervention, intervention), name)
    return [*faster.values()]
