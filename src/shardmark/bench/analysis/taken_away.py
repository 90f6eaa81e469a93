"""Parts of a step that are lost, from the times of a script without one thing after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median, stdev
from typing import Any

from shardmark.base.results.schema import TrialResult
from shardmark.base.statistics.intervals import Estimate, estimate_difference
from shardmark.base.text import counted
from shardmark.base.traffic import required_fraction
from shardmark.bench.analysis.compare.rows import gathered
from shardmark.bench.analysis.parts import (
    FEW_ROUNDS,
    LATE,
    NOTEWORTHY,
    Division,
    Part,
    is_above,
    shown_and_undecided,
)
from shardmark.bench.analysis.trial.rank_metrics import measured_steps, window_seconds

PLAIN, LOOK, ALL, UPDATE = "as it is", "look", "all of it", "no_update"
OWN_ROWS, EQUAL_ROWS = "own rows", "equal rows"
BETWEEN = {
    "evaluation": "no_evaluation", "checkpoint": "no_checkpoint", "logging": "no_logging"
}  # fmt: skip
KINDS = {"same_batch": "input", "no_peers": "communication"}
KINDS |= {name: kind for kind, name in BETWEEN.items()}
"""Kinds of parts by the intervention that takes them away."""
WORTH_A_TRY = 0.02
"""Share of a rank's time from which a thing is taken away."""
WRAPPERS = {"DistributedDataParallel", "fully_shard"}  # reduce gradients inside of passes
WATCHED, LEAST_LOOKS = 0.08, 5
"""Share of a step and looks from which own code and collectives are named, as they stay."""
THIN = 0.25
"""Share of the rest of a step, for its messages alone, from which the link is thin."""
BY_CHANCE = 3.0
"""Standard errors between means of ranks' sizes of batches up to which they are alike."""
PRECISE = 0.02
"""Half of an interval's width, in shares of a step, that is narrow enough."""
NO_LOSS = Estimate(value=0.0, low=0.0, high=None, n=0)
SPANS = ("data", "backward", "optimizer")
"""Spans that a script's steps are divided in; the rest is the forward pass and its own code."""
LOOKED_AT = {"optimizer": "update", "data": "input"}
"""Kinds of looks at the main thread by span, where their names differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trial of a variant."""

    step_seconds: float
    """Mean of the slowest rank."""
    ranks: tuple[Mapping[str, float], ...]
    """Mean seconds of each rank's `step` and spans while all ranks took steps."""
    result: TrialResult

    def excess(self, rank: int, span: str = "step") -> float:
        """Seconds that a rank takes longer than the median of the others."""
        seconds = [of_rank[span] for of_rank in self.ranks]
        return seconds[rank] - median(seconds[:rank] + seconds[rank + 1 :])

    def seen(self, intervention: str) -> list[dict[str, Any]]:
        """Return what an intervention saw on each rank."""
        facts = (rank.settings.get("seen", {}) for rank in self.result.ranks)
        return [seen[intervention] for seen in facts if intervention in seen]


def sample_of(result: TrialResult, lines: Sequence[Mapping[str, Any]]) -> Sample:
    """Return the sample of a trial that ended well, with the lines of its file of steps."""
    by_rank = gathered((line["rank"], line) for line in lines if line["measured"])
    # A rank that is ahead leaves its cores to the others when it has ended.
    first_end = min(_end(steps[-1]) for steps in by_rank.values())
    ranks = []
    for steps in by_rank.values():
        shared = [step for step in steps if _end(step) <= first_end] or steps
        spans = {name: fmean(step[f"{name}_seconds"] or 0.0 for step in shared) for name in SPANS}
        seconds = fmean(step["step_seconds"] for step in shared)
        ranks.append({**spans, "forward": seconds - sum(spans.values()), "step": seconds})
    # Means: a median hides what is rare.
    step_seconds = max(window_seconds(rank) / measured_steps(rank) for rank in result.ranks)
    return Sample(step_seconds=step_seconds, ranks=tuple(ranks), result=result)


def _end(step: Mapping[str, Any]) -> float:
    return float(step["started_at_seconds"]) + float(step["step_seconds"])


