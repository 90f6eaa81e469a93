"""Runs the reference, compares each cell's capture with it, and writes the verdicts."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from shardmark.base.errors import ShardmarkError, error_kind
from shardmark.base.evidence.captures import BLIND, Capture, Tolerances, equal
from shardmark.base.evidence.checks import Check
from shardmark.base.files.run_files import TRIAL_FILE, rank_file
from shardmark.base.layout import Shard
from shardmark.base.recipe import Recipe
from shardmark.base.results.files import write_atomically
from shardmark.base.results.schema import ExchangeRecord, RankRecord
from shardmark.base.results.verification import CELLS_FILE, NOT_TRIED, VERDICTS_FILE, Cause, Verdict
from shardmark.base.text import one_line
from shardmark.bench.reference.capture import at_constant_rate, read_capture
from shardmark.bench.reference.compare import INPUT_CHECKS, SKIPPED, checks_of, nonfinite_step
from shardmark.bench.reference.hypotheses import cause_of, reduction_checks
from shardmark.bench.reference.reference import CPU, CommunicatesError, Hypothesis, ReferenceRuns
from shardmark.bench.reference.repeats import STATEFUL, keeps_state, unrepeatable_cause
from shardmark.bench.reference.whole_batch import WholeBatch, whole_batch_check
from shardmark.ranks.train.exchanged_group import CannotPlayError
from shardmark.ranks.train.record import weights_sha256
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import build_workload
from shardmark.ranks.workloads.base import BatchPlan


def guarantee_checks(
    capture: Capture, trial: Trial, steps: int, ranks: Sequence[RankRecord]
) -> tuple[Check, ...]:
    """Check initial weights, samples and use of gradients against the strategy's guarantee."""
    not_finite = sum(not math.isfinite(loss) for rank in capture.losses for loss in rank)
    return (
        *_input_checks(capture, trial, steps),
        *_gradient_checks(trial, steps, ranks),
        equal("losses that are not finite", str(not_finite), "0"),
    )


def _input_checks(capture: Capture, trial: Trial, steps: int) -> Iterator[Check]:
    workload = build_workload(trial.workload, trial.recipe.seed)
    expected = weights_sha256(sorted(workload.build_model().named_parameters()))
    hashes = ", ".join(sorted({sha[:12] for sha in capture.initial_sha256}))
    yield equal("initial weights", hashes, expected[:12])

    plan = BatchPlan(global_batch=trial.batch_per_step, seed=trial.recipe.seed)
    shares = trial.layout.shares
    expected_ids: list[tuple[int, ...]] = []
    for index in range(shares):
        batches = workload.batches(plan, Shard(index=index, count=shares))
        expected_ids += (next(batches).sample_ids for _ in range(steps))
    counts = Counter(ids for rank in capture.sample_ids for ids in rank)
    total = counts.total()
    once = sum(counts[ids] == 1 for ids in expected_ids) if total == len(expected_ids) else total
    yield equal("shares that were trained on once", str(once), str(len(expected_ids)))


def _gradient_checks(trial: Trial, steps: int, ranks: Sequence[RankRecord]) -> Iterator[Check]:
    """Check that each server uses the gradient of every step of every worker once."""
    gradients = str(steps * trial.layout.shares)
    for rank in ranks:
        if rank.role != "server":
            continue
        exchange = rank.exchange or ExchangeRecord()
        location = f"rank {rank.rank}"
        yield equal("gradients used once", str(exchange.updates), gradients, location)
        recorded = str(sum(exchange.staleness.values()))
        yield equal("gradients whose staleness is known", recorded, gradients, location)
        bound = _largest_staleness(trial)
        if rank.rank == trial.layout.server_ranks[0] and bound is not None:
            stalest = max(map(int, exchange.staleness), default=0)
            yield Check(
                name="staleness within the bound",
                holds=stalest <= bound,
                found=float(stalest),
                expected=0.0,
                tolerance=float(bound),
                where=location,
            )


def _largest_staleness(trial: Trial) -> int | None:
    """Return how many gradients of other workers the bound allows between a pull and a push.

    When a worker pulls after c pushes, all others have made at least c - s pushes; when it pushes
    next, at most c + s + 1.  So each of the others pushes at most 2 s + 1 times in between.
    """
    bound = trial.built_strategy.settings(trial.recipe).get("staleness_bound")
    return (2 * bound + 1) * (trial.layout.shares - 1) if isinstance(bound, int) else None


