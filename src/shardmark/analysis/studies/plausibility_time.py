"""Published times and rates against one another and the number of devices."""

from __future__ import annotations

from collections.abc import Iterator

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.facts import facts
from shardmark.analysis.studies.plausibility_check import Check, Examined, Finding, examined
from shardmark.analysis.studies.schema import Figures, Paper
from shardmark.analysis.studies.statements import Statement

SPEEDUP = Check(
    name="speed-up above the number of devices",
    assumption="each device does the same work for a sample, however many there are",
    formula="speed-up <= ranks / ranks of what it is relative to",
    margin=0.05,
)
EFFICIENCY = Check(
    name="scaling efficiency above 1",
    assumption="each device does the same work for a sample, however many there are",
    formula="speed-up over the factor of devices <= 1",
    margin=0.05,
)
THROUGHPUT = Check(
    name="throughput, time and samples",
    assumption="an epoch takes every training sample once, and both figures are of the same steps",
    formula="samples per second = training samples / seconds of an epoch",
    margin=0.05,
)
TOTAL = Check(
    name="total time and epochs",
    assumption="the total is that of all epochs, and every training of the study had as many; where"
    " it does not say how many, the whole number that fits its reference",
    formula="total = epochs x mean seconds of an epoch",
    margin=0.02,
)


def time_checks(against: Against) -> tuple[Examined, ...]:
    paper = against.paper
    return (
        examined(SPEEDUP, [*_speedups(paper), *_stated_speedups(paper)]),
        examined(EFFICIENCY, [*_efficiencies(paper), *_stated_efficiencies(paper)]),
        examined(THROUGHPUT, list(_throughputs(paper))),
        examined(TOTAL, list(_totals(paper))),
    )


def speed_ratio(figures: Figures, base: Figures) -> float | None:
    """How many times as fast, from samples per second, else from the seconds of an epoch."""
    for metric, inverse in (("samples_per_second", False), ("epoch_seconds", True)):
        one, other = figures.value(metric), base.value(metric)
        if one is not None and other is not None:
            return other / one if inverse else one / other
    return None


def _speedups(paper: Paper) -> Iterator[Finding | None]:
    """Over the same strategy on fewer ranks, and over the study's reference on fewer."""
    for figures in paper.figures:
        bases = {id(one): one for one in (paper.fewest_ranks(figures), paper.reference_of(figures))}
        for base in bases.values():
            if base is None or base.world_size >= figures.world_size:
                continue
            found = speed_ratio(figures, base)
            if found is not None:
                yield _speedup(
                    f"{figures.words} over {base.words}",
                    figures.place,
                    found,
                    figures.world_size / base.world_size,
                )


def _stated_speedups(paper: Paper) -> Iterator[Finding | None]:
    for one in paper.statements:
        base = None if one.relative_to is None else one.relative_to.world_size
        claimed = one.high if one.value is None else one.value
        if one.about != "speedup" or claimed is None or one.world_size is None or base is None:
            continue
        assert one.relative_to is not None, "its ranks are known"
        subject = f"{one.title} on {one.world_size} over {one.relative_to.title} on {base}, stated"
        yield _speedup(subject, one.place, claimed, one.world_size / base)


def _speedup(subject: str, place: str, found: float, devices: float) -> Finding | None:
    if not SPEEDUP.contradicted(found, devices, "at most"):
        return None
    return Finding(
        check=SPEEDUP,
        subject=subject,
        place=place,
        metric="speedup",
        published=found,
        side="at most",
        limit=devices,
        basis=f"{devices:g} times the devices",
        meaning="the two did not do the same work: another batch, another number of samples, or"
        " one of them waits for something else than its device",
    )


def _efficiencies(paper: Paper) -> Iterator[Finding | None]:
    for figures in paper.figures:
        found = figures.value("scaling_efficiency")
        if found is not None:
            yield _efficiency(figures.words, figures.place, found)


def _stated_efficiencies(paper: Paper) -> Iterator[Finding | None]:
    for one in paper.statements:
        claimed = one.high if one.value is None else one.value
        if one.about == "scaling_efficiency" and claimed is not None:
            yield _efficiency(_claim(one), one.place, claimed)


def _claim(statement: Statement) -> str:
    ranks = "" if statement.world_size is None else f" on {statement.world_size} ranks"
    return f"{statement.title}{ranks}, stated"


def _efficiency(subject: str, place: str, found: float) -> Finding | None:
    if not EFFICIENCY.contradicted(found, 1.0, "at most"):
        return None
    return Finding(
        check=EFFICIENCY,
        subject=subject,
        place=place,
        metric="scaling_efficiency",
        published=found,
        side="at most",
        limit=1.0,
        basis="all devices busy all the time",
        meaning="more devices did less work each for a sample, or the few were held up",
    )


def _throughputs(paper: Paper) -> Iterator[Finding | None]:
    for figures in paper.figures:
        rate, seconds = figures.value("samples_per_second"), figures.value("epoch_seconds")
        samples, source = training_samples(paper, figures)
        if rate is None or seconds is None or samples is None:
            continue
        limit = samples / seconds
        if not THROUGHPUT.contradicted(rate, limit, "about"):
            yield None
            continue
        yield Finding(
            check=THROUGHPUT,
            subject=figures.words,
            place=figures.place,
            metric="samples_per_second",
            published=rate,
            side="about",
            limit=limit,
            basis=f"{samples:,} samples ({source}) in {seconds:g} s",
            meaning="rate and time are not of the same steps, or the epoch had other samples",
        )


def training_samples(paper: Paper, figures: Figures) -> tuple[int | None, str]:
    """Of one epoch, and who says so."""
    conditions = {**paper.conditions, **figures.conditions}
    stated = conditions.get("workload.training_samples")
    if isinstance(stated, int):
        return stated, "as stated"
    known = facts().dataset(conditions.get("workload.dataset"))
    return (None, "") if known is None else (known.training_samples, known.source)


def _totals(paper: Paper) -> Iterator[Finding | None]:
    for figures in paper.figures:
        total, seconds = figures.training_seconds, figures.value("epoch_seconds")
        epochs, basis = epochs_of_training(paper, figures)
        if total is None or seconds is None or epochs is None:
            continue
        limit = epochs * seconds
        rounding = epochs * paper.half_unit(figures, "epoch_seconds")
        rounding += paper.half_unit(figures, "total_seconds")
        if not TOTAL.contradicted(total, limit, "about", rounding=rounding):
            yield None
            continue
        yield Finding(
            check=TOTAL,
            subject=f"total time of {figures.words}",
            place=figures.place,
            metric="total_seconds",
            published=total,
            digit=paper.digit(figures, "total_seconds"),
            side="about",
            limit=limit,
            basis=f"{epochs} epochs ({basis}) of {seconds:g} s",
            meaning=f"the total makes {total / seconds:.1f} epochs: it has something in it that the"
            " others' does not, the mean leaves some epochs out, or the epochs were not as many",
            parts=(("difference:", total - limit),),
        )


def epochs_of_training(paper: Paper, figures: Figures) -> tuple[int | None, str]:
    """As stated, else from the reference's total and mean; None where neither is there."""
    stated = {**paper.conditions, **figures.conditions}.get("recipe.epochs")
    if isinstance(stated, int):
        return stated, "as stated"
    base = paper.reference_of(figures)
    if base is None or not base.training_seconds or not base.value("epoch_seconds"):
        return None, ""
    seconds = base.value("epoch_seconds")
    assert seconds is not None, "looked at above"
    return round(base.training_seconds / seconds), f"as those of {base.words}"
