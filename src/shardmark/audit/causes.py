"""Causes of a deviation, each with the evidence that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardmark.audit.comparison import Records, Vectors, aligned, relative, stacked
from shardmark.audit.record import Loader, Record
from shardmark.equivalence.capture import Array

EXPLAINED = 0.02
"""Part of a deviation that a cause may leave unexplained."""

MOST_NAMES = 3


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
        """True if a deviating gradient needs no other cause."""
        return self.name in {
            "different_start",
            "accumulation_not_synchronised",
            "not_reduced",
            "ranks_disagree",
            "untied_weights",
        }


def some(names: list[str]) -> str:
    """The first names of a list."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 10 else f"a factor of {1 + value:.3g}"


# Causes that need no replay


def of_start(records: Records) -> Finding | None:
    """Ranks that begin with other weights."""
    first = records.ranks[0]
    if first.flat_slices:
        return None
    for rank in records.ranks[1:]:
        pairs = zip(first.names, first.before, rank.before, strict=False)
        other = [name for name, a, b in pairs if a.shape != b.shape or not bool((a == b).all())]
        if other:
            a, b = (
                np.concatenate([t.double().flatten().numpy() for t in r.before])
                for r in (first, rank)
            )
            size = relative(a, b) if a.shape == b.shape else 1.0
            return Finding(
                name="different_start",
                deviation=f"the weights of the ranks differ by {percent(size)} at the start",
                reason="each rank draws its own initial weights and none are sent to the others",
                remedy="broadcast rank 0's weights before the first step (DDP does), or seed all "
                "ranks alike before the model is made",
                evidence=f"{some(other)} of rank {rank.rank} differ from rank 0's",
            )
    return None


def of_data(records: Records) -> Finding | None:
    """Ranks that train on the same samples, or on too few or too many of them."""
    shares = _rows_of_steps(records)
    if records.count > 1 and shares and all(_equal_rows(rows) for rows in shares):
        count = len(shares[0][0])
        return Finding(
            name="same_data",
            deviation=f"all ranks train on the same {count} samples in each step",
            reason="the samples are not divided among the ranks",
            remedy="give the DataLoader a DistributedSampler, or draw each rank's samples by a "
            "seed that depends on the rank",
            evidence=f"the samples of rank 0 and rank 1 are equal in {len(shares)} of "
            f"{len(shares)} steps",
        )
    return _of_epoch(records) or _of_order(records)


def _rows_of_steps(records: Records) -> list[list[list[float]]]:
    """Checksums of the samples by step and rank: of loaded batches, else of the model's inputs."""
    steps: list[list[list[float]]] = []
    for step in range(records.steps):
        rows = [
            [
                round(row, 9)
                for f in rank.forwards
                if f.step == step and f.inputs
                for row in f.inputs[0].tolist()
            ]
            for rank in records.ranks
        ]
        if not all(rows) or max(map(len, rows)) < 2:
            return []
        steps.append(rows)
    return steps


def _equal_rows(ranks: list[list[float]]) -> bool:
    first = Counter(ranks[0])
    return len(first) > 1 and all(Counter(rows) == first for rows in ranks[1:])