UNDECIDED = Cause(
    text="undecided: forward passes differ by rounding, and this model amplifies rounding",
    evidence="weights, samples and random numbers are equal, and the first losses differ only by"
    " rounding; a perturbation of that size changes the reference's gradient by over a quarter",
    first_deviation="losses",
)

NO_UPDATE = Cause(
    text="undecided: every step overflows fp16 and is skipped",
    evidence="this holds for the strategy and the reference, which halve the loss scale each time",
    first_deviation=SKIPPED,
)

ROUNDING_SKIPS = Cause(
    text="undecided: rounding alone decides which steps overflow fp16",
    evidence="a perturbation of that size makes the reference skip other steps",
    first_deviation=SKIPPED,
)

OTHER_DEVICE = Cause(
    text="undecided: the reference fits only in host memory",
    evidence="computed on the CPU, it differs; other kernels and random numbers may be the reason",
    first_deviation="none",
)

COMMUNICATES = Cause(
    text="undecided: the task communicates by itself",
    evidence="its collectives include all ranks, and several ranks process the same samples",
    first_deviation="none",
)

UNKNOWN_GROUP = ("world group map", "Could not resolve the process group", "not registered")
"""Parts of torch's messages about a group that the reference does not know."""

LIBRARIES = (str(Path(__file__).parents[2]), "-packages", sysconfig.get_path("stdlib"), "<")
"""Parts of names of files that the user did not write; "<" marks generated code."""

logger = logging.getLogger(__name__)


class KnownReference(NamedTuple):
    """The reference of all trials with the same numerics, with its tolerances."""

    runs: ReferenceRuns
    tolerances: Tolerances
    whole_batch: WholeBatch
    unrepeatable: Cause | None = None
    """Cause of an undecided verdict if two identical runs of the task differ, else None."""


class NoReferenceError(Exception):
    """Raised with the cause if a cell has no reference."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.evidence)
        self.cause = cause


def without_execution_settings(recipe: Recipe) -> Recipe:
    """Return the recipe without settings that change how a step is computed but not its result.

    `channels_last` stays: dropout draws random numbers in the order of the elements in memory.
    """
    plain: dict[str, object] = {
        "activation_checkpointing": False,
        "cpu_offload": False,
        "compile": "none",
    }
    if recipe.optimizer.implementation != "default":
        implementation = {"implementation": "default"}
        plain["optimizer"] = recipe.optimizer.model_copy(update=implementation)
    return recipe.model_copy(update=plain)


class ReferenceCache:
    """Cache of references by everything they depend on; most strategies share one reference."""

    def __init__(self) -> None:
        self._results: dict[str, KnownReference | NoReferenceError] = {}

    def get(self, trial: Trial, steps: int) -> KnownReference:
        """Return the reference.  Raises `NoReferenceError` if the task or the memory fails."""
        recipe = without_execution_settings(trial.recipe)
        shares, threads = trial.layout.shares, trial.threads_of(trial.layout.processes)
        models = [model.model_dump(mode="json") for model in (trial.workload, recipe)]
        numerics = asdict(trial.built_strategy.numerics(recipe))
        key = json.dumps((*models, numerics, shares, steps, threads), sort_keys=True)
        if key not in self._results:
            runs = ReferenceRuns(
                workload=build_workload(trial.workload, recipe.seed),
                trial=trial.model_copy(update={"recipe": recipe}),
                shares=shares,
                steps=steps,
                device=torch.device(trial.device_type),
                threads=threads,
            )
            try:
                self._results[key] = known_reference(runs)
            except Exception as error:
                if error_kind(error) == "storage":
                    raise
                traceback.print_exc()  # into the log
                self._results[key] = NoReferenceError(_no_reference(error))
        cached = self._results[key]
        if isinstance(cached, NoReferenceError):
            raise cached
        return cached


def _no_reference(error: Exception) -> Cause:
    """Return the failure with the last line of the user's code as a cause, without a traceback."""
    unknown = any(text in str(error) for text in UNKNOWN_GROUP)
    if isinstance(error, CannotPlayError) or unknown:
        used = "a process group that it created" if unknown else error
        return Cause(
            text="undecided: the task communicates by itself",
            evidence=f"it uses {used}, which one process cannot simulate for all ranks",
            first_deviation="none",
        )
    return Cause(text=NOT_TRIED, evidence=_failure(error), first_deviation="none")


