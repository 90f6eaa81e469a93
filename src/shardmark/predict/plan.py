"""Predicts memory and time of an experiment's strategies on machines that were not measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from shardmark.base.cells import ranks_and_nodes, title_of
from shardmark.base.errors import InputError, ShardmarkError, StrategyUnavailable
from shardmark.base.machine import Machine
from shardmark.base.ranking import Question, Ranking
from shardmark.base.recipe import MAX_RANKS, Recipe
from shardmark.base.text import as_text, counted, listed, with_options
from shardmark.bench.analysis.compare.rows import gathered
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.matrix import cells_of_any_size, unsupported_reason
from shardmark.predict.anchor import Anchor, Anchors
from shardmark.predict.batch.predicted import largest
from shardmark.predict.hardware.catalogue import GiB, NodeType, joined_node, nodes_of
from shardmark.predict.intervals import OFFLOADED, RESIDUALS, Basis
from shardmark.predict.measured import Measured, measured_number, measured_trials
from shardmark.predict.memory import Fit, RankMemory, fit_of, rank_memory, usable_bytes
from shardmark.predict.model_name import ASSUMED_STEPS, EACH_PASS, as_usual, with_strategy_options
from shardmark.predict.models import Models
from shardmark.predict.profile import Profile
from shardmark.predict.published import nearest_published
from shardmark.predict.remedies import (
    CHANNELS_LAST,
    CHECKPOINTING,
    Remedy,
    fewest_devices,
    remedies_of,
)
from shardmark.predict.request import PlanRequest
from shardmark.predict.search.search import Search, searcher_of, winner_of
from shardmark.predict.step import Factors, Step, StepTime, plan_step
from shardmark.predict.timing import Constants, Stack
from shardmark.ranks.trial import StrategySpec, Trial
from shardmark.ranks.workloads.language.options import LanguageOptions

HOUR_SECONDS = 3600.0
EQUAL_WORK = 1.1
"""Factor up to which recipes train equally many samples: epochs drop a partial step."""
COMPARED_WORK = {"tokens": 1e9, "samples": 1e6}
"""Work that hours and dollars are for if the recipe's cannot be compared, by unit."""
PEAK_ERROR = 0.03
"""Relative error of predicted peaks: smaller differences decide nothing."""
NO_CHECKPOINTING = "no activation checkpointing", "activation checkpointing"
SOME_CHECKPOINTING = NO_CHECKPOINTING[0], f"{NO_CHECKPOINTING[1]} where it is needed"
"""Words of an assumption, and those that replace them."""
RECOMPUTED = 0.75
"""Fraction of its speed that a strategy keeps if it recomputes activations, and only computes."""
FP8 = "fp8 in products of blocks, else bf16"
LONG_TOKENS = 32_768
"""Tokens of a sample from which programs usually divide it between cards."""


