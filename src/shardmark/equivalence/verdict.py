"""Runs the reference, compares each cell's capture with it, and writes the verdicts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from shardmark.core.run_files import TRIAL_FILE, rank_file
from shardmark.equivalence.capture import Capture, read_capture
from shardmark.equivalence.compare import GIVEN, Tolerances, checks_of
from shardmark.equivalence.guarantees import guarantee_checks
from shardmark.equivalence.hypotheses import cause_of
from shardmark.equivalence.reference import AS_DEFINED, Hypothesis, Noise, Reference
from shardmark.equivalence.whole_batch import CAUSE as WHOLE_BATCH_CAUSE
from shardmark.equivalence.whole_batch import whole_batch_check
from shardmark.results.files import write_whole
from shardmark.results.schema import RankRecord
from shardmark.results.verification import (
    CELLS_FILE,
    VERDICTS_FILE,
    Cause,
    Check,
    Verdict,
)
from shardmark.train.schedule import set_numerics
from shardmark.trials.trial import Trial
from shardmark.workloads import build_workload
from shardmark.workloads.base import BatchPlan, Workload

DISTURBED_RUNS = 3

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Half of the distance from 1 to the next larger number (IEEE 754; bfloat16 has 8 bits)."""

UNDECIDED = Cause(
    text="cannot be told: forward passes differ by rounding, and this model amplifies rounding",
    evidence="equal weights, samples and draws; other first losses, within rounding; a disturbance "
    "of that size alone moves the reference's gradient by more than a quarter of itself",
    first_deviation="losses",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRuns:
    """Runs references of one trial: its workload, recipe and number of distinct shares."""

    workload: Workload
    trial: Trial
    shares: int
    steps: int
    device: torch.device
    threads: int = 1
    """Of each of the strategy's processes: with others a kernel may add in another order."""

    def run(self, hypothesis: Hypothesis = AS_DEFINED, noise: Noise | None = None) -> Capture:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return Reference(
                self.workload,
                self.trial.recipe,
                shares=self.shares,
                plan=self.plan,
                total_steps=self.steps,
                device=self.device,
                hypothesis=hypothesis,
                noise=noise,
            ).capture(self.steps)
        finally:
            torch.set_num_threads(threads)

    def tolerances(self) -> Tolerances:
        """The reference, and how far rounding-sized disturbances take it.

        A result of n added terms has a relative error of about sqrt(n) u (Higham, Accuracy and
        Stability of Numerical Algorithms, 2nd ed., section 2.8): forward and backward passes add
        up as many terms as the widest layer has inputs, the reduction one for each rank and
        micro-batch.

        A model may amplify such errors until they hide a factor of two (detectors do: one pair of
        nearly equal scores in another order is another choice of boxes).  Then only gradients are
        disturbed, as reductions do, and the first forward pass must be equal to the last bit.
        """
        compute, reduction = self._roundoffs()

        def disturbed(seeds: Sequence[int], parameters: float) -> list[Capture]:
            noises = (
                Noise(seed=seed, parameters=parameters, gradients=compute + reduction)
                for seed in seeds
            )
            return [self.run(noise=noise) for noise in noises]

        reference = self.run()
        first = Tolerances(
            reference=reference,
            undisturbed=reference,
            disturbed=disturbed([1], compute),
            floor=4 * compute,
        )
        if first.hide_errors:
            runs = disturbed(range(2, 2 + DISTURBED_RUNS), 0.0)
            return replace(first, disturbed=runs, exact_forward=True)
        rest = disturbed(range(2, 1 + DISTURBED_RUNS), compute)
        return replace(first, disturbed=[*first.disturbed, *rest])

    def whole_batch_check(self, tolerances: Tolerances) -> Check:
        """Whether the reference adds up to one process on the whole batch."""
        return whole_batch_check(
            self.workload,
            self.trial.recipe,
            shares=self.shares,
            plan=self.plan,
            device=self.device,
            tolerances=tolerances,
        )

    @property
    def plan(self) -> BatchPlan:
        return BatchPlan(global_batch=self.trial.batch_per_step, seed=self.trial.recipe.seed)

    def _roundoffs(self) -> tuple[float, float]:
        """Relative errors of what a rank computes, and of the reduction over ranks."""
        recipe = self.trial.recipe
        model = self.workload.build_model()
        widest = max(p.numel() // p.shape[0] for p in model.parameters() if p.dim() > 0)
        terms = self.shares * recipe.gradient_accumulation
        compute = math.sqrt(widest) * UNIT_ROUNDOFF["fp32"]
        if recipe.precision != "fp32":
            compute += UNIT_ROUNDOFF[recipe.precision]
        return compute, math.sqrt(terms) * UNIT_ROUNDOFF["fp32"]


class KnownReference(NamedTuple):
    """What trials of the same mathematics are held against."""

    runs: ReferenceRuns
    tolerances: Tolerances
    whole_batch: Check
    """On the reference itself."""


class ReferenceCache:
    """References by what they depend on: most strategies share theirs."""

    def __init__(self) -> None:
        self._made: dict[str, KnownReference] = {}

    def of(self, trial: Trial, steps: int) -> KnownReference:
        # Neither touches a parameter: the reference has no use for them.
        recipe = trial.recipe.model_copy(
            update={"activation_checkpointing": False, "cpu_offload": False}
        )
        shares, threads = trial.layout.shares, threads_of_a_rank(trial)
        models = [model.model_dump(mode="json") for model in (trial.workload, recipe)]
        key = json.dumps((*models, shares, steps, threads), sort_keys=True)
        if key not in self._made:
            runs = ReferenceRuns(
                workload=build_workload(trial.workload, recipe.seed),
                trial=trial,
                shares=shares,
                steps=steps,
                device=torch.device(trial.device_type),
                threads=threads,
            )
            tolerances = runs.tolerances()
            whole_batch = runs.whole_batch_check(tolerances)
            self._made[key] = KnownReference(runs, tolerances, whole_batch)
        return self._made[key]


def threads_of_a_rank(trial: Trial) -> int:
    """As many as each process of the trial has, servers included."""
    cores = len(os.sched_getaffinity(0))
    return trial.recipe.threads_per_rank or max(1, cores // trial.layout.processes)


def judge_all(folder: Path) -> None:
    """Judge the cells that the folder's list names; the verdicts so far are always beside it."""
    verdicts: list[Verdict] = []
    references = ReferenceCache()
    for directory in map(Path, json.loads((folder / CELLS_FILE).read_text())):
        trial = Trial.model_validate_json((directory / TRIAL_FILE).read_text())
        verdicts.append(compare_to_reference(trial, directory, references))
        text = json.dumps([verdict.model_dump(mode="json") for verdict in verdicts])
        write_whole(folder / VERDICTS_FILE, text.encode())


def compare_to_reference(trial: Trial, directory: Path, references: ReferenceCache) -> Verdict:
    """The verdict on what the trial's ranks left in the folder."""
    steps = trial.recipe.steps
    assert steps is not None, "a verification counts steps"
    set_numerics(trial.recipe)
    capture = read_capture(trial, directory)
    guarantee = trial.built_strategy.guarantee()
    if guarantee is None:
        return verdict_on(capture, trial, steps, references)
    records = [
        RankRecord.model_validate_json((directory / rank_file(rank)).read_text())
        for rank in range(trial.layout.processes)
    ]
    checks = guarantee_checks(capture, trial, steps, records)
    broken = next((check for check in checks if not check.holds), None)
    if broken is None:
        return verdict_of(trial, None, checks, guarantee=guarantee)
    cause = Cause(
        text=f"the guarantee is broken: {broken.name}",
        evidence=f"found {broken.found}, expected {broken.expected}",
        first_deviation=broken.name,
    )
    return verdict_of(trial, False, checks, cause, guarantee=guarantee)


def verdict_on(capture: Capture, trial: Trial, steps: int, references: ReferenceCache) -> Verdict:
    """Hold a capture against the reference of its trial."""
    runs, tolerances, whole_batch = references.of(trial, steps)
    one_process = len(capture.losses) == 1 and trial.layout.shares > 1
    if one_process:
        reference = tolerances.reference.seen_by_one_process()
        tolerances = replace(
            tolerances,
            reference=reference,
            undisturbed=reference,
            disturbed=[run.seen_by_one_process() for run in tolerances.disturbed],
        )
    checks = (*checks_of(capture, tolerances), whole_batch)
    if all(check.holds for check in checks):
        return verdict_of(trial, True, checks)
    if not whole_batch.holds:
        return verdict_of(trial, False, checks, WHOLE_BATCH_CAUSE)
    if cannot_be_told(capture, checks, tolerances):
        return verdict_of(trial, None, checks, UNDECIDED)

    def run(hypothesis: Hypothesis) -> Capture:
        made = runs.run(hypothesis)
        return made.seen_by_one_process() if one_process else made

    cause = cause_of(
        capture,
        checks,
        tolerances,
        recipe=trial.recipe,
        run=run,
        whole_batch=lambda: replace(runs, shares=1).run(),
    )
    return verdict_of(trial, False, checks, cause)


def cannot_be_told(capture: Capture, checks: Sequence[Check], tolerances: Tolerances) -> bool:
    """Whether the first forward pass differs by rounding alone where it has to be exact."""
    given = all(check.holds for check in checks if check.name in GIVEN)
    if not tolerances.exact_forward or not given:
        return False
    pairs = [
        (mine[0], wanted[0])
        for mine, wanted in zip(capture.losses, tolerances.reference.losses, strict=True)
    ]
    return any(mine != wanted for mine, wanted in pairs) and all(
        abs(mine - wanted) <= tolerances.floor * abs(wanted) for mine, wanted in pairs
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
    )