def _failure(error: Exception) -> str:
    plain = isinstance(error, ShardmarkError)
    message = one_line(str(error) if plain else f"{type(error).__name__}: {error}")
    if error_kind(error) == "out_of_memory":
        return f"the reference does not fit in memory: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not any(part in f.filename for part in LIBRARIES)]
    line = ""
    if user_frames:
        line = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})"
    return f"the task fails in the process that simulates the ranks: {message}{line}"


def known_reference(runs: ReferenceRuns) -> KnownReference:
    """Return the reference, computed on the CPU if it does not fit in the device's memory.

    A task that communicates by itself is simulated again, with ranks that wait for each other.
    """
    try:
        tolerances = runs.tolerances()
        unrepeatable = unrepeatable_cause(runs, tolerances)
        stateful = unrepeatable is None and keeps_state(runs, tolerances)
        whole_batch = whole_batch_check(runs, tolerances, stateful=stateful)
        return KnownReference(runs, tolerances, whole_batch, STATEFUL if stateful else unrepeatable)
    except CommunicatesError:
        return known_reference(replace(runs, communicates=True))
    except Exception as error:
        if error_kind(error) != "out_of_memory" or runs.device.type == "cpu":
            raise
        logger.warning("the reference does not fit %s; it runs on the CPU", runs.device)
    # Only here: until the error is deleted, its frames keep the tensors in memory.
    gc.collect()
    torch.cuda.empty_cache()
    return known_reference(replace(runs, device=CPU, threads=len(os.sched_getaffinity(0))))


def compare_cells(folder: Path) -> None:
    """Compare the cells in the folder's list; store the verdicts after each cell."""
    verdicts: list[Verdict] = []
    references = ReferenceCache()
    for directory in map(Path, json.loads((folder / CELLS_FILE).read_text())):
        trial = at_constant_rate(Trial.model_validate_json((directory / TRIAL_FILE).read_text()))
        verdicts.append(compare_to_reference(trial, directory, references))
        text = json.dumps([verdict.model_dump(mode="json") for verdict in verdicts])
        write_atomically(folder / VERDICTS_FILE, text.encode())


def compare_to_reference(trial: Trial, directory: Path, references: ReferenceCache) -> Verdict:
    """Return the verdict on the captures in the directory; undecided if there is no reference."""
    steps = trial.recipe.steps
    assert steps is not None, "a verification counts steps"
    capture = read_capture(trial, directory)
    guarantee = trial.built_strategy.guarantee()
    if guarantee is None:
        try:
            return verdict_on(capture, trial, steps, references)
        except NoReferenceError as error:
            return verdict_of(trial, None, (), error.cause)
    records = [
        RankRecord.model_validate_json((directory / rank_file(rank)).read_text())
        for rank in range(trial.layout.processes)
    ]
    checks = guarantee_checks(capture, trial, steps, records)
    broken = next((check for check in checks if not check.holds), None)
    if broken is None:
        return verdict_of(trial, None, checks, nonfinite_cause(capture), guarantee=guarantee)
    cause = Cause(
        text=f"the guarantee is broken: {broken.name}",
        evidence=f"found {broken.found}, expected {broken.expected}",
        first_deviation=broken.name,
    )
    return verdict_of(trial, False, checks, cause, guarantee=guarantee)


