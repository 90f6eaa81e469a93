"""Finds what makes a script faster without a change of what it trains.  Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.results.store import load_run
from shardmark.base.statistics.race import Decision
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.compare.race import Race, race_of, verdict_on
from shardmark.bench.analysis.improvement import FIRST, SNIPPETS, TOGETHER, Improvement, patch_of
from shardmark.bench.analysis.parts import WORTH_A_TRY
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.launch.session import RunSession
from shardmark.bench.why import look_at
from shardmark.experiment.experiment import Experiment
from shardmark.scripts.interventions import SAVINGS, text_of

WORKERS = (2, 4, 8)
FEW_WORKERS = 4
"""Number of workers that is tried even with fewer cores: some of them wait for files."""
PREFETCHED, BUCKET_MB = 8, 100
DDP_BUCKET_BYTES = 25 * 2**20
PAIRS_OF_RACES = (3, 30, 60)
"""Most pairs of an intervention after each of three races: of all, of the better half, together."""
ON_REQUEST = {"compile"}
"""Interventions that are tried only if they are named: each trial compiles for a minute."""
RACED_ALONE = 0.7
"""Share of the budget for the race of single interventions; the rest is for them together."""


def improve(
    experiment_of: Callable[[Mapping[str, str]], Experiment],
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
    seen, device_type = look_at(command, world_size, path / "look", listener=listener)
    if time.monotonic() - began > budget_seconds * RACED_ALONE:
        raise InputError("--budget", f"{budget_seconds:g} s", "the first trial takes longer")
    fitting = {
        name: {intervention: value}
        for name, intervention, value in _fitting(seen, device_type, world_size)
        if (intervention in only if only else intervention not in ON_REQUEST)
    }
    if not fitting:
        allowed = "found are its loader, optimizer, wrappers and convolutions, and none is slow"
        raise InputError("command", "no intervention of --improve fits it", allowed)
    variants = {FIRST: "", **{name: text_of(one) for name, one in fitting.items()}}

    def race(share: float, names: Collection[str], most_pairs: int) -> Race:
        """Measure variants until they are decided, then compare what the fast ones train."""
        left = budget_seconds * share - (time.monotonic() - began)
        experiment = experiment_of({name: variants[name] for name in names})
        repeats = experiment.measure.repeats.model_copy(update={"at_most": most_pairs})
        measure = experiment.measure.model_copy(update={"repeats": repeats})
        experiment = experiment.model_copy(update={"measure": measure})
        options = RunOptions(budget_seconds=left)
        if left <= 0:
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
    ranked = sorted(result.racers, key=lambda racer: -racer.standing.ratio)
    finalists = [racer.row.strategy for racer in ranked[: max(2, (len(ranked) + 1) // 2)]]
    result = race(RACED_ALONE, [FIRST, *finalists], PAIRS_OF_RACES[1])
    faster = _fastest_of_each(result, fitting)
    if len(faster) > 1:
        together = {key: value for name in faster for key, value in fitting[name].items()}
        fitting[TOGETHER], variants[TOGETHER] = together, text_of(together)
        finalists.append(TOGETHER)
    if len(faster) > 1 or any(verdict_on(racer) == "not decided" for racer in result.racers):
        result = race(1.0, [FIRST, *finalists], PAIRS_OF_RACES[2])
    ranked = sorted(result.racers, key=lambda racer: -racer.standing.ratio)
    best = next((racer.row for racer in ranked if verdict_on(racer) == "keep"), None)
    chosen = {} if best is None else fitting[best.strategy]
    places: dict[str, dict[str, Any]] = {}
    for record in best.ok_trials[0].ranks if best is not None else ():
        for facts in record.settings.get("seen", {}).values():
            for place, call in facts.get("places", {}).items():
                for kind, arguments in call.items():
                    places.setdefault(place, {}).setdefault(kind, {}).update(arguments)
    patch, missing = patch_of(places)
    return Improvement(
        race=result,
        interventions=tuple(chosen),
        best="" if best is None else best.strategy,
        patch=patch,
        snippets=(
            *(SNIPPETS[name].format(value) for name, value in chosen.items() if name in SNIPPETS),
            *missing,
        ),
    )


def _race(path: Path, experiment: Experiment) -> Race:
    margin = experiment.measure.repeats.margin
    assert margin is not None, "it is a race"
    result = race_of(compare([load_run(path)]).rows, FIRST, margin)
    if result is None:
        raise InputError("--budget", "too short to compare two trials", "give it more time")
    return result


def _fitting(
    seen: Mapping[str, Any], device_type: str, world_size: int
) -> Iterator[tuple[str, str, str]]:
    """Yield name, intervention and value of what the script has a place for."""
    shares, wrappers, cuda = seen["shares"], seen["wrappers"], device_type == "cuda"
    cores = seen["cores"] // world_size
    if loader := seen.get("loader"):
        yield from _fitting_loader(loader, shares.get("input", 0.0), cores, cuda=cuda)
    if shares.get("update", 0.0) >= WORTH_A_TRY:
        yield "fused", "fused", ""
        yield "foreach", "foreach", ""
    if "zero_grad" in wrappers:
        yield "set_to_none", "set_to_none", ""
    if "DistributedDataParallel" in wrappers:
        yield "bucket_view", "bucket_view", ""
        if seen["trained_bytes"] > DDP_BUCKET_BYTES:
            yield "bucket_mb", "bucket_mb", str(BUCKET_MB)
        if seen["passes"] > 1:
            yield "no_sync", "no_sync", str(seen["passes"])
    if "fully_shard" in wrappers:
        yield "keep_unsharded", "keep_unsharded", ""
    if "compile" not in wrappers:
        yield "compile", "compile", ""
    if "Conv2d" in wrappers:
        yield "channels_last", "channels_last", ""
        if cuda:
            yield "cudnn_benchmark", "cudnn_benchmark", ""
    if not cuda and seen["threads"] < cores:
        yield f"{cores} threads", "threads", str(cores)
    yield ("tf32", "tf32", "") if cuda else ("malloc", "malloc", "")


def _fitting_loader(
    loader: Mapping[str, Any], share: float, cores: int, *, cuda: bool
) -> Iterator[tuple[str, str, str]]:
    if share >= WORTH_A_TRY:
        for count in WORKERS:
            if loader["workers"] < count <= max(FEW_WORKERS, cores):
                yield f"{count} workers", "workers", str(count)
        if loader["workers"]:
            yield "prefetch", "prefetch", str(PREFETCHED)
    if cuda:
        yield "pin_memory", "pin_memory", ""


def _fastest_of_each(race: Race, fitting: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the variants to keep, one for each intervention and for each kind of update."""
    faster: dict[str, str] = {}
    for racer in sorted(race.racers, key=lambda racer: -racer.standing.ratio):
        if verdict_on(racer) == "keep":
            name = racer.row.strategy
            (intervention,) = fitting[name]
            faster.setdefault({"foreach": "fused"}.get(intervention, intervention), name)
    return [*faster.values()]
