"""Differences between two scripts, A and B, each with the evidence that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmark.audit import causes
from shardmark.audit.causes import percent, some
from shardmark.audit.comparison import (
    EQUAL,
    LATER,
    SAME_ROWS,
    Records,
    Vectors,
    aligned,
    relative,
    reproduces,
    stacked,
    tensors_differ,
)
from shardmark.audit.pairing import paired_names
from shardmark.base.text import counted
from shardmark.scripts.record import Record, Step

if TYPE_CHECKING:
    from torch import Tensor

MODEL, INPUTS, FORWARD, GRADIENT, CLIPPING, UPDATE, LATER_STEPS = range(7)
"""Stages of a step.  A difference can explain deviations of its stage and of later ones."""
TAKEN_AWAY = 7
"""Stage of a difference that the comparison takes away: other samples, other initial weights."""

IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}
"""Options of optimizers that change no result but its rounding."""
CHANCE = 6.0
"""Standard errors of a size of random weights that chance does not exceed."""
UNLIKELY = 1e-4
"""Probability below which two sets of samples do not come from one."""
LIMITS = (0.1, 0.5, 1.0, 5.0)
"""Usual limits of a gradient's norm."""
SHARDED = {"FSDP1", "FSDP2", "DeepSpeed"}


STAGES = {
    **dict.fromkeys(("frozen", "tied_weights", "parameters", "weights_type", "resumed"), MODEL),
    **dict.fromkeys(("start", "samples", "sample_values", "batch"), TAKEN_AWAY),
    **dict.fromkeys(("same_data", "data_divided_twice", "data_dropped"), TAKEN_AWAY),
    **dict.fromkeys(("data_repeated", "same_order_every_epoch"), TAKEN_AWAY),
    "inputs": INPUTS,
    **dict.fromkeys(("precision", "dropout", "batch_norm", "targets"), FORWARD),
    **dict.fromkeys(("loss_function", "loss_options", "loss_term", "loss"), FORWARD),
    "clipping": CLIPPING,
    **dict.fromkeys(("weight_decay", "learning_rate", "optimizer_setting"), UPDATE),
    **dict.fromkeys(("optimizer", "state_type"), UPDATE),
    **dict.fromkeys(("schedule", "weights_changed"), LATER_STEPS),
    **dict.fromkeys(("average", "buffers"), TAKEN_AWAY),  # no gradient depends on them
}
"""Stage of each difference; those of the gradient are left out."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of the training that B does otherwise than A."""

    name: str
    """Stable name for programs, such as `weight_decay`."""
    reason: str
    """A clause: "weight decay of norm.weight is 0.01 (A: 0)"."""
    evidence: str

    @property
    def stage(self) -> int:
        return STAGES.get(self.name, GRADIENT)


@dataclass(frozen=True, kw_only=True)
class Scripts:
    """Records of two scripts' first steps."""

    a: Sequence[Record]
    alone: Sequence[Record]
    """B as it runs by itself."""
    b: Sequence[Record]
    """B with A's weights, batches and draws; the same as `alone` if it has them anyway."""
    again: Sequence[Record] | None
    """A second start of A, which shows what does not repeat itself; None if it was not needed."""
    pairs: Mapping[str, str]
    """A's name of each of B's parameters that A has, too."""
    records: Records
    """B's ranks, with A as their reference."""

    @property
    def steps(self) -> int:
        return self.records.steps

    @property
    def follows(self) -> bool:
        """True if B's models got A's samples in the first step."""
        return same_rows(self.a, self.b, steps=1)

    @property
    def changes_inputs(self) -> bool:
        """True if B's models get other inputs although B has A's batches."""
        return bool(self.b[0].fed) and not self.follows

    @property
    def loss_floor(self) -> float:
        """Relative difference of a loss that rounding causes: little if all outputs are equal."""
        a, b = (rows_of(ranks, 0, outputs=True) for ranks in (self.a, self.b))
        equal = bool(a) and [rows.tolist() for rows in a] == [rows.tolist() for rows in b]
        return 1e-5 if equal else max(1e-4, 8 * self.records.floor)

    @property
    def repeats_start(self) -> bool:
        """True if A begins with the same weights each time, as far as that was tried."""
        first = self.a[0]
        names = {name: name for name in first.names}
        return self.again is None or not same_start(first, self.again[0], names)

    def repeats_samples(self, step: int) -> bool:
        """True if A takes the same samples each time, as far as that was tried."""
        return self.again is None or _equal_rows(rows_of(self.a, step), rows_of(self.again, step))