def verdict_on(capture: Capture, trial: Trial, steps: int, references: ReferenceCache) -> Verdict:
    """Compare a capture with the reference of its trial."""
    runs, tolerances, whole_batch, unrepeatable = references.get(trial, steps)
    one_process = len(capture.losses) == 1 and trial.layout.shares > 1
    if one_process:
        reference = tolerances.reference.seen_by_one_process()
        tolerances = replace(
            tolerances,
            reference=reference,
            unperturbed=reference,
            perturbed=[run.seen_by_one_process() for run in tolerances.perturbed],
        )
    numerics = trial.built_strategy.numerics(trial.recipe)
    reduction = reduction_checks(capture, trial.recipe, numerics)
    checks = (*checks_of(capture, tolerances), *reduction, whole_batch.check)
    same_samples = runs.communicates and trial.layout.shares != trial.world_size
    unknown = COMMUNICATES if same_samples else unrepeatable
    if unknown is not None:
        return verdict_of(trial, None, checks, unknown)
    if (cause := nonfinite_cause(capture, tolerances.reference)) is not None:
        return verdict_of(trial, None if cause.training_fails else False, checks, cause)
    undecided = None  # failed checks refute equivalence
    wrong = {check.name for check in checks if not check.holds} & INPUT_CHECKS
    expected = tolerances.reference
    if not wrong and capture.skipped == expected.skipped and not expected.tensors["gradient"]:
        undecided = NO_UPDATE
    elif runs.device.type != trial.device_type and not wrong - {"random draws"}:
        undecided = OTHER_DEVICE
    elif not wrong and tolerances.rounding_skips:
        undecided = ROUNDING_SKIPS
    elif not wrong:
        # Other kernels add in another order everywhere, which this model may amplify.
        largest = tolerances.floor if trial.recipe.compile == "none" else BLIND
        undecided = UNDECIDED if differs_by_rounding(capture, tolerances, largest) else None
    if undecided is not NO_UPDATE and all(check.holds for check in checks):
        return verdict_of(trial, True, checks)
    if not whole_batch.check.holds:
        return verdict_of(trial, False, checks, whole_batch.cause)
    if undecided is not None:
        return verdict_of(trial, None, checks, undecided)

    def run(hypothesis: Hypothesis) -> Capture:
        result = runs.run(hypothesis)
        return result.seen_by_one_process() if one_process else result

    cause = cause_of(capture, checks, tolerances, recipe=trial.recipe, numerics=numerics, run=run)
    return verdict_of(trial, False, checks, cause)


def nonfinite_cause(capture: Capture, expected: Capture | None = None) -> Cause | None:
    """Return the cause of a loss that is not finite; None if all losses are finite.

    If the loss of the reference is not finite either, the training fails with every strategy.
    """
    actual = nonfinite_step(capture)
    reference_nonfinite = actual if expected is None else nonfinite_step(expected)
    if actual is None and reference_nonfinite is None:
        return None
    step, rank, loss = actual or reference_nonfinite or (0, 0, math.nan)
    subject = "the loss" if actual else "the reference's loss"
    other = "the strategy's losses are finite"
    if actual:
        other = (
            f"the reference's is not finite from step {reference_nonfinite[0] + 1} on"
            if reference_nonfinite
            else "the reference's losses are finite"
        )
    return Cause(
        text=f"{subject} is {'NaN' if math.isnan(loss) else 'infinite'} from step {step + 1} on",
        evidence=f"on rank {rank}" + (f"; {other}" if expected is not None else ""),
        training_fails=actual is not None
        and reference_nonfinite is not None
        and reference_nonfinite[0] <= actual[0],
        first_deviation="losses",
    )


def differs_by_rounding(capture: Capture, tolerances: Tolerances, largest: float) -> bool:
    """Return True if first losses that must be equal differ, relatively by at most `largest`."""
    if not tolerances.exact_forward:
        return False
    pairs = [
        (actual[0], reference_loss[0])
        for actual, reference_loss in zip(capture.losses, tolerances.reference.losses, strict=True)
    ]
    return any(actual != reference_loss for actual, reference_loss in pairs) and all(
        abs(actual - reference_loss) <= largest * abs(reference_loss)
        for actual, reference_loss in pairs
    )


def verdict_of(
    trial: Trial,
    equivalent: bool | None,
    checks: tuple[Check, ...],
    cause: Cause | None = None,
    *,
    guarantee: str | None = None,
) -> Verdict:
    return Verdict(
        id=trial.id,
        strategy=trial.strategy.name,
        strategy_options=trial.strategy.options,
        world_size=trial.world_size,
        precision=trial.recipe.precision,
        varied=trial.varied,
        equivalent=equivalent,
        checks=checks,
        cause=cause,
        guarantee=guarantee,
        mathematics=trial.built_strategy.numerics(trial.recipe).descriptions,
    )
