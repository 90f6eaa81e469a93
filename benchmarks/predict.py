"""Scores predicted step times against published measurements, each source left out of the fit.

    python benchmarks/predict.py [--data FILE | --cases FILE] [--small]

`--data` names the development cases, `../shared/data/published_throughput_dev.csv` by default.
`--cases` scores any file of the same columns with the constants that ship.  Measures nothing.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT, Table, options_of, store, surroundings
from benchmarks.published import Case, read

from shardmark.core.errors import InputError
from shardmark.predict.calibrate import calibrate_compute
from shardmark.predict.intervals import Kind, interval, residuals_of
from shardmark.predict.step import Factors, Step, plan_step
from shardmark.predict.timing import Constants

CASES = ROOT.parent / "shared" / "data" / "published_throughput_dev.csv"
SERIES = (
    *("source", "model", "params_b", "task", "seq_len_or_image", "precision"),
    *("activation_checkpointing", "gpu", "throughput_unit"),
)
DISTRIBUTIONS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03)
"""Candidates for the one fitted constant, which is chosen for each source by the other ones."""
WORST = 0.25
"""Cap of the errors in a choice: some published runs hang, or swap."""
BAR = (
    "scale-out median at most 2.5 %, 90th percentile 11 %, skill 0.5; DLPerf ResNet-50 2.5 %, 0.6; "
    "coverage 87 to 93 %; another card at most 25 %"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured run, and a run that is predicted from it."""

    anchor: Case
    target: Case
    kind: Kind

    @property
    def source(self) -> str:
        return self.target.row["source"]


@dataclass(frozen=True, slots=True)
class Score:
    pair: Pair
    error: float
    """Relative error of the predicted speed."""
    naive: float
    """Relative error of the rule that the speed of a card stays, or scales with its peak."""
    residual: float
    """log(measured / predicted seconds)."""


@cache
def planned(case: Case, constants: Constants) -> Step:
    """The step of a case; constants of scaling do not change it."""
    return plan_step(
        case.profile,
        case.strategy,
        case.recipe,
        case.ranks,
        case.node,
        nodes=case.nodes,
        constants=constants,
    )


def scored(pair: Pair, constants: Constants) -> Score:
    """The score of a pair; raises `InputError` if the anchor cannot calibrate the prediction."""
    anchor, target = pair.anchor, pair.target
    factors = calibrate_compute(
        planned(anchor, Constants()), anchor.seconds, anchor.micro_batch, constants, Factors()
    )
    seconds = planned(target, Constants()).time(constants, factors).seconds
    naive = anchor.samples_per_second / target.samples_per_second
    if pair.kind == "another card":
        naive *= _peak(target) / _peak(anchor)
    return Score(
        pair, abs(target.seconds / seconds - 1), abs(naive - 1), log(target.seconds / seconds)
    )


def _peak(case: Case) -> float:
    return case.node.card.peak(case.recipe.precision, tf32=case.recipe.tf32)


def scale_out(cases: Sequence[Case]) -> Iterable[Pair]:
    """Pairs of each run with the smallest run of its series; `single` is in every series."""
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        section = case.row["notes"].partition("section: ")[2].partition(";")[0]
        groups[(*(case.row[key] for key in SERIES), section)].append(case)
    for group in groups.values():
        said = [(case.ranks, case.row["strategy"], case.row["interconnect"]) for case in group]
        by_batch = max(Counter(said).values()) > 1
        for case in group:
            smaller = [
                other
                for other in group
                if other.ranks < case.ranks
                and (other.ranks == 1 or other.row["strategy"] == case.row["strategy"])
                and (not by_batch or other.row["micro_batch"] == case.row["micro_batch"])
                and other.row["interconnect"] in ("", case.row["interconnect"])
            ]
            if smaller:
                same = case.row["strategy"]
                first = min(smaller, key=lambda each: (each.ranks, each.row["strategy"] != same))
                yield Pair(first, case, "more nodes" if case.nodes > 1 else "more ranks")


def other_cards(cases: Sequence[Case]) -> Iterable[Pair]:
    """Pairs of the same training on two cards; a copy with more memory is not another card."""
    for anchor, target in product(cases, cases):
        same = all(
            anchor.row[key] == target.row[key]
            for key in ("source", "model", "task", "seq_len_or_image")
        )
        alike = (
            anchor.ranks == target.ranks == 1
            and anchor.recipe.activation_checkpointing == target.recipe.activation_checkpointing
            and anchor.recipe.precision == target.recipe.precision
        )
        if same and alike and _peak(anchor) != _peak(target):
            yield Pair(anchor, target, "another card")


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def all_scores(pairs: Iterable[Pair], constants: Constants) -> dict[Pair, Score]:
    scores = {}
    for pair in pairs:
        with suppress(InputError):
            scores[pair] = scored(pair, constants)
    return scores


def left_out(pairs: Sequence[Pair], grid: Sequence[Constants]) -> list[Score]:
    """Scores of each source with the constants that are best for all other sources."""
    by_point = [all_scores(pairs, constants) for constants in grid]
    scores_left_out = []
    for source in dict.fromkeys(pair.source for pair in pairs):
        others = [
            fmean(min(WORST, s.error) for pair, s in scores.items() if pair.source != source)
            for scores in by_point
        ]
        best = by_point[others.index(min(others))]
        scores_left_out += [score for pair, score in best.items() if pair.source == source]
    return scores_left_out


def coverage(scores: Sequence[Score]) -> float:
    """Coverage of the intervals from the residuals of all other sources."""
    inside = 0
    for score in scores:
        others = [
            other.residual
            for other in scores
            if other.pair.kind == score.pair.kind and other.pair.source != score.pair.source
        ]
        residuals = residuals_of(others)
        inside += residuals.low <= exp(score.residual) <= residuals.high
    return inside / len(scores)


