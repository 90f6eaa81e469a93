"""Differences between two scripts, A and B, each with the evidence that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch.nn import functional

from shardmark.audit import causes
from shardmark.audit.causes import Finding, percent
from shardmark.audit.comparison import (
    EQUAL,
    LATER,
    SAME_ROWS,
    Records,
    aligned,
    factor_of,
    joined_flat,
    relative,
    reproduces,
    rows_of,
    scaled,
    stacked,
    tensors_differ,
)
from shardmark.audit.pairing import paired_names
from shardmark.base.text import counted, listed
from shardmark.scripts.record import Record, Step

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
RANDOM_OR_ROUNDED = {"precision", "dropout", "batch_norm"}
"""Differences that explain other outputs of the same weights and samples."""

_TEXT = Path(__file__).with_name("stages.yaml").read_text(encoding="utf-8")
STAGES: dict[str, int] = {
    name: globals()[s] for s, names in yaml.safe_load(_TEXT).items() for name in names
}
"""Stage of each difference; those of the gradient are left out."""


def stage_of(difference: Finding) -> int:
    return STAGES.get(difference.name, GRADIENT)


def differing(name: str, reason: str, evidence: str) -> Finding:
    """A part of the training that B does otherwise than A; `reason` is a clause about B."""
    return Finding(name=name, deviation="", reason=reason, remedy="", evidence=evidence)


@dataclass(frozen=True)
class Fact:
    """A fact of a script, which is a difference where it is not A's."""

    name: str
    read: Callable[[Record], Mapping[Any, object]]
    """Values of rank 0 by key.  The first that is not A's is named; both scripts must have it."""
    reason: str
    """Text with the fields `key`, `b` and `a`."""
    evidence: str
    alone: bool = False
    """True for a fact of the script as it runs by itself."""

    def __call__(self, scripts: Scripts) -> Iterator[Finding]:
        b, a = map(self.read, ((scripts.alone if self.alone else scripts.b)[0], scripts.a[0]))
        for key in b:
            if key in a and b[key] != a[key]:
                reason = self.reason.format(key=key, b=b[key], a=a[key])
                yield differing(self.name, reason, self.evidence)
                return


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
    def repeats_start(self) -> bool:
        """True if A begins with the same weights each time, as far as that was tried."""
        return self.again is None or not same_start(self.a[0], self.again[0])

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
    shapes = []
    for record in (b, a):
        places = {module: place for place, module in enumerate(record.calls)}
        of_names = dict(zip(record.names, record.shapes, strict=True))
        order = sorted(of_names, key=lambda n: places.get(n.rpartition(".")[0], len(places)))
        shapes.append({name: of_names[name] for name in order})
    of_b, of_a = (dict(zip(record.names, record.start, strict=True)) for record in (b, a))
    return paired_names(shapes[0], shapes[1], (of_b, of_a))


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


def same_start(a: Record, b: Record) -> list[str]:
    """Names of parameters whose initial values are not A's, whose record has B's names."""
    return [
        name
        for name, first, value in zip(b.names, a.before, b.before, strict=True)
        if first is not None and a.every == b.every and tensors_differ(first, value, EQUAL)
    ]


def same_draws(a: Sequence[Record], b: Sequence[Record]) -> bool:
    """True if the ranks draw the same random numbers, in and around their forward passes."""
    draws = [
        [
            [bytes(value.flatten().float().numpy().tobytes()) for value in values]
            for rank in ranks
            for values in (
                [t for n in sorted(rank.forward_draws) for t in rank.forward_draws[n]],
                [draw.value for draw in rank.draws],
            )
        ]
        for ranks in (a, b)
    ]
    return draws[0] == draws[1] if len(a) == len(b) else not any(map(any, draws))


def differences(scripts: Scripts) -> list[Finding]:
    """Return what B does otherwise than A, in the order of a step."""
    seen = [difference for look in LOOKS for difference in look(scripts)]
    explained = {
        *("outputs" for d in seen if stage_of(d) < FORWARD or d.name in RANDOM_OR_ROUNDED),
        *("loss" for d in seen if d.name != "loss" and stage_of(d) in {MODEL, FORWARD, GRADIENT}),
    }
    return [d for d in seen if d.name not in explained]


# The model


