"""Causes of a deviation, each with the evidence that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from math import hypot, inf, prod
from operator import mul
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import yaml
from torch import Tensor

from shardmark.audit.comparison import (
    EQUAL,
    EXPLAINED,
    REDUCTION,
    SAME_ROWS,
    Records,
    Vectors,
    aligned,
    common_factor,
    difference_of_rows,
    factor_of,
    joined_flat,
    relative,
    reproduces,
    scaled,
    stacked,
    tensors_differ,
)
from shardmark.base.evidence.captures import Array
from shardmark.base.text import counted, listed
from shardmark.scripts.batches import checksum
from shardmark.scripts.launch import ON_A_CPU
from shardmark.scripts.record import GRAPH, Loader, Micro, Record, Step

GUIDE = "docs/guides/from-one-gpu.md"

EXACT = 1e-5
"""Relative difference of numbers of a script that are equal by its definition of the loss."""
NORMS = 1e-3
"""Relative difference of norms that counts as equal: scripts add a small number to a norm."""
LEAST_SHARE = 8
"""Number of indices that tell an order from another one, and from draws with replacement."""
REDUCTIONS = ("mean", "sum", "none", GRAPH)
OF_ONE_NUMBER = {"Exp", "LinalgVectorNorm", "Log", "Log1P", "Pow", "Reciprocal", "Rsqrt", "Sqrt"}
"""Functions that a loss may be of one number of a batch, such as the root of a mean."""

_BITS = {"bf16": 8, "fp16": 11}
"""Significant bits of the 16-bit types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause with its evidence."""

    name: str
    """Stable name for programs, such as `uneven_weights`."""
    deviation: str
    """Description of the deviation as a clause: "the gradient is off by 15 %"."""
    reason: str
    """Reason for the deviation, as the clause after "because"."""
    remedy: str
    evidence: str

    @property
    def explains_gradient(self) -> bool:
        return CAUSES[self.name].explains_gradient


Stage = Literal["ranks", "gradient", "rates", "accumulation"]
"""The ranks' records alone, a gradient or learning rates that differ from those of one process, or
the weights of a step's micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause: all that the audit knows of it.  Texts have fields for the facts of a finding."""

    meaning: str
    """Description of the fault in the guide's table."""
    reason: str
    remedy: str
    find: Callable[[Records], Finding | None]
    """Looks at records; several causes share a look that tells them apart."""
    explains_gradient: bool = False
    """True if a deviating gradient needs no other cause."""
    stage: Stage = "ranks"
    """Place of the fault.  A stage tries its causes in the order of the table."""
    in_one_process: str = ""
    """Predicate of the ranks and one process in the answer, if it has the fault, too."""


def finding(name: str, deviation: str, evidence: str, **facts: object) -> Finding:
    """A finding with the texts of its cause."""
    cause = CAUSES[name]
    return Finding(
        name=name, deviation=deviation, reason=cause.reason.format(**facts),
        remedy=cause.remedy.format(**facts), evidence=evidence,
    )  # fmt: skip


def causes_found(stage: Stage, records: Records) -> Iterator[Finding]:
    """Yield the findings of a stage, in the order of the table."""
    looks = dict.fromkeys(row.find for row in CAUSES.values() if row.stage == stage)
    return (cause for look in looks if (cause := look(records)) is not None)


def percent(value: float) -> str:
    """A relative difference as text."""
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:.0f} %"


# Causes that need no replay


def of_distribution(records: Records) -> Finding | None:
    """Ranks that exchange nothing: a script for one process."""
    first = records.ranks[0]
    joined = any(rank.joined for rank in records.ranks)
    exchanges = joined and (first.frameworks or any(rank.collectives for rank in records.ranks))
    if not first.accelerate_alone and (exchanges or (joined and not records.different_gradients)):
        return None
    return finding(
        "not_distributed",
        f"each of the {records.count} ranks trains a model of its own",
        f"in {counted(records.steps, 'step')}, no model is wrapped and no collective is called",
        which="the script is not distributed: it "
        + ("wraps no model and calls no collective" if joined else "joins no process group"),
        remedy=ON_A_CPU if first.accelerate_alone else f"add the lines of {GUIDE}",
    )


def of_start(records: Records) -> Finding | None:
    """Ranks that begin with other weights."""
    first = records.ranks[0]
    for rank in records.ranks[1:]:
        pairs = [(first.before[n], rank.before[n]) for n in records.unsliced]
        differ = [tensors_differ(a, b, EQUAL) for a, b in pairs]
        if first.every > 1 and not any(differ):  # elements that are not recorded
            differ = [first.start[n] != rank.start[n] for n in records.unsliced]
        if any(differ):
            other = [first.names[n] for n, d in zip(records.unsliced, differ, strict=True) if d]
            a, b = (joined_flat(tensors) for tensors in zip(*pairs, strict=True))
            size = relative(a, b) if a.shape == b.shape else 1.0
            return finding(
                "different_start",
                f"the weights of the ranks differ by {percent(size)} at the start",
                f"{listed(other)} of rank {rank.rank} differ from rank 0's",
            )
    return None


def of_data(records: Records) -> Finding | None:
    """Ranks that train on the same samples, or on too few or too many of them."""
    steps = [list(map(Counter, rows)) for rows in _rows_of_steps(records)]
    same = all(len(rows[0]) > 1 and rows.count(rows[0]) == len(rows) for rows in steps)
    if records.count > 1 and steps and same and not records.divides_rows:
        count = steps[0][0].total()
        return finding(
            "same_data",
            f"all ranks train on the same {count} samples in each step",
            f"the samples of rank 0 and rank 1 are equal in {len(steps)} of {len(steps)} steps",
            **_of_sampler(
                [rank.loaders[0] for rank in records.ranks if rank.loaders],
                "give the DataLoader a DistributedSampler, give each rank its own part of a "
                "stream, or draw each rank's samples by a seed that depends on the rank",
            ),
        )
    return _of_epoch(records) or _of_order(records)


def _of_sampler(loaders: Sequence[Loader], remedy: str) -> dict[str, str]:
    """Facts of the ranks' samplers; `remedy` is for those without `num_replicas` and `rank`."""
    settings = [loader.sampler_settings for loader in loaders]
    for name in ("seed", "epoch", "num_replicas"):
        values = [facts.get(name) for facts in settings]
        if len(set(values)) > 1:
            return {
                "origin": f": the sampler's {name} differs by rank ({', '.join(map(str, values))})",
                "remedy": f"give the sampler of every rank the same {name}",
            }
    if not settings or not all({"num_replicas", "rank"} <= facts.keys() for facts in settings):
        return {"origin": "", "remedy": remedy}
    replicas, ranks = settings[0]["num_replicas"], [facts["rank"] for facts in settings]
    if replicas != len(loaders) or len(set(ranks)) < len(ranks):
        return {
            "origin": f": the samplers have num_replicas={replicas} and the ranks "
            f"{', '.join(map(str, ranks))}",
            "remedy": "give the sampler the number of ranks, and each rank its own rank",
        }
    return {"origin": "", "remedy": "make the samples of the data set the same on all ranks"}


def _rows_of_steps(records: Records) -> list[list[list[float]]]:
    """Checksums of the samples that the models got, by step and rank."""
    steps: list[list[list[float]]] = []
    for step in range(records.steps):
        rows = [
            [value for f in rank.forwards if f.step == step for value in f.samples]
            for rank in records.ranks
        ]
        if not all(rows) or max(map(len, rows)) < 2:
            return []
        steps.append(rows)
    return steps


def _of_epoch(records: Records) -> Finding | None:
    """Samples of an epoch that no rank or that several ranks train on."""
    epochs = [{one.number: one for one in reversed(rank.loaders)} for rank in records.ranks]
    for number in epochs[0] if records.count > 1 else ():
        loaders = [first_epoch[number] for first_epoch in epochs if number in first_epoch]
        same_kind = len({loader.sampler for loader in loaders}) == 1
        if len(loaders) == records.count and same_kind and (cause := _of_shares(records, loaders)):
            return cause
    return None