def _of_epoch(records: Records) -> Finding | None:
    """Samples of an epoch that no rank or that several ranks train on."""
    for loaders in zip(*(rank.loaders for rank in records.ranks), strict=False):
        samples, size = loaders[0].samples, loaders[0].batch_size
        indices_of_ranks = [loader.indices for loader in loaders if loader.indices is not None]
        if len(indices_of_ranks) < records.count or records.count < 2 or not samples or not size:
            continue
        if len({loader.first_sample for loader in loaders}) > 1:
            part = samples // records.count
            return Finding(
                name="data_dropped",
                deviation=f"each rank trains on {part} of its {samples} samples",
                reason="the data is divided twice: each rank has other data, which a sampler "
                "divides among the ranks again",
                remedy="give all ranks the same data set, or no DistributedSampler",
                evidence=f"the data sets of the ranks begin with different samples, and a "
                f"{loaders[0].sampler} takes 1 of {records.count} of each",
            )
        if any(loader.samples != samples for loader in loaders):
            continue
        counts = Counter(index for indices in indices_of_ranks for index in indices)
        if all(set(indices) == set(range(samples)) for indices in indices_of_ranks):
            continue  # an evaluation on every rank, or the same data, which is seen by its samples
        missing, again = samples - len(counts), sum(counts.values()) - len(counts)
        if missing >= records.count * size:
            return Finding(
                name="data_dropped",
                deviation=f"{missing} of {samples} samples are on no rank",
                reason="the ranks' shares do not cover the data set",
                remedy="use a DistributedSampler, or the shares [rank::ranks]",
                evidence=f"the ranks read {len(counts)} different samples in an epoch",
            )
        if again >= records.count * size:
            return Finding(
                name="data_repeated",
                deviation=f"{again} samples are on several ranks",
                reason="the ranks' shares overlap",
                remedy="use a DistributedSampler, or the shares [rank::ranks]",
                evidence=f"the ranks read {sum(counts.values())} samples in an epoch, and "
                f"{len(counts)} different ones",
            )
    return None


def _of_order(records: Records) -> Finding | None:
    """Epochs in the same order, as `set_epoch` was not called."""
    epochs: dict[int, list[Loader]] = {}
    for loader in records.ranks[0].loaders:
        if loader.shuffles and loader.samples_seen:
            epochs.setdefault(loader.number, []).append(loader)
    for same in epochs.values():
        if len(same) < 2 or not same[0].indices or len(same[0].indices) < 3:
            continue
        if same[0].indices == same[1].indices:
            return Finding(
                name="same_order_every_epoch",
                deviation="every epoch has its samples in the same order",
                reason="set_epoch of the DistributedSampler is not called",
                remedy="call sampler.set_epoch(epoch) before each epoch",
                evidence="the sampler shuffles, and its orders of the first and the second epoch "
                "are equal",
            )
    return None


def of_optimizer(records: Records) -> Finding | None:
    """Parameters that the optimizer does not have."""
    first = records.ranks[0]
    if not first.orphans or not first.strangers:
        return None
    return Finding(
        name="optimizer_of_other_parameters",
        deviation=f"{some(first.orphans)} are never updated",
        reason="the optimizer was made before the model's parameters were replaced",
        remedy="make the optimizer after the model is wrapped or moved",
        evidence=f"{len(first.orphans)} parameters have a gradient and are not in the optimizer; "
        f"{first.strangers} of the optimizer's are not in the model",
    )


def of_ties(records: Records) -> Finding | None:
    """Tied weights that are two parameters."""
    first = records.ranks[0]
    numbers = {name: number for number, name in enumerate(first.names)}
    for one, other in first.twins:
        after = [first.steps[-1].after[numbers[name]] for name in (one, other)]
        if after[0].shape == after[1].shape and not bool((after[0] == after[1]).all()):
            return Finding(
                name="untied_weights",
                deviation=f"{one} and {other} drift apart",
                reason="the tied weights became two parameters when the model was wrapped or moved",
                remedy="tie the weights again after that, or wrap both modules as one unit",
                evidence="both are equal before the first step and have different updates",
            )
    return None


def of_scaler(records: Records) -> Finding | None:
    """Clipping of gradients that still have the scale of a GradScaler."""
    for clip in (clip for step in records.ranks[0].steps for clip in step.clips):
        if clip.scaled and clip.norm is not None:
            return Finding(
                name="clipped_before_unscaling",
                deviation=f"the gradient is clipped to {clip.limit / clip.scale:.3g} instead of "
                f"{clip.limit:g}",
                reason=f"it is clipped while it is still multiplied by {clip.scale:g}",
                remedy="call scaler.unscale_(optimizer) before clipping",
                evidence=f"the norm at the call is {clip.norm:.3g}, without the scale "
                f"{clip.norm / clip.scale:.3g}",
            )
    return None