def baseline(ranks: Sequence[Record], names: Sequence[str], pairs: Mapping[str, str]) -> Record:
    """A's records as one, with the parameters in B's order, as the reference of B's records."""
    first = ranks[0]
    numbers = {name: number for number, name in enumerate(first.names)}
    order = [numbers[pairs[name]] if name in pairs else None for name in names]

    def ordered(tensors: Sequence[Any]) -> list[Any]:
        return [None if n is None or n >= len(tensors) else tensors[n] for n in order]

    def ordered_step(step: Step) -> Step:
        return replace(
            step,
            gradients=ordered(step.gradients),
            reduced=ordered(step.reduced) if step.reduced else [],
            after=ordered(step.after),
            clips=[replace(clip, gradients=ordered(clip.gradients)) for clip in step.clips],
        )

    return replace(
        first,
        names=list(names),
        before=ordered(first.before),
        steps=list(map(ordered_step, first.steps)),
        forwards=[forward for rank in ranks for forward in rank.forwards],
        epsilon=max(rank.epsilon for rank in ranks),
    )


def pairs_of(a: Record, b: Record) -> dict[str, str]:
    """A's name of each of B's parameters that A has, too."""
    shapes = [dict(zip(record.names, record.shapes, strict=True)) for record in (b, a)]
    return paired_names(*shapes)


def rows_of(ranks: Sequence[Record], step: int, *, outputs: bool = False) -> list[np.ndarray]:
    """Sorted checksums of the rows of all ranks in a step, for each tensor of the inputs."""
    forwards = [f for rank in ranks for f in rank.forwards if f.step == step]
    tensors = [[t.numpy() for t in (f.outputs if outputs else f.inputs)] for f in forwards]
    return [np.sort(np.concatenate(same)) for same in zip(*tensors, strict=False)]


def same_rows(a: Sequence[Record], b: Sequence[Record], *, steps: int) -> bool:
    """True if the models get the same rows in each of the first steps, on whatever rank."""
    return all(_equal_rows(rows_of(a, step), rows_of(b, step)) for step in range(steps))


def _equal_rows(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """True if every tensor of one script whose rows differ has an equal one in the other.

    A wrapper may pass more tensors along, such as positions.
    """
    varying = [
        [rows for rows in tensors if np.std(rows)] or [rows for rows in tensors if len(rows)]
        for tensors in (first, second)
    ]
    fewer, more = sorted(varying, key=len)
    return bool(fewer) and all(any(_equal(one, other) for other in more) for one in fewer)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    if len(one) != len(other):
        return False
    return bool(np.max(np.abs(one - other)) <= SAME_ROWS * (np.std(one) or np.max(np.abs(one))))


def same_start(a: Record, b: Record, pairs: Mapping[str, str]) -> list[str]:
    """Names of B's parameters whose initial values are not A's."""
    numbers = {name: n for n, name in enumerate(a.names)}
    return [
        name
        for n, name in enumerate(b.names)
        if name in pairs
        and a.every == b.every
        and tensors_differ(a.before[numbers[pairs[name]]], b.before[n], EQUAL)
    ]


def same_draws(a: Sequence[Record], b: Sequence[Record]) -> bool:
    """True if the ranks draw the same random numbers, in and around their forward passes."""
    if len(a) != len(b):
        return not any(rank.forward_draws or rank.draws for rank in (*a, *b))
    return all(
        [*map(_bytes, (t for n in sorted(r.forward_draws) for t in r.forward_draws[n]))]
        == [*map(_bytes, (t for n in sorted(s.forward_draws) for t in s.forward_draws[n]))]
        and [_bytes(d.value) for d in r.draws] == [_bytes(d.value) for d in s.draws]
        for r, s in zip(a, b, strict=True)
    )


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.flatten().float().numpy().tobytes())


def differences(scripts: Scripts) -> list[Difference]:
    """Return what B does otherwise than A, in the order of a step."""
    seen = [difference for look in LOOKS for difference in look(scripts)]
    explains_loss = any(d.name != "loss" and d.stage in {FORWARD, GRADIENT, MODEL} for d in seen)
    return [d for d in seen if d.name != "loss" or not explains_loss]