TOO_LARGE = "weights, gradients and optimizer state alone need more than its cards have"
"""Reason for no trace, so that `device_bytes` counts these alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of a strategy on a number of nodes; None, with a `reason`, for what has none."""

    strategy: str
    strategy_options: Mapping[str, Any]
    varied: Mapping[str, Any]
    nodes: int
    ranks: int
    devices: int
    card_bytes: float
    samples: int
    """Samples of a step, over all ranks."""
    tokens_per_sample: float | None
    """Number of tokens of a sample without padding."""
    useful_fraction: float = 1.0
    """Fraction of its tokens that are no padding."""
    own_mathematics: tuple[str, ...] = ()
    """`Numerics.descriptions`: differences from the training of one device."""
    parameters: int | None = None
    """Number of elements of the model's parameters."""
    active_parameters: int | None = None
    """Number of those that compute a token; None unless tokens are sent to some experts."""
    memory: RankMemory | None = None
    device_bytes: float | None = None
    """Memory that the card usually needs, context and libraries included; of a CPU's tensors."""
    card_fit: Fit | None = None
    """Answer for the card alone: `fit` also asks for the host's memory."""
    host_bytes: float = 0.0
    """Offloaded state of all ranks of a node in the host's memory."""
    host_room_bytes: float | None = None
    """Memory of the host; None if it is not known."""
    largest_batch: int | None = None
    """Largest number of samples that fits into a pass of a rank; 0 if not even one fits."""
    time: StepTime | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    """Bounds of a step: a 90 % interval, whose origin `predict/intervals.py` describes."""
    naive_samples_per_second: float | None = None
    """Throughput if each device were as fast as on the fewest devices."""
    steps: int | None = None
    """Steps of the recipe."""
    price_per_hour: float | None = None
    """Price of one card."""
    reason: str | None = None
    on: str | None = None
    """Name of the machines, in a plan for several kinds."""

    @property
    def at_least(self) -> bool:
        """True if `device_bytes` counts no activations, since the rest is too large."""
        return self.reason == TOO_LARGE

    @property
    def label(self) -> str:
        """Strategy with its options, as `fsdp-hybrid (shard_group=2)`."""
        return with_options(self.strategy, self.strategy_options)

    @property
    def place(self) -> str:
        """Strategy, ranks and varied keys, as `ddp on 8 ranks, precision bf16`."""
        varied = (
            f", {title_of(key).rpartition('.')[2]} {as_text(value)}"
            for key, value in self.varied.items()
        )
        on = "" if self.on is None else f" of {self.on}"
        ranks = ranks_and_nodes(self.ranks, self.nodes)
        return f"{self.label} on {ranks}{on}{''.join(varied)}"

    @property
    def task(self) -> dict[str, Any]:
        """Varied keys of the task; speeds in tokens compare over lengths of sequences."""
        return {
            key: value
            for key, value in self.varied.items()
            if key.startswith("workload.") and key != "workload.sequence_length"
        }

    def error_fraction(self, question: Question) -> float:
        """Return the fraction by which memory, or the time of a step, may exceed the prediction."""
        if question == "memory":
            return PEAK_ERROR
        if self.step_seconds is None or self.high_seconds is None:
            return 0.0
        return self.high_seconds / self.step_seconds - 1

    @property
    def fit(self) -> Fit | None:
        """Answer whether it fits into the memory of the card and of the host."""
        overflows = self.host_room_bytes is not None and self.host_bytes > self.host_room_bytes
        return "no" if overflows and self.card_fit is not None else self.card_fit

    @property
    def fits(self) -> bool | None:
        """False only if it fits under no circumstances."""
        return None if self.fit is None else self.fit != "no"

    @property
    def step_seconds(self) -> float | None:
        return None if self.time is None else self.time.seconds

    @property
    def samples_per_second(self) -> float | None:
        return None if self.time is None else self.samples / self.time.seconds

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens_per_sample else "samples"

    @property
    def step_work(self) -> float:
        """Tokens of a language model, else samples."""
        return self.samples * (self.tokens_per_sample or 1)

    @property
    def work_per_second(self) -> float:
        return 0.0 if self.time is None else self.step_work / self.time.seconds

    @property
    def work(self) -> float | None:
        """Tokens or samples that the recipe's steps train."""
        return None if self.steps is None else self.steps * self.step_work

    def hours_for(self, work: float | None = None) -> float | None:
        """Duration of so much work, or of the recipe's steps, without evaluations and start."""
        work, rate = work or self.work, self.work_per_second
        return work / rate / HOUR_SECONDS if work is not None and rate else None

    def dollars_for(self, work: float | None = None) -> float | None:
        hours = self.hours_for(work)
        if hours is None or self.price_per_hour is None:
            return None
        return hours * self.devices * self.price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The predictions for an experiment on one or several kinds of machines."""

    experiment: str
    on: str
    rows: tuple[Prediction, ...]
    anchored: str | None
    """Measured trials that the predictions start from; None without a run."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the measured trials."""
    notes: tuple[str, ...] = ()
    search: Search | None = None
    """Search over all layouts of the most ranks, if requested."""
    winner: Experiment | None = None
    """The fastest layout, as an experiment to run."""
    precision: str | None = None
    """Precision of the recipe; None if it is an axis."""
    stack: Stack = "eager"
    """Vintage of the software."""
    requested_work: float | None = None
    """Tokens or samples that hours and dollars are for, if they are not those of the recipe."""
    requested_samples: float | None = None
    """Samples that the requested tokens are those of; None if tokens or nothing was requested."""
    assumed: str | None = None
    """Assumptions about a model that was named alone; None for an experiment of the user."""
    remedies: tuple[Remedy, ...] = ()
    """Changes under which the experiment fits, if nothing does."""
    fewest: Remedy | None = None
    """The fewest devices of one node on which a strategy fits, if they are fewer."""

    @property
    def best(self) -> tuple[Ranking[Prediction], ...]:
        """The best rows for speed, memory and cost among those that fit."""
        predicted = [row for row in self.rows if row.time is not None]
        fitting = [row for row in predicted if row.fit == "yes"]
        fitting = fitting or [row for row in predicted if row.fits]
        return tuple(_ranking(question, fitting) for question in MINIMISED if fitting)

    @property
    def by_task(self) -> tuple[Plan, ...]:
        """Parts of the plan with one task each: models and data sets do not compete."""
        tasks = gathered((as_text(row.task), row) for row in self.rows)
        return tuple(replace(self, rows=tuple(rows)) for rows in tasks.values()) or (self,)

    @property
    def unit(self) -> str:
        return next((row.unit for row in self.rows if row.unit == "tokens"), "samples")

    @property
    def answered(self) -> bool:
        """True if something fits and its speed is predicted."""
        return bool(self.best or (self.search is not None and self.search.front))

    @property
    def work(self) -> float | None:
        """Tokens or samples that hours and dollars are for; None for those of the recipe.

        If rows train unequal numbers of samples, as with a batch for each rank, dollars for the
        recipe cannot be compared; the steps of a model that was named alone mean nothing.
        """
        if self.requested_work is not None:
            return self.requested_work
        works = [row.work for row in self.rows if row.time is not None and row.work]
        equal = not works or max(works) <= EQUAL_WORK * min(works)
        if equal and self.assumed is None:
            return None
        return COMPARED_WORK[self.unit]