def of_accumulation(records: Records) -> Finding | None:
    """Gradients of micro-batches that are added instead of averaged, or divided twice."""
    count = len(records.ranks[0].steps[0].micros)
    loss_factor, gradient_factor = _loss_factor(records), _gradient_factor(records)
    if count < 2 or loss_factor is None or gradient_factor is None:
        return None
    times = loss_factor * gradient_factor * count  # 1 if a step uses the mean of its micro-batches
    evidence = (
        f"the loss is multiplied by {loss_factor:.4g} and the sum of gradients by "
        f"{gradient_factor:.4g}"
    )
    if abs(times / count - 1) < EXPLAINED:
        return Finding(
            name="accumulation_not_divided",
            deviation=f"the gradient is {count} times that of the {count} micro-batches together",
            reason="the gradients of the micro-batches are added and not averaged",
            remedy=f"divide the loss by {count} before backward",
            evidence=evidence,
        )
    if abs(times * count - 1) < EXPLAINED:
        return Finding(
            name="accumulation_divided_twice",
            deviation=f"the gradient is 1/{count} of that of the {count} micro-batches together",
            reason="it is divided by the number of micro-batches twice",
            remedy="divide once: the library may do it already",
            evidence=evidence,
        )
    return None


def _loss_factor(records: Records) -> float | None:
    """Factor between a mean loss and the number that `backward` gets; None if it changes."""
    micros = records.ranks[0].steps[0].micros
    factors = [
        micro.loss / call.value
        for micro in micros
        for call in micro.losses
        if micro.loss is not None and call.value and call.reduction == "mean"
    ]
    calls = [call for micro in micros for call in micro.losses]
    if not len(factors) == len(calls) == len(micros) or not factors:
        return None
    return factors[0] if max(factors) - min(factors) <= 1e-3 * max(factors) else None


def _gradient_factor(records: Records) -> float | None:
    """Factor between the mean of the ranks' own gradients and the one that is used."""
    used, mean = aligned(records.clipped() or records.gradients(), mean_of_ranks(records))
    if not np.linalg.norm(mean):
        return None
    factor = float(used @ mean / (mean @ mean))
    return factor if relative(used, factor * mean) <= EXPLAINED else None


def of_buffers(records: Records) -> Finding | None:
    """Buffers that differ among ranks."""
    for step in range(records.steps):
        first = records.ranks[0].steps[step].buffers
        for rank in records.ranks[1:]:
            other = rank.steps[step].buffers
            names = [
                name
                for name, value in first.items()
                if name in other
                and relative(value.double().numpy(), other[name].double().numpy()) > 1e-5
            ]
            if names:
                return Finding(
                    name="buffers_differ",
                    deviation=f"{some(names)} of the ranks differ",
                    reason="each rank updates its buffers from its own samples",
                    remedy="let DDP broadcast the buffers, or average them over the ranks",
                    evidence=f"the buffers of rank 0 and rank {rank.rank} differ at the beginning "
                    f"of step {step + 1}",
                )
    return None


# Causes of a gradient that deviates


def mean_of_ranks(records: Records) -> Vectors:
    """Mean over the ranks of their gradients, summed over micro-batches; empty if unknown."""
    local = records.local_gradients()
    total: Vectors = {}
    for rank in local:
        for micro in rank:
            for name, gradient in micro.items():
                total[name] = total.get(name, 0) + gradient / len(local)
    return total