# The model


def of_parameters(scripts: Scripts) -> Iterator[Difference]:
    a, b = scripts.a[0], scripts.b[0]
    more = [name for name in b.names if name not in scripts.pairs]
    fewer = [name for name in a.names if name not in set(scripts.pairs.values())]
    sides = ((fewer, a, b, "A", "B"), (more, b, a, "B", "A"))
    for names, record, other, which, lacking in sides:
        frozen = [name for name in names if _ends_like(name, other.frozen)]
        twins = {name for pair in record.twins for name in pair} | _copies(record)
        untied = [name for name in names if name in twins and name not in frozen]
        rest = [name for name in names if name not in {*frozen, *untied}]
        if frozen:
            yield Difference(
                "frozen",
                f"{lacking} does not train {some(frozen)}",
                f"{counted(len(frozen), 'parameter')} of {which}'s optimizer "
                "are in the other model, and in none of its optimizers",
            )
        if untied:
            yield Difference(
                "tied_weights",
                f"{some(untied)} {'is' if len(untied) == 1 else 'are'} a parameter of its "
                f"own in {which}, and tied to another one in {lacking}",
                f"it begins with the values of another parameter of {which}",
            )
        if rest:
            yield Difference(
                "parameters",
                f"{which} trains {some(rest)}, and {lacking} has no such parameter",
                f"A trains {len(a.names)} parameters, B {len(b.names)}",
            )
    types = [sorted({t for f in r.optimizer_facts for t in f.types}) for r in (a, b)]
    sharded = SHARDED & {*a.frameworks, *b.frameworks}
    if types[0] != types[1] and "DeepSpeed" not in sharded:
        yield Difference(
            "weights_type",
            f"its weights are {' and '.join(types[1])} (A: {' and '.join(types[0])})",
            "types of the optimizers' parameters",
        )


def _ends_like(name: str, others: Sequence[str]) -> bool:
    return any(o == name or o.endswith("." + name) or name.endswith("." + o) for o in others)


def _copies(record: Record) -> set[str]:
    """Matrices that begin with the values of another one."""
    seen = Counter(zip(record.shapes, record.start, strict=True))
    return {
        name
        for name, shape, value in zip(record.names, record.shapes, record.start, strict=True)
        if len(shape) > 1 and value and seen[shape, value] > 1
    }


def of_start(scripts: Scripts) -> Iterator[Difference]:
    other = same_start(scripts.a[0], scripts.alone[0], scripts.pairs)
    if other and scripts.repeats_start and scripts.alone[0].resumed_at == scripts.a[0].resumed_at:
        yield Difference(
            "start",
            f"it begins with other weights ({some(other)})",
            f"initial values of {len(other)} of {len(scripts.pairs)} parameters are not "
            "A's, which repeats its own",
        )
    elif other and scripts.again is not None:
        yield from _of_spread(scripts)
    if scripts.alone[0].resumed_at != scripts.a[0].resumed_at:
        resumed = [counted(r[0].resumed_at, "step") for r in (scripts.alone, scripts.a)]
        yield Difference(
            "resumed",
            f"its optimizer has taken {resumed[0]} before (A's: {resumed[1]})",
            "the state of the optimizer before the first recorded step",
        )


def _of_spread(scripts: Scripts) -> Iterator[Difference]:
    """Initial weights that A draws anew in each start: they have a size, which repeats itself."""
    assert scripts.again is not None
    first, again, b = scripts.a[0], scripts.again[0], scripts.alone[0]
    numbers = {name: number for number, name in enumerate(first.names)}
    for n, name in enumerate(b.names):
        if name not in scripts.pairs:
            continue
        at = numbers[scripts.pairs[name]]
        a, second, value = (
            float(t.double().norm()) / max(1, t.numel()) ** 0.5
            for t in (first.before[at], again.before[at], b.before[n])
        )
        chance = CHANCE / (2 * b.before[n].numel()) ** 0.5
        if a and abs(value - a) > a * chance + 4 * abs(second - a):
            yield Difference(
                "start",
                f"the initial values of {name} have another size: {value:.3g} (A: {a:.3g})",
                f"root mean squares; A's second start has {second:.3g}",
            )
            return


# The data


