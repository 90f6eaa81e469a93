"""Published and claimed ratios of memory against what sharding can reach on so many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.plausibility_check import Check, Examined, Finding, examined
from shardmark.analysis.studies.plausibility_memory import PEAK, falls, reference_bytes
from shardmark.analysis.studies.plausibility_sizes import SHARDED, ModelState, optimizers_of
from shardmark.analysis.studies.schema import Paper
from shardmark.analysis.studies.statements import Statement

NO_SUCH_RATIO = "sharding alone reaches no such ratio on so many ranks, whatever the model"
WITH_FEWER_SAMPLES = ", nor does it with an n-th of the samples on each rank"
RATIO = Check(
    name="memory ratio of sharding",
    assumption="both sides hold the same activations, and the less they are, the lower the ratio:"
    " here none; of the strategies and optimizers that the study may mean the lowest ratio; a DDP"
    " reference holds its gradients twice, as buckets",
    formula="ratio >= state of a rank / state of a rank of the reference",
    margin=0.1,
)


def ratio_checks(against: Against) -> tuple[Examined, ...]:
    return (examined(RATIO, [*_ratios_of_figures(against.paper), *_ratios(against)]),)


def least_ratio(
    optimizers: Sequence[str], strategies: Sequence[str], references: Sequence[str], ranks: int
) -> float:
    """Lowest share of the reference's state that one rank can hold; of no model in particular."""
    states = [ModelState(optimizer=one, parameter_bytes=1.0, source="") for one in optimizers]
    return min(
        state.held_bytes(strategy, ranks) / reference_bytes(state, reference, ranks)
        for state in states
        for strategy in strategies
        for reference in references
    )


def _ratios_of_figures(paper: Paper) -> Iterator[Finding | None]:
    """Needs no size of the model."""
    for fall in falls(paper):
        optimizers = optimizers_of({**paper.conditions, **fall.figures.conditions})
        limit = least_ratio(optimizers, [fall.strategy], [fall.base], fall.ranks)
        least_before = fall.before - paper.half_unit(fall.reference, PEAK)
        most = (fall.after + paper.half_unit(fall.figures, PEAK)) / least_before
        if not RATIO.contradicted(most, limit, "at least"):
            yield None
            continue
        yield Finding(
            check=RATIO,
            subject=f"peak of {fall.figures.words} over that of {fall.reference.words}",
            place=fall.figures.place,
            metric="memory_ratio",
            published=fall.after / fall.before,
            side="at least",
            limit=limit,
            basis=f"n = {fall.ranks}, if all memory were state",
            meaning=f"{NO_SUCH_RATIO}{WITH_FEWER_SAMPLES if fall.base == 'single' else ''}",
        )


def _ratios(against: Against) -> Iterator[Finding | None]:
    for statement in against.paper.statements:
        relative = statement.relative_to
        claimed = statement.low if statement.value is None else statement.value
        if claimed is None and statement.high is not None:
            claimed = statement.high
        if statement.about != "memory_ratio" or relative is None or claimed is None:
            continue
        if all(one in SHARDED for one in (*statement.strategies, *relative.strategies)):
            for ranks in _rank_counts(against, statement):
                yield _ratio(against.paper, statement, relative.strategies, claimed, ranks)


def _rank_counts(against: Against, statement: Statement) -> list[int]:
    """As stated, else those on which the strategy was measured beside the study."""
    if statement.world_size is not None:
        return [statement.world_size]
    rows = [row for row in against.rows if row.ok_trials and row.strategy in statement.strategies]
    return sorted({row.world_size for row in rows})


def _ratio(
    paper: Paper, statement: Statement, references: Sequence[str], claimed: float, ranks: int
) -> Finding | None:
    optimizers = optimizers_of({**paper.conditions, **statement.conditions})
    limit = least_ratio(optimizers, statement.strategies, references, ranks)
    if not RATIO.contradicted(claimed, limit, "at least"):
        return None
    assert statement.relative_to is not None, "the caller looked"
    stated = statement.world_size is not None
    return Finding(
        check=RATIO,
        subject=f"peak of {statement.title} over that of {statement.relative_to.title} on {ranks}"
        f" ranks{'' if stated else ', as measured here'}",
        place=statement.place,
        metric="memory_ratio",
        published=claimed,
        side="at least",
        limit=limit,
        basis=f"n = {ranks}{'' if stated else f', since {paper.name} does not say on how many'}",
        meaning=NO_SUCH_RATIO,
    )
