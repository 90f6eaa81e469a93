"""The judge of `verify`: runs the reference, compares, finds causes, writes verdicts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardmark.core.run_files import TRIAL_FILE, rank_file
from shardmark.equivalence.causes import cause_of
from shardmark.equivalence.evidence import (
    EVIDENCE,
    Evidence,
    RankEvidence,
    put_together,
    seen_by_one_process,
)
from shardmark.equivalence.guarantees import check_guarantee
from shardmark.equivalence.parity import GIVEN, UNIT_ROUNDOFF, Tolerances, checks_of
from shardmark.equivalence.reference import reference_evidence
from shardmark.equivalence.variation import NOTHING, Noise, Variation
from shardmark.results.schema import RankRecord
from shardmark.results.verification import Cause, Check, Verdict
from shardmark.trials.trial import Trial
from shardmark.workloads.base import BatchPlan, Workload

DISTURBED_RUNS = 3
CELLS_FILE = "cells.json"
VERDICTS_FILE = "verdicts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A workload, a recipe and a number of ranks, on which references are run."""

    workload: Workload
    trial: Trial
    ranks: int
    steps: int
    device: torch.device
    threads: int = 1
    """Of each of the strategy's processes: with others a kernel may add in another order."""

    def run(self, variation: Variation = NOTHING) -> Evidence:
        with so_many_threads(self.threads):
            return reference_evidence(
                self.workload,
                self.trial.recipe,
                ranks=self.ranks,
                plan=BatchPlan(global_batch=self.trial.batch_per_step, seed=self.trial.recipe.seed),
                steps=self.steps,
                device=self.device,
                variation=variation,
            )

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
        reference = self.run()

        def disturbed(first_seed: int, runs: int, parameters: float) -> list[Evidence]:
            seeds = range(first_seed, first_seed + runs)
            noises = [
                Noise(seed=seed, parameters=parameters, gradients=compute + reduction)
                for seed in seeds
            ]
            return [self.run(Variation(noise=noise)) for noise in noises]

        first = Tolerances(
            reference=reference, disturbed=disturbed(1, 1, compute), floor=4 * compute
        )
        if first.hide_errors:
            runs = disturbed(2, DISTURBED_RUNS, 0.0)
            return replace(first, disturbed=runs, exact_forward=True)
        rest = disturbed(2, DISTURBED_RUNS - 1, compute)
        return replace(first, disturbed=[*first.disturbed, *rest])

    def _roundoffs(self) -> tuple[float, float]:
        """Relative errors of what a rank computes, and of the reduction over ranks."""
        recipe = self.trial.recipe
        u32 = UNIT_ROUNDOFF["fp32"]
        model = self.workload.build_model()
        widest = max(p.numel() // p.shape[0] for p in model.parameters() if p.dim() > 0)
        terms = self.ranks * recipe.gradient_accumulation
        compute = math.sqrt(widest) * u32
        if recipe.precision != "fp32":
            compute += UNIT_ROUNDOFF[recipe.precision]
        return compute, math.sqrt(terms) * u32


@contextmanager
def so_many_threads(threads: int) -> Iterator[None]:
    """For torch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_of_a_rank(trial: Trial) -> int:
    """As many as each process of the trial has, servers included."""
    processes = trial.layout.processes
    cores = len(os.sched_getaffinity(0))
    return trial.recipe.threads_per_rank or max(1, cores // processes)


def judge_all(folder: Path) -> None:
    """Judge the cells that the folder's list names; leave the verdicts beside it."""
    verdicts = []
    benches = Benches()
    for directory in json.loads((folder / CELLS_FILE).read_text()):
        trial = Trial.model_validate_json((Path(directory) / TRIAL_FILE).read_text())
        assert trial.recipe.steps is not None, "a verification counts steps"
        verdicts.append(judge(trial, Path(directory), trial.recipe.steps, benches))
    text = json.dumps([verdict.model_dump(mode="json") for verdict in verdicts])
    (folder / VERDICTS_FILE).write_text(text)


def judge(trial: Trial, directory: Path, steps: int, benches: Benches) -> Verdict:
    """The verdict on the evidence that the trial's ranks left in the folder."""
    strategy = trial.built_strategy
    found = put_together(
        [
            RankEvidence.load(directory / EVIDENCE.format(rank))
            for rank in trial.layout.training_ranks
        ]
    )
    guarantee = strategy.guarantee()
    if guarantee is None:
        return verdict_on(found, trial, steps, benches)
    records = [
        RankRecord.model_validate_json((directory / rank_file(rank)).read_text())
        for rank in range(trial.layout.processes)
    ]
    return check_guarantee(found, trial, steps, records, guarantee=guarantee)


class Benches:
    """References by what they depend on: most strategies share theirs."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Bench, Tolerances]] = {}

    def of(self, trial: Trial, steps: int) -> tuple[Bench, Tolerances]:
        # Neither touches a parameter: the reference has no use for them.
        recipe = trial.recipe.model_copy(
            update={"activation_checkpointing": False, "cpu_offload": False}
        )
        threads = threads_of_a_rank(trial)
        models = [model.model_dump(mode="json") for model in (trial.workload, recipe)]
        key = json.dumps((*models, trial.world_size, steps, threads), sort_keys=True)
        if key not in self._made:
            bench = Bench(
                workload=trial.workload.build(recipe.seed),
                trial=trial,
                ranks=trial.world_size,
                steps=steps,
                device=torch.device(trial.device_type),
                threads=threads,
            )
            self._made[key] = (bench, bench.tolerances())
        return self._made[key]


UNDECIDED = Cause(
    text="cannot be told: forward passes differ by rounding, and this model amplifies rounding",
    evidence="equal weights, samples and draws; other first losses, within rounding; a disturbance "
    "of that size alone moves the reference's gradient by more than a quarter of itself",
    first_deviation="losses",
)


def cannot_be_told(found: Evidence, checks: Sequence[Check], tolerances: Tolerances) -> bool:
    """Whether the first forward pass differs by rounding alone where it has to be exact."""
    if not tolerances.exact_forward or any(
        not check.holds for check in checks if check.name in GIVEN
    ):
        return False
    pairs = [
        (mine[0], wanted[0])
        for mine, wanted in zip(found.losses, tolerances.reference.losses, strict=True)
    ]
    differs = any(mine != wanted for mine, wanted in pairs)
    return differs and all(
        abs(mine - wanted) <= tolerances.floor * abs(wanted) for mine, wanted in pairs
    )


def verdict_on(found: Evidence, trial: Trial, steps: int, benches: Benches) -> Verdict:
    """Hold evidence against the reference of its trial."""
    bench, tolerances = benches.of(trial, steps)
    alone = len(found.losses) == 1 and trial.world_size > 1
    if alone:
        tolerances = replace(
            tolerances,
            reference=seen_by_one_process(tolerances.reference),
            disturbed=[seen_by_one_process(run) for run in tolerances.disturbed],
        )
    checks = checks_of(found, tolerances)

    def run(variation: Variation) -> Evidence:
        evidence = bench.run(variation)
        return seen_by_one_process(evidence) if alone else evidence

    def whole_batch() -> Evidence:
        return replace(bench, ranks=1).run()

    equivalent: bool | None = all(check.holds for check in checks)
    cause = None
    if not equivalent and cannot_be_told(found, checks, tolerances):
        equivalent, cause = None, UNDECIDED
    elif not equivalent:
        cause = cause_of(
            found, checks, tolerances, recipe=trial.recipe, run=run, whole_batch=whole_batch
        )
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
    )