def of_samples(scripts: Scripts) -> Iterator[Difference]:
    if scripts.changes_inputs:
        return
    for step in range(scripts.steps):
        of_a, of_b = rows_of(scripts.a, step), rows_of(scripts.alone, step)
        if not of_a or not of_b or _equal_rows(of_a, of_b):
            continue
        if len(of_a[0]) != len(of_b[0]):
            yield Difference(
                "batch",
                f"B takes {len(of_b[0])} samples a step, A {len(of_a[0])}",
                f"rows that the models get in step {step + 1}",
            )
        elif not scripts.repeats_samples(step):
            yield from _of_unrepeated_samples(scripts)
        else:
            common = len({f"{v:.6g}" for v in of_a[0]} & {f"{v:.6g}" for v in of_b[0]})
            indices = [
                [r.loaders[0].indices for r in s if r.loaders] for s in (scripts.a, scripts.alone)
            ]
            same_order = indices[0] and indices[0] == indices[1] and indices[0][0] is not None
            reason = "its samples have other values: another transform or augmentation"
            if not same_order:
                reason = "it takes other samples, or the same ones in another order"
            yield Difference(
                "sample_values" if same_order else "samples",
                reason,
                f"{common} of {len(of_a[0])} samples of step {step + 1} are A's, which "
                "repeats its own",
            )
        return


def _of_unrepeated_samples(scripts: Scripts) -> Iterator[Difference]:
    """Samples that A draws anew in each start: their order, shapes and values are compared."""
    from scipy.stats import ks_2samp

    loaders = [
        next((loader for loader in ranks[0].loaders if loader.batches), None)
        for ranks in (scripts.alone, scripts.a)
    ]
    if loaders[0] is not None and loaders[1] is not None:
        shuffle = [x.shuffles or "Random" in x.sampler for x in loaders if x is not None]
        orders = ["in random order" if random else "in their order" for random in shuffle]
        if orders[0] != orders[1]:
            yield Difference(
                "samples",
                f"its loader takes the samples {orders[0]} (A: {orders[1]})",
                f"samplers: {loaders[0].sampler} (A: {loaders[1].sampler})",
            )
            return
    steps = range(scripts.steps)
    shapes = [
        {tuple(s) for r in ranks for f in r.forwards for s in f.shapes[:1]}
        for ranks in (scripts.alone, scripts.a)
    ]
    rows = [
        np.concatenate([rows_of(ranks, step)[0] for step in steps])
        for ranks in (scripts.alone, scripts.a)
    ]
    ratio = abs(float(np.log((np.std(rows[0]) or 1.0) / (np.std(rows[1]) or 1.0))))
    if len(shapes[0]) == len(shapes[1]) == 1 and shapes[0] != shapes[1]:
        yield Difference(
            "sample_values",
            f"its samples have the shape {shapes[0].pop()} (A: {shapes[1].pop()})",
            "first input of the model",
        )
    elif (
        float(ks_2samp(rows[0], rows[1]).pvalue) < UNLIKELY or ratio > CHANCE / len(rows[0]) ** 0.5
    ):
        yield Difference(
            "sample_values",
            "its samples have other values: another transform or augmentation",
            f"mean and standard deviation of the rows' checksums: {rows[0].mean():.3g} and "
            f"{rows[0].std():.3g} (A: {rows[1].mean():.3g} and {rows[1].std():.3g})",
        )


def of_inputs(scripts: Scripts) -> Iterator[Difference]:
    if not scripts.changes_inputs:
        return
    sizes = [float(np.sqrt(np.mean(rows_of(s, 0)[0] ** 2))) for s in (scripts.b, scripts.a)]
    yield Difference(
        "inputs",
        "its model gets other inputs from the same batch: B changes them otherwise",
        f"root mean square of the rows' checksums: {sizes[0]:.4g} (A: {sizes[1]:.4g})",
    )


# The forward pass


def of_precision(scripts: Scripts) -> Iterator[Difference]:
    a, b = (max(rank.epsilon for rank in ranks) for ranks in (scripts.a, scripts.b))
    if max(a, b) > 4 * min(a, b):
        bits = [round(-np.log2(value)) for value in (b, a)]
        yield Difference(
            "precision",
            f"its forward pass rounds to {bits[0]} bits (A: {bits[1]})",
            "types of the modules' outputs",
        )