FASTER = 1.05
"""Least ratio of speeds that is worth a note."""
TIE = 0.01
"""Relative difference of predictions that decides nothing: their errors are larger."""


def _ranking(question: Question, rows: Sequence[Prediction]) -> Ranking[Prediction]:
    """Rank the strategies by their best rows; among ties one that trains as a single device."""
    by_label = gathered(((row.label, row.on), row) for row in sorted(rows, key=MINIMISED[question]))
    ordered = [best for best, *_ in by_label.values()]
    limit = (1 + TIE) * MINIMISED[question](ordered[0])
    tied = (row for row in ordered if MINIMISED[question](row) <= limit and not row.own_mathematics)
    first = next(tied, ordered[0])
    return ranking_of(question, first, [row for row in ordered if row is not first])


def ranking_of(
    question: Question, best: Prediction, rivals: Sequence[Prediction]
) -> Ranking[Prediction]:
    """Rank rivals within the error of the best row's prediction as close."""
    limit = (1 + best.error_fraction(question)) * MINIMISED[question](best)
    close = tuple(rival for rival in rivals if MINIMISED[question](rival) <= limit)
    return Ranking(
        question=question,
        row=best,
        rivals=tuple(rivals),
        close=close,
        reason="tie" if close else "shown" if rivals else "alone",
    )


MINIMISED: Mapping[Question, Callable[[Prediction], float]] = {
    "fastest": lambda row: 1 / row.work_per_second,
    "memory": lambda row: row.device_bytes or 0.0,
    "cost": lambda row: (
        row.devices
        * (row.hours_for(1) or 0.0)
        * (1.0 if row.price_per_hour is None else row.price_per_hour)
    ),
}
"""Quantity that the best row minimises: the cost in card hours, or in dollars with a price."""


def parse_nodes(text: str) -> tuple[int, ...]:
    """Parse `4`, `1,2,3` or `1..128`, which doubles the first up to the last.

    Raises `InputError`.
    """
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= MAX_RANKS:
            allowed = f"allowed are numbers from 1 to {MAX_RANKS}, as 4, 1,2,3 or 1..128"
            raise InputError("--nodes", f"found {part!r}", allowed)
        counts.add(last)
        while first < last:
            counts.add(first)
            first *= 2
    return tuple(sorted(counts))