def of_parameters(scripts: Scripts) -> Iterator[Finding]:
    a, b = scripts.a[0], scripts.b[0]
    more = [name for name in b.names if name not in scripts.pairs]
    fewer = [name for name in a.names if name not in set(scripts.pairs.values())]
    sides = ((fewer, a, b, "A", "B"), (more, b, a, "B", "A"))
    for names, record, other, which, lacking in sides:
        ends = [f".{name}" for name in other.frozen]
        frozen = [n for n in names if any(e.endswith(f".{n}") or f".{n}".endswith(e) for e in ends)]
        untied = [name for name in names if name in _copies(record) and name not in frozen]
        rest = [name for name in names if name not in {*frozen, *untied}]
        if frozen:
            yield differing(
                "frozen",
                f"{lacking} does not train {listed(frozen)}",
                f"{counted(len(frozen), 'parameter')} of {which}'s optimizer "
                "are in the other model, and in none of its optimizers",
            )
        if untied:
            yield differing(
                "tied_weights",
                f"{listed(untied)} {'is' if len(untied) == 1 else 'are'} a parameter of its "
                f"own in {which}, and tied to another one in {lacking}",
                f"it begins with the values of another parameter of {which}",
            )
        if rest:
            yield differing(
                "parameters",
                f"{which} trains {listed(rest)}, and {lacking} has no such parameter",
                f"A trains {len(a.names)} parameters, B {len(b.names)}",
            )


def _copies(record: Record) -> set[str]:
    """Matrices that begin with the values of another one."""
    seen = Counter(zip(record.shapes, record.start, strict=True))
    return {
        name
        for name, shape, value in zip(record.names, record.shapes, record.start, strict=True)
        if len(shape) > 1 and value and seen[shape, value] > 1
    }


def of_start(scripts: Scripts) -> Iterator[Finding]:
    a, b = scripts.records.one_process, scripts.alone[0]
    other = same_start(a, b)
    if other and scripts.repeats_start and a.resumed_at == b.resumed_at:
        yield differing(
            "start",
            f"it begins with other weights ({listed(other)})",
            f"initial values of {len(other)} of {len(scripts.pairs)} parameters are not "
            "A's, which repeats its own",
        )
    elif other and scripts.again is not None:
        yield from _of_spread(b, a, baseline(scripts.again, b.names, scripts.pairs))


def _of_spread(b: Record, a: Record, again: Record) -> Iterator[Finding]:
    """Initial weights that A draws anew in each start: they have a size, which repeats itself."""
    for name, *tensors in zip(b.names, b.before, a.before, again.before, strict=True):
        if tensors[1] is None:
            continue
        count = max(1, tensors[0].numel())
        size, first, second = (float(t.double().norm()) / count**0.5 for t in tensors)
        chance = first * CHANCE / (2 * count) ** 0.5
        if first and abs(size - first) > chance + 4 * abs(second - first):
            yield differing(
                "start",
                f"the initial values of {name} have another size: {size:.3g} (A: {first:.3g})",
                f"root mean squares; A's second start has {second:.3g}",
            )
            return


# The data