def of_dropout(scripts: Scripts) -> Iterator[Difference]:
    a, b = (Counter(p for p in ranks[0].dropout.values() if p) for ranks in (scripts.a, scripts.b))
    drawn = [
        any(n < len(r[0].forwards) for n in r[0].forward_draws) for r in (scripts.a, scripts.alone)
    ]
    if a != b or drawn[0] != drawn[1]:
        texts = [
            " and ".join(f"{p:g} in {counted(n, 'module')}" for p, n in sorted(c.items())) or "none"
            for c in (b, a)
        ]
        yield Difference(
            "dropout",
            f"its dropout is {texts[0]} (A: {texts[1]})"
            if a != b
            else "one of the two draws random numbers in its forward pass, and the other none",
            "modules in training mode, and random numbers drawn in forward passes",
        )


def of_batch_norm(scripts: Scripts) -> Iterator[Difference]:
    a, b = scripts.a[0], scripts.b[0]
    rows = [next((f.rows for f in record.forwards), 0) for record in (b, a)]
    if a.batch_norm != b.batch_norm or (a.batch_norm and rows[0] != rows[1]):
        texts = [
            f"the {rows[n]} rows of a forward pass on a rank" if r.batch_norm else "no such rows"
            for n, r in enumerate((b, a))
        ]
        yield Difference(
            "batch_norm",
            f"its batch norm takes its statistics from {texts[0]} (A: {texts[1]})",
            "batch norm in training mode, which is not synchronised",
        )


def of_loss(scripts: Scripts) -> Iterator[Difference]:
    calls = [
        [call for m in ranks[0].steps[0].micros for call in m.losses]
        for ranks in (scripts.a, scripts.b)
    ]
    if not calls[0] or not calls[1]:
        return
    a, b = (c[0] for c in calls)
    functions = [Counter(c.function for c in of_script).keys() for of_script in calls]
    if functions[0] != functions[1]:
        if scripts.follows and scripts.records.deviation <= 8 * scripts.records.floor:
            return  # cross_entropy, and nll_loss after log_softmax, are one loss
        texts = [", ".join(sorted(f)) for f in reversed(functions)]
        yield Difference(
            "loss_function",
            f"its loss is {texts[0]} (A: {texts[1]})",
            "loss functions of torch that are called in step 1",
        )
        return
    for key in sorted({*a.options, *b.options} - {"reduction"}):
        values = [call.options.get(key, DEFAULTS.get(key)) for call in (b, a)]
        if values[0] != values[1]:
            yield Difference(
                "loss_options",
                f"{key} of its {b.function} is {values[0]} (A: {values[1]})",
                "arguments of the loss function in step 1",
            )
    if not scripts.follows:
        return
    counts = [
        sum(c.weight for r in ranks for m in r.steps[0].micros for c in m.losses[:1])
        for ranks in (scripts.b, scripts.a)
    ]
    if counts[0] != counts[1] and all(counts):
        yield Difference(
            "targets",
            f"its loss counts {counts[0]:g} targets of a step (A: {counts[1]:g})",
            "targets of step 1 that are not ignored, on all ranks",
        )
    yield from _of_other_terms(scripts)


def of_loss_value(scripts: Scripts) -> Iterator[Difference]:
    """Another loss of the same samples, by a loss that the script computes itself."""
    micros = {len(rank.steps[0].micros) for rank in (*scripts.a, *scripts.b)}
    losses = [[scripts.records.loss(r) for r in ranks] for ranks in (scripts.b, scripts.a)]
    if not scripts.follows or len(micros) > 1 or None in losses[0] + losses[1]:
        return
    b, a = (float(np.mean([v for v in of_ranks if v is not None])) for of_ranks in losses)
    if len(scripts.a) == len(scripts.b) and abs(b - a) > scripts.loss_floor * abs(a):
        yield Difference(
            "loss",
            f"its loss of the same samples is {b:.6g} (A: {a:.6g})",
            "numbers that backward is called on in step 1, mean of the ranks",
        )