def of_disagreement(records: Records) -> Finding | None:
    """Gradients that are not reduced: each rank uses another."""
    if records.ranks[0].flat_slices:
        return None
    gradients = records.gradients_by_rank()
    different = [
        name
        for name in records.ranks[0].names
        if any(
            (name in g) != (name in gradients[0])
            or (name in g and relative(g[name], gradients[0][name]) > 1e-5)
            for g in gradients[1:]
        )
    ]
    if not different:
        return None
    local = records.local_gradients()
    unreduced = [name for name in different if _uses_local(name, gradients, local)]
    flags = [micro.synchronised for micro in records.ranks[0].steps[0].micros]
    norms = [np.linalg.norm(stacked(g)) for g in gradients]
    evidence = "norms of the gradient by rank: " + ", ".join(f"{norm:.4g}" for norm in norms)
    if flags and flags[-1] is False:
        return Finding(
            name="accumulation_not_synchronised",
            deviation="the ranks use different gradients",
            reason="the last micro-batch of a step runs under no_sync, so that nothing is reduced",
            remedy="leave no_sync for the last micro-batch of each step",
            evidence=evidence,
        )
    if unreduced:
        everything = len(different) == len(gradients[0])
        which = "no gradient is" if everything else f"{some(different)} is not"
        return Finding(
            name="not_reduced",
            deviation="the ranks use different gradients"
            + ("" if everything else f" of {some(different)}"),
            reason=f"{which} reduced over the ranks",
            remedy="call the wrapped model itself, with all of its parameters inside the wrapper, "
            "or reduce their gradients before the step",
            evidence=f"each rank uses the gradient of its own samples; {evidence}",
        )
    return Finding(
        name="ranks_disagree",
        deviation=f"the ranks use different gradients of {some(different)}",
        reason="they are not reduced alike on all ranks",
        remedy="compare how each rank reduces and changes these gradients",
        evidence=evidence,
    )


def _uses_local(name: str, gradients: list[Vectors], local: list[list[Vectors]]) -> bool:
    """True if every rank that has a gradient uses that of its own rows."""
    compared = False
    for used, micros in zip(gradients, local, strict=True):
        summed = sum((micro[name] for micro in micros if name in micro), start=np.zeros(1))
        if name not in used:
            continue
        if np.shape(summed) != used[name].shape or relative(summed, used[name]) > 1e-3:
            return False
        compared = True
    return compared


def of_gradient(
    records: Records, replay: Record, same_with_shares: Callable[[], bool]
) -> Finding | None:
    """The cause of a gradient that all ranks share and that differs from one process's."""
    gradient, expected = aligned(records.gradients(), records.replayed(replay))
    if not np.linalg.norm(expected):
        return None
    deviation = relative(gradient, expected)
    off = f"the gradient is off by {percent(deviation)}"
    finding = (
        _of_factor(records, gradient, expected)
        or _of_clipping(records, replay, off)
        or _of_weights(records, replay, off)
    )
    if finding is None and records.ranks[0].batch_norm and same_with_shares():
        return Finding(
            name="batch_norm_of_share",
            deviation=off,
            reason="batch norm takes its statistics from the samples of one rank",
            remedy="convert the model by SyncBatchNorm.convert_sync_batchnorm, or use a norm that "
            "does not depend on the batch",
            evidence="one process whose batch norm takes its statistics from each rank's rows has "
            "the ranks' gradient",
        )
    return (
        finding or _of_whole_batch(records, replay, off) or _of_precision(gradient, expected, off)
    )


