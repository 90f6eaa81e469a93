"""Published memory against the bytes of the model's own state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.plausibility_check import Check, Examined, Finding, examined
from shardmark.analysis.studies.plausibility_sizes import (
    FULL_PRECISION_BYTES,
    HALF_PRECISION_BYTES,
    OPTIMIZERS,
    SHARDED,
    SMALLEST_GROUP,
    ModelState,
    states_of,
)
from shardmark.analysis.studies.schema import Figures, Paper

PEAK = "peak_memory_bytes"
SAVED = Check(
    name="memory saved by sharding",
    assumption="sharding divides parameters, gradients and optimizer state evenly over n ranks and"
    " leaves activations as they are; 4 bytes a number; of the optimizers that the study may have"
    " used the one with the largest state; a DDP reference holds its gradients twice, as buckets",
    formula="fall <= (1 - 1/n) x (parameters + gradients + optimizer state, of what is sharded)",
    margin=0.25,
)
BELOW_STATE = Check(
    name="memory below the model's own state",
    assumption="at the end of a backward pass a rank holds its share of parameters, gradients and"
    " optimizer state; 2 bytes a number unless the study says full precision; of the optimizers"
    " that it may have used the one with the smallest state",
    formula="peak >= (parameters + gradients + optimizer state), each over n where it is sharded",
    margin=0.05,
)


def memory_checks(against: Against) -> tuple[Examined, ...]:
    return (
        examined(SAVED, list(_saved(against))),
        examined(BELOW_STATE, list(_below_state(against))),
    )


def most_saved_bytes(state: ModelState, strategy: str, reference: str, ranks: int) -> float:
    """By which one rank's peak can fall from the reference's: what it no longer holds.

    (1 - 1/n) of what is sharded, plus the second copy of the gradients of a `ddp` reference.
    """
    return reference_bytes(state, reference, ranks) - state.held_bytes(strategy, ranks)


def reference_bytes(state: ModelState, strategy: str, ranks: int) -> float:
    """Held by one rank of the reference, at most."""
    buckets = state.kinds["gradients"] if strategy == "ddp" else 0.0
    return state.held_bytes(strategy, ranks, group=SMALLEST_GROUP) + buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """A sharded training and its reference, both with a published peak."""

    figures: Figures
    strategy: str
    after: float
    reference: Figures
    base: str
    """Strategy of the reference."""
    before: float

    @property
    def ranks(self) -> int:
        return self.figures.world_size


def falls(paper: Paper) -> Iterator[Fall]:
    for figures in paper.figures:
        reference, strategy = paper.reference_of(figures), figures.strategy
        if reference is None or strategy is None or reference.strategy is None:
            continue
        before, after = reference.value(PEAK), figures.value(PEAK)
        if not SHARDED.get(strategy) or reference.strategy not in SHARDED:
            continue
        if before is not None and after is not None:
            yield Fall(
                figures=figures,
                strategy=strategy,
                after=after,
                reference=reference,
                base=reference.strategy,
                before=before,
            )


def _coarser_digit(paper: Paper, fall: Fall) -> float | None:
    """The coarser of both sides' last digits; None where one is not known."""
    digits = [paper.digit(one, PEAK) for one in (fall.reference, fall.figures)]
    known = [digit for digit in digits if digit is not None]
    return max(known) if len(known) == len(digits) else None


def _saved(against: Against) -> Iterator[Finding | None]:
    paper = against.paper
    for fall in falls(paper):
        states = states_of(against, {**paper.conditions, **fall.figures.conditions})
        if states:
            yield _saving(paper, fall, states)


def _saving(paper: Paper, fall: Fall, states: Sequence[ModelState]) -> Finding | None:
    limits = {
        state.optimizer: most_saved_bytes(state, fall.strategy, fall.base, fall.ranks)
        for state in states
    }
    limit, saved = max(limits.values()), fall.before - fall.after
    rounding = paper.half_unit(fall.reference, PEAK) + paper.half_unit(fall.figures, PEAK)
    if not SAVED.contradicted(saved, limit, "at most", rounding=rounding):
        return None
    return Finding(
        check=SAVED,
        subject=f"fall of the peak from {fall.reference.words} to {fall.figures.words}",
        place=fall.figures.place,
        metric=PEAK,
        published=saved,
        digit=_coarser_digit(paper, fall),
        side="at most",
        limit=limit,
        basis=f"n = {fall.ranks}, {states[0].source}",
        meaning=f"the fall is not the doing of {fall.strategy} alone: the rest has another"
        " cause, such as fewer samples on each rank, other buffers, or another way of measuring",
        parts=(
            *((f"{name}:", size) for name, size in limits.items()),
            ("not explained:", saved - limit),
        ),
    )


def _below_state(against: Against) -> Iterator[Finding | None]:
    paper = against.paper
    for figures in paper.figures:
        conditions = {**paper.conditions, **figures.conditions}
        states = states_of(against, conditions)
        peak = figures.value(PEAK)
        if peak is None or not states or figures.strategy is None:
            continue
        if figures.strategy not in SHARDED:
            continue
        full = conditions.get("recipe.precision") == "fp32"
        share = (FULL_PRECISION_BYTES if full else HALF_PRECISION_BYTES) / FULL_PRECISION_BYTES
        state = min(states, key=lambda one: OPTIMIZERS[one.optimizer])
        limit = share * state.held_bytes(figures.strategy, figures.world_size)
        rounding = paper.half_unit(figures, PEAK)
        if not BELOW_STATE.contradicted(peak, limit, "at least", rounding=rounding):
            yield None
            continue
        yield Finding(
            check=BELOW_STATE,
            subject=f"peak of {figures.words}",
            place=figures.place,
            metric=PEAK,
            published=peak,
            digit=paper.digit(figures, PEAK),
            side="at least",
            limit=limit,
            basis=f"n = {figures.world_size}, {state.optimizer}, {state.source}",
            meaning="the figure is not the peak of a training of this model: it is of another"
            " moment, another quantity or another model",
        )