def _of_other_terms(scripts: Scripts) -> Iterator[Difference]:
    """A term of the loss beside the loss function, by what backward gets and that it returns."""
    rest: list[list[float]] = []
    for ranks in (scripts.b, scripts.a):
        micros = [m for rank in ranks for m in rank.steps[0].micros]
        if any(m.loss is None or len(m.losses) != 1 or m.losses[0].value is None for m in micros):
            return
        factors = [m.loss / (m.losses[0].value or 1.0) for m in micros if m.loss is not None]
        rest.append([f * len(ranks[0].steps[0].micros) for f in factors])
    means = [[m.losses[0] for r in s for m in r.steps[0].micros] for s in (scripts.b, scripts.a)]
    if any(call.reduction != "mean" for calls in means for call in calls):
        return
    b, a = (float(np.mean(values)) for values in rest)
    # A term beside the loss is no whole factor of it, as a division by micro-batches is.
    has_other_term = abs(b - a) > 1e-4 * max(abs(b), abs(a))
    by_count = [abs(v - round(v)) < 1e-3 or abs(1 / v - round(1 / v)) < 1e-3 for v in (a, b) if v]
    if has_other_term and not all(by_count):
        yield Difference(
            "loss_term",
            f"backward gets {b:.5g} times the value of its loss function (A: {a:.5g}): the "
            "terms beside it have another size",
            "numbers that backward is called on in step 1, and results of the loss function",
        )


DEFAULTS: Mapping[str, float | str] = {
    "label_smoothing": 0.0,
    "ignore_index": -100,
    "beta": 1.0,
    "delta": 1.0,
    "log_target": False,
}
"""Values of arguments of torch's loss functions that are left out."""


# The gradient


def of_causes(scripts: Scripts) -> Iterator[Difference]:
    """Causes that `audit` sees among the ranks of one script, and not of the other."""
    by_script = []
    for ranks in (scripts.a, scripts.alone):
        records = Records(ranks=ranks, replay=None, disturbed=None)
        by_script.append({cause.name: cause for cause in causes.causes_found("ranks", records)})
    if min(len(scripts.a), len(scripts.b)) > 1:
        for name in by_script[1].keys() - by_script[0].keys() - {"settings_differ"}:
            cause = by_script[1][name]
            yield Difference(name, f"{cause.deviation}, because {cause.reason}", cause.evidence)


def of_weighting(scripts: Scripts) -> Iterator[Difference]:
    """A gradient that is a multiple of A's, or a weighted sum of B's parts that is not a mean.

    The steps are tried in turn: the last window of an epoch may differ alone.
    """
    records = scripts.records
    if not scripts.follows:
        return
    for step in range(scripts.steps):
        gradients, expected = records.gradients(step), records.replayed(records.one_process, step)
        if step == 0:
            clipped = records.clipped(), records.clipped_of(records.one_process)
            gradients, expected = clipped if all(clipped) else (gradients, expected)
        used, single = aligned(gradients, expected)
        size = float(single @ single)
        factor = float(used @ single / size) if size else 0.0
        floor = records.floor if step == 0 else LATER / 4
        scaled: Vectors = {name: factor * values for name, values in expected.items()}
        multiple = factor > 0 and relative(used, factor * single) <= 4 * floor
        if multiple and abs(factor - 1) > max(LATER, 8 * floor):
            if step == 0 and not reproduces(gradients, scaled, expected, records.floor):
                return
            if any(abs(np.linalg.norm(v) - n) < 1e-3 * n for v in (used, single) for n in LIMITS):
                return  # `of_clipping` looks at it
            yield Difference(
                "gradient_factor",
                f"all of its gradient of step {step + 1} is {factor:.4g} times A's",
                "no tensor differs from that multiple by more than rounding",
            )
            return
        if relative(used, single) > max(LATER, 8 * floor):
            break
    weights = causes.of_weighting(records)
    if weights is not None:
        evidence = weights.evidence.replace("that of one process", "A's gradient")
        yield Difference(
            "weighting",
            "it weighs its ranks and micro-batches alike, and A by their samples or tokens",
            evidence,
        )