def _of_shares(records: Records, loaders: Sequence[Loader]) -> Finding | None:
    """Shares of the ranks' samplers that leave samples out, or that overlap."""
    shares, count = [loader.indices or [] for loader in loaders], records.count
    settings, size = [loader.sampler_settings for loader in loaders], loaders[0].largest_batch or 1
    replicas = settings[0].get("num_replicas", count)
    available = set[int]().union(*(loader.available for loader in loaders))
    # In the last batches, a share may begin again.
    heads = [share[: len(available) // (replicas * size) * size] for share in shares]
    if not all(shares) or any(len(set(head)) < len(head) for head in heads):
        return None  # unknown, or drawn with replacement
    divided = all(
        abs(replicas * len(share) - len(loader.available)) < replicas * size
        for share, loader in zip(shares, loaders, strict=True)
    )
    if divided and len({loader.first_sample for loader in loaders}) > 1 and replicas == count:
        samples = len(loaders[0].available)
        return finding(
            "data_divided_twice",
            f"each rank trains on {samples // count} of its {samples} samples",
            f"the data sets of the ranks begin with different samples, and a "
            f"{loaders[0].sampler} takes 1 of {count} of each",
        )
    fixed_parts = any(loader.available != loaders[0].available for loader in loaders)
    # Each rank takes all in an evaluation, or of the same data, which are seen by their samples.
    comparable = all(loader.samples == loaders[0].samples for loader in loaders) and any(
        set(share) != available for share in shares
    )
    facts = _of_sampler(loaders, "use a DistributedSampler, or shares of one order for all")
    counts = Counter(index for share in shares for index in share)
    missing, again = len(available) - len(counts), counts.total() - len(counts)
    # Samplers may repeat samples by intent, but not as often as independent orders do by chance.
    by_chance = len(available) * prod(1 - len(share) / len(available) for share in shares)
    independent = abs(missing - by_chance) < 1.5 * len(available) ** 0.5
    same_seed = len({(values.get("seed"), values.get("epoch")) for values in settings}) == 1
    wrong = independent or (facts["origin"] and same_seed)
    wrong = wrong and divided and len(available) >= LEAST_SHARE * count
    if not comparable or not (wrong or fixed_parts):
        return None
    facts["origin"] = facts["origin"] or (": each rank has its own order" if independent else "")
    evidence = f"the ranks read {counts.total()} samples in an epoch, {len(counts)} different ones"
    if missing >= count * size:
        off = f"{missing} of {len(available)} samples are on no rank"
        return finding("data_dropped", off, evidence, **facts)
    rows_by_indices: dict[tuple[int, ...], set[tuple[float, ...]]] = {}
    for share, of_rank in zip(shares, next(iter(_rows_of_steps(records)), []), strict=False):
        rows_by_indices.setdefault((*share,), set()).add((*sorted(of_rank),))
    parts = records.divides_rows or any(len(other) > 1 for other in rows_by_indices.values())
    if again >= count * size and not parts:
        off = f"{again} samples are on several ranks"
        return finding("data_repeated", off, evidence, **facts)
    return None


def _of_order(records: Records) -> Finding | None:
    """Epochs in the same order: the sampler's seed does not change."""
    loaders = records.ranks[0].loaders
    for number in {loader.number for loader in loaders}:
        epochs = [epoch for epoch in loaders if epoch.number == number and epoch.shuffles]
        # Others are evaluations, or looks at the first batch.
        orders = [epoch.indices or [] for epoch in epochs if epoch.trains or epoch is epochs[-1]]
        if len(orders) > 1 and len(orders[0]) >= LEAST_SHARE and orders[0] == orders[1]:
            return finding(
                "same_order_every_epoch",
                "every epoch has its samples in the same order",
                "the sampler shuffles, and its orders of the first and the second epoch are equal",
                sampler=epochs[0].sampler,
            )
    return None


def of_draws(records: Records, *, any_seed: bool = False) -> Finding | None:
    """Ranks that draw the same noise for different samples, with a seed of its own.

    One seed for all, which the initial weights have too, is the usual way to give all ranks the
    same model: `any_seed` finds noise that goes on after it.
    """
    if records.divides_rows:
        return None
    noise = [_noise(rank, any_seed=any_seed) for rank in records.ranks]
    for a, b in combinations(range(records.count), 2):
        loaders = zip(records.ranks[a].loaders, records.ranks[b].loaders, strict=False)
        sums = [zip(one.sums, other.sums, strict=False) for one, other in loaders if one.sums]
        if not any(all(abs(x - y) > 0 for x, y in of_loader) for of_loader in sums):
            continue  # ranks that share samples draw alike
        for place, draws in noise[a].items():
            others = noise[b].get(place, [])
            if 1 < len(draws) == len(others) and all(map(torch.equal, draws, others)):
                return finding(
                    "equal_draws",
                    "the ranks draw the same random numbers for different samples",
                    f"{len(draws)} draws of shape {tuple(place[1])} at {place[0]} are equal on "
                    f"rank {a} and rank {b}, whose loaders gave them different batches",
                )
    return None


def _noise(record: Record, *, any_seed: bool) -> dict[tuple[str, torch.Size], list[Tensor]]:
    """Numbers that a rank draws for each row of its batches, by place, without dropout."""
    places: dict[tuple[str, torch.Size], list[Tensor]] = {}
    for draw in record.draws:
        following = record.forwards[draw.forward : draw.forward + 1] if draw.forward else []
        of_rows = any(draw.value.dim() and len(draw.value) == f.rows for f in following)
        if of_rows and (any_seed or draw.own_seed):
            place = draw.place.partition(" < ")[0], draw.value.shape
            places.setdefault(place, []).append(draw.value)
    for number, forward in enumerate(record.forwards if any_seed or record.own_seed else []):
        shapes = [(forward.rows, *shape) for shape in forward.shapes]
        for index, value in enumerate(record.forward_draws.get(number, [])):
            if tuple(value.shape) in shapes:  # noise for its inputs
                place = f"draw {index + 1} of {forward.module}", value.shape
                places.setdefault(place, []).append(value)
    return {place: values for place, values in places.items() if all(map(_is_noise, values))}


def _is_noise(value: Tensor) -> bool:
    """True for floating-point numbers with more than two values: a mask has no others."""
    if not value.is_floating_point() or not value.numel():
        return False
    return bool(((value > value.min()) & (value < value.max())).any())


def of_optimizer(records: Records) -> Finding | None:
    """Parameters that the optimizer does not have."""
    first = records.ranks[0]
    if not first.orphans or not first.strangers:
        return None
    return finding(
        "optimizer_of_other_parameters",
        f"{listed(first.orphans)} are never updated",
        f"{len(first.orphans)} parameters have a gradient and are not in the optimizer; "
        f"{first.strangers} of the optimizer's are not in the model",
    )


def of_ties(records: Records) -> Finding | None:
    """Tied weights that are two parameters."""
    first = records.ranks[0]
    numbers = {name: number for number, name in enumerate(first.names)}
    for one, other in first.twins:
        after = [first.steps[-1].after[numbers[name]] for name in (one, other)]
        if after[0].shape == after[1].shape and not bool((after[0] == after[1]).all()):
            return finding(
                "untied_weights",
                f"{one} and {other} drift apart",
                "both are equal before the first step and have different updates",
            )
    return None


def of_scaler(records: Records) -> Finding | None:
    """Clipping of gradients that still have the scale of a GradScaler."""
    for clip in (clip for step in records.ranks[0].steps for clip in step.clips):
        if clip.scaled and clip.norm is not None:
            return finding(
                "clipped_before_unscaling",
                f"the gradient is clipped to {clip.limit / clip.scale:.3g} instead of "
                f"{clip.limit:g}",
                f"the norm at the call is {clip.norm:.3g}, without the scale "
                f"{clip.norm / clip.scale:.3g}",
                scale=f"{clip.scale:g}",
            )
    return None


def of_accumulation(records: Records) -> Finding | None:
    """Gradients of micro-batches that are added instead of averaged, or divided twice."""
    of_ranks, records = records, _accumulating(records)
    micros, window = records.ranks[0].steps[0].micros, records.ranks[0].window
    factors, gradient_factor = loss_factors(micros), _gradient_factor(records)
    if not factors or gradient_factor is None:
        return None
    count, by_graph = len(factors), micros[0].losses[0].reduction == GRAPH
    sums = [gradient_factor * sum(factors[: n + 1]) for n in range(count)]  # the last is to be 1
    close = EXPLAINED if _constant(factors) else EXACT
    means = sum(abs(value / max(1, round(value)) - 1) < close for value in sums)
    several = f"the {count} micro-batches together"
    texts = listed(list(dict.fromkeys(f"{factor:.4g}" for factor in factors)))
    evidence = (
        f"the loss is multiplied by {texts} and the sum of gradients by {gradient_factor:.4g}"
    )
    full = [gradient_factor * sum(loss_factors(s.micros)) for s in records.ranks[0].steps[1:2]]
    divides = abs(full[0] - 1) < close if full else not by_graph  # else the loss has another factor
    if count < window and divides and abs(sums[-1] * window / count - 1) < close:
        return finding(
            "short_window",
            f"the last gradient of an epoch is {count}/{window} of that of its micro-batches",
            evidence,
            count=count,
            window=window,
        )
    if not _accumulates(records.ranks[0], of_ranks.ranks[0]):
        return None
    rows = sum(f.rows for f in records.ranks[0].forwards if f.step == 0)
    if by_graph and micros[0].losses[0].options["sums"]:  # over columns, divided by as many?
        means *= sum(counted_targets(micros)) % (count * rows) != 0
    if (means == count if by_graph else means > 1) and abs(sums[-1] / means - 1) < close:
        off = f"the gradient is {means} times that of {several}"
        return finding("accumulation_not_divided", off, evidence, count=means)
    if abs(sums[-1] * count - 1) < close and not by_graph:  # a loss may have a factor on purpose
        off = f"the gradient is 1/{count} of that of {several}"
        return finding("accumulation_divided_twice", off, evidence)
    return None


def of_unknown_division(records: Records) -> str | None:
    """Say that nothing shows whether gradients of micro-batches are divided by their number."""
    first, one = records.ranks[0], _accumulating(records)
    micros = one.ranks[0].steps[0].micros
    factors = loss_factors(first.steps[0].micros)
    if not _accumulates(first, first) or of_accumulation(records):
        return None
    of_mean = bool(factors) and first.steps[0].micros[0].losses[0].reduction == "mean"
    if factors and not (of_mean and records.matched and not _constant(factors)):
        return None  # a mean with other terms beside it has factors that vary
    if abs((_gradient_factor(one) or 0.0) * sum(loss_factors(micros)) - 1) < EXPLAINED:
        return None
    return (
        f"whether {len(micros)} micro-batches are divided by their number is not known: none of"
        " torch's loss functions alone gives their losses"
    )


def _accumulates(record: Record, rank: Record) -> bool:
    """True if the backward passes of the first step have other samples, and all the same loss.

    `rank` is the record of one of the ranks: passes with its full batch each see several views.
    """
    micros = record.steps[0].micros
    first = [f for f in record.forwards if f.step == 0]
    samples = [
        Counter(row for f in first if f.micro == number for row in f.samples)
        for number in range(len(micros))
    ]
    repeated = any(a == b for n, a in enumerate(samples) for b in samples[:n])
    losses = {tuple(call.function for call in micro.losses) for micro in micros}
    loaders = [set(micro.loaders) for micro in micros if micro.loaders]
    places = {micro.place for micro in micros}
    if len(micros) < 2 or (repeated and any(samples)) or len(losses) > 1:
        return False
    if loaders and not set.intersection(*loaders):
        return False
    by_graph = any(call.reduction == GRAPH for micro in micros for call in micro.losses)
    batches = [len(micro.loaders) for step in record.steps for micro in step.micros]
    sizes = [loader.largest_batch or loader.batch_size or 0 for loader in rank.loaders]
    rows = [f.rows for f in rank.forwards if f.step == 0]
    views = 0 < max(sizes, default=0) <= min(rows, default=0)
    if (any(record.parts) or by_graph or views) and sum(batches) < len(batches):
        return False  # losses of one batch and of what is made of it, as by a GAN
    if by_graph and len(places) > 1:
        return False  # maybe two losses
    # Backward passes in different lines may be of several losses of one batch.
    return len(places) < len(micros) or len(loaders) == len(micros)


def loss_factors(micros: Sequence[Micro], *, by_hand: bool = False) -> list[float]:
    """Loss of each micro-batch in units of the mean over its targets; empty where unknown.

    `by_hand` counts a script that adds up the losses of the targets itself: it may leave some out.
    """
    factors = []
    for micro in micros:
        call = micro.losses[0] if len(micro.losses) == 1 else None
        if call is None or micro.loss is None or not call.value:
            return []
        if call.reduction == "none" and not by_hand:
            return []
        of_sum = call.reduction in {"sum", "none"}
        factors.append(micro.loss / call.value * (call.weight if of_sum else 1.0))
    return factors if all(factors) else []


def _constant(values: Sequence[float], tolerance: float = 1e-3) -> bool:
    return max(values) - min(values) <= tolerance * max(map(abs, values))


def _gradient_factor(records: Records) -> float | None:
    """Factor between the mean of the ranks' own gradients and the one that is used."""
    used, mean = aligned(records.clipped() or records.gradients(), mean_of_ranks(records))
    return factor_of(used, mean, EXPLAINED)


def of_buffers(records: Records) -> Finding | None:
    """Buffers that differ among ranks."""
    for step in range(records.steps):
        first = records.ranks[0].steps[step].buffers
        for rank in records.ranks[1:]:
            other = rank.steps[step].buffers
            names = [
                name
                for name, value in first.items()
                if name in other and tensors_differ(value, other[name], 1e-5)
            ]
            if names:
                return finding(
                    "buffers_differ",
                    f"{listed(names)} of the ranks differ",
                    f"the buffers of rank 0 and rank {rank.rank} differ at the beginning "
                    f"of step {step + 1}",
                    which="updates its buffers from its own samples"
                    if step
                    else "begins with its own buffers, or changes them before its first step",
                )
    return None


def unseen(records: Records) -> str:
    """Reason why records without a deviation show nothing; empty if they do."""
    if not any(np.any(gradient) for gradient in records.gradients().values()):
        return "the gradient of step 1 is 0 on the ranks, as of a loss that no weight changes"
    rows = {value for steps in _rows_of_steps(records) for rank in steps for value in rank}
    local = [stacked(rank[0]) for rank in records.local_gradients() if rank]
    equal = all(len(g) == len(local[0]) and relative(g, local[0]) < REDUCTION for g in local)
    if len(rows) == 1 and local and equal:
        return "all rows that the models get are equal, so that faults of the data do not show"
    return ""


# Causes of a gradient that deviates


def mean_of_ranks(records: Records) -> Vectors:
    """Mean over the ranks of their gradients, summed over micro-batches; empty if unknown."""
    return scaled(1 / records.count, _summed(records.local_gradients()))


def _summed(by_rank: Sequence[Sequence[Vectors]]) -> Vectors:
    """Sum of gradients over ranks and micro-batches."""
    total: Vectors = {}
    for name, gradient in (pair for rank in by_rank for micro in rank for pair in micro.items()):
        total[name] = total.get(name, 0) + gradient
    return total


def of_disagreement(records: Records) -> Finding | None:
    """Gradients that are not reduced: each rank uses another."""
    different = records.different_gradients
    if not different or records.reduces_in_step or records.local_steps:
        return None
    weights = of_weights(records)
    if weights is not None and weights.name == "local_steps":
        return None
    gradients = records.gradients_by_rank()
    local = [_summed([micros]) for micros in records.local_gradients()]
    scales = [
        factor_of(*aligned(*pair), REDUCTION) or 1.0 for pair in zip(gradients, local, strict=True)
    ]
    local = list(map(scaled, scales, local))  # a rank may clip, or divide, what is its own
    unreduced = [name for name in different if _uses_local(name, gradients, local)]
    flags = [micro.synchronised for micro in records.ranks[0].steps[0].micros]
    norms = [np.linalg.norm(stacked(g)) for g in gradients]
    evidence = "norms of the gradient by rank: " + ", ".join(f"{norm:.4g}" for norm in norms)
    off, names = "the ranks use different gradients", listed(different)
    if flags and flags[-1] is False:
        return finding("accumulation_not_synchronised", off, evidence)
    everything = {*different} == set().union(*gradients)
    for library, size in records.ranks[0].small_groups.items() if everything else ():
        ranks, effect = counted(size, "rank"), ", which changes nothing"
        group = f"{library} reduces them over a process group of {ranks}"
        group += effect if size == 1 else f" of {records.count}"
        evidence = f"the script runs on {records.count} ranks; {evidence}"
        return finding("group_too_small", off, evidence, group=group)
    if unreduced:
        verb = "is" if len(different) == 1 else "are"
        which = "no gradient is" if everything else f"{names} {verb} not"
        off = off if everything else f"{off} of {names}"
        evidence = f"each rank uses the gradient of its own samples; {evidence}"
        if records.ranks[0].steps[0].in_backward and records.ranks[0].frameworks:
            evidence += "; the optimizer steps in a hook, before a wrapper reduces the gradient"
        return finding("not_reduced", off, evidence, which=which)
    return of_norm(records) or finding("ranks_disagree", f"{off} of {names}", evidence)


def of_weights(records: Records) -> Finding | None:
    """Weights that change outside of the optimizer: to be equal, or on some ranks only."""
    names = records.ranks[0].names
    for step in range(1, records.steps):
        moved = [rank.steps[step].moved for rank in records.ranks]
        converging: list[str] = []
        diverging: list[str] = []
        for number in sorted({*records.unsliced}.intersection(set().union(*moved))):
            left = [checksum(rank.steps[step - 1].after[number]) for rank in records.ranks]
            now = [by_number.get(number, old) for by_number, old in zip(moved, left, strict=True)]
            if _equal(left) != _equal(now):
                (diverging if _equal(left) else converging).append(names[number])
        if converging and all(moved) and records.different_gradients:
            return finding(
                "local_steps",
                "the ranks use different gradients",
                f"{listed(converging)} of the ranks differ after step {step}, and are equal "
                f"before step {step + 1}",
            )
        if diverging:
            ranks = [str(rank) for rank, by_number in enumerate(moved) if by_number]
            alone = len(ranks) < records.count
            return finding(
                "weights_changed_by_rank",
                f"the weights of the ranks differ from step {step + 1} on",
                f"{listed(diverging)} of rank {ranks[0]} are not the weights that step {step} left"
                + ("; those of other ranks are" if alone else ""),
                which=f"rank {', '.join(ranks)} alone" if alone else "each rank",
            )
    return None


def _equal(checksums: Sequence[float]) -> bool:
    return max(checksums) - min(checksums) <= EQUAL * max(map(abs, checksums))


def _uses_local(name: str, gradients: list[Vectors], local: list[Vectors]) -> bool:
    """True if every rank that has a gradient uses that of its own rows."""
    ranks = zip(gradients, local, strict=True)
    pairs = [
        (used[name], of_rows.get(name, np.zeros(1))) for used, of_rows in ranks if name in used
    ]
    return bool(pairs) and all(
        used.shape == of_rows.shape and relative(used, of_rows) <= REDUCTION
        for used, of_rows in pairs
    )


def of_gradient(records: Records) -> Finding | None:
    """The cause of a gradient that all ranks share and that differs from one process's."""
    if not np.linalg.norm(stacked(records.expected)):
        return None
    return next(causes_found("gradient", records), None)


def of_later_step(records: Records, number: int) -> Finding | None:
    """The cause of a gradient that deviates in a later step for the first time."""
    later = records.from_step(number)
    wrong_before = later.off_before_clipping(later.one_process) > later.reduction_tolerance
    seen = replace(later, before_clipping=wrong_before)
    cause = of_disagreement(later) or of_gradient(seen)
    return cause and replace(cause, deviation=f"in step {number + 1}, {cause.deviation}")


def of_batch_norm(records: Records, *, left: float = 0.0) -> Finding | None:
    """Batch norm that takes its statistics from the rows of a rank.

    `left` is the share of the deviation that may have other causes.
    """
    other = records.with_shares() if records.ranks[0].batch_norm else None
    if other is None:
        return None
    used, of_shares = records.gradients(), records.replayed(other)
    off, text = relative(*aligned(used, of_shares)), "has the ranks' gradient"
    if not reproduces(used, of_shares, records.expected, records.floor):
        if off >= left * records.deviation:
            return None
        text = f"is off by {percent(off)}"
    evidence = "one process whose batch norm takes its statistics from each rank's rows "
    return finding("batch_norm_of_share", _off(records), evidence + text)


def beside_batch_norm(
    records: Records, cause: Finding | None, *, unclear: bool
) -> tuple[Finding | None, list[Finding]]:
    """A cause that batch norm of a rank's rows does not feign, and that of the rest if clear."""
    other = records.with_shares() if records.ranks[0].batch_norm else None
    if other is None:
        return cause, []
    by_shares = replace(records, replay=other, with_shares=lambda: None)
    rest = None if unclear else of_gradient(by_shares)
    exact = rest is not None and rest.name != "whole_batch_loss"
    if not exact and by_shares.deviation >= records.deviation:
        return cause, []  # it takes the rows of all ranks
    of_share = of_batch_norm(records, left=inf if exact else 0.5)
    return of_share or rest, [rest] if of_share and rest else []


def _off(records: Records) -> str:
    return f"the gradient is off by {percent(records.deviation)}"


def of_factor(records: Records, *vectors: Vectors) -> Finding | None:
    """A gradient that is the number of ranks too large or too small, or another pair of vectors."""
    gradients, single = vectors or (records.gradients(), records.expected)
    factor = common_factor(gradients, single, records.floor)
    if factor is None:
        return None
    ranks = records.count
    evidence = f"the ranks' gradient is {factor:.6g} times that of one process"
    if abs(factor / ranks - 1) < EXPLAINED:
        off = f"the gradient is {ranks} times too large"
        hooks = records.ranks[0].gradient_hooks  # they may reduce before a gradient is seen
        reduction = None if hooks else _gradient_factor(records)
        if reduction is not None and abs(reduction - 1) < EXPLAINED:
            return finding("multiplied_by_ranks", off, evidence, ranks=ranks)
        if reduction is None or abs(reduction / ranks - 1) < EXPLAINED:
            origin = "it is summed over the ranks and not averaged"
            if reduction is None:
                origin = f"it is summed over the ranks, or multiplied by {ranks}"
            return finding("summed", off, evidence, origin=origin, ranks=ranks)
    sums = [_summed([micros]) for micros in records.local_gradients()]
    empty = any(total and not np.any(stacked(total)) for total in sums)
    if abs(factor * ranks - 1) > EXPLAINED or empty:  # a rank without targets weighs too much
        return None
    off, text = f"the gradient is {ranks} times too small", text_of_sums(records)
    rows = sum(f.rows for rank in records.ranks for f in rank.forwards if f.step == 0)
    terms = [term for rank in records.ranks for m in rank.steps[0].micros for term in m.terms]
    if all(abs(prod(term.factors)) * rows < 1 + EXACT for term in terms):
        text = ""  # their divisor holds the number of ranks
    of_one = records.replay.steps[0].micros if records.replay is not None else []
    if _size_of_sums([rank.steps[0].micros for rank in records.ranks], of_one) is not None:
        text = f"{of_one[0].losses[0].function} is called with reduction='sum'"
    if text:
        return finding("averaged_sum", off, f"{evidence}; {text}", ranks=ranks)
    return (None if vectors else of_norm(records)) or finding("averaged_twice", off, evidence)


def means_of_rank(records: Records) -> tuple[str, ...]:
    """Keys of the terms that the script divides by a number of its own: a rank's rows, or targets.

    Their sums over all ranks' samples are N times as large, and so is one process's gradient.
    """
    if abs((_gradient_factor(records) or 0.0) - 1) > EXPLAINED:
        return ()
    keys, first = sums_over_samples(records, on_all=False), records.ranks[0]
    rows = {loader.largest_batch or loader.batch_size or 0 for loader in first.loaders}
    rows |= {forward.rows for forward in first.forwards if forward.step == 0}
    of_ranks = [rank.steps[0].micros for rank in records.ranks]
    targets = (
        {int(call.weight) for micro in micros for call in micro.losses}
        | {term.count for micro in micros for term in micro.terms}
        for micros in of_ranks
    )
    sizes = {n * k for n in rows | set.intersection(*targets) for k in (1, len(of_ranks[0]))}
    divided = {
        term.key
        for term in (term for micros in of_ranks for micro in micros for term in micro.terms)
        for factor in (*term.factors, *accumulate(term.factors, mul))
        if term.is_mean or any(abs(factor * size - 1) < EXACT for size in sizes if size > 1)
    }
    return tuple(sorted(keys)) if keys <= divided else ()


def sums_over_samples(records: Records, *, on_all: bool = True) -> set[str]:
    """Keys of the terms that are sums with one weight in one process and on all, or some, ranks."""
    *of_ranks, of_one = (
        [term for micro in process.steps[0].micros for term in micro.terms]
        for process in (*records.ranks, records.one_process)
    )
    keys = {term.key for term in of_one}
    counts = {key: sum(term.count for term in of_one if term.key == key) for key in keys}
    for terms in of_ranks:
        for term in terms:
            counts[term.key] = counts.get(term.key, 0) - term.count
        on_rank, functions = {term.key for term in terms}, {term.function for term in terms}
        keys -= {key for key in keys - on_rank if on_all or key.split()[0] in functions}
    # What does not depend on samples has as many results on one rank as in one process.
    return {key for key in keys if not counts[key]}


def text_of_sums(records: Records) -> str:
    """Name the functions whose sums all ranks' losses have; empty without any."""
    keys = set() if records.replay is None else sums_over_samples(records)
    names = ", ".join(sorted({key.split()[0] for key in keys}))
    return names and f"the loss adds up {names} with one weight on the ranks and in one process"


def of_clipping(records: Records) -> Finding | None:
    """Clipping by the norm of a part of the gradient."""
    clips = [clip for rank in records.ranks for clip in rank.steps[0].last_clips[:1]]
    norms = [clip.norm for clip in clips if clip.norm is not None]
    differ = len(norms) == records.count and max(norms) > (1 + 1e-4) * min(norms)
    off_before = records.off_before_clipping(records.one_process)
    if differ and max(norms) > clips[0].limit and off_before <= records.reduction_tolerance:
        factors = [min(1.0, clips[0].limit / (norm + 1e-6)) for norm in norms]
        by_rank = [
            [None if gradient is None else factor * gradient for gradient in clip.gradients]
            for factor, clip in zip(factors, clips, strict=True)
        ]
        used, single = records.gradients(), records.expected
        if reproduces(used, {**single, **records.reduced(by_rank)}, single, records.floor):
            texts = ", ".join(f"{norm:.4g}" for norm in norms)
            evidence = f"the norms that the ranks clip to {clips[0].limit:g} are {texts}"
            return finding("clipped_locally", _off(records), evidence)
    return of_early_clips(records) or of_norm(records)


def of_early_clips(records: Records) -> Finding | None:
    """Clipping after each micro-batch, before the gradients of an accumulated step are reduced."""
    clipped, steps = replace(records, before_clipping=False), [r.steps[0] for r in records.ranks]
    early = [clip for step in steps for clip in step.clips if clip.micros < len(step.micros)]
    reached = [clip for clip in early if (clip.norm or 0.0) > clip.limit]
    by_rank = [_clipped_early(step, len(records.ranks[0].names)) for step in steps]
    used, single = clipped.gradients(), clipped.replayed(records.one_process)
    if not reached or not reproduces(used, records.reduced(by_rank), single, records.floor):
        return None
    norms = ", ".join(f"{clip.norm:.4g}" for clip in reached[:4])
    return finding(
        "clipped_locally",
        f"the gradient is off by {percent(relative(*aligned(used, single)))}",
        f"{early[0].function} is called after each of {len(steps[0].micros)} micro-batches, "
        f"before the gradients are reduced: norms of {norms} are clipped to {early[0].limit:g}",
    )


def _clipped_early(step: Step, count: int) -> list[Tensor | None]:
    """Add up a rank's own gradients of the micro-batches as its calls have clipped the sums."""
    added: dict[int, Tensor] = {}
    for number, micro in enumerate(step.micros, start=1):
        for n, gradient in micro.gradients.items():
            added[n] = added[n] + gradient if n in added else gradient
        for clip in (clip for clip in step.clips if clip.micros == number):
            factor = min(1.0, clip.limit / ((clip.norm or 0.0) + 1e-6))
            added = {n: factor * gradient for n, gradient in added.items()}
    return [added.get(n) for n in range(count)]


def of_norm(records: Records) -> Finding | None:
    """Clipping by another norm than that of the full gradient: it is at the limit in its place.

    The script may compute it itself.  The limit is the norm that one process leaves.
    """
    replay = records.replay
    steps = [] if replay is None else replay.steps
    limit, *later = [hypot(*step.local_norms) for step in steps] or [0.0]
    factors = _factors_by_rank(records) if limit and not records.before_clipping else []
    if not factors or min(factors) <= 0:
        return None
    different, clips = records.different_gradients, steps[0].last_clips
    off = "the ranks use different gradients" if different else _off(records)
    means = aligned(mean_of_ranks(records), records.expected)
    right = clips[0].norm if clips else limit * (factor_of(*means, EXPLAINED) or 0.0)
    used = ", ".join(dict.fromkeys(f"{(right or 1.0) / factor:.4g}" for factor in factors))
    of_full = f"that of the full gradient is {right:.4g}" if right else "1 is the right one"
    evidence = f"the norm that is used is {used}, and {of_full}"
    squares = np.square([rank.steps[0].local_norms for rank in records.ranks]) / limit**2
    if max(factors) > (1 + NORMS) * min(factors):
        once = np.isin(records.ranks[0].names, different)  # each rank of a group has them
        for size in (size for size in range(1, records.count) if records.count % size == 0):
            groups = squares.reshape(-1, size, len(once))
            norms = np.sqrt(np.where(once, groups.mean(1), groups.sum(1)).sum(1))
            at_limit = np.abs(norms - 1) < NORMS
            below = np.all(at_limit | (norms < 1)) and min(factors) > 1 - NORMS
            if at_limit.any() and below:
                cause = "clip_norm_of_group" if size > 1 else "clipped_locally"
                return finding(cause, off, evidence, size=size)
        text = ", ".join(f"{factor:.4g}" for factor in factors)
        evidence = f"the gradients of the ranks' shards are {text} times those of one process"
        return None if different else finding("shards_scaled", off, evidence)
    of_ranks = np.sqrt(squares.sum(1))
    replicated = not {"FSDP1", "FSDP2"} & {*records.ranks[0].frameworks}
    candidates = (
        ("clip_norm_counted_again", "squared norms", np.linalg.norm(of_ranks)),
        ("clip_norm_averaged", "", np.mean(of_ranks)),
        *([("clip_norm_counted_again", "norms", np.sum(of_ranks))] if replicated else []),
    )
    clipped = clips or any(abs(norm / limit - 1) < NORMS for norm in later)
    for cause, summands, norm in candidates if clipped else ():
        if abs(norm - 1) < NORMS < abs(factors[0] - 1):
            parts = ", ".join(f"{part * (right or 1.0) / factors[0]:.4g}" for part in of_ranks)
            text = f"{evidence}; the ranks' parts have {parts}"
            return finding(cause, off, text, summands=summands)
    return None


def _factors_by_rank(records: Records) -> list[float]:
    """Factor between each rank's part of the gradient and that of one process; empty if none."""
    single, different = records.expected, records.different_gradients
    if different:
        chosen = {name: single[name] for name in different if name in single}
        pairs = [aligned(gradients, chosen) for gradients in records.gradients_by_rank()]
    elif "FSDP2" in records.ranks[0].frameworks:
        pairs = _shards(records)
    else:
        pairs = [aligned(records.gradients(), single)]
    factors = [factor_of(*pair, max(1e-4, 4 * records.floor)) for pair in pairs]
    return [] if None in factors else [factor for factor in factors if factor]


def _shards(records: Records) -> list[tuple[Array, Array]]:
    """Each rank's shard (rows in order) of the gradient, and the same rows in one process."""
    shards: list[tuple[list[Array], list[Array]]] = [([], []) for _ in range(records.count)]
    steps = records.ranks[0].steps[0], records.one_process.steps[0]
    for joined, single in zip(*(step.gradients for step in steps), strict=False):
        if joined is None or single is None or not joined.dim() or joined.shape != single.shape:
            continue
        rows = -(-len(joined) // records.count)
        for rank, (values, expected) in enumerate(shards):
            values.append(joined[rank * rows : (rank + 1) * rows].double().flatten().numpy())
            expected.append(single[rank * rows : (rank + 1) * rows].double().flatten().numpy())
    none = [np.zeros(0)]
    return [(np.concatenate(a or none), np.concatenate(b or none)) for a, b in shards]


def weights_of_parts(records: Records) -> list[float]:
    """Solve for the weights with which the ranks' micro-batches give the gradient of one process.

    Empty if there are none, or if the ranks do not use the mean.
    """
    parts = [micro for rank in records.local_gradients() for micro in rank]
    expected = records.clipped_of(records.one_process) or records.expected
    names = [name for name in expected if any(name in part for part in parts)]
    if len(names) < len(expected) or not names:
        return []
    target = stacked(expected, names)
    zeros = {name: np.zeros_like(expected[name]) for name in names}
    columns = np.stack([stacked({**zeros, **part}, names) for part in parts], axis=1)
    if len(target) < 4 * len(parts):
        return []
    weights = [float(weight) for weight in np.linalg.lstsq(columns, target, rcond=None)[0]]
    mean, used = mean_of_ranks(records), records.clipped() or records.gradients()
    weighted = _summed([[scaled(w, part) for w, part in zip(weights, parts, strict=True)]])
    averaged = relative(*aligned(mean, used)) <= records.reduction_tolerance
    shown = averaged and reproduces(expected, weighted, mean, records.floor)
    return weights if shown and min(weights) >= 0 else []


def of_weighting(records: Records) -> Finding | None:
    """Weights of the ranks' gradients whose sum is the gradient of one process."""
    weights = weights_of_parts(records)
    if not weights or _constant(weights):
        return None  # a factor is no matter of weights
    terms = [micro.terms for rank in records.ranks for micro in rank.steps[0].micros]
    if terms and all(len(t) == 1 == t[0].count and t[0].function in OF_ONE_NUMBER for t in terms):
        of_number = f"the loss is the function {terms[0][0].function} of one number of each rank"
        return finding("whole_batch_loss", _off(records), of_number)
    micros = max(1, len(records.ranks[0].steps[0].micros))
    shares = [float(np.mean(weights[r * micros : (r + 1) * micros])) for r in range(records.count)]
    counts = [sum(counted_targets(rank.steps[0].micros)) for rank in records.ranks]
    if micros > 1 and _constant(shares):
        of_micros = ", ".join(f"{weight:.4f}" for weight in weights)
        return finding(
            "uneven_micro_batches",
            _off(records),
            f"averaging the micro-batches' gradients with weights {of_micros} gives the gradient "
            f"of one process, with other micro-batches; a step uses {1 / records.count:.4f} each",
        )
    if _have_own_factors(records):
        return None
    text, numbers = ", ".join(f"{s:.4f}" for s in shares), ", ".join(f"{n:g}" for n in counts)
    seen = f"; targets that count, by rank: {numbers}" if all(counts) else ""
    if abs(sum(shares) - 1) > EXPLAINED:
        seen += f"; besides, the gradient is {1 / sum(shares):.3g} times as large"
    return finding(
        "uneven_weights",
        _off(records),
        f"averaging the ranks' gradients with weights {text} gives the gradient of one process; "
        f"the ranks use {1 / records.count:.4f} each{seen}",
    )


def _have_own_factors(records: Records) -> bool:
    """True if ranks with equally many targets multiply their means by numbers of their own."""
    micros = [rank.steps[0].micros for rank in records.ranks]
    factors, counts = ([sum(f(m)) for m in micros] for f in (loss_factors, counted_targets))
    return all(factors) and all(counts) and _constant(counts) and not _constant(factors)


def of_whole_batch(records: Records) -> Finding | None:
    """A loss that is no mean over samples, such as a contrastive one."""
    if records.deviation <= records.reduction_tolerance:
        return None  # whether the reduction is right is known with this tolerance alone
    off = _off(records)
    used, averaged = aligned(records.gradients(), mean_of_ranks(records))
    if records.ranks[0].gradient_hooks or not len(used) or records.one_process.padded_left:
        return None  # functions of the script, or padding, may change a gradient
    gathers = [place for micro in records.ranks[0].steps[0].micros for place in micro.gathers]
    reduced_right = relative(used, averaged) <= records.reduction_tolerance
    first = _has_own_gradient(records, 0) if gathers or reduced_right else None
    if gathers and first is False:
        return finding("gathered_without_gradients", off, gathers[0])
    # The last rank shows models that differ by rank in parts that the optimizer does not train.
    if not (first and reduced_right and _has_own_gradient(records, records.count - 1)):
        return None
    if text := text_of_sums(records):
        return finding("averaged_sum", off, text, ranks=records.count)
    whole_batch = finding(
        "whole_batch_loss",
        off,
        "one process that trains on one rank's samples alone has that rank's gradient, and these "
        "gradients are averaged, but no weighting of them gives that of all samples together",
    )
    groups = terms_of_own_targets(records)
    named = filter(None, (of_terms(records, terms) for terms in groups))
    return next(named, None) if groups else whole_batch


def terms_of_own_targets(records: Records) -> list[tuple[int, ...]]:
    """Numbers of terms of a loss that may be means over a rank's own targets, beside other terms.

    Their factors, or the numbers of targets, differ.  All of them come first, then each one.
    """
    micros = [micro for rank in records.ranks for micro in rank.steps[0].micros]
    if len({len(micro.terms) for micro in micros}) != 1:
        return []
    keys = [*zip(*([term.key for term in micro.terms] for micro in micros), strict=True)]
    counts = {tuple(c.weight for c in m.losses if c.reduction == "mean") for m in micros}
    unlike = len(counts) > 1 or any(0.0 in of_micro for of_micro in counts)  # 0 is unknown
    means = [unlike and term.is_mean for term in micros[0].terms]
    numbers = [n for n, same in enumerate(keys) if len({*same}) > 1 or means[n]]
    groups = dict.fromkeys([(*numbers,), *((number,) for number in numbers)])
    return [group for group in groups if 0 < len(group) < len(keys)][:3]  # each needs replays


def of_terms(records: Records, numbers: tuple[int, ...]) -> Finding | None:
    """The cause of terms that have most of the deviation, from replays without the other terms."""
    terms = records.ranks[0].steps[0].micros[0].terms
    others = tuple(str(n) for n in range(len(terms)) if n not in numbers)
    orders = [*((rank,) for rank in range(records.count)), (*range(records.count),)]
    *ranks, one = [records.alone(*order, without=others) for order in orders]
    alone = [record for record in ranks if record is not None]
    if one is None or len(alone) < records.count:
        return None
    part = Records(ranks=alone, replay=one, local_steps=True)
    pairs = ((r, Records(ranks=[r.one_process])) for r in (part, records))
    off, off_of_loss = (np.subtract(*aligned(*map(mean_of_ranks, pair))) for pair in pairs)
    if 2 * np.linalg.norm(off) < np.linalg.norm(off_of_loss) or not (cause := of_weighting(part)):
        return None
    names = ", ".join(sorted({terms[number].function for number in numbers}))
    evidence = f"in a part of the loss ({names}), {cause.evidence}"
    return replace(cause, deviation=_off(records), evidence=evidence)


def draws_elsewhere(records: Records) -> bool:
    """True if Python's or numpy's random numbers give the last rank's samples another gradient."""
    off = relative(*aligned(records.gradients(), mean_of_ranks(records)))
    seen = records.ranks[-1].draws_elsewhere and off <= records.reduction_tolerance
    return seen and _has_own_gradient(records, records.count - 1) is False


def _has_own_gradient(records: Records, rank: int) -> bool | None:
    """True if a rank's samples alone give its gradient in one process; None if unknown."""
    single = records.alone(rank)
    if single is None:
        return None
    of_rank = _summed(records.local_gradients()[rank : rank + 1])
    expected = records.clipped_of(single) or records.replayed(single)
    largest = records.reduction_tolerance * float(np.linalg.norm(stacked(expected)))
    return all(
        np.linalg.norm(of_rank.get(name, 0) - gradient) <= largest
        for name, gradient in expected.items()
    )


def of_precision(records: Records) -> Finding | None:
    """Gradients that are rounded to 16 bits on several ranks only."""
    gradient, _ = aligned(records.gradients(), records.expected)
    for name, bits in _BITS.items():
        if records.deviation <= 4 * 2.0**-bits and _fits(gradient, bits):
            return finding(
                "precision",
                _off(records),
                f"all gradients of the ranks are {name} numbers",
                type=name,
            )
    return None


def rounding(gradient: Array) -> float:
    """Relative spacing of the shortest type that represents the gradient; 0 for fp32."""
    return next((2.0 ** (1 - bits) for bits in _BITS.values() if _fits(gradient, bits)), 0.0)


def _fits(values: Array, bits: int) -> bool:
    mantissa, _ = np.frexp(values[values != 0])
    scaled = mantissa * 2.0**bits
    return bool(np.mean(scaled == np.round(scaled)) > 0.9)


# Causes of an update that deviates


def of_settings(records: Records) -> Finding | None:
    """Settings of the optimizer that depend on the rank, or on the number of ranks.

    `of_rates` compares learning rates with those of one process.
    """
    for step in range(records.steps):
        for groups in zip(*(rank.steps[step].settings for rank in records.ranks), strict=False):
            for name in groups[0]:
                values = [group.get(name, float("nan")) for group in groups]
                if len({f"{value:.7g}" for value in values}) > 1:
                    texts = ", ".join(f"{value:g}" for value in values)
                    return finding(
                        "settings_differ",
                        f"the ranks use different values of {name} in the optimizer",
                        f"{name} of step {step + 1} by rank: {texts}",
                    )
    replay = records.replay
    if replay is None or scales_batch(records, replay) is not False:
        return None
    first, single = (record.steps[0].settings for record in (records.ranks[0], replay))
    for of_ranks, of_one in zip(first, single, strict=False):
        for name in of_ranks.keys() & of_one.keys() - {"lr"}:
            if f"{of_ranks[name]:.7g}" != f"{of_one[name]:.7g}":
                return finding(
                    "settings_depend_on_ranks",
                    f"{name} of the optimizer is not that of one process",
                    f"{of_ranks[name]:g} on {records.count} ranks, {of_one[name]:g} in one process",
                )
    return None


def of_rates(records: Records) -> Finding | None:
    """Learning rates that depend on the number of ranks although the batch does not."""
    replay = records.one_process
    step = first_other_rate(records, replay)
    if step is None:
        return None
    by_group = zip(*(r.steps[step].rates for r in (*records.ranks, replay)), strict=False)
    differing = [rates for rates in by_group if len({f"{rate:.7g}" for rate in rates}) > 1]
    if not differing:
        return None
    *rates, single = differing[0]
    if len(set(rates)) > 1 or not single or scales_batch(records, replay) is not False:
        return None  # `of_settings` compares the ranks
    factor = rates[0] / single
    return finding(
        "learning_rate_scaled" if step == 0 else "schedule_differs",
        f"the learning rate of step {step + 1} is {factor:.4g} times that of one process",
        f"learning rates of step {step + 1}: {rates[0]:g} on {records.count} ranks, "
        f"{single:g} in one process, for the same samples",
        origin="the ranks share one batch",
    )


def advances_by_ranks(records: Records, replay: Record) -> bool:
    """True if a schedule advances with the number of ranks, as Accelerate's prepared ones do.

    A learning rate that is multiplied by one number in all steps advances as in one process.
    """
    if not scales_rates(records, replay):
        return False
    pairs = [
        (a, b)
        for rank, single in zip(records.ranks[0].steps, replay.steps, strict=False)
        for a, b in zip(rank.rates[:1], single.rates[:1], strict=False)
    ]
    first, *_ = pairs
    return any(abs(a * first[1] - b * first[0]) > 1e-6 * abs(a * first[1]) for a, b in pairs) or (
        not any(first) and len({a == b for a, b in pairs}) > 1
    )


def of_schedule(records: Records) -> Finding | None:
    """A schedule that advances with the ranks: by its rates, or by its total in optimizer steps."""
    return of_rates(records) or of_total(records)


def of_total(records: Records) -> Finding | None:
    """A schedule with a total that is no number of batches, and that advances once per rank."""
    first, replay = records.ranks[0], records.one_process
    lengths = [loader.length for loader in first.loaders if loader.length]
    of_epochs = any(total % length == 0 for total in first.totals for length in lengths)
    if not advances_by_ranks(records, replay) or first.asked_lengths or of_epochs:
        return None
    if not first.totals or not lengths:
        return None
    total, ranks = first.totals[0], records.count
    return finding(
        "schedule_differs",
        f"the learning rate ends its schedule after {total / ranks:g} optimizer steps instead of "
        f"{total}",
        f"the schedule's total is {total}, which is no number of epochs of {lengths[0]} batches",
        origin="its total is a number of optimizer steps",
    )


def first_other_rate(records: Records, replay: Record) -> int | None:
    """First step, from 0, in which a rank's learning rates are not those of one process."""
    for step in range(records.steps):
        single = [f"{rate:.7g}" for rate in replay.steps[step].rates]
        if any([f"{r:.7g}" for r in rank.steps[step].rates] != single for rank in records.ranks):
            return step
    return None


def scales_batch(records: Records, replay: Record) -> bool | None:
    """True if a rank's batch is that of one process: N ranks then train on N times as much.

    None if neither a rank's batch nor all ranks' batch together is that of one process.
    """
    pairs = zip(records.ranks[0].loaders, replay.loaders, strict=False)
    sizes = [(rank.batch_size, single.batch_size) for rank, single in pairs if rank.batches]
    if sizes or replay.grown:
        return all(rank == single for rank, single in sizes)
    single, *of_ranks = [
        sum(forward.rows for forward in record.forwards if forward.step == 0)
        for record in (replay, *records.ranks)
    ]
    return True if single == of_ranks[0] else False if single == sum(of_ranks) else None


def scales_rates(records: Records, replay: Record) -> bool:
    """True if N ranks use another learning rate for a batch that is N times as large."""
    return (
        first_other_rate(records, replay) is not None and scales_batch(records, replay) is not False
    )


# Causes where one process gets other data: the ranks' own gradients are what is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The gradient of one process, put together from the ranks' own gradients."""

    gradient: Vectors
    sized: bool
    """False if the gradient is known up to a factor, as the loss of one process is unknown."""


def estimate(records: Records, *, plain_mean: bool = False) -> Estimate:
    """Estimate the gradient of one process from the ranks' own ones; empty if these are unknown.

    A rank weighs as much as it has targets that count, unless the user accepts the plain mean.
    The loss of one process, which has other samples, shows the size of the gradient.
    """
    local = records.local_gradients()
    if not local[0] or not all(micro for rank in local for micro in rank):
        return Estimate(gradient={}, sized=False)
    ranks = [rank.steps[0].micros for rank in records.ranks]
    single = records.replay.steps[0].micros if records.replay is not None else []
    factors, of_one = [loss_factors(micros) for micros in ranks], loss_factors(single)
    counts = [counted_targets(micros) for micros in ranks]
    factors_known = all(factors) and not _have_own_factors(records)
    weighs = factors_known and all(map(all, counts)) and not plain_mean
    of_sums = _size_of_sums(ranks, single) if factors_known and of_one else None
    of_targets = zip(of_one, counted_targets(single), strict=False)
    per_target = of_sums is not None or (  # the loss is divided by the targets of a full step
        bool(of_one)
        and not _constant(of_one)
        and _constant([factor / (count or 1) for factor, count in of_targets])
    )
    micros_of_all = records.count * len(ranks[0])
    mean_factor = sum(map(sum, factors)) / micros_of_all if factors_known else 1.0
    expected: Vectors = {}
    for number, gradients_of_ranks in enumerate(zip(*local, strict=False)):
        total = sum(count[number] for count in counts)
        if per_target:
            total = sum(map(sum, counts)) / len(ranks[0])
        for rank, gradients in enumerate(gradients_of_ranks):
            weight = 1 / records.count / mean_factor
            if weighs:
                weight = counts[rank][number] / total / factors[rank][number]
            for name, gradient in gradients.items():
                expected[name] = expected.get(name, 0) + weight * gradient
    size = of_sums
    if size is None and factors_known and of_one and (_constant(of_one) or per_target):
        size = sum(of_one) / len(ranks[0])
    if size is None and (times := _times_of_same_rows(records)) is not None:
        size = times * (sum(factors[0]) / len(factors[0]) if factors_known else 1.0)
    if size is None and plain_mean and records.matched:
        weights = weights_of_parts(records)
        size = mean_factor * records.count * sum(weights) / len(weights) if weights else None
    sized = size is not None
    if size is None:
        used, shape = aligned(records.clipped() or records.gradients(), expected)
        size = factor_of(used, shape) or 1.0
    gradient, mean = scaled(size, expected), mean_of_ranks(records)
    if plain_mean and relative(*aligned(gradient, mean)) < EXPLAINED:
        gradient = mean  # losses of uneven ranks show the size only roughly
    return Estimate(gradient=gradient, sized=sized)


def counted_targets(micros: Sequence[Micro]) -> list[float]:
    """Number of targets that count in each micro-batch."""
    return [sum(call.weight for call in micro.losses) for micro in micros]


def _size_of_sums(ranks: Sequence[Sequence[Micro]], single: Sequence[Micro]) -> float | None:
    """Loss of one process on all ranks' targets in units of their mean, where it is a plain sum."""
    micros = [micro for of_rank in (*ranks, single) for micro in of_rank]
    factors, counts = loss_factors(micros), counted_targets(micros)
    by_mean = any(call.reduction != "sum" for micro in micros for call in micro.losses)
    if by_mean or not factors or not all(counts):
        return None
    of_targets = [factor / count for factor, count in zip(factors, counts, strict=True)]
    of_ranks, of_one = factors[: -len(single)], factors[-len(single) :]
    means = [sum(values) / len(values) for values in (of_ranks, of_one) if values]
    # Division by the targets of all ranks gives one factor on average: that is a mean.
    plain = abs(of_targets[0] - 1) < 1e-3 or not (_constant(counts) or _constant(means))
    if not _constant(of_targets) or not plain:
        return None
    return of_targets[0] * sum(sum(counted_targets(of_rank)) for of_rank in ranks) / len(ranks[0])


def _times_of_same_rows(records: Records) -> float | None:
    """Factor between rank 0's own gradient and that of one process on rank 0's samples."""
    replay, first = records.replay, records.ranks[0]
    if replay is None or difference_of_rows([first], replay) > SAME_ROWS:
        return None
    if len(replay.steps[0].micros) != len(first.steps[0].micros):
        return None
    of_rank_0 = _summed(records.local_gradients()[:1])
    single, of_rank = aligned(records.clipped_of(replay) or records.replayed(replay), of_rank_0)
    return factor_of(single, of_rank, 1e-3)


def unseen_dependence(records: Records) -> str:
    """Part of the loss that depends on several samples, which a rank's own gradient cannot show."""
    micros = [micro for rank in records.ranks for micro in rank.steps[0].micros]
    places = [place for micro in micros for place in (*micro.gathers, *micro.exchanges)]
    if places:
        return f"the loss may use the samples of other ranks ({places[0]})"
    if any(call.couples for micro in micros for call in micro.losses):
        return "the loss of a sample depends on the other samples of the batch"
    return ""


def weights_are_known(records: Records) -> bool:
    """True if every loss is a mean or a sum of torch's loss functions over targets that count.

    The sum of several means weighs ranks alike only if these have equally many targets of each.
    """
    ranks = [[micro.losses for micro in rank.steps[0].micros] for rank in records.ranks]
    micros = [calls for losses in ranks for calls in losses]
    weights = [[[c.weight for c in calls if c.reduction == "mean"] for calls in r] for r in ranks]
    if not all(c.weight and c.reduction != "none" for calls in micros for c in calls):
        return False
    equal = weights[1:] == weights[:-1] or all(len(calls) == 1 for calls in micros)
    return all(micros) and equal and not _have_own_factors(records)


def with_own_means(records: Records) -> Records:
    """Take losses that torch's functions do not tell from their graphs, if all are alike means.

    A mean that leaves elements out, by a mask or a hinge, is another multiple of what it counts.
    """
    if weights_are_known(records) or records.replay is None:
        return records
    *ranks, replay = map(_of_means, (*records.ranks, records.replay))
    factors = loss_factors([micro for rank in ranks for micro in rank.steps[0].micros])
    of_one = loss_factors(replay.steps[0].micros)
    if not (factors and of_one and _constant(factors) and _constant([*of_one, 1.0])):
        return records
    times = max(factors[0], 1 / factors[0])
    is_mean = abs(times - round(times)) < 1e-3 and not any(p.gradient_hooks for p in ranks)
    return replace(records, ranks=ranks, replay=replay) if is_mean else records


def _of_means(process: Record) -> Record:
    """A record whose losses are the means that their graphs show."""
    means = [[replace(micro, losses=micro.means) for micro in s.micros] for s in process.steps]
    pairs = zip(process.steps, means, strict=True)
    return replace(process, steps=[replace(step, micros=micros) for step, micros in pairs])


def of_own_gradients(records: Records, expected: Vectors) -> Finding | None:
    """The cause of a gradient that is not the weighted mean of the ranks' own ones."""
    used_gradients = records.clipped() or records.gradients()
    used, target = aligned(used_gradients, expected)
    if not np.linalg.norm(target):
        return None
    off = f"the gradient is off by {percent(relative(used, target))}"
    factor = of_factor(records, used_gradients, expected)
    if factor is not None:
        return factor
    if relative(*aligned(used_gradients, mean_of_ranks(records))) > records.reduction_tolerance:
        return None
    return finding("uneven_weights", off, "the ranks use the plain mean of their gradients")


# Causes that one process has, too


def _accumulating(records: Records) -> Records:
    """Records of one process that trains on the ranks' samples, or of the ranks without one.

    Losses that torch's functions do not tell are the means of their graphs, where those have all
    elements of the ranks' means.
    """
    if not records.matched:
        return records
    one = records.one_process
    micros = [_of_means(process).steps[0].micros for process in (*records.ranks, one)]
    *counts, totals = map(counted_targets, micros)
    factors = [*zip(*map(loss_factors, micros), strict=False)]
    shown = factors and [sum(same) for same in zip(*counts, strict=False)] == totals
    equal = shown and all(map(_constant, factors)) and not one.gradient_hooks
    if equal and not loss_factors(one.steps[0].micros):
        one = _of_means(one)
    return Records(ranks=[one])


def of_other_steps(records: Records) -> Finding | None:
    """A loss that is divided by the targets of several steps, while each step takes its own."""
    records = _accumulating(records)
    if any(call.reduction == "none" for m in records.ranks[0].steps[0].micros for call in m.losses):
        by_graph = replace(records, ranks=list(map(_of_means, records.ranks)))
        # A mask that the script multiplies by is seen in the graph alone.
        records = by_graph if loss_factors(by_graph.ranks[0].steps[0].micros) else records
    steps, reduction = records.ranks[0].steps, _gradient_factor(records)
    for number in range(2, records.steps + 1) if reduction else ():
        micros = [micro for step in steps[:number] for micro in step.micros]
        factors, counts = loss_factors(micros, by_hand=True), counted_targets(micros)
        by_step = [
            sum(sum(counted_targets(rank.steps[step].micros)) for rank in records.ranks)
            for step in range(number)
        ]
        if not factors or not all(counts) or _constant(counts):
            continue  # equal counts may be a number of the script
        divisors = [
            records.count * count / factor / (reduction or 1)
            for count, factor in zip(counts, factors, strict=True)
        ]
        if _constant([*divisors, sum(by_step)], EXACT):
            return finding(
                "divided_by_other_steps",
                f"the gradient is {by_step[0] / sum(by_step):.3g} times that of the mean over its "
                "targets",
                f"steps 1 to {number} have {', '.join(f'{n:g}' for n in by_step)} targets, and the "
                f"loss of each is divided by {sum(by_step):g}",
                steps=number,
            )
    return None


def of_rescaling(records: Records) -> Finding | None:
    """A gradient that is multiplied by one number in all steps, between backward and the update.

    Its norm varies: clipping leaves one norm.  The loss is a mean, which nothing has to divide.
    """
    one = _accumulating(records)
    steps, count = one.ranks[0].steps, len(one.ranks[0].steps[0].micros)
    if not records.matched or any(clip.scaled for step in steps for clip in step.clips):
        return None
    alone = [one, *map(one.from_step, range(1, one.steps))]
    means = all(abs(sum(loss_factors(step.micros)) - 1) < EXPLAINED for step in steps)
    norms = [float(np.linalg.norm(stacked(a.clipped() or a.gradients()))) for a in alone]
    inside = [hypot(*(norm for norm, _ in step.sizes[1:])) for step in steps]
    for origin, factors, used in (
        ("the script, or a library,", [_gradient_factor(a) for a in alone if means], norms),
        ("DeepSpeed's engine", list(map(_factor_in_engine, steps)), inside),
    ):
        positive = [factor for factor in factors if factor and factor > 0]
        if not 1 < len(positive) == len(steps) or not _constant(positive) or _constant(used):
            continue
        if all(abs(number * positive[0] - 1) > EXPLAINED for number in (1, count)):
            text = f"1/{1 / positive[0]:.5g} of" if positive[0] < 1 else f"{positive[0]:.5g} times"
            return finding(
                "gradient_rescaled",
                f"the optimizer gets {text} the gradient",
                "norms of what it gets by step: " + ", ".join(f"{norm:.4g}" for norm in used),
                origin=origin,
            )
    return None


def _factor_in_engine(step: Step) -> float | None:
    """Factor between the mean gradient of DeepSpeed's engine and what the optimizer inside gets."""
    scales = [micro.scale for micro in step.micros if micro.scale]
    if len(step.sizes) < 2 or not 0 < len(scales) == len(step.micros) or not _constant(scales):
        return None
    (norm, elements), *inside = step.sizes
    if not norm or not elements <= sum(number for _, number in inside) < 2 * elements:
        return None  # it gets other parameters than the engine has
    factor = hypot(*(size for size, _ in inside)) / norm
    if any(abs(value - 1) < EXPLAINED for value in (factor, factor * scales[0])):
        return 1.0  # the engine multiplied the loss by a scale, and divides the gradient by it
    return factor * sum(scales)


def of_kept(records: Records) -> Finding | None:
    """A gradient that is added to that of the next step, as without zero_grad."""
    one = _accumulating(records)
    first_rank = one.ranks[0]
    if one.steps < 2 or first_rank.flat_slices:
        return None
    if all(map(torch.equal, first_rank.before, first_rank.steps[0].after)):
        return None  # an optimizer that takes no step may accumulate on purpose
    later, first = one.from_step(1), one.gradients()
    used, of_rows = later.clipped() or later.gradients(), mean_of_ranks(later)
    names = [n for n in of_rows if n in used and n in first and len(used[n]) == len(of_rows[n])]
    earlier, rest = stacked(first, names), stacked(used, names) - stacked(of_rows, names)
    if not np.any(earlier) or (off := relative(rest, earlier)) > records.reduction_tolerance:
        return None
    evidence = f"without that of its own samples it is the gradient of step 1 (off by {off:.1g})"
    return finding(
        "gradient_kept", "the gradient of step 2 has that of step 1 added to it", evidence
    )


def of_micro_batches(records: Records) -> Finding | None:
    """Micro-batches that weigh alike, or as their samples, and have other numbers of targets.

    One pass over all of them is put together from their own gradients, which is exact where the
    loss of a target depends on its own sample alone.
    """
    tolerance, of_ranks, records = records.reduction_tolerance, records, _accumulating(records)
    first = records.ranks[0]
    micros = first.steps[0].micros
    factors, counts = loss_factors(micros, by_hand=True), counted_targets(micros)
    calls = [call for micro in micros for call in micro.losses]
    unknown = any(call.couples or call.reduction not in REDUCTIONS for call in calls)
    accumulates = _accumulates(first, of_ranks.ranks[0])
    if not factors or not all(counts) or unknown or first.batch_norm or not accumulates:
        return None
    by_graph = any(call.reduction == GRAPH for call in calls)
    if by_graph and of_ranks.deviation > tolerance and of_weighting(of_ranks) is None:
        return None  # a sample's loss may depend on others
    of_step = [f for f in first.forwards if f.step == 0]
    samples = [sum(f.rows for f in of_step if f.micro == n) for n in range(len(micros))]
    equal, by_samples = (
        _constant([f / (n or 1) for f, n in zip(factors, numbers, strict=True)], EXACT)
        for numbers in ([1] * len(factors), samples)
    )
    by_targets = any(
        len({*call.counted.reshape(count, -1).sum(1).tolist()}) > 1
        for call, count in zip(calls, samples, strict=True)
        if call.counted is not None and count and len(call.counted) % count == 0
    )
    shown = by_targets if by_samples else equal  # else a sample may count once, by intent
    if not shown or _gradient_factor(records) is None:
        return None
    gradients = records.local_gradients()[0]
    weights = [factor / sum(factors) for factor in factors]
    expected = [count / sum(counts) for count in counts]
    together = zip(gradients, weights, expected, strict=True)
    one_pass = _summed([[scaled(right / weight, g) for g, weight, right in together]])
    off = relative(*aligned(_summed([gradients]), one_pass))
    if off <= tolerance:
        return None
    fewest, most = (
        f"{counts[n]:g} targets weighs {weights[n]:.3g} in place of {expected[n]:.3g}"
        for n in (counts.index(min(counts)), counts.index(max(counts)))
    )
    return finding(
        "uneven_micro_batches",
        f"the gradient is off by {percent(off)} from that of one pass",
        f"a micro-batch with {fewest}, and one with {most}",
    )


_TEXT = Path(__file__).with_name("causes.yaml").read_text(encoding="utf-8")
CAUSES: Mapping[str, Cause] = {
    name: Cause(find=globals()[look], **texts)
    for look, causes in yaml.safe_load(_TEXT).items()
    for name, texts in causes.items()
}
"""Name -> cause.  To add one: a row of the file, the function that finds it, and a script of
`tests/zoo`; if a user may accept it, its name in `base/evidence/accepted.py`."""