def _of_factor(records: Records, gradient: Array, expected: Array) -> Finding | None:
    factor = float(gradient @ expected / (expected @ expected))
    if relative(gradient, factor * expected) > EXPLAINED * abs(factor - 1) or factor <= 0:
        return None
    ranks = records.count
    evidence = f"the ranks' gradient is {factor:.6g} times that of one process"
    if abs(factor / ranks - 1) < EXPLAINED:
        return Finding(
            name="summed",
            deviation=f"the gradient is {ranks} times too large",
            reason="it is summed over the ranks and not averaged",
            remedy=f"divide by the number of ranks, or average the loss over all {ranks} ranks' "
            "samples",
            evidence=evidence,
        )
    if abs(factor * ranks - 1) < EXPLAINED:
        calls = [call for micro in records.ranks[0].steps[0].micros for call in micro.losses]
        if calls and all(call.reduction == "sum" for call in calls):
            return Finding(
                name="averaged_sum",
                deviation=f"the gradient is {ranks} times too small",
                reason="the loss is a sum over samples, and the wrapper averages it over the ranks",
                remedy=f"multiply the loss by {ranks}, or use a mean over all ranks' samples",
                evidence=f"{evidence}; {calls[0].function} is called with reduction='sum'",
            )
        return Finding(
            name="averaged_twice",
            deviation=f"the gradient is {ranks} times too small",
            reason="it is divided by the number of ranks twice, or a sum over the ranks' samples "
            "is averaged",
            remedy="divide once: DDP and FSDP average over the ranks already",
            evidence=evidence,
        )
    return None


def _of_clipping(records: Records, replay: Record, off: str) -> Finding | None:
    """Clipping by the norm of a part of the gradient."""
    norms = [[clip.norm for clip in rank.steps[0].clips[:1]] for rank in records.ranks]
    limits = [clip.limit for rank in records.ranks for clip in rank.steps[0].clips[:1]]
    numbers = [norm for of_rank in norms for norm in of_rank if norm is not None]
    finding = Finding(
        name="clipped_locally",
        deviation=off,
        reason="each rank clips by the norm of its own part of the gradient",
        remedy="clip by the norm over all ranks: after the gradients are reduced, by "
        "torch.nn.utils.clip_grad_norm_ (DDP, FSDP2) or the wrapper's clip_grad_norm_ (FSDP1)",
        evidence="",
    )
    if len(numbers) == records.count and max(numbers) > (1 + 1e-4) * min(numbers):
        by_rank = ", ".join(f"{norm:.4g}" for norm in numbers)
        return _with(finding, f"the norms that the ranks clip to {limits[0]:g} are {by_rank}")
    if "FSDP2" in records.ranks[0].frameworks and records.count > 1:
        factors = _factors_of_shards(records, replay)
        if factors and max(factors) > (1 + 1e-3) * min(factors):
            text = ", ".join(f"{factor:.4g}" for factor in factors)
            return _with(
                finding,
                f"the gradients of the ranks' shards are {text} times those of one process",
            )
    return None


def _with(finding: Finding, evidence: str) -> Finding:
    return Finding(
        name=finding.name,
        deviation=finding.deviation,
        reason=finding.reason,
        remedy=finding.remedy,
        evidence=evidence,
    )