def of_clipping(scripts: Scripts) -> Iterator[Difference]:
    a, b = (ranks[0].steps[0].clips[:1] for ranks in (scripts.a, scripts.b))
    described = [
        "; ".join(f"{c.function} to {c.limit:g}" for c in clips) or "none" for clips in (b, a)
    ]
    records = scripts.records
    gradients, expected = aligned(records.gradients(), records.expected)
    norms = [float(np.linalg.norm(values)) for values in (gradients, expected)]
    evidence = f"norm of the gradient that the optimizer uses: {norms[0]:.4g} (A: {norms[1]:.4g})"
    differ = scripts.follows and abs(norms[0] - norms[1]) > 1e-3 * max(norms)
    steps = [step for s in (scripts.a, scripts.b) for step in s[0].steps]
    reached = any((c.norm or 0.0) > c.limit for step in steps for c in step.clips)
    by_hand = not (a and b) and reached and scripts.follows and not differ
    if described[0] != described[1] and not by_hand:
        yield Difference(
            "clipping", f"its clipping is {described[0]} (A: {described[1]})", evidence
        )
    factor = float(gradients @ expected) / (float(expected @ expected) or 1.0)
    same_direction = relative(gradients, factor * expected) <= 4 * records.floor
    round_norm = any(abs(n - limit) < 1e-3 * limit for n in norms for limit in LIMITS)
    if not a and not b and differ and round_norm and same_direction:
        yield Difference(
            "clipping",
            f"{'B' if norms[0] < norms[1] else 'A'}'s gradient has the norm "
            f"{min(norms):.4g}, as a library that clips leaves it",
            f"both gradients have the same direction; {evidence}",
        )


def of_reduction(scripts: Scripts) -> Iterator[Difference]:
    of_a = Records(ranks=scripts.a, replay=None, disturbed=None)
    used = [records.gradients() for records in (scripts.records, of_a)]
    types = [causes.rounding(stacked(gradients)) for gradients in used]
    if types[0] > types[1]:
        yield Difference(
            "reduction_type",
            f"its gradients have {round(1 - np.log2(types[0]))} significant bits, and A's more",
            "all gradients of step 1 are 16-bit numbers, as a reduction in that type leaves them",
        )


# The update


def settings_of(record: Record, step: int) -> dict[str, dict[str, float]]:
    """Numbers of each parameter's group, by name."""
    groups = record.steps[step].settings
    return {
        name: groups[group]
        for name, group in zip(record.names, record.groups, strict=False)
        if group < len(groups)
    }


def of_settings(scripts: Scripts) -> Iterator[Difference]:
    """Settings of the optimizers, by parameter; learning rates in all steps."""
    facts = [record.optimizer_facts[0] for record in (scripts.b[0], scripts.a[0])]
    classes = [fact.path.rpartition(":")[2] for fact in facts]
    groups = [record.steps[0].settings for record in (scripts.b[0], scripts.a[0])]
    keys = [{key for group in of_script for key in group} for of_script in groups]
    shared = (keys[0] & keys[1]) - {"lr"}
    for key in sorted(shared):
        yield from _of_setting(scripts, key, 0)
    switches = [{*fact.switches} - IMPLEMENTATIONS for fact in facts]
    torch_both = all(fact.path.startswith("torch.") for fact in facts)
    decays = any(group.get("weight_decay") for of_script in groups for group in of_script)
    other = (classes[0] != classes[1] and keys[0] != keys[1]) or (
        switches[0] != switches[1] and torch_both
    )
    if "decoupled_weight_decay" in switches[0] ^ switches[1] and not decays:
        other = False
    if other:
        named = [
            " with ".join(filter(None, (c, ", ".join(sorted(s)))))
            for c, s in zip(classes, switches, strict=True)
        ]
        yield Difference(
            "optimizer",
            f"its optimizer is {named[0]} (A: {named[1]})",
            "class and options of the optimizer of step 1",
        )
    for step in range(scripts.steps):
        rates = list(_of_setting(scripts, "lr", step))
        if rates:
            yield from rates
            break


SETTING_NAMES = {"lr": "learning_rate", "weight_decay": "weight_decay"}


def _of_setting(scripts: Scripts, key: str, step: int) -> Iterator[Difference]:
    of_b, of_a = (settings_of(record, step) for record in (scripts.b[0], scripts.a[0]))
    other: dict[tuple[float, float], list[str]] = {}
    for name, b_group in of_b.items():
        a_group = of_a.get(scripts.pairs.get(name, ""), {})
        if key in b_group and key in a_group and f"{b_group[key]:.7g}" != f"{a_group[key]:.7g}":
            other.setdefault((b_group[key], a_group[key]), []).append(name)
    if not other:
        return
    (own_value, a_value), names = max(other.items(), key=lambda pair: len(pair[1]))
    everything = len(names) == len(scripts.pairs)
    of_names = "" if everything else f" of {some(names)}"
    text = {"lr": "learning rate", "weight_decay": "weight decay"}.get(key, key)
    at = f" of step {step + 1}" if key == "lr" else ""
    yield Difference(
        "schedule" if key == "lr" and step else SETTING_NAMES.get(key, "optimizer_setting"),
        f"its {text}{of_names}{at} is {own_value:.4g} (A: {a_value:.4g})",
        f"settings of the optimizers' groups: {len(names)} of {len(scripts.pairs)} parameters",
    )