def make_plan(request: PlanRequest, models: Models, constants: Constants | None = None) -> Plan:
    """Predict each cell of the experiment on each number of nodes.

    The rows of several kinds of machines name theirs.  Raises `InputError` for an unknown machine,
    a run that says nothing about the experiment's model, and a search on several kinds.
    """
    asked, request = request, request.resolved()
    models.reference_model = request.reference_model
    models.routed_experts = request.assumed is not None and request.stack == "fused"
    number = None if asked.measured is None else measured_number(asked, models)
    kinds = [*dict.fromkeys(request.machines)]
    prices: list[float | None] = [*request.prices_per_hour] or [None]
    if len(prices) not in {1, len(kinds)}:
        message = f"found {len(prices)} prices for {len(kinds)} kinds of machines"
        raise InputError("--price-per-hour", message, "give one for all, or one for each --on")
    if request.search and len(kinds) > 1:
        raise InputError("--search", f"found {len(kinds)} kinds of machines", "give one --on")
    prices *= len(kinds) // len(prices)
    constants = constants or request.constants
    plan_on = partial(_plan_on, request=request, models=models, constants=constants, number=number)
    if len(kinds) == 1:
        return plan_on(kinds[0], prices[0])
    plans = [plan_on(on, price, sized=False) for on, price in zip(kinds, prices, strict=True)]
    if request.assumed is not None:  # nobody chose the strategies: each machine uses all of it
        plans = [replace(plan, rows=_using_most_devices(plan.rows)) for plan in plans]
    rows = tuple(replace(row, on=plan.on) for plan in plans for row in plan.rows)
    fits, assumed = any(row.fit == "yes" for row in rows), plans[0].assumed
    if len({plan.assumed for plan in plans}) > 1:
        assumed = (request.assumed or "").replace(*SOME_CHECKPOINTING)
    return replace(
        plans[0],
        assumed=assumed,
        on=f"{', '.join(kinds[:-1])} and {kinds[-1]}",
        rows=rows,
        remedies=() if fits else plan_on(kinds[0], prices[0]).remedies,
        doubts=tuple(dict.fromkeys(doubt for plan in plans for doubt in plan.doubts)),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


def _using_most_devices(rows: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """Return the predicted rows with the most devices; all rows if nothing was predicted."""
    most = max((row.devices for row in rows if row.time is not None), default=0)
    return tuple(row for row in rows if row.devices == most and row.time is not None) or tuple(rows)


def _best_on_fewer(planners: Sequence[Planner], devices: int) -> Iterator[Prediction]:
    """Yield the fastest row that fits on each half of the devices, and that of one device."""
    while (devices := devices // 2) >= 1:
        cells = planners
        if devices == 1:
            single = {"strategy": StrategySpec(name="single"), "world_size": 1, "varied": {}}
            cells = [replace(planners[0], cell=planners[0].cell.changed(**single))]
        if (best := _fastest([planner.row_on(devices) for planner in cells])) is not None:
            yield best


def _plan_on(
    on: str,
    price_per_hour: float | None,
    *,
    request: PlanRequest,
    models: Models,
    constants: Constants,
    number: Measured | None,
    sized: bool = True,
) -> Plan:
    """Predict the experiment on machines of one kind; `number` is a measured speed.

    `sized` looks for the fewest devices on which it fits, or for changes under which it does.
    """
    experiment, nodes = request.experiment, request.nodes
    _check(on, price_per_hour, request)
    name, count = nodes_of(on)
    nodes = nodes if count is None else (count,)
    node, notes = joined_node(name, nodes[-1])
    if node.node.devices * nodes[-1] > MAX_RANKS:
        message = f"{nodes[-1]} nodes of {node.node.devices} cards"
        raise InputError("--nodes", message, f"allowed are at most {MAX_RANKS} ranks")
    if node.card.device_type == "cpu" and node.card.operation_seconds is None:
        notes.append(
            "Libraries' own code is left out: the card's file has no operation_seconds, which"
            " `shardmark doctor --network --write FILE` measures."
        )
    cells, left_out = cells_of_any_size(experiment)
    anchors = _anchors(request, node, cells, models, constants, number=number)
    planners = planners_of(
        request, node, cells, models, constants, anchors=anchors, price_per_hour=price_per_hour
    )
    cells = [planner.cell for planner in planners]
    assumed, may_recompute = request.assumed, _may_recompute(request)
    room = node.node.devices * nodes[-1] * usable_bytes(node.card)
    large = may_recompute and models.state_exceeds(cells[0], room)
    rows = [] if large else [row for planner in planners for row in planner.rows(nodes)]
    recomputing = _recomputing(planners, rows, nodes) if may_recompute else None
    if recomputing is not None:
        assumed = (assumed or "").replace(*NO_CHECKPOINTING)
        planners, rows, without = recomputing
        notes += [f"On {on} {text}" for text in without]
        cells = [planner.cell for planner in planners]
    if request.assumed:
        if nodes[-1] == 1 and any(row.fits for row in rows):
            # Nobody chose the number of ranks: fewer may be faster.
            rows += _best_on_fewer(planners, node.node.devices)
        notes += _faster_notes(planners, _fastest(rows), nodes, on)
    notes += _accumulation_notes(planners, nodes)
    best, winner = None, None
    if request.search:
        factors = Factors() if (anchor := planners[0].anchor) is None else anchor.factors
        try:
            searcher = searcher_of(
                cells, node, nodes[-1], models, constants=constants, factors=factors
            )
            best = searcher.search(usable_bytes(node.card))
        except ShardmarkError as error:
            notes.append(f"No layouts could be searched: {error}")
        else:
            winner = winner_of(best, experiment, cells[0])
    if (request.padding or request.mean_length) and all(row.unit == "samples" for row in rows):
        message = "samples of this model have no tokens"
        raise InputError("--padding or --mean-length", message, "leave it out")
    notes += [f"left out: {reason}" for reason in left_out]
    notes += _placement_notes(rows)
    notes += _published_notes(_fastest(rows) if anchors is None else None, node, cells)
    waiting = {row.label: None for row in rows if row.time is not None and row.time.host_bound}
    if waiting:
        notes.append(
            f"In steps of {', '.join(waiting)} the card waits for the host, whose Python code"
            " launches operations or prepares samples more slowly than the card computes. Hosts"
            " differ by a factor of three: measure such steps."
        )
    return Plan(
        experiment=experiment.name,
        on=on,
        rows=tuple(rows),
        anchored=None if anchors is None else anchors.description,
        doubts=() if anchors is None else tuple(anchors.doubts),
        notes=(*notes, *models.notes, *(() if anchors is None else anchors.notes)),
        search=best,
        winner=winner,
        precision=_precision(request, cells),
        stack=request.stack or "eager",
        **_requested(request, rows),
        assumed=assumed,
        **(_sizes_that_fit(rows, cells, node, nodes[-1], models) if sized else {}),
    )


def _precision(request: PlanRequest, cells: Iterable[Trial]) -> str | None:
    precisions = {cell.recipe.precision for cell in cells}
    return FP8 if request.fp8 else precisions.pop() if len(precisions) == 1 else None


def _best_rate(rows: Iterable[Prediction]) -> float:
    """Return the speed of the fastest row that fits; 0 if none does."""
    return max((row.work_per_second for row in rows if row.fit == "yes"), default=0.0)


def _check(on: str, price_per_hour: float | None, request: PlanRequest) -> None:
    """Raise `InputError` for a number of nodes, a price or a precision that cannot be."""
    _, count = nodes_of(on)
    if count is not None and request.nodes not in ((1,), (count,)):
        message = f"found {listed([*map(str, request.nodes)])}, and {on} says {count}"
        raise InputError("--nodes", message, "leave one of them out")
    if price_per_hour is not None and not 0 <= price_per_hour < inf:
        message = f"found {price_per_hour:g}"
        raise InputError("the price of a card's hour", message, "allowed are dollars from 0 on")
    if request.fp8 and request.search:
        raise InputError("--precision fp8", "--search has no products in 8 bits", "leave one out")
    cells = cells_of_any_size(request.experiment)[0] if request.fp8 else []
    if any(cell.recipe.precision != "bf16" for cell in cells):
        message = "the experiment has other precisions than bf16"
        raise InputError("--precision fp8", message, "leave recipe.precision out of --set")


def _may_recompute(request: PlanRequest) -> bool:
    """Return whether activations are checkpointed if they do not fit.

    Usual recipes of language models do so.
    """
    experiment, key = request.experiment, "activation_checkpointing"
    chosen = key in experiment.recipe.model_fields_set or f"recipe.{key}" in experiment.matrix
    is_language = isinstance(experiment.workload, LanguageOptions)
    return request.assumed is not None and is_language and not chosen


def _recomputing(
    planners: Sequence[Planner], rows: Sequence[Prediction], nodes: Sequence[int]
) -> tuple[list[Planner], list[Prediction], list[str]] | None:
    """Return planners with activation checkpointing, their rows, and what `rows` need instead.

    Return None if a strategy that fits without it is faster than what fits with it, or has more
    than `RECOMPUTED` of the speed of the fastest, or if nothing fits with it and it saves nothing.
    """
    fastest = max((row.work_per_second for row in rows), default=0.0)
    if _best_rate(rows) > RECOMPUTED * fastest:
        return None
    changed = [replace(planner, cell=CHECKPOINTING.applied(planner.cell)) for planner in planners]
    changed_rows = [row for planner in changed for row in planner.rows(nodes)]
    best, before = _best_rate(changed_rows), [row.device_bytes or inf for row in rows]
    least = min(changed_rows, key=lambda row: (not row.fits, row.device_bytes or inf))
    saves = not rows or (least.device_bytes or inf) < (1 - PEAK_ERROR) * min(before)
    if best < _best_rate(rows) or not (best or saves):
        return None
    texts = [
        "it is planned with activation checkpointing, as usual recipes have it; without it"
        f" {row.strategy} needs {_needs(row)}."
        for row in rows
        if least.fits and row.place == least.place
    ]
    return changed, changed_rows, texts


def planners_of(
    request: PlanRequest,
    node: NodeType,
    cells: Iterable[Trial],
    models: Models,
    constants: Constants,
    *,
    anchors: Anchors | None = None,
    price_per_hour: float | None = None,
) -> list[Planner]:
    """Return what predicts each cell of a resolved request on machines of one kind."""
    if request.assumed:
        cells = map(as_usual, cells)
    return [
        Planner(
            cell=cell,
            node=node,
            models=models,
            anchor=None if anchors is None else anchors.anchor(cell),
            price_per_hour=price_per_hour,
            constants=constants,
            request=request,
        )
        for cell in cells
    ]


def _anchors(
    request: PlanRequest,
    node: NodeType,
    cells: Sequence[Trial],
    models: Models,
    constants: Constants,
    *,
    number: Measured | None,
) -> Anchors | None:
    """Return what the user has measured; None for nothing.

    Raises `InputError` for a run that has nothing in the precision of any cell.
    """
    if request.run is None and number is None:
        return None
    measured = [] if request.run is None else measured_trials(request.run, node, cells)
    anchors = Anchors([*measured, *filter(None, [number])], node, models, constants)
    if request.run is not None and not any(map(anchors.matching, cells)):
        reasons = (trial.disturbed for trial in request.run.trials)
        disturbed = next((f" that was not disturbed: {text}" for text in reasons if text), "")
        message = f"it has no measured trial in this precision{disturbed}"
        raise InputError(f"--from {request.run.path}", message, "measure one, or leave --from out")
    return anchors


def _requested(request: PlanRequest, rows: Sequence[Prediction]) -> dict[str, Any]:
    """Return the work to price in the unit of the rows.  Raises `InputError` for another unit."""
    work, lengths = request.work, [row.tokens_per_sample for row in rows if row.tokens_per_sample]
    if work is not None and request.work_unit == "tokens" and rows and not lengths:
        raise InputError("--tokens", "samples of this model have no tokens", "give --samples")
    recipe = request.experiment.recipe
    if work is None and request.assumed is not None and recipe.steps != ASSUMED_STEPS:
        work = max((row.work or 0.0 for row in rows if row.time is not None), default=0.0) or None
        return {"requested_work": work}
    if work is None or request.work_unit != "samples" or not lengths:
        return {"requested_work": work}
    return {"requested_work": work * lengths[0], "requested_samples": work}


def _fastest(rows: Sequence[Prediction]) -> Prediction | None:
    """Return the fastest row that fits; None if none does."""
    fitting = [row for row in rows if row.time is not None and row.fit == "yes"]
    return _ranking("fastest", fitting).row if fitting else None


def _faster_notes(
    planners: Sequence[Planner], fastest: Prediction | None, nodes: Sequence[int], on: str
) -> Iterator[str]:
    """Yield what a change of the memory's layout gives the fastest strategy."""
    if fastest is None:
        return
    for planner in planners:
        if str(planner.cell.strategy) != fastest.label or planner.cell.recipe.channels_last:
            continue
        other = replace(planner, cell=CHANNELS_LAST.applied(planner.cell))
        gain = _best_rate(other.rows(nodes)) / (fastest.work_per_second or inf)
        if gain > FASTER:
            yield f"{fastest.label} on {on}, {CHANNELS_LAST.setting}: {gain:.2f}x the speed."
        return


def _accumulation_notes(planners: Sequence[Planner], nodes: Sequence[int]) -> Iterator[str]:
    """Yield what both ways to reduce accumulated gradients need, for the last FSDP strategy."""
    for planner in reversed(planners):
        passes, options = planner.cell.recipe.gradient_accumulation, planner.cell.strategy.options
        ways = (options | {EACH_PASS: each_pass} for each_pass in (True, False))
        cells = [with_strategy_options(planner.cell, way) for way in ways]
        if passes == 1 or cells[0].strategy == cells[1].strategy:
            continue
        every, once = ([*replace(planner, cell=cell).rows(nodes)][-1] for cell in cells)
        if every.memory is not None:
            yield (
                f"{every.strategy} on {every.ranks} ranks accumulates {passes} micro-batches:"
                f" {_needs(every)} if"
                f" each reduces its gradients (reduce_each_pass); {_needs(once)} if only the last"
                " one does, and a rank holds full gradients until then."
            )
            return


def _needs(row: Prediction) -> str:
    """Return, for example, `37.2 GiB for 9,000 tokens/s`; the memory alone without a speed."""
    speed_text = f" for {row.work_per_second:,.0f} {row.unit}/s" if row.time else ""
    return f"{(row.device_bytes or 0.0) / GiB:.3g} GiB{speed_text}"


def _published_notes(
    fastest: Prediction | None, node: NodeType, cells: Sequence[Trial]
) -> Iterator[str]:
    """Yield the published speed that is nearest to the fastest row that fits."""
    published = fastest and nearest_published(
        node.node.card,
        fastest.unit,
        cells[0].recipe.precision,
        parameters=fastest.parameters or 1,
        length=fastest.tokens_per_sample or 1,
        devices=fastest.devices,
    )
    if published is not None:
        yield f"Published: {published}."


def _placement_notes(rows: Sequence[Prediction]) -> Iterator[str]:
    """Yield how experts and long samples are placed, and, once for each strategy, what offloaded
    state needs of the host's memory."""
    if any(row.active_parameters and row.devices > 1 and row.memory for row in rows):
        yield (
            "Experts are placed as other layers are: each rank computes all of them, and gathers"
            " them if its strategy shards. Expert parallelism, which large models usually need, is"
            " not planned."
        )
    long = (row for row in rows if (row.tokens_per_sample or 0) >= LONG_TOKENS and row.memory)
    if any(row.devices > 1 and "ulysses" not in row.strategy for row in long):
        yield (
            "Context parallelism, which divides such long samples, is not planned; --set"
            " strategy=fsdp-ulysses is, which divides them inside of a node."
        )
    largest = {
        row.label: row for row in sorted(rows, key=lambda row: row.host_bytes) if row.host_bytes
    }
    for row in largest.values():
        needs = f"{row.place}: offloaded state takes {row.host_bytes / GiB:,.0f} GiB of each node"
        if (room := row.host_room_bytes) is None:
            yield f"{needs}, whose memory is not known."
        else:
            fits = "" if row.host_bytes <= room else ": it does not fit"
            yield f"{needs}, which has {room / GiB:,.0f}{fits}."


def _sizes_that_fit(
    rows: Sequence[Prediction], cells: Sequence[Trial], node: NodeType, nodes: int, models: Models
) -> dict[str, Any]:
    """Return the fields of a plan about changes under which the experiment fits."""
    predicted = {row.label for row in rows if row.memory is not None}
    first = cells[0].varied if cells else {}
    chosen = [one for one in cells if str(one.strategy) in predicted and one.varied == first]
    if not chosen:
        return {}
    if any(row.fit == "yes" for row in rows):
        return {"fewest": fewest_devices(chosen, node, nodes, models)}
    return {"remedies": tuple(remedies_of(chosen, node, nodes, models))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Predicts one cell of the matrix on machines of one kind, in one stack of software."""

    cell: Trial
    node: NodeType
    models: Models
    anchor: Anchor | None
    price_per_hour: float | None
    constants: Constants
    request: PlanRequest

    def rows(self, nodes: Sequence[int]) -> Iterator[Prediction]:
        """Yield a row for each number of nodes, or one row if the strategy needs a single rank."""
        sizes = [(self.node.node.devices * count, count) for count in nodes]
        strategy = self.cell.built_strategy
        if all(unsupported_reason(strategy, *size) for size in sizes):
            sizes = sizes if unsupported_reason(strategy, 1, 1) else [(1, 1)]
        per_device = None if self.anchor is None else self.anchor.samples_per_second_per_device
        for size in sizes:
            row = self.row_on(*size)
            if per_device is None and row.samples_per_second is not None:
                per_device = row.samples_per_second / row.devices
            if per_device is not None and row.time is not None:
                row = replace(row, naive_samples_per_second=per_device * row.devices)
            yield row

    def row_on(self, ranks: int, nodes: int = 1) -> Prediction:
        """Return the row of some devices, of one node or several."""
        cell, reason = self.cell, unsupported_reason(self.cell.built_strategy, ranks, nodes)
        layout = self.cell.built_strategy.layout(ranks, nodes) if reason is None else None
        shares = ranks if layout is None else layout.shares
        samples = cell.recipe.global_batch or (cell.recipe.per_rank_batch or 0) * shares
        row = Prediction(
            strategy=cell.strategy.name,
            strategy_options=cell.strategy.options,
            varied=cell.varied,
            nodes=nodes,
            ranks=ranks,
            devices=ranks if layout is None else layout.devices,
            card_bytes=self.node.card.usable_bytes,
            samples=samples,
            tokens_per_sample=cell.workload.tokens_per_sample,
            own_mathematics=cell.built_strategy.numerics(cell.recipe).descriptions,
            steps=self._steps(samples),
            price_per_hour=self.price_per_hour,
            reason=reason or self._batch_problem(shares),
        )
        if row.reason is not None:
            return row
        host_gib = self.node.node.host_memory_gib
        try:
            profile = self.profile(ranks, nodes)
            memory = self._memory(profile, cell.recipe, ranks, nodes)
            tokens = cell.workload.tokens_per_sample or profile.tokens_per_sample
            useful = None if tokens is None else self.request.useful_tokens(tokens)
            row = replace(
                row,
                tokens_per_sample=useful,
                useful_fraction=useful / tokens if useful and tokens else 1.0,
                parameters=profile.size.parameters,
                active_parameters=profile.active_parameters,
                memory=memory,
                device_bytes=memory.device_bytes(self.node.card.device_type),
                card_fit=fit_of(memory.peak_bytes, self.node.card),
                host_bytes=memory.on_host * min(ranks, self.node.node.devices),
                host_room_bytes=None if host_gib is None else host_gib * GiB,
                largest_batch=self._largest(profile, ranks, nodes),
            )
            if not any(unit.forward for unit in profile.units):
                return replace(row, reason=TOO_LARGE)
            return self._timed(row, profile)
        except StrategyUnavailable as error:
            return replace(row, reason=f"{error.reason}; {error.remedy}")
        except ShardmarkError as error:
            return replace(row, reason=str(error))

    def _batch_problem(self, shares: int) -> str | None:
        """Return the reason why the batch cannot be divided equally; None if it can."""
        recipe = self.cell.recipe
        global_batch, passes = recipe.global_batch, recipe.gradient_accumulation
        batch = global_batch or recipe.per_rank_batch or 0
        if batch % (passes if global_batch is None else shares * passes) == 0:
            return None
        if global_batch is None or shares == 1:
            more = f"{batch * passes} samples a step are micro-batches of {batch}"
            return f"{counted(batch, 'sample')} are not {passes} equal micro-batches; {more}"
        keep = "set recipe.per_rank_batch, which grows with the ranks, in place of global_batch"
        parts = f"{passes} micro-batches of each of " if passes > 1 else ""
        return f"{batch} samples cannot be divided equally over {parts}{shares} ranks; {keep}"

    def profile(self, ranks: int, nodes: int) -> Profile:
        """Trace the model.  Raises `ShardmarkError` if the strategy or the trace fails."""
        cell, strategy = self.cell, self.cell.built_strategy
        machine = Machine.predicted(self.node.card.device_type, self.node.node.devices * nodes)
        strategy.check(ranks, machine, cell.recipe)
        card = self.node.card
        runs = not self.models.state_exceeds(cell, ranks * usable_bytes(card))
        return self.models.profile_of(cell, ranks, nodes, device_type=card.device_type, runs=runs)

    def _memory(self, profile: Profile, recipe: Recipe, ranks: int, nodes: int) -> RankMemory:
        strategy, device_type = self.cell.built_strategy, self.node.card.device_type
        return rank_memory(profile, strategy, recipe, ranks, nodes=nodes, device_type=device_type)

    def _largest(self, profile: Profile, ranks: int, nodes: int) -> int:
        """Largest number of samples that fits into a pass of a rank."""
        recipe, room = self.cell.recipe, usable_bytes(self.node.card)
        passes = recipe.gradient_accumulation

        def needed_bytes(samples: int) -> float:
            batch = {"global_batch": None, "per_rank_batch": samples * passes}
            changed = recipe.model_copy(update=batch)
            memory = self._memory(profile, changed, ranks, nodes)
            return memory.device_bytes(self.node.card.device_type)

        return largest(needed_bytes, room)

    def step(self, profile: Profile, ranks: int, nodes: int) -> Step:
        """Predict the step of so many ranks before calibration."""
        cell = self.cell
        return plan_step(
            *(profile, cell.built_strategy, cell.recipe, ranks, self.node),
            nodes=nodes,
            constants=self.constants,
            fp8=self.request.fp8,
        )

    def _timed(self, row: Prediction, profile: Profile) -> Prediction:
        anchor = self.anchor
        factors = Factors() if anchor is None else anchor.factors
        time = self.step(profile, row.ranks, row.nodes).time(self.constants, factors)
        stack = self.request.stack or "eager"
        alone: Basis = stack if profile.tokens_per_sample else "images"
        residuals = RESIDUALS[alone if anchor is None else anchor.basis(row.nodes, alone)]
        if anchor is None and self.cell.recipe.cpu_offload:
            residuals = OFFLOADED
        low, high = residuals.around(time.seconds)
        return replace(row, time=time, low_seconds=low, high_seconds=high)

    def _steps(self, samples: int) -> int | None:
        recipe = self.cell.recipe
        if recipe.steps is not None:
            return recipe.steps
        count = self.models.training_samples(self.cell.workload)
        return None if count is None or not samples else (recipe.epochs or 0) * (count // samples)
