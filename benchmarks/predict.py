"""Scores predicted step times against published measurements, each source left out of the fit.

    python benchmarks/predict.py [--cases FILE] [--small]

Each source of `data/published.csv` and `data/recent.csv` is predicted with constants and intervals
that were chosen by all other sources of its stack of software.  Rows are asked as on the command
line.  `--cases` scores a file of the same columns with those that ship, and `--small` the
development cases.  Measures nothing.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from math import ceil, exp, floor, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray  # noqa: TC002  (beside numpy)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT, Table, options_of, store, surroundings
from benchmarks.published import Case, read
from benchmarks.traced import memory_profile

from shardmark.base.errors import InputError
from shardmark.base.recipe import Recipe
from shardmark.predict import memory
from shardmark.predict.anchor import SHARED, calibrate_compute
from shardmark.predict.hardware.catalogue import GiB
from shardmark.predict.intervals import RESIDUALS, Basis, Residuals
from shardmark.predict.published import PublishedSpeed
from shardmark.predict.step import Factors, Step
from shardmark.predict.timing import CONSTANTS, Constants
from shardmark.ranks.strategies import build_strategy

CASES = Path(__file__).with_name("data") / "published.csv"
RECENT = CASES.with_name("recent.csv")
UNSEEN = CASES.with_name("unseen.csv")
"""Rows that no constant and no interval was chosen from, and none may be."""
PUBLISHED = ROOT / "src" / "shardmark" / "predict" / "published.csv"
MEMORY_CASES = CASES.with_name("memory.csv")
SERIES = (
    *("source", "model", "params_b", "task", "seq_len_or_image", "precision"),
    *("activation_checkpointing", "gpu", "throughput_unit"),
)
DISTRIBUTIONS = (0.005, 0.01, 0.015, 0.02, 0.025)
"""Candidates for the constant of scaling, which is chosen for each source by the other ones."""
FITTED = (
    *(
        "core_share",
        "core_convolution_share",
        "product_share",
        "attention_share",
        "convolution_share",
        "grouped_share",
    ),
    *("depthwise_share", "depthwise_accesses", "operand_rate", "winograd_factor", "memory_share"),
    *("transposed_accesses", "tile_seconds", "launch_seconds"),
)
"""Constants of one GPU, which are fitted for each source to the other ones."""
FITTED_BY_BASIS: Mapping[Basis, Sequence[str]] = {
    **{"images": FITTED, "eager": ("language",), "fused": ("language",)}
}
SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
"""Powers of another model's factor that each publisher's rows are tried with."""
OTHER_MODELS = 4
"""Other models of a source that a run is predicted from."""
STEP, MOST = 0.1, 0.5
"""Change of a constant's logarithm for its derivative, and its largest change in a fit."""
STIFFNESS = 0.05
MATTERS = 0.1
"""Share of a step that follows a constant, from which on a row says something about it."""
ROWS = 8
"""Rows of each source that a fit sees."""
LOOP = "adamw of transformers"
"""Optimizer that updates one parameter after the other, with one temporary of its size."""
WITHIN = 1.3
COVERAGE = 0.90
NAIVE_SHARE = 0.4
"""Naive rule without a measurement: all cards reach this fraction of their peak."""
WORST = 0.25
"""Cap of the errors in a choice: some published runs hang, or swap."""
TOLERANCE = 1.05
BAR = (
    "scale-out median 3.5 %, 90th percentile 11 %, skill 0.5; coverage 85 to 95 %; "
    "within 1.3: 85 % on one GPU, 70 % on several; bf16 language models 15 %, 80 %; dp 30 %"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured run, and a run that is predicted from it."""

    anchor: Case
    target: Case
    kind: Basis

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
    planner = replace(case.planner, constants=constants)
    return planner.step(case.profile, case.ranks, case.nodes)


def scored(pair: Pair, distribution: float | None = None, shared: float = SHARED) -> Score:
    """The score of a pair; raises `InputError` if the anchor cannot calibrate the prediction."""
    anchor, target = pair.anchor, pair.target
    shipped = CONSTANTS[target.stack]
    share = shipped.distribution if distribution is None else distribution
    constants = replace(shipped, distribution=share)
    micro_batch = anchor.micro_batch * (anchor.profile.tokens_per_sample or 1)
    factors = calibrate_compute(
        planned(anchor, shipped), anchor.seconds, micro_batch, constants, Factors()
    )
    if pair.kind == "another model":
        factors = Factors(compute=factors.compute**shared)
    seconds = planned(target, shipped).time(constants, factors).seconds
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
        kind = (section, case.recipe.compile, str(case.recipe.channels_last))
        groups[(*(case.row[key] for key in SERIES), *kind)].append(case)
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


def other_models(cases: Sequence[Case]) -> Iterable[Pair]:
    """Pairs of a source's trainings of two models on one kind of card, the smaller run first."""
    groups: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in cases:
        width = case.recipe.precision == "fp32"
        adapts = getattr(case.planner.cell.workload, "adapter", None) is not None
        card = case.node.node.card
        groups[_owner(case), card, width, case.is_text, case.recipe.compile, adapts].append(case)
    for group in groups.values():
        for target in group:
            others: dict[str, Case] = {}
            for case in sorted(group, key=lambda other: other.ranks):
                if case.row["model"] != target.row["model"] and case.ranks <= target.ranks:
                    others.setdefault(case.row["model"], case)
            for anchor in [*others.values()][:OTHER_MODELS]:
                yield Pair(anchor, target, "another model")


def all_scores(pairs: Iterable[Pair], distribution: float | None = None) -> dict[Pair, Score]:
    scores = {}
    for pair in pairs:
        with suppress(InputError):
            scores[pair] = scored(pair, distribution)
    return scores


def left_out(pairs: Sequence[Pair], grid: Sequence[float]) -> list[Score]:
    """Scores of each source with the distribution that is best for all other sources."""
    by_point = [all_scores(pairs, distribution) for distribution in grid]
    scores_left_out = []
    for source in dict.fromkeys(pair.source for pair in pairs):
        others = [
            fmean(min(WORST, s.error) for pair, s in scores.items() if pair.source != source)
            for scores in by_point
        ]
        best = by_point[others.index(min(others))]
        scores_left_out += [score for pair, score in best.items() if pair.source == source]
    return scores_left_out


def shares_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Pairs within 1.3 by power of another model's factor, and the power that others choose.

    For each publisher it is the one with the least mean error of the others, each weighing alike.
    """
    within: dict[str, float] = {}
    errors: dict[str, list[float]] = defaultdict(list)
    for share in SHARES:
        by_owner: dict[str, list[float]] = defaultdict(list)
        for pair in pairs:
            with suppress(InputError):
                by_owner[_owner(pair.target)].append(abs(scored(pair, shared=share).residual))
        within[f"{share:g}"] = fmean(r <= log(WITHIN) for of in by_owner.values() for r in of)
        for owner, of in by_owner.items():
            errors[owner].append(fmean(min(MOST, r) for r in of))
    chosen = {
        owner: SHARES[int(np.argmin(np.mean([e for o, e in errors.items() if o != owner], 0)))]
        for owner in (errors if len(errors) > 1 else ())
    }
    return {"within": within, "chosen": chosen}


@dataclass(frozen=True, slots=True)
class Alone:
    """A prediction without a measurement."""

    case: Case
    residual: float
    """log(measured / predicted seconds)."""

    @property
    def flops(self) -> float:
        """FLOPs of the model in a rank's step, without those that checkpointing repeats."""
        case = self.case
        operations = (o for u in case.profile.units for o in (*u.forward, *u.backward))
        passes = case.recipe.gradient_accumulation
        return passes * sum(o.flops.at(case.micro_batch) for o in operations)

    @property
    def speeds(self) -> list[float]:
        """Published and predicted TFLOP/s of a GPU."""
        published = self.flops / self.case.seconds / 1e12
        return [float(f"{speed:.4g}") for speed in (published, published * exp(self.residual))]

    @property
    def naive(self) -> float:
        """The residual of the naive rule."""
        again = 4 / 3 if self.case.recipe.activation_checkpointing else 1
        return log(self.case.seconds * NAIVE_SHARE * _peak(self.case) / (again * self.flops))


def residual_of(case: Case, constants: Constants) -> float:
    return log(case.seconds / planned(case, constants).time(constants).seconds)


def alone_left_out(
    cases: Sequence[Case], names: Sequence[str]
) -> tuple[list[Alone], dict[str, Constants], dict[str, list[int]]]:
    """Predictions of each publisher's rows with constants fitted to all others of the stack.

    The constants of each publisher follow, and the rows and publishers that a constant matters to.
    """
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_source[_owner(case)].append(case)
    seen = [c for of in by_source.values() for c in of[:: -(-len(of) // ROWS)]]
    shipped = CONSTANTS[cases[0].stack]
    residuals = np.array([residual_of(case, shipped) for case in seen])
    moved = [_with(shipped, {name: STEP}) for name in names]
    slopes = [[residual_of(case, each) for each in moved] for case in seen]
    derivatives = (np.array(slopes) - residuals[:, None]) / STEP
    owners = np.array([_owner(case) for case in seen])
    weights = np.array([1 / np.sqrt((owners == owner).sum()) for owner in owners])

    def fitted(others: NDArray[np.bool_]) -> Constants:
        changes = _fitted(residuals[others], derivatives[others], weights[others])
        return _with(shipped, dict(zip(names, changes, strict=True)))

    scores, folds = [], {"all": fitted(np.ones(len(seen), dtype=bool))}
    for owner, of in by_source.items():
        folds[owner] = fitted(owners != owner)
        scores += [Alone(case, residual_of(case, folds[owner])) for case in of]
    matters = np.abs(derivatives) > MATTERS
    rows = {
        name: [int(of.sum()), len({*owners[of]})] for name, of in zip(names, matters.T, strict=True)
    }
    return scores, folds, rows


def basis_of(case: Case) -> Basis:
    """What a prediction without a measurement is made from."""
    return case.stack if case.is_text else "images"


def _owner(case: Case) -> str:
    """Who published a source: several of one publisher are left out together."""
    return case.row["source"].partition("/")[0]


def _with(constants: Constants, changes: Mapping[str, float]) -> Constants:
    """The constants with some multiplied by the exponentials of their changes."""
    return replace(constants, **{n: getattr(constants, n) * exp(d) for n, d in changes.items()})


def _fitted(
    residuals: NDArray[np.float64], derivatives: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Changes with the least weighted sum of absolute residuals, which are linear in them."""
    changes = np.zeros(derivatives.shape[1])
    for _ in range(30):
        left = np.abs(residuals + derivatives @ changes)
        scaled = derivatives * (weights / np.clip(left, 0.02, None) * (left < 3 * WORST))[:, None]
        stiff = STIFFNESS * weights.sum() * np.eye(len(changes))
        changes = np.clip(
            -np.linalg.solve(scaled.T @ derivatives + stiff, scaled.T @ residuals), -MOST, MOST
        )
    return changes


SPEEDS: Mapping[str, Callable[[Case], bool]] = {
    "language, one GPU": lambda case: case.is_text and case.ranks == 1,
    "language, several": lambda case: case.is_text and case.ranks > 1,
    "images, one GPU": lambda case: not case.is_text and case.ranks == 1,
    "images, several": lambda case: not case.is_text and case.ranks > 1,
}


GROUPS: Mapping[str, Callable[[Case], bool]] = {
    "one GPU": lambda case: case.ranks == 1,
    "several GPUs": lambda case: case.ranks > 1 and case.strategy.name != "dp",
    "dp": lambda case: case.strategy.name == "dp",
    "language models, 16 bits": lambda case: case.is_text and case.recipe.precision != "fp32",
    "images": lambda case: not case.is_text,
}


def alone_numbers(scores: Sequence[Alone]) -> dict[str, float]:
    residuals, naive = [s.residual for s in scores], [s.naive for s in scores]
    return {
        "rows": len(scores),
        "sources": len({_owner(s.case) for s in scores}),
        "median": median(abs(exp(r) - 1) for r in residuals),
        "bias": exp(median(residuals)) - 1,
        "within": fmean(abs(r) <= log(WITHIN) for r in residuals),
        "naive_within": fmean(abs(r) <= log(WITHIN) for r in naive),
    }


def numbers_of(scores: Sequence[Score]) -> dict[str, float]:
    errors, naive = [s.error for s in scores], [s.naive for s in scores]
    return {
        "pairs": len(scores),
        "sources": len({s.pair.source for s in scores}),
        "median": median(errors),
        "p90": float(np.quantile(errors, 0.9)),
        "naive_median": median(naive),
        "naive_p90": float(np.quantile(naive, 0.9)),
        "skill": 1 - median(errors) / median(naive),
        "skill_of_means": 1 - fmean(errors) / fmean(naive),
    }


def memory_numbers() -> dict[str, dict[str, float]]:
    """Errors of predicted memory by kind of model, and how often the range holds the measurement.

    NVML counts what the usual allowance is for; some sources count tensors alone.
    """
    errors: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    with MEMORY_CASES.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            passes, ranks = int(row["passes"]), int(row["ranks"])
            recipe = Recipe.model_validate(
                {
                    **{"steps": 1, "optimizer": {"name": row["optimizer"].partition(" ")[0]}},
                    **{"per_rank_batch": int(row["samples"]) * passes},
                    **{"gradient_accumulation": passes, "precision": row["precision"]},
                    "activation_checkpointing": "checkpointed" in row["profile"],
                }
            )
            strategy = build_strategy(row["strategy"], {})
            precision = "fp32" if row["precision"] == "fp32" else "16"
            profile = memory_profile(f"{row['profile']} {precision}")
            if row["optimizer"] == LOOP:
                profile = replace(profile, update_values=1, updates_together=False)
            tensors = memory.rank_memory(profile, strategy, recipe, ranks).peak_bytes
            least, usual, most = (
                tensors if row["meaning"] == "tensors" else each.needed_bytes(tensors)
                for each in (memory.LEAST, memory.USUAL, memory.MOST)
            )
            found = float(row["gib"]) * GiB
            kind = "language" if re.search("bert|gpt", row["profile"]) else "vision"
            errors[kind].append((abs(usual / found - 1), least <= found <= most))
    return {
        kind: {
            "rows": len(of),
            "median": median(error for error, _ in of),
            "in_range": fmean(inside for _, inside in of),
        }
        for kind, of in errors.items()
    }


def measured(cases: Sequence[Case], *, held_out: bool) -> dict[str, Any]:
    """All measures; with `held_out` each source is left out of the constants that predict it."""
    scaled = list(scale_out(cases))
    scores = left_out(scaled, DISTRIBUTIONS) if held_out else [*all_scores(scaled).values()]
    cards, models = (
        list(all_scores(pairs).values()) for pairs in (other_cards(cases), other_models(cases))
    )
    moved = [*cards, *models]
    stated = [case for case in cases if not case.assumed]
    numbers: dict[str, Any] = {"memory": memory_numbers()}
    alone = []
    for basis, names in FITTED_BY_BASIS.items():
        alike = [case for case in stated if basis_of(case) == basis]
        if not held_out:
            alone += [Alone(case, residual_of(case, CONSTANTS[case.stack])) for case in alike]
            continue
        left, folds, rows = alone_left_out(alike, names)
        alone += left
        for name in names:
            values = [float(f"{getattr(fold, name):.3g}") for fold in folds.values()]
            ends = [values[0], min(values), max(values)]
            numbers.setdefault("fitted", {}).setdefault(basis, {})[name] = [*ends, *rows[name]]
    chosen = {"scale-out": scores, "another card": cards, "another model": models}
    numbers |= {name: numbers_of(of) for name, of in chosen.items() if of}
    numbers["shares"] = shares_of([score.pair for score in models])
    numbers["alone"] = {
        name: alone_numbers(of)
        for name, belongs in GROUPS.items()
        if (of := [score for score in alone if belongs(score.case)])
    }
    by_kind: dict[Basis, list[tuple[str, float]]] = defaultdict(list)
    for score in (*scores, *moved):
        if score.pair.kind == "another model" and basis_of(score.pair.target) != "fused":
            continue  # the interval without a measurement stays
        by_kind[score.pair.kind].append((score.pair.source, score.residual))
    for one in alone:
        by_kind[basis_of(one.case)].append((_owner(one.case), one.residual))
    numbers["coverage"] = {kind: covered(of, kind, held_out) for kind, of in by_kind.items()}
    numbers["residuals"] = {
        kind: asdict(residuals_of(balanced(of))) for kind, of in by_kind.items()
    }
    by_source = defaultdict(list)
    for score in scores:
        by_source[score.pair.source].append(score)
    numbers["by_source"] = {  # named by its first predicted row
        each[0].pair.target.row["id"]: numbers_of(each) for each in by_source.values()
    }
    numbers["alone_by_source"] = {
        f"{owner} ({basis_of(of[0].case)})": alone_numbers(of)
        for owner in dict.fromkeys(s.case.row["source"] for s in alone)
        if (of := [s for s in alone if s.case.row["source"] == owner])
    }
    numbers["speeds"] = {
        name: {score.case.row["id"]: score.speeds for score in alone if belongs(score.case)}
        for name, belongs in SPEEDS.items()
    }
    worst = sorted(alone, key=lambda score: -abs(score.residual))[:10]
    numbers["worst"] = {s.case.row["id"]: exp(s.residual) - 1 for s in worst}
    return numbers


def balanced(residuals: Sequence[tuple[str, float]]) -> list[float]:
    """Residuals of which no source has more than a fifth: large ones are thinned out."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, residual in residuals:
        by_source[source].append(residual)
    most = max(ROWS, len(residuals) // 5)
    return [r for of in by_source.values() for r in sorted(of)[:: -(-len(of) // most)]]


def residuals_of(logarithms: Iterable[float]) -> Residuals:
    """Return the quantiles of log(measured / predicted), such that the next one lies inside them.

    Source: conformal prediction, Vovk et al., Algorithmic Learning in a Random World (2005).
    """
    ordered = sorted(logarithms)
    tail = (1 - COVERAGE) / 2
    low = max(0, floor((len(ordered) + 1) * tail) - 1)
    high = min(len(ordered), ceil((len(ordered) + 1) * (1 - tail))) - 1
    return Residuals(exp(ordered[low]), exp(ordered[high]))


def covered(of: Sequence[tuple[str, float]], kind: Basis, held_out: bool) -> float:
    """Fraction of runs inside the interval, which the residuals of all other sources give."""
    inside: list[bool] = []
    for source in dict.fromkeys(source for source, _ in of):
        others = [pair for pair in of if pair[0] != source]
        if held_out and not others:
            continue
        made = residuals_of(balanced(others)) if held_out else RESIDUALS[kind]
        inside += [
            made.low <= exp(residual) <= made.high for name, residual in of if name == source
        ]
    return fmean(inside)


def write_published(cases: Sequence[Case]) -> None:
    """Write the speeds that ship: of each source, model, number of cards and length, the first."""
    shown: dict[tuple[object, ...], dict[str, object]] = {}
    for case in cases:
        tokens, precision = case.profile.tokens_per_sample or 1, case.recipe.precision
        facts = {
            "source": re.split(r"[ (]", case.row["source"])[0],
            "model": case.row["model"],
            "parameters": f"{case.profile.size.parameters:.4g}",
            "unit": "tokens" if case.is_text else "samples",
            "length": f"{tokens:g}",
            "precision": precision,
            "strategy": str(case.planner.cell.strategy.name),
            "card": case.node.node.card,
            "devices": case.ranks,
        }
        work = case.question.samples * tokens
        seconds = planned(case, CONSTANTS[case.stack]).time(CONSTANTS[case.stack]).seconds
        speeds = {"rate": f"{work / case.seconds:.4g}", "planned": f"{work / seconds:.3g}"}
        shown.setdefault(tuple(facts.values()), facts | speeds)
    with PUBLISHED.open("w", newline="", encoding="utf-8") as file:
        names = [field.name for field in fields(PublishedSpeed)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(shown.values())


def rows_of(numbers: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    bars = {"scale-out": "3.5 %, 11 %, 0.5", "another card": "", "another model": ""}
    for name, bar in bars.items():
        if n := numbers.get(name):
            yield (
                name,
                f"{n['pairs']} of {n['sources']}",
                f"{n['median']:.1%}, {n['p90']:.1%}, {n['skill']:.2f} ({n['skill_of_means']:.2f})",
                f"{n['naive_median']:.1%}, {n['naive_p90']:.1%}",
                bar,
            )
    bars = {"one GPU": "85 %", "several GPUs": "70 %", "dp": "30 %"}
    for name, n in numbers["alone"].items():
        yield (
            f"{name}, nothing measured",
            f"{n['rows']} of {n['sources']}",
            f"within {WITHIN} {n['within']:.0%}; {n['median']:.0%}, {n['bias']:+.0%}",
            f"within {n['naive_within']:.0%}",
            bars.get(name, "80 %, 15 %"),
        )
    for name, n in numbers["memory"].items():
        share = f"in the range {n['in_range']:.0%}"
        bar = {"vision": "4 %", "language": "7 %"}[name]
        yield (f"memory, {name}", f"{n['rows']}", f"{n['median']:.0%}, {share}", "", bar)
    for kind, share in numbers["coverage"].items():
        yield (f"coverage, {kind}", "", f"{share:.0%}", "", "85 to 95 %")


def main() -> None:
    parser = options_of("predict", __doc__)
    parser.add_argument("--cases", type=Path, help="another file, with the constants that ship")
    options = parser.parse_args()
    files = [options.cases] if options.cases else [CASES, RECENT]
    around = surroundings()
    cases: list[Case] = []
    refused: list[tuple[str, str]] = []
    for file in files:
        of_file, without = read(file)
        cases, refused = [*cases, *of_file], [*refused, *without]
    numbers = measured(cases, held_out=options.cases is None and not options.small)
    if options.cases is None:
        write_published([case for case in cases if not case.assumed])
    numbers["not_predicted"] = dict(Counter(reason for _, reason in refused).most_common())
    notes = [f"Not predicted, {len(refused)} rows:"]
    notes += [f"- {count}: {why}" for why, count in numbers["not_predicted"].items()]
    notes += ["Worst without a measurement:"]
    notes += [f"- {name}: {error:+.0%}" for name, error in numbers["worst"].items()]
    store(
        "predict" if options.cases is None else "predict_cases",
        options=options,
        around=around,
        bar=BAR,
        holds=holds(numbers),
        table=Table(
            columns=("measure", "rows, sources", "predicted", "naive rule", "bar"),
            rows=tuple(rows_of(numbers)),
            notes=("\n".join(notes),),
        ),
        numbers=numbers,
    )


def holds(numbers: Mapping[str, Any]) -> bool:
    scale, alone, language = numbers.get("scale-out"), numbers["alone"], "language models, 16 bits"
    if scale is None or not {"one GPU", "several GPUs", "dp", language} <= alone.keys():
        return False  # another file lacks rows of some kind
    text = alone[language]
    return bool(
        (scale["median"] <= 0.035 and scale["p90"] <= 0.11 and scale["skill"] >= 0.5)
        and all(0.85 <= share <= 0.95 for share in numbers["coverage"].values())
        and (alone["one GPU"]["within"] >= 0.85 and alone["several GPUs"]["within"] >= 0.7)
        and (text["within"] >= 0.8 and abs(text["bias"]) <= 0.15)
        and alone["dp"]["median"] <= 0.3
    )


if __name__ == "__main__":
    main()