def of_state(scripts: Scripts) -> Iterator[Difference]:
    types = [s[0].optimizer_facts[0].state_types for s in (scripts.b, scripts.a)]
    for key in sorted(types[0].keys() & types[1].keys()):
        if types[0][key] != types[1][key]:
            yield Difference(
                "state_type",
                f"its optimizer keeps {key} in {types[0][key]} (A: {types[1][key]})",
                "types of the optimizer's state after step 1",
            )
            return


# Between and after the steps


def of_schedule(scripts: Scripts) -> Iterator[Difference]:
    """Settings of schedules that both have: their rates may be equal in the first steps."""
    b, a = (s[0].schedule_settings for s in (scripts.alone, scripts.a))
    other = [key for key in sorted(b.keys() & a.keys()) if b[key] != a[key]]
    if other:
        yield Difference(
            "schedule",
            f"its {other[0]} is {b[other[0]]:g} (A: {a[other[0]]:g})",
            "settings of the schedules of learning rates",
        )


def of_moved(scripts: Scripts) -> Iterator[Difference]:
    for step in range(1, scripts.steps):
        b, a = (s[0].steps[step].moved for s in (scripts.b, scripts.a))
        if bool(a) != bool(b):
            record, which = (scripts.b[0], "B") if b else (scripts.a[0], "A")
            yield Difference(
                "weights_changed",
                f"{which} changes weights outside of the optimizer, and the other does not",
                f"{some([record.names[n] for n in (b or a)])} before step {step + 1}",
            )
            return


def of_average(scripts: Scripts) -> Iterator[Difference]:
    b, a = scripts.alone[0], scripts.a[0]
    if SHARDED & {*a.frameworks, *b.frameworks}:
        return  # an average of sharded parameters is not seen
    if bool(a.average) != bool(b.average):
        which = "B" if b.average else "A"
        yield Difference(
            "average",
            f"{which} keeps an average of its weights, and the other does not",
            "a second set of tensors with the parameters' shapes, which follows them",
        )
    elif a.average and len(a.average) == len(b.average):
        copies, others, starts = (
            np.concatenate([t.double().flatten().numpy() for t in tensors])
            for tensors in (b.average, a.average, a.before)
        )
        size = float(np.linalg.norm(others - starts))
        off = float(np.linalg.norm(copies - others)) / size if size else 0.0
        if scripts.b is scripts.alone and off > LATER:
            yield Difference(
                "average",
                f"the average of its weights is off by {percent(off)} of its change",
                f"after {counted(scripts.steps, 'step')}",
            )


def of_buffers(scripts: Scripts) -> Iterator[Difference]:
    if not scripts.follows:
        return
    last = scripts.steps - 1
    b, a = (s[0].steps[last].buffers for s in (scripts.b, scripts.a))
    pairs = paired_names(*({n: tuple(v.shape) for n, v in buffers.items()} for buffers in (b, a)))
    tolerance = max(LATER, 8 * scripts.records.floor)
    names = [name for name, other in pairs.items() if tensors_differ(b[name], a[other], tolerance)]
    if names:
        yield Difference(
            "buffers",
            f"{some(names)} {'is' if len(names) == 1 else 'are'} not A's before step {last + 1}",
            f"{len(names)} of {len(b)} buffers differ by more than rounding",
        )


LOOKS: Sequence[Callable[[Scripts], Iterator[Difference]]] = (
    of_parameters, of_start, of_samples, of_inputs, of_precision, of_dropout, of_batch_norm,
    of_loss, of_loss_value, of_causes, of_reduction, of_clipping, of_weighting, of_settings,
    of_state, of_schedule, of_moved, of_average, of_buffers,
)  # fmt: skip
"""Functions that look for differences, in the order of a step."""