def shipped_coverage(scores: Sequence[Score]) -> float:
    within = (interval(1.0, score.pair.kind) for score in scores)
    pairs = zip(within, scores, strict=True)
    return fmean(low <= exp(score.residual) <= high for (low, high), score in pairs)


def numbers_of(scores: Sequence[Score]) -> dict[str, float]:
    errors, naive = [s.error for s in scores], [s.naive for s in scores]
    return {
        "pairs": len(scores),
        "sources": len({s.pair.source for s in scores}),
        "median": median(errors),
        "p90": quantile(errors, 0.9),
        "naive_median": median(naive),
        "naive_p90": quantile(naive, 0.9),
        "skill": 1 - median(errors) / median(naive),
        "skill_of_means": 1 - fmean(errors) / fmean(naive),
    }


def row_of(title: str, numbers: Mapping[str, float], bar: str) -> tuple[str, ...]:
    return (
        title,
        f"{numbers['pairs']:.0f} of {numbers['sources']:.0f} sources",
        f"{numbers['median']:.1%}",
        f"{numbers['p90']:.1%}",
        f"{numbers['skill']:.2f} ({numbers['skill_of_means']:.2f})",
        f"{numbers['naive_median']:.1%}",
        bar,
    )


def reasons(refused: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Ids of rows by the reason why they are not predicted, the commonest reason first."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in refused:
        by_reason[reason].append(name)
    return dict(sorted(by_reason.items(), key=lambda item: -len(item[1])))


def main() -> None:
    parser = options_of("predict", __doc__)
    parser.add_argument("--cases", type=Path, help="another file, with the constants that ship")
    parser.add_argument("--data", type=Path, default=CASES, help="the development cases")
    options = parser.parse_args()
    file = options.cases or options.data
    if not file.is_file():
        raise SystemExit(f"skipped: there is no {file}; give one with --data or --cases")
    around = surroundings()
    cases, refused = read(file)
    scaled, cards = list(scale_out(cases)), list(other_cards(cases))
    shipped = Constants()
    held_out = options.cases is None
    points = [replace(shipped, distribution=share) for share in DISTRIBUTIONS]
    if options.small:
        points = [shipped]
    scores = left_out(scaled, points) if held_out else list(all_scores(scaled, shipped).values())
    moved = list(all_scores(cards, shipped).values())
    predicted = {score.pair for score in (*scores, *moved)}
    for pair in (*scaled, *cards):
        if pair not in predicted:
            refused.append((pair.target.row["id"], why_not(pair, shipped)))
    paired = {id(case) for pair in (*scaled, *cards) for case in (pair.anchor, pair.target)}
    alone = "no smaller run and no other card of its series is there to predict it from"
    refused += [(case.row["id"], alone) for case in cases if id(case) not in paired]

    numbers: dict[str, Any] = {}
    rows = []
    for name, title, chosen, bar in (
        ("scale_out", "scale-out", scores, "2.5 %, 11 %, 0.5"),
        (
            "slow_networks",
            "slow networks (DLPerf ResNet-50)",
            [score for score in scores if "DLPerf" in score.pair.source],
            "2.5 %, 0.6",
        ),
        ("another_card", "another card", moved, "25 %"),
    ):
        if chosen:
            numbers[name] = numbers_of(chosen)
            rows.append(row_of(title, numbers[name], bar))
    if scores:
        held = coverage(scores) if held_out else shipped_coverage(scores)
        numbers["coverage"] = held
        title = "coverage of the 90 % interval, scale-out"
        rows.append((title, f"{len(scores)}", f"{held:.1%}", "", "", "", "87 to 93 %"))
    if moved and not held_out:
        numbers["coverage_another_card"] = shipped_coverage(moved)
    if held_out:
        numbers["residuals"] = {
            kind: asdict(residuals_of(s.residual for s in each if s.pair.kind == kind))
            for each in (list(all_scores(scaled, shipped).values()), moved)
            for kind in dict.fromkeys(s.pair.kind for s in each)
        }
    by_source = defaultdict(list)
    for score in scores:
        by_source[score.pair.source].append(score)
    numbers["by_source"] = {  # named by its first predicted row
        each[0].pair.target.row["id"]: numbers_of(each) for each in by_source.values()
    }
    not_predicted = reasons(refused)
    numbers["not_predicted"] = not_predicted
    notes = [f"{len(refused)} rows of {file.name} are not predicted:"]
    notes += [f"- {len(ids)}: {why} ({', '.join(ids)})" for why, ids in not_predicted.items()]
    store(
        "predict" if held_out else "predict_cases",
        options=options,
        around=around,
        bar=BAR,
        holds=holds(numbers),
        table=Table(
            columns=("measure", "predicted", "median", "90th", "skill (means)", "naive", "bar"),
            rows=tuple(rows),
            notes=("\n".join(notes),),
        ),
        numbers=numbers,
    )


def why_not(pair: Pair, constants: Constants) -> str:
    try:
        scored(pair, constants)
    except InputError as error:
        return f"its smaller run {pair.anchor.row['id']} says nothing: {error.args[1]}"
    raise AssertionError(pair)


def holds(numbers: Mapping[str, Any]) -> bool:
    scale, slow, card = (
        numbers.get(name) for name in ("scale_out", "slow_networks", "another_card")
    )
    return bool(
        scale
        and scale["median"] <= 0.025
        and scale["p90"] <= 0.11
        and scale["skill"] >= 0.5
        and 0.87 <= numbers["coverage"] <= 0.93
        and (slow is None or (slow["median"] <= 0.025 and slow["skill"] >= 0.6))
        and (card is None or card["median"] <= 0.25)
    )


if __name__ == "__main__":
    main()
