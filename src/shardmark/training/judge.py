"""The judge of `verify`: runs the reference, compares, finds causes, writes verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardmark.analysis.evidence import (
    EVIDENCE,
    Evidence,
    RankEvidence,
    put_together,
    seen_by_one_process,
)
from shardmark.analysis.parity import UNIT_ROUNDOFF, Tolerances, checks_of
from shardmark.experiment.schema import Trial
from shardmark.results.verification import Verdict
from shardmark.strategies import build_strategy
from shardmark.training.causes import cause_of
from shardmark.training.reference import reference_evidence
from shardmark.training.variation import NOTHING, Noise, Variation
from shardmark.workloads import build_workload
from shardmark.workloads._protocol import BatchPlan, Workload

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

    def run(self, variation: Variation = NOTHING) -> Evidence:
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
        """
        recipe = self.trial.recipe
        u32 = UNIT_ROUNDOFF["fp32"]
        model = self.workload.build_model()
        widest = max(p.numel() // p.shape[0] for p in model.parameters() if p.dim() > 0)
        terms = self.ranks * recipe.gradient_accumulation
        compute = math.sqrt(widest) * u32
        if recipe.precision != "fp32":
            compute += UNIT_ROUNDOFF[recipe.precision]
        runs = [
            self.run(
                Variation(
                    noise=Noise(
                        seed=1 + index,
                        parameters=compute,
                        gradients=compute + math.sqrt(terms) * u32,
                    )
                )
            )
            for index in range(DISTURBED_RUNS)
        ]
        return Tolerances(reference=self.run(), disturbed=runs, floor=4 * compute)


def judge_all(folder: Path) -> None:
    """Judge the cells that the folder's list names; leave the verdicts beside it."""
    verdicts = []
    benches = Benches()
    for directory in json.loads((folder / CELLS_FILE).read_text()):
        trial = Trial.model_validate_json((Path(directory) / "trial.json").read_text())
        assert trial.recipe.steps is not None, "a verification counts steps"
        verdicts.append(judge(trial, Path(directory), trial.recipe.steps, benches))
    text = json.dumps([verdict.model_dump(mode="json") for verdict in verdicts])
    (folder / VERDICTS_FILE).write_text(text)


def judge(trial: Trial, directory: Path, steps: int, benches: Benches) -> Verdict:
    """The verdict on the evidence that the trial's ranks left in the folder."""
    strategy = build_strategy(trial.strategy.name, trial.strategy.options)
    processes = len(strategy.placement(trial.world_size))
    found = put_together(
        [RankEvidence.load(directory / EVIDENCE.format(rank)) for rank in range(processes)]
    )
    return verdict_on(found, trial, steps, benches)


class Benches:
    """References by what they depend on: most strategies share theirs."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Bench, Tolerances]] = {}

    def of(self, trial: Trial, steps: int) -> tuple[Bench, Tolerances]:
        # Neither touches a parameter: the reference has no use for them.
        recipe = trial.recipe.model_copy(
            update={"activation_checkpointing": False, "cpu_offload": False}
        )
        told = (trial.workload, recipe.model_dump(mode="json"), trial.world_size, steps)
        key = json.dumps(told, sort_keys=True)
        if key not in self._made:
            bench = Bench(
                workload=build_workload(trial.workload, seed=recipe.seed),
                trial=trial,
                ranks=trial.world_size,
                steps=steps,
                device=torch.device(trial.device_type),
            )
            self._made[key] = (bench, bench.tolerances())
        return self._made[key]


def verdict_on(found: Evidence, trial: Trial, steps: int, benches: Benches) -> Verdict:
    """Hold evidence against the reference of its trial."""
    bench, tolerances = benches.of(trial, steps)
    alone = len(found.losses) == 1 and trial.world_size > 1
    if alone:
        tolerances = Tolerances(
            reference=seen_by_one_process(tolerances.reference),
            disturbed=[seen_by_one_process(run) for run in tolerances.disturbed],
            floor=tolerances.floor,
        )
    checks = checks_of(found, tolerances)

    def run(variation: Variation) -> Evidence:
        evidence = bench.run(variation)
        return seen_by_one_process(evidence) if alone else evidence

    def whole_batch() -> Evidence:
        return replace(bench, ranks=1).run()

    equivalent = all(check.holds for check in checks)
    return Verdict(
        id=trial.id,
        strategy=trial.strategy.name,
        strategy_options=trial.strategy.options,
        world_size=trial.world_size,
        precision=trial.recipe.precision,
        varied=trial.varied,
        equivalent=equivalent,
        checks=checks,
        cause=None
        if equivalent
        else cause_of(
            found, checks, tolerances, recipe=trial.recipe, run=run, whole_batch=whole_batch
        ),
    )