def of_samples(scripts: Scripts) -> Iterator[Finding]:
    if scripts.changes_inputs:
        return
    for step in range(scripts.steps):
        of_a, of_b = rows_of(scripts.a, step), rows_of(scripts.alone, step)
        if not of_a or not of_b or _equal_rows(of_a, of_b):
            continue
        if len(of_a[0]) != len(of_b[0]):
            sizes = [
                {len(rows) for n in range(scripts.steps) for rows in rows_of(ranks, n)[:1]}
                for ranks in (scripts.a, scripts.alone)
            ]
            always = max(map(len, sizes)) == 1
            when = "a step" if always else f"in step {step + 1}"
            yield differing(
                "batch" if always else "accumulation",
                f"B takes {len(of_b[0])} samples {when}, A {len(of_a[0])}",
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
            yield differing(
                "sample_values" if same_order else "samples",
                reason,
                f"{common} of {len(of_a[0])} samples of step {step + 1} are A's, which "
                "repeats its own",
            )
        return


def _of_unrepeated_samples(scripts: Scripts) -> Iterator[Finding]:
    """Samples that A draws anew in each start: their order, shapes and values are compared."""
    from scipy.stats import ks_2samp

    loaders = [
        next((loader for loader in ranks[0].loaders if loader.batches), None)
        for ranks in (scripts.alone, scripts.a)
    ]
    shuffle = [x.shuffles or "Random" in x.sampler for x in loaders if x is not None]
    orders = ["in random order" if random else "in their order" for random in shuffle]
    if len(orders) > 1 and orders[0] != orders[1]:
        yield differing(
            "samples",
            f"its loader takes the samples {orders[0]} (A: {orders[1]})",
            f"samplers: {' (A: '.join(x.sampler for x in loaders if x is not None)})",
        )
        return
    both = (scripts.alone, scripts.a)
    shapes = [{tuple(s) for r in rs for f in r.forwards for s in f.shapes[:1]} for rs in both]
    rows = [np.concatenate([rows_of(rs, n)[0] for n in range(scripts.steps)]) for rs in both]
    ratio = abs(float(np.log((np.std(rows[0]) or 1.0) / (np.std(rows[1]) or 1.0))))
    if len(shapes[0]) == len(shapes[1]) == 1 and shapes[0] != shapes[1]:
        yield differing(
            "sample_values",
            f"its samples have the shape {shapes[0].pop()} (A: {shapes[1].pop()})",
            "first input of the model",
        )
    elif ks_2samp(rows[0], rows[1]).pvalue < UNLIKELY or ratio > CHANCE / len(rows[0]) ** 0.5:
        yield differing(
            "sample_values",
            "its samples have other values: another transform or augmentation",
            f"mean and standard deviation of the rows' checksums: {rows[0].mean():.3g} and "
            f"{rows[0].std():.3g} (A: {rows[1].mean():.3g} and {rows[1].std():.3g})",
        )


def of_inputs(scripts: Scripts) -> Iterator[Finding]:
    if not scripts.changes_inputs:
        return
    sizes = [float(np.sqrt(np.mean(rows_of(s, 0)[0] ** 2))) for s in (scripts.b, scripts.a)]
    yield differing(
        "inputs",
        "its model gets other inputs from the same batch: B changes them otherwise",
        f"root mean square of the rows' checksums: {sizes[0]:.4g} (A: {sizes[1]:.4g})",
    )


# The forward pass


def dropout_of(record: Record) -> dict[str, str]:
    """Probabilities of dropout, and whether the forward passes of each step draw numbers."""
    counts = sorted(Counter(p for p in record.dropout.values() if p).items())
    drawing = {record.forwards[n].step for n in record.forward_draws if n < len(record.forwards)}
    text = " and ".join(f"{p:g} in {counted(n, 'module')}" for p, n in counts)
    uses = {
        f"use of random numbers in the model in step {n + 1}": "some" if n in drawing else "none"
        for n in sorted({forward.step for forward in record.forwards})
    }
    return {"dropout": text or "none", **uses}


def of_outputs(scripts: Scripts) -> Iterator[Finding]:
    """The first module that gets other inputs or has other outputs, if the gradients differ."""
    records = scripts.records
    passes = [sum(f.step == 0 for r in s for f in r.forwards) for s in (scripts.b, scripts.a)]
    same = scripts.follows and passes[0] == passes[1]
    if not same or records.deviation <= 8 * records.floor:
        return
    modules = {name.rpartition(".")[0]: o.rpartition(".")[0] for name, o in scripts.pairs.items()}
    b, a = (
        {name: np.sum([rank.calls[name] for rank in ranks], axis=0) for name in ranks[0].calls}
        for ranks in (scripts.b, scripts.a)
    )
    agree = "the first one"
    for name in (name for name in b if modules.get(name) in a):
        for n, verb in enumerate(("gets other inputs than A's", "has other outputs")):
            value, expected = b[name][n], a[modules[name]][n]
            if abs(value - expected) > 16 * records.floor * max(value, expected):
                yield differing(
                    "outputs",
                    f"its {name or 'model'} {verb} from the same samples and weights",
                    f"sum of their squares in step 1: {value:.6g} (A: {expected:.6g}); the modules "
                    f"agree up to {agree}",
                )
                return
        agree = name or agree


def of_loss(scripts: Scripts) -> Iterator[Finding]:
    """The loss function and its arguments, unless another one gives the same gradient."""
    b, a = (
        [call for m in ranks[0].steps[0].micros for call in m.losses]
        for ranks in (scripts.b, scripts.a)
    )
    if not a or not b:
        return
    functions = [", ".join(sorted({call.function for call in calls})) for calls in (b, a)]
    if functions[0] != functions[1]:
        if scripts.follows and scripts.records.deviation <= 8 * scripts.records.floor:
            return  # cross_entropy, and nll_loss after log_softmax, are one loss
        yield differing(
            "loss_function",
            f"its loss is {functions[0]} (A: {functions[1]})",
            "loss functions of torch that are called in step 1",
        )
        return
    arguments = signature(getattr(functional, b[0].function)).parameters
    same = next(call for call in a if call.function == b[0].function)
    for key in sorted({*same.options, *b[0].options} - {"reduction"}):
        values = [call.options.get(key, arguments[key].default) for call in (b[0], same)]
        if values[0] != values[1]:
            yield differing(
                "loss_options",
                f"{key} of its {b[0].function} is {values[0]} (A: {values[1]})",
                "arguments of the loss function in step 1",
            )
    if not scripts.follows:
        return
    counts = [
        sum(n for rank in ranks for n in causes.counted_targets(rank.steps[0].micros))
        for ranks in (scripts.b, scripts.a)
    ]
    if counts[0] != counts[1] and all(counts):
        yield differing(
            "targets",
            f"its loss counts {counts[0]:g} targets of a step (A: {counts[1]:g})",
            "targets of step 1 that are not ignored, on all ranks",
        )
    yield from _of_other_terms(scripts)


def of_loss_value(scripts: Scripts) -> Iterator[Finding]:
    """Another loss of the same samples, by a loss that the script computes itself."""
    micros = {len(rank.steps[0].micros) for rank in (*scripts.a, *scripts.b)}
    losses = [[scripts.records.loss(r) for r in ranks] for ranks in (scripts.b, scripts.a)]
    if not scripts.follows or len(micros) > 1 or None in losses[0] + losses[1]:
        return
    b, a = (float(np.mean([v for v in of_ranks if v is not None])) for of_ranks in losses)
    outputs = [rows_of(ranks, 0, "outputs") for ranks in (scripts.b, scripts.a)]
    same = _equal_rows(*outputs)
    limit, distance = 8 * scripts.records.floor, abs(b - a)
    rounding = SAME_ROWS if same else max(1e-4, limit)
    if len(scripts.a) != len(scripts.b) or distance <= rounding * abs(a):
        return
    if distance > limit * abs(a) and scripts.records.deviation <= limit:
        return  # a factor that the gradient does not have, or a constant
    inputs = "outputs of the model" if same else "samples"
    yield differing(
        "loss",
        f"its loss of the same {inputs} is {b:.6g} (A: {a:.6g})",
        "numbers that backward is called on in step 1, mean of the ranks",
    )


def _of_other_terms(scripts: Scripts) -> Iterator[Finding]:
    """A term of the loss beside the loss function, by what backward gets and that it returns."""
    values = []
    for ranks in (scripts.b, scripts.a):
        micros = [m for rank in ranks for m in rank.steps[0].micros]
        factors = causes.loss_factors(micros)
        if not factors or any(m.losses[0].reduction != "mean" for m in micros):
            return
        values.append(float(np.mean(factors)) * len(ranks[0].steps[0].micros))
    b, a = values
    # A term beside the loss is no whole factor of it, as a division by micro-batches is.
    has_other_term = abs(b - a) > 1e-4 * max(abs(b), abs(a))
    by_count = [abs(v - round(v)) < 1e-3 or abs(1 / v - round(1 / v)) < 1e-3 for v in (a, b) if v]
    if has_other_term and not all(by_count):
        yield differing(
            "loss_term",
            f"backward gets {b:.5g} times the value of its loss function (A: {a:.5g}): the "
            "terms beside it have another size",
            "numbers that backward is called on in step 1, and results of the loss function",
        )


# The gradient


def of_absent(scripts: Scripts) -> Iterator[Finding]:
    """Parameters that have a gradient in one script, and none or zeros in the other."""
    records = scripts.records
    b, a = records.gradients(), records.expected
    for which, gradients, other in (("its", b, a), ("A's", a, b)) if scripts.follows else ():
        least = 4 * records.floor * float(np.linalg.norm(stacked(other)))
        names = [
            name
            for name in records.ranks[0].names
            if name in scripts.pairs and not np.any(gradients.get(name, 0.0))
            if np.linalg.norm(other.get(name, 0.0)) > least
        ]
        if names:
            yield differing(
                "no_gradient",
                f"the loss gives no gradient to {which} {listed(names)}",
                f"gradients of step 1: {counted(len(names), 'parameter')} of {len(scripts.pairs)}",
            )


def of_kept(scripts: Scripts) -> Iterator[Finding]:
    """A gradient that is added to that of the next step, as without zero_grad."""
    b, a = (causes.of_kept(Records(ranks=ranks)) for ranks in (scripts.b, scripts.a))
    if (cause := b or a) and not (a and b):
        which, text = "its" if b else "A's", "gradient of step 2 has that of step 1 added to it"
        yield differing("gradient_kept", f"{which} {text}, as without zero_grad", cause.evidence)


def of_causes(scripts: Scripts) -> Iterator[Finding]:
    """Causes that `audit` sees among the ranks of one script, and not of the other."""
    a, b = (
        {cause.name: cause for cause in causes.causes_found("ranks", Records(ranks=ranks))}
        for ranks in (scripts.a, scripts.alone)
    )
    for name in b.keys() - a.keys() - {"settings_differ", "gradient_kept"}:
        if min(len(scripts.a), len(scripts.b)) > 1:
            reason = f"{b[name].deviation}, because {b[name].reason}"
            yield differing(name, reason, b[name].evidence)


def of_weighting(scripts: Scripts) -> Iterator[Finding]:
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
        floor = records.floor if step == 0 else LATER / 4
        factor = factor_of(used, single, 4 * floor)
        if factor and factor > 0 and abs(factor - 1) > max(LATER, 8 * floor):
            multiple = scaled(factor, expected)
            if step == 0 and not reproduces(gradients, multiple, expected, records.floor):
                return
            if any(abs(np.linalg.norm(v) - n) < 1e-3 * n for v in (used, single) for n in LIMITS):
                return  # `of_clipping` looks at it
            yield differing(
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
        yield differing(
            "weighting",
            "it weighs its ranks and micro-batches alike, and A by their samples or tokens",
            evidence,
        )


def of_clipping(scripts: Scripts) -> Iterator[Finding]:
    a, b = (ranks[0].steps[0].last_clips[:1] for ranks in (scripts.a, scripts.b))
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
        yield differing("clipping", f"its clipping is {described[0]} (A: {described[1]})", evidence)
    same_direction = factor_of(gradients, expected, 4 * records.floor) is not None
    round_norm = any(abs(n - limit) < 1e-3 * limit for n in norms for limit in LIMITS)
    if not a and not b and differ and round_norm and same_direction:
        yield differing(
            "clipping",
            f"{'B' if norms[0] < norms[1] else 'A'}'s gradient has the norm "
            f"{min(norms):.4g}, as a library that clips leaves it",
            f"both gradients have the same direction; {evidence}",
        )


def of_reduction(scripts: Scripts) -> Iterator[Finding]:
    of_a = Records(ranks=scripts.a)
    used = [records.gradients() for records in (scripts.records, of_a)]
    types = [causes.rounding(stacked(gradients)) for gradients in used]
    if types[0] > types[1]:
        yield differing(
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


def of_settings(scripts: Scripts) -> Iterator[Finding]:
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
    if other and (decays or "decoupled_weight_decay" not in switches[0] ^ switches[1]):
        named = [
            " with ".join(filter(None, (c, ", ".join(sorted(s)))))
            for c, s in zip(classes, switches, strict=True)
        ]
        yield differing(
            "optimizer",
            f"its optimizer is {named[0]} (A: {named[1]})",
            "class and options of the optimizer of step 1",
        )
    rates = (rate for step in range(scripts.steps) for rate in _of_setting(scripts, "lr", step))
    yield from islice(rates, 1)


def _of_setting(scripts: Scripts, key: str, step: int) -> Iterator[Finding]:
    of_b, of_a = (settings_of(record, step) for record in (scripts.b[0], scripts.a[0]))
    other: dict[tuple[float, float], list[str]] = {}
    for name, b_group in of_b.items():
        a_group = of_a.get(scripts.pairs.get(name, ""), {})
        if key in b_group and key in a_group and f"{b_group[key]:.7g}" != f"{a_group[key]:.7g}":
            other.setdefault((b_group[key], a_group[key]), []).append(name)
    if not other:
        return
    (own_value, a_value), names = max(other.items(), key=lambda pair: len(pair[1]))
    of_names = "" if len(names) == len(scripts.pairs) else f" of {listed(names)}"
    setting = {"lr": "learning_rate", "weight_decay": "weight_decay"}.get(key)
    text = setting.replace("_", " ") if setting else key
    at = f" of step {step + 1}" if key == "lr" else ""
    yield differing(
        "schedule" if key == "lr" and step else setting or "optimizer_setting",
        f"its {text}{of_names}{at} is {own_value:.4g} (A: {a_value:.4g})",
        f"settings of the optimizers' groups: {len(names)} of {len(scripts.pairs)} parameters",
    )


# Between and after the steps


def of_moved(scripts: Scripts) -> Iterator[Finding]:
    for step in range(1, scripts.steps):
        b, a = (s[0].steps[step].moved for s in (scripts.b, scripts.a))
        if bool(a) != bool(b):
            record, which = (scripts.b[0], "B") if b else (scripts.a[0], "A")
            yield differing(
                "weights_changed",
                f"{which} changes weights outside of the optimizer, and the other does not",
                f"{listed([record.names[n] for n in (b or a)])} before step {step + 1}",
            )
            return


def of_average(scripts: Scripts) -> Iterator[Finding]:
    b, a = scripts.alone[0], scripts.a[0]
    if {"FSDP2", "DeepSpeed"} & {*a.frameworks, *b.frameworks}:
        return  # an average of sharded parameters is not seen
    if bool(a.average) != bool(b.average):
        which = "B" if b.average else "A"
        yield differing(
            "average",
            f"{which} keeps an average of its weights, and the other does not",
            "a second set of tensors with the parameters' shapes, which follows them",
        )
    elif a.average and len(a.average) == len(b.average):
        copies, others, starts = map(joined_flat, (b.average, a.average, a.before))
        size = float(np.linalg.norm(others - starts))
        off = float(np.linalg.norm(copies - others)) / size if size else 0.0
        if scripts.b is scripts.alone and off > LATER:
            yield differing(
                "average",
                f"the average of its weights is off by {percent(off)} of its change",
                f"after {counted(scripts.steps, 'step')}",
            )


def of_buffers(scripts: Scripts) -> Iterator[Finding]:
    if not scripts.follows:
        return
    last = scripts.steps - 1
    b, a = (s[0].steps[last].buffers for s in (scripts.b, scripts.a))
    shapes = [{n: tuple(v.shape) for n, v in buffers.items()} for buffers in (b, a)]
    pairs = paired_names(shapes[0], shapes[1])
    tolerance = max(LATER, 8 * scripts.records.floor)
    names = [name for name, other in pairs.items() if tensors_differ(b[name], a[other], tolerance)]
    if names:
        yield differing(
            "buffers",
            f"{listed(names)} {'is' if len(names) == 1 else 'are'} not A's before step {last + 1}",
            f"{len(names)} of {len(b)} buffers differ by more than rounding",
        )


LOOKS: Sequence[Callable[[Scripts], Iterator[Finding]]] = (
    of_parameters,
    Fact(
        "weights_type", lambda r: {} if "DeepSpeed" in r.frameworks else {"": " and ".join(
            sorted({t for facts in r.optimizer_facts for t in facts.types})
        )}, "its weights are {b} (A: {a})", "types of the optimizers' parameters",
    ),
    of_start,
    Fact(
        "resumed", lambda r: {"": counted(r.resumed_at, "step")},
        "its optimizer has taken {b} before (A's: {a})",
        "the state of the optimizer before the first recorded step", alone=True,
    ),
    of_samples, of_inputs,
    Fact(
        "precision",
        lambda r: {"": round(-np.log2(r.epsilon))} if r.epsilon and not r.graphs else {},
        "its forward pass rounds to {b} bits (A: {a})", "types of the modules' outputs",
    ),
    Fact(
        "dropout", dropout_of, "its {key} is {b} (A: {a})",
        "modules in training mode, and random numbers drawn in forward passes", alone=True,
    ),
    Fact(
        "batch_norm", lambda r: {} if r.graphs else {
            "": f"the {r.forwards[0].rows if r.forwards else 0} rows of a forward pass on a rank"
            if r.batch_norm else "no such rows"
        }, "its batch norm takes its statistics from {b} (A: {a})",
        "batch norm in training mode, which is not synchronised",
    ),
    of_outputs, of_loss, of_loss_value, of_absent, of_causes, of_reduction, of_clipping,
    of_weighting, of_settings,
    Fact(
        "state_type", lambda r: dict(sorted(r.optimizer_facts[0].state_types.items())),
        "its optimizer keeps {key} in {b} (A: {a})",
        "types of the optimizer's state after step 1",
    ),
    Fact(
        "schedule", lambda r: dict(sorted(r.schedule_settings.items())),
        "its {key} is {b:g} (A: {a:g})", "settings of the schedules of learning rates", alone=True,
    ),
    Fact(
        "state_lost", lambda r: {
            n: "new" if step.state_is_new else "that of the steps before"
            for n, step in enumerate(r.steps, 1)
        }, "the state of its optimizer is {b} in step {key} (A: {a})",
        "the optimizer's state before the step", alone=True,
    ),
    of_kept, of_moved, of_average, of_buffers,
)  # fmt: skip
"""Functions that look for differences, in the order of a step."""