@dataclass(slots=True)
class Samples:
    """The samples of one number of ranks, by variant and round."""

    world_size: int
    by_variant: dict[str, dict[int, Sample]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons of variants that do not run."""
    stripped: str = ALL
    """The variant without all that can be taken away, which may be one thing or none."""

    def trials(self, variant: str) -> list[Sample]:
        return [*self.by_variant.get(variant, {}).values()]

    @property
    def seen(self) -> list[dict[str, Any]]:
        """Facts of `look` by rank."""
        return self.trials(LOOK)[0].seen("Look")

    @property
    def step(self) -> Estimate:
        return estimate_difference([sample.step_seconds for sample in self.trials(PLAIN)])

    def saved(self, variant: str, *, than: str = PLAIN) -> Estimate | None:
        """Estimate what a step takes less than in another variant; None without common rounds."""
        one, other = (self.by_variant.get(name, {}) for name in (than, variant))
        rounds = sorted(one.keys() & other.keys())
        differences = [one[n].step_seconds - other[n].step_seconds for n in rounds]
        return estimate_difference(differences) if differences else None

    def precise(self, variants: Iterable[str]) -> bool:
        """True if the intervals of what the variants save are narrow enough."""
        saved = (self.saved(name) for name in variants if name != PLAIN)
        return all(
            e.half_width is not None
            and e.half_width <= max(PRECISE * self.step.value, abs(e.value) / 10)
            for e in filter(None, saved)
        )

    def late(self) -> tuple[int, Estimate] | None:
        """Return the rank that takes longest without peers, and how much longer than the others."""
        samples = self.trials(self.stripped)
        if not samples or self.world_size == 1:
            return None
        ranks = range(self.world_size)
        rank = max(ranks, key=lambda rank: fmean(s.ranks[rank]["step"] for s in samples))
        return rank, estimate_difference([sample.excess(rank) for sample in samples])


def rows_differ(seen: Iterable[Mapping[str, Any]]) -> bool:
    """True if ranks or steps had batches of other sizes."""
    return len({size for rank in seen for size in rank["rows"]}) > 1


def rows_vary(seen: Sequence[Mapping[str, Any]]) -> bool:
    """True if sizes of batches vary by chance: they differ, and no rank has larger ones."""
    sizes = sorted((rank["rows"] for rank in seen if len(rank["rows"]) > 1), key=fmean)
    if len(sizes) < 2 or not rows_differ(seen):
        return False
    return _alike_by_chance(sizes[0], sizes[-1])


def _alike_by_chance(smaller: Sequence[float], larger: Sequence[float]) -> bool:
    """True if the means of two ranks' sizes may be alike, by Welch's statistic."""
    errors = math.hypot(*(stdev(rows) / math.sqrt(len(rows)) for rows in (smaller, larger)))
    return fmean(larger) - fmean(smaller) <= BY_CHANCE * errors


def _rank_of_longest_rows(seen: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the rank whose batches are larger than those of each other rank, but for chance."""
    order = sorted(range(len(seen)), key=lambda rank: fmean(seen[rank]["rows"] or [0]))
    sizes = [seen[rank]["rows"] for rank in order[-2:]]
    return None if min(map(len, sizes)) < 2 or _alike_by_chance(*sizes) else order[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Division):
    """The parts of a script's step on a number of ranks."""

    ranks: int
    lost: Estimate
    needed: Part | None
    """Communication that is no loss: neither is the link thin, nor are there more collectives
    than gradients need.  None if it is a part, or small."""
    findings: tuple[str, ...]
    """Sentences on what counts show of collectives and loaders."""
    counts: Mapping[str, Any]
    notes: tuple[str, ...]
    """Sentences on what could not be taken away, and on disturbed or few trials."""

    @property
    def all_parts(self) -> tuple[Part, ...]:
        return (*self.parts, *([self.needed] if self.needed else []))

    @property
    def computing_seconds(self) -> float:
        needed_seconds = self.needed.seconds.value if self.needed else 0.0
        return self.step.value - self.lost.value - needed_seconds


def explanation_of(samples: Samples, chosen: Sequence[str]) -> Explanation:
    """Explain a step by what it takes less without each of the chosen interventions' things."""
    step, seen = samples.step, samples.seen
    parts, unknown, beside = [], [], list[Part]()
    for name in chosen:
        saved, kind = samples.saved(name), KINDS[name]
        if kind == "input" and largest_share(seen, kind) < WORTH_A_TRY:
            continue  # tried for rows of other sizes: the batches of the warm-up may be shorter
        if saved is None:
            unknown.append(kind)
        else:
            if kind == "communication" and (waits := samples.saved(EQUAL_ROWS, than=OWN_ROWS)):
                saved = _without(saved, waits)  # ranks wait in their collectives
            if kind == "communication" and (beside := [*_own_collectives(samples, saved)]):
                saved = _without(saved, beside[0].seconds)
            rank = _rank_at_fault(seen, kind, saved.value / step.value)
            place = _place(seen[rank or 0], kind)
            parts.append(Part(kind=kind, seconds=saved, rank=rank, place=place))
    counts = _counts(samples)
    more, loader, idle = [*_more_reductions(counts, seen[0])], counts["loader"], list[str]()
    if loader and not loader["workers"] and largest_share(seen, "input") > WATCHED:
        idle = [f"the loader at {loader['place']} has no workers: it loads while the model waits"]
    needed = next((p for p in parts if p.kind == "communication"), None)
    if needed is not None:  # the link takes long for a step's messages, or its rate is not known
        rate, rest_seconds = counts["link_bytes_per_second"], step.value - needed.seconds.value
        thin = not rate or counts["sent_bytes"] / rate > THIN * rest_seconds
        needed = None if more or thin else needed
    code = [*_code(samples)]
    late = [*_lateness(samples, code)]
    parts = [part for part in (*beside, *parts, *late) if part is not needed]
    # The own code that makes a rank late is told once.
    explained = {(p.rank, p.phase) for p in late if is_above(p.seconds, LATE * step.value)}
    parts += [part for part in code if (part.rank, part.kind) not in explained]
    shown, undecided = shown_and_undecided(parts, step.value)
    if needed is not None and needed.seconds.value < NOTEWORTHY * step.value:
        needed = None
    update = samples.saved(UPDATE)
    return Explanation(
        ranks=samples.world_size, step=step, lost=_lost(samples, shown, needed), parts=shown,
        undecided=undecided, unknown=tuple(unknown),
        update=update if update is not None and update.value > 0 else None, needed=needed,
        findings=(*more, *idle), counts=counts, notes=tuple(_notes(samples)),
    )  # fmt: skip


def largest_share(seen: Sequence[Mapping[str, Any]], kind: str) -> float:
    """Largest share of a rank's time in which the looks saw this kind of part."""
    return max(float(rank["shares"].get(kind, 0.0)) for rank in seen)


def _without(seconds: Estimate, other: Estimate) -> Estimate:
    """Return the difference of two estimates with independent errors."""
    shift = max(0.0, other.value)
    value = seconds.value - shift
    if seconds.half_width is None or other.half_width is None:
        return replace(seconds, value=value, low=None, high=None)
    half = math.hypot(seconds.half_width, other.half_width)
    return replace(seconds, value=value, low=value - half, high=value + half)


def _rank_at_fault(seen: Sequence[Mapping[str, Any]], kind: str, share: float) -> int | None:
    """Return the rank that does most of this, if the others do less than half as much."""
    if len(seen) < 2 or kind == "communication":
        return None
    shares = [rank["shares"].get(kind, 0.0) for rank in seen]
    most = max(range(len(shares)), key=shares.__getitem__)
    others = max(shares[:most] + shares[most + 1 :])
    return most if shares[most] >= share / 2 and others < shares[most] / 2 else None


def _place(seen: Mapping[str, Any], kind: str) -> str | None:
    """Return the line of the script where a thing of this kind is made or called."""
    if kind == "input" and seen.get("loader", {}).get("place"):
        return str(seen["loader"]["place"])
    lines = seen["lines"].get(kind)
    return str(lines[0][0]) if lines else None


def _lateness(samples: Samples, code: Sequence[Part]) -> Iterable[Part]:
    """Yield what makes a rank late, or that all of them wait for the longest rows of each step."""
    longest = samples.saved(EQUAL_ROWS, than=OWN_ROWS)
    if longest is not None:
        most = _rank_of_longest_rows(samples.seen)
        yield Part(kind="late_rank", seconds=longest, rank=most, lateness="rows", phase="forward")
    if (late := samples.late()) is None:
        return
    rank, before = late[0], (late[0] - 1) % samples.world_size
    are_equal = all(seen["rows"] for seen in samples.seen) and not rows_differ(samples.seen)
    are_equal |= rows_vary(samples.seen)  # then all ranks had those of rank 0
    swaps = {kind: samples.trials(kind) for kind in (samples.stripped, "rows", "places")}
    tried = swaps["places"] and (swaps["rows"] or are_equal)
    exchanged = any(seen["swapped"] for s in swaps["places"] for seen in s.seen("SwapPlaces"))
    causes = {None: "own work" if tried else None} | ({"rows": "rows"} if swaps["rows"] else {})
    causes |= {"places": "place"} if exchanged else {}
    excesses = {
        moving: [
            [s.excess(before if kind == moving else rank) for s in swaps[kind]]
            for kind in swaps
            if swaps[kind]
        ]
        for moving in causes
    }
    moving = max(causes, key=lambda variant: sum(map(fmean, excesses[variant])))
    excess, lateness = estimate_difference([*chain(*excesses[moving])]), causes[moving]
    means = [*map(fmean, excesses[moving])]
    if min(means) < means[0] / 2:  # it is not late again when ranks swap
        excess = replace(excess, low=None, high=None)
    spans = {
        span: fmean(sample.excess(rank, span) for sample in samples.trials(samples.stripped))
        for span in (*SPANS, "forward")
    }
    phase = max(spans, key=spans.__getitem__)
    explaining = [p for p in code if p.rank == rank and p.seconds.value > excess.value / 2]
    if phase == "forward" and explaining:
        phase = "own_code"  # the time between the passes counts to the forward pass
    place = _place(samples.seen[rank], LOOKED_AT.get(phase, phase))
    if lateness != "rows" or longest is None:
        yield Part(
            kind="late_rank", seconds=excess, rank=rank, lateness=lateness, phase=phase, place=place
        )


def _own_collectives(samples: Samples, most: Estimate) -> Iterable[Part]:
    """Yield what a script calls itself where a wrapper reduces its gradients, such as a metric's.

    Of the rank that spends least there: others may wait in it for a late one.  All of them may wait
    for the device: without peers a step saves no more than `most`.
    """
    rank = min(samples.seen, key=lambda rank: rank["shares"].get("communication", 0.0))
    share = rank["shares"].get("communication", 0.0)
    watched = _watched(samples, share, rank["looks"])
    if watched is not None and WRAPPERS & {*rank.get("wrappers", ())}:
        place = _place(rank, "communication")
        seconds = min(watched, most, key=lambda estimate: estimate.value)
        yield Part(kind="own_collectives", seconds=seconds, known_by="watched", place=place)


def _watched(samples: Samples, share: float, looks: int) -> Estimate | None:
    """Estimate seconds of a step from a share of a rank's looks; None if they are few."""
    if share < WATCHED or share * looks < LEAST_LOOKS:
        return None
    step_seconds = samples.step.value
    error = 2 * (share * (1 - share) / looks) ** 0.5
    low, high = ((share + sign * error) * step_seconds for sign in (-1, 1))
    return Estimate(value=share * step_seconds, low=low, high=high, n=looks)


def _code(samples: Samples) -> Iterable[Part]:
    """Yield the script's own code, of the rank that spends most time there.

    What a line with a print computes stays when nothing is printed, and is own code, too.  Beside
    a GPU the main thread may wait there for what the GPU computes, so that nothing is told.
    """
    seen, step_seconds = samples.seen, samples.step.value
    kinds = ["own_code"]
    for kind, name in BETWEEN.items():
        saved = samples.saved(name)
        least = largest_share(seen, kind) * step_seconds / 2
        kinds += [kind] if saved and saved.high is not None and saved.high < least else []
    shares = [sum(rank["shares"].get(kind, 0.0) for kind in kinds) for rank in seen]
    most = max(range(len(shares)), key=shares.__getitem__)
    share, seconds = shares[most], _watched(samples, shares[most], seen[most]["looks"])
    if seconds is not None and not seen[most].get("on_gpu"):
        alone = len(shares) > 1 and share > 2 * max(shares[:most] + shares[most + 1 :])
        yield Part(
            kind="own_code", seconds=seconds, known_by="watched", rank=most if alone else None,
            place=_place(seen[most], max(kinds, key=lambda k: seen[most]["shares"].get(k, 0.0))),
        )  # fmt: skip


def _lost(samples: Samples, parts: Sequence[Part], needed: Part | None) -> Estimate:
    """Estimate what a step would take less: no less than without one part, no more than all."""
    if not parts:
        return NO_LOSS
    # What the ranks wait for is gone without peers; a late rank's work and own code are not.
    late = [part for part in parts if part.kind == "late_rank" and part.rank is not None]
    late_ranks = {part.rank for part in late}
    watched = [part for part in parts if part.kind == "own_code" and part.rank not in late_ranks]
    alone = (p.seconds for p in parts if p.known_by != "watched" and p.kind != "late_rank")
    lost = samples.saved(samples.stripped) or next(alone, NO_LOSS)
    if needed is not None:
        lost = _without(lost, needed.seconds)
    value = lost.value + sum(part.seconds.value for part in (*late, *watched))
    rest_seconds = samples.step.value - (needed.seconds.value if needed else 0.0)
    most = min(sum(part.seconds.value for part in parts), rest_seconds)
    value = min(max(value, parts[0].seconds.value), most)
    shift = value - lost.value
    low, high = (None if end is None else end + shift for end in (lost.low, lost.high))
    return replace(lost, value=value, low=low, high=high)


def _counts(samples: Samples) -> dict[str, Any]:
    probe, seen = samples.trials(LOOK)[0].result.ranks[0].probe, samples.seen
    collectives = (probe.collectives if probe else None) or {}
    fractions = {kind: required_fraction(kind, samples.world_size) for kind in collectives}
    return {
        "sent_bytes": sum(
            (fractions[kind] or 0.0) * record.payload_bytes for kind, record in collectives.items()
        ),
        "link_bytes_per_second": seen[0].get("link_bytes_per_second"),
        "collectives": {kind: record.model_dump() for kind, record in collectives.items()},
        "trained_tensors": seen[0]["trained_tensors"],
        "trained_bytes": seen[0]["trained_bytes"],
        "rows_by_rank": [fmean(rank["rows"]) if rank["rows"] else None for rank in seen],
        "loader": seen[0].get("loader"),
    }


def _more_reductions(counts: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterable[str]:
    """Yield what shows that gradients are reduced too often, and not a few metrics, or activations.

    A wrapper has buckets beside metrics; activations are reduced in a single backward pass, too.
    """
    collectives, tensors = counts["collectives"], counts["trained_tensors"]
    calls = collectives.get("all_reduce", {"calls": 0})["calls"]
    if calls >= tensors >= (16 if WRAPPERS & {*seen.get("wrappers", ())} else 4):
        yield (
            f"{calls:.0f} all-reduces a step for {tensors} tensors: DDP, or one flat tensor, takes "
            "a few"
        )
    reductions = (collectives.get(kind) for kind in ("all_reduce", "reduce_scatter"))
    reduced = sum(record["payload_bytes"] for record in reductions if record)
    if (size := counts["trained_bytes"]) and reduced > 1.5 * size and seen.get("passes", 1) > 1:
        yield (
            f"{reduced / size:.1f} times the gradients are reduced a step: under accumulation, "
            "no_sync() leaves one reduction"
        )


def _notes(samples: Samples) -> Iterable[str]:
    for name, reason in samples.failures.items():
        problem = "failed later on" if samples.trials(name) else "could not be taken away"
        yield f"{name} {problem}: {reason}"
    if any(rank.get("on_gpu") for rank in samples.seen):
        yield "the script's own code is not told: there it may wait for what the GPU computes"
    every = [s for by_round in samples.by_variant.values() for s in by_round.values()]
    disturbed = [s.result.disturbed for s in every if s.result.disturbed]
    if disturbed:
        yield f"{len(disturbed)} of {len(every)} trials disturbed, the first: {disturbed[0]}"
    if (count := len(samples.trials(PLAIN))) <= FEW_ROUNDS:
        yield f"{counted(count, 'round')} only: the budget is used up"