def _factors_of_shards(records: Records, replay: Record) -> list[float]:
    """Factor on each rank's shard (rows in order) of the gradient; empty if they are no factors."""
    shards: list[tuple[list[Array], list[Array]]] = [([], []) for _ in range(records.count)]
    pairs = zip(records.ranks[0].steps[0].gradients, replay.steps[0].gradients, strict=False)
    for joined, single in pairs:
        if joined is None or single is None or not joined.dim() or joined.shape != single.shape:
            continue
        rows = -(-len(joined) // records.count)
        for rank, (values, expected) in enumerate(shards):
            values.append(joined[rank * rows : (rank + 1) * rows].double().flatten().numpy())
            expected.append(single[rank * rows : (rank + 1) * rows].double().flatten().numpy())
    factors = []
    for values, expected in shards:
        a, b = np.concatenate(values or [np.zeros(0)]), np.concatenate(expected or [np.zeros(0)])
        if not np.linalg.norm(b):
            return []
        factor = float(a @ b / (b @ b))
        if relative(a, factor * b) > 1e-4:
            return []
        factors.append(factor)
    return factors


def _of_weights(records: Records, replay: Record, off: str) -> Finding | None:
    """Solve for the weights of the ranks' gradients whose sum is the gradient of one process."""
    local = records.local_gradients()
    parts = [micro for rank in local for micro in rank]
    expected = records.clipped_of(replay) or records.replayed(replay)
    names = [name for name in expected if all(name in part for part in parts)]
    if not names or not parts:
        return None
    target = stacked(expected, names)
    columns = np.stack([stacked(part, names) for part in parts], axis=1)
    if len(target) < 4 * len(parts):
        return None
    weights = np.linalg.lstsq(columns, target, rcond=None)[0]
    used = stacked(records.clipped() or records.gradients(), names)
    mean = columns.sum(axis=1) / records.count
    left, before = relative(columns @ weights, target), relative(mean, target)
    reduced_right = relative(mean, used) <= max(1e-3, 4 * records.floor)
    if left > max(EXPLAINED * before, 4 * records.floor) or not reduced_right or min(weights) < 0:
        return None
    micros = max(1, len(local[0]))
    shares = [float(np.mean(weights[r * micros : (r + 1) * micros])) for r in range(records.count)]
    counts = [
        sum(call.weight for micro in rank.steps[0].micros for call in micro.losses)
        for rank in records.ranks
    ]
    text = ", ".join(f"{share:.4f}" for share in shares)
    equal_share = 1 / records.count
    if max(abs(float(weight) - equal_share) for weight in weights) < 1e-3:
        return None
    counted = ", ".join(f"{count:g}" for count in counts)
    seen = f"; targets that count by rank: {counted}" if all(counts) else ""
    return Finding(
        name="uneven_weights",
        deviation=off,
        reason="each rank averages over its own samples or tokens, and their numbers differ",
        remedy="divide each rank's sum by the number of all ranks' samples or tokens, and multiply "
        "by the number of ranks where DDP or FSDP averages",
        evidence=f"weighted by {text} the ranks' own gradients give that of one process; the ranks "
        f"use {equal_share:.4f} each{seen}",
    )


def _of_whole_batch(records: Records, replay: Record, off: str) -> Finding | None:
    """A loss that is no mean over samples, such as a contrastive one."""
    mean = mean_of_ranks(records)
    used, averaged = aligned(records.gradients(), mean)
    gathers = [place for micro in records.ranks[0].steps[0].micros for place in micro.gathers]
    if gathers:
        return Finding(
            name="gathered_without_gradients",
            deviation=off,
            reason="the loss uses other ranks' outputs, and no gradient flows back through the "
            "gather",
            remedy="gather by torch.distributed.nn.all_gather, which returns gradients",
            evidence=gathers[0],
        )
    if not len(used) or relative(used, averaged) > max(1e-3, 4 * records.floor):
        return None
    if not _same_outputs(records, replay):
        return None
    return Finding(
        name="whole_batch_loss",
        deviation=off,
        reason="the loss depends on all samples of a batch together, and each rank sees its own",
        remedy="gather the outputs of all ranks by torch.distributed.nn.all_gather before the loss",
        evidence="the model's outputs for each sample are equal in one process, and the ranks' "
        "gradients are reduced right, but no weighting of them gives that of one process",
    )


def _same_outputs(records: Records, replay: Record) -> bool:
    """True if the model's outputs in the first step have the same rows in one process."""
    ranks = [f for rank in records.ranks for f in rank.forwards if f.step == 0 and f.outputs]
    single = [f for f in replay.forwards if f.step == 0 and f.outputs]
    rows = np.sort(np.concatenate([f.outputs[0].numpy() for f in ranks] or [np.zeros(0)]))
    others = np.sort(np.concatenate([f.outputs[0].numpy() for f in single] or [np.zeros(0)]))
    return (
        len(rows) == len(others)
        and bool(len(rows))
        and relative(rows, others) < 100 * records.epsilon
    )


def _of_precision(gradient: Array, expected: Array, off: str) -> Finding | None:
    """Gradients that are rounded to 16 bits on several ranks only."""
    for name, bits in {"bf16": 8, "fp16": 11}.items():
        if relative(gradient, expected) > 4 * 2.0**-bits:
            continue
        if _fits(gradient, bits) and not _fits(expected, bits):
            return Finding(
                name="precision",
                deviation=off,
                reason=f"the gradients are rounded to {name} when they are reduced",
                remedy="reduce in fp32 where this rounding matters",
                evidence=f"all gradients of the ranks are {name} numbers; those of one process are "
                "not",
            )
    return None


def _fits(values: Array, bits: int) -> bool:
    mantissa, _ = np.frexp(values)
    scaled = mantissa * 2.0**bits
    return bool(np.mean(scaled == np.round(scaled)) > 0.9)


# Causes of an update that deviates


def of_rates(records: Records, replay: Record) -> Finding | None:
    """Learning rates that depend on the number of ranks although the batch does not."""
    ranks, single = records.ranks[0].steps[0].rates, replay.steps[0].rates
    if len(ranks) != len(single) or not single or not single[0]:
        return None
    factor = ranks[0] / single[0]
    if abs(factor - 1) < 1e-6 or scales_batch(records, replay):
        return None
    return Finding(
        name="learning_rate_scaled",
        deviation=f"the learning rate is {factor:.4g} times that of one process",
        reason="the script multiplies it by the number of ranks, although the ranks share one "
        "batch",
        remedy="scale the rate only where the batch of all ranks together grows",
        evidence=f"learning rates of the first step: {ranks[0]:g} on {records.count} ranks, "
        f"{single[0]:g} in one process, for the same samples",
    )


def scales_batch(records: Records, replay: Record) -> bool:
    """True if a rank's batch is that of one process: N ranks then train on N times as much."""
    pairs = zip(records.ranks[0].loaders, replay.loaders, strict=False)
    sizes = [(rank.batch_size, single.batch_size) for rank, single in pairs if rank.samples_seen]
    return not any(rank != single for rank, single in sizes)


def scales_rates(records: Records, replay: Record) -> bool:
    """True if N ranks use another learning rate for a batch that is N times as large."""
    different = records.ranks[0].steps[0].rates != replay.steps[0].rates
    return different and scales_batch(records, replay)


# Causes where one process gets other data: the ranks' own gradients are what is expected


def weighted_by_targets(records: Records) -> Vectors:
    """The ranks' own gradients, weighted by the targets that count; empty if they are unknown."""
    local = records.local_gradients()
    if not all(micro for rank in local for micro in rank) or not local[0]:
        return {}
    weights = [
        [sum(call.weight for call in micro.losses) for micro in rank.steps[0].micros]
        for rank in records.ranks
    ]
    expected: Vectors = {}
    for number, of_micro in enumerate(zip(*local, strict=False)):
        counts = [rank[number] for rank in weights if number < len(rank)]
        total = sum(counts)
        for rank, gradients in enumerate(of_micro):
            share = counts[rank] / total if all(counts) else 1 / records.count
            for name, gradient in gradients.items():
                expected[name] = expected.get(name, 0) + share * gradient
    return expected


def of_own_gradients(records: Records, expected: Vectors) -> Finding | None:
    """The cause of a gradient that is not the weighted mean of the ranks' own ones."""
    used, target = aligned(records.clipped() or records.gradients(), expected)
    if not np.linalg.norm(target):
        return None
    off = f"the gradient is off by {percent(relative(used, target))}"
    factor = _of_factor(records, used, target)
    if factor is not None:
        return factor
    mean, _ = aligned(mean_of_ranks(records), expected)
    if relative(used, mean) > max(1e-3, 4 * records.floor):
        return None
    return Finding(
        name="uneven_weights",
        deviation=off,
        reason="each rank averages over its own samples or tokens, and their numbers differ",
        remedy="divide each rank's sum by the number of all ranks' samples or tokens, and multiply "
        "by the number of ranks where DDP or FSDP averages",
        evidence="the ranks use the plain mean of their gradients",
    )
