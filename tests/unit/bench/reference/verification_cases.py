"""Captures made by hand, and verification cases whose references take milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardmark.base.evidence.captures import Array, Capture, Tolerances
from shardmark.base.layout import Shard
from shardmark.base.recipe import Limits, Measure
from shardmark.base.results.verification import Verdict
from shardmark.bench.reference.compare import QualityTolerances
from shardmark.bench.reference.reference import AS_DEFINED, Hypothesis, Noise, ReferenceRuns
from shardmark.bench.reference.verdict import (
    KnownReference,
    ReferenceCache,
    known_reference,
    verdict_on,
)
from shardmark.ranks.trial import StrategySpec, Trial
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from tests.unit.ranks.train.toy import ToyWorkload, Unused, normed, plain, recipe

STEPS = 3
RANKS = 2


def norm_only() -> nn.Module:
    """Batch norm without dropout."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


class EarlyUsed(nn.Module):
    """A model with a part that only the first step uses, while `last` is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.early = nn.Linear(4, 2), nn.Linear(4, 2)
        nn.init.zeros_(self.last.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(inputs)
        return outputs if self.last.weight.any() else outputs + self.early(inputs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normed": normed,
    "norm only": norm_only,
    "plain": plain,
    "unused": Unused,
    "early used": EarlyUsed,
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
}


def array(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def handmade(**changes: Any) -> Capture:
    """Two ranks, two steps, one weight and one batch norm's mean; all numbers are round."""
    made = Capture(
        initial_sha256=("a" * 64, "a" * 64),
        sample_ids=(((0, 1), (4, 5)), ((2, 3), (6, 7))),
        weights=((2.0, 2.0), (2.0, 2.0)),
        losses=((2.0, 1.0), (4.0, 3.0)),
        draws=((("a",), ("b",)), (("c",), ("d",))),
        learning_rates=(0.5, 0.25),
        skipped=((), ()),
        tensors={
            "gradient": {"weight": array(3.0, 4.0)},
            "parameters after the first update": {"weight": array(1.0, 0.0)},
            "parameters": {"weight": array(0.0, 2.0)},
            "optimizer state": {"weight/momentum_buffer": array(6.0, 8.0)},
        },
        buffers=({"mean": array(1.0)}, {"mean": array(2.0)}),
        data_set=("24 samples", "24 samples"),
        quality={"validation_loss": 2.0, "accuracy_top1": 0.5},
        samples_evaluated=100,
    )
    return replace(made, **changes)


def with_tensor(made: Capture, part: str, tensors: Mapping[str, Array]) -> Capture:
    return replace(made, tensors={**made.tensors, part: tensors})


def tolerances_of(made: Capture, *perturbed: Capture, floor: float = 1e-3) -> Tolerances:
    return QualityTolerances(
        reference=made, unperturbed=made, perturbed=perturbed or (made,), floor=floor
    )


def tight(*perturbed: Capture, floor: float = 1e-3) -> Tolerances:
    """Tolerances of the handmade capture: a thousandth, unless a perturbed run shows more."""
    made = handmade()
    return tolerances_of(made, *perturbed, floor=floor)


class Task(ToyWorkload):
    """The toy regression with an evaluation."""

    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> object:
        assert (shard, device.type) == (Shard(index=0, count=1), "cpu")
        rows = range(self.validation_samples)
        with torch.no_grad():
            return float(self.mean_loss(model, self.batch(rows)))

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        (loss,) = parts
        assert isinstance(loss, float)
        return {"validation_loss": loss}


class OneReference(ReferenceCache):
    """Every trial has the same reference."""

    def __init__(self, known: KnownReference) -> None:
        super().__init__()
        self._only = known

    def get(self, trial: Trial, steps: int) -> KnownReference:
        assert (trial.id, steps) == (self._only.runs.trial.id, STEPS)
        return self._only


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedRuns(ReferenceRuns):
    """Trains with each hypothesis once, however many verdicts ask for it."""

    known: dict[object, Capture] = field(default_factory=dict)

    def run(self, hypothesis: Hypothesis = AS_DEFINED, noise: Noise | None = None) -> Capture:
        key = (self.shares, hypothesis, noise)
        if key not in self.known:
            self.known[key] = ReferenceRuns.run(self, hypothesis, noise)
        return self.known[key]


class VerificationCase:
    """Judges captures without processes."""

    def __init__(
        self,
        model: str,
        *,
        target_scale: float = 1.0,
        uneven: bool = False,
        weights_known: bool = True,
        **changes: Any,
    ) -> None:
        """Large targets make large gradients."""
        told = {"global_batch": 16, "steps": STEPS, **changes}
        self.trial = Trial(
            id="toy",
            experiment="toy",
            workload=ClassificationOptions(),
            recipe=recipe(**told),
            strategy=StrategySpec(name="ddp"),
            world_size=RANKS,
            measure=Measure(),
            limits=Limits(),
            device_type="cpu",
        )
        task = Task(MODELS[model], uneven=uneven, weights_known=weights_known)
        task.targets *= target_scale
        self.known = known_reference(
            ReferenceRuns(
                workload=task,
                trial=self.trial,
                shares=RANKS,
                steps=STEPS,
                device=torch.device("cpu"),
            )
        )
        runs = self.known.runs
        given = {field.name: getattr(runs, field.name) for field in fields(ReferenceRuns)}
        self.runs = RememberedRuns(**given)
        self.tolerances = self.known.tolerances
        self.reference = self.tolerances.reference
        self.whole_batch = self.known.whole_batch.check

    def verdict(self, capture: Capture, tolerances: Tolerances | None = None) -> Verdict:
        known = self.known._replace(runs=self.runs, tolerances=tolerances or self.tolerances)
        return verdict_on(capture, self.trial, STEPS, OneReference(known))

    def verdict_on_run(
        self, hypothesis: Hypothesis = AS_DEFINED, noise: Noise | None = None
    ) -> Verdict:
        """The verdict on a strategy that trains so."""
        return self.verdict(self.runs.run(hypothesis, noise))


@cache
def verification_case(
    model: str = "normed", accumulation: int = 1, **of_task: bool
) -> VerificationCase:
    """A case for all tests that need no special recipe."""
    return VerificationCase(model, gradient_accumulation=accumulation, **of_task)
