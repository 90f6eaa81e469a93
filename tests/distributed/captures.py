"""Verified steps by real ranks, many trials in one group, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.nn import functional

from shardmark.base.errors import ShardmarkError
from shardmark.base.evidence.captures import Capture
from shardmark.base.recipe import Limits, Measure, Optimizer, Recipe
from shardmark.base.results.verification import Verdict
from shardmark.bench.reference.capture import capture_steps
from shardmark.bench.reference.verdict import ReferenceCache, verdict_on
from shardmark.ranks.strategies.base import RankContext, Server
from shardmark.ranks.train.schedule import set_numerics
from shardmark.ranks.trial import StrategySpec, Trial
from shardmark.ranks.workloads import TaskOptions, build_workload
from shardmark.ranks.workloads.base import BatchPlan
from shardmark.ranks.workloads.own.options import OwnOptions
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from tests.distributed.faults import Started
from tests.distributed.models import TEMPLATES

STEPS = 3
SHIPPED = (
    *("ddp", "zro", "fsdp", "fsdp-grad-op", "fsdp1"),
    *("zero-0", "zero-1", "zero-2", "zero-3"),
)
WORKLOAD = ClassificationOptions(
    model="tests.distributed.models:small", dataset="digits", validation_samples=100
)


def own(name: str) -> OwnOptions:
    """The task of the user's that `shardmark init` writes under this name."""
    return OwnOptions(task=f"{TEMPLATES / name}.py:Task")


GROUPED = OwnOptions(task="tests.distributed.models:GroupedTokens")
"""That of tokens, with parameter groups."""
PADDED = OwnOptions(task="tests.distributed.models:PaddedTokens")
"""The same, where the loss alone knows what samples weigh."""
SGD = Optimizer(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.1)
FUSED = Optimizer(name="adamw", lr=1e-3, weight_decay=0.1, implementation="fused")
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {"optimizer": Optimizer(name="adamw", lr=1e-3, weight_decay=0.1)},
    "bf16": {"precision": "bf16"},
    "accumulated, checkpointed": {"gradient_accumulation": 2, "activation_checkpointing": True},
    "clipped": {"gradient_clipping": 0.1},
    "channels last, fused": {"channels_last": True, "optimizer": FUSED},
}
SYNCHRONISED: dict[str, Any] = {"sync_batch_norm": True}
REFERENCES = ReferenceCache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trial, and how its worker is made where something is wrong with it."""

    trial: Trial
    begin: Callable[..., Started] | None = None
    cause: str | None = None
    """Text that the verdict must contain; None: equivalent."""


Captures = list[dict[str, Capture | None]]
"""Captures by rank and case; a server has none."""


def recipe(**changes: Any) -> Recipe:
    common = {"global_batch": 32, "steps": STEPS, "optimizer": SGD, "seed": 3}
    return Recipe.model_validate(common | changes)


def trial(
    strategy: str,
    wanted: Recipe,
    *,
    ranks: int = 2,
    workload: TaskOptions = WORKLOAD,
    device_type: Literal["cuda", "cpu"] = "cpu",
    **options: Any,
) -> Trial:
    return Trial(
        id=f"{strategy}-{ranks}",
        experiment="verify",
        workload=workload,
        recipe=wanted,
        strategy=StrategySpec(name=strategy, options=options),
        world_size=ranks,
        measure=Measure(),
        limits=Limits(),
        device_type=device_type,
    )


LINEAR = functional.linear
"""torch's function.  Stage 3 of DeepSpeed replaces it and never resets it; real trials do not share
a process."""


def capture_all(process: RankContext, cases: Mapping[str, Case]) -> dict[str, Capture | None]:
    return {name: _captured(process, case) for name, case in cases.items()}


def _captured(process: RankContext, case: Case) -> Capture | None:
    functional.linear = LINEAR
    of = case.trial
    workload = build_workload(of.workload, of.recipe.seed)
    if case.begin is None:
        role = of.built_strategy.start(workload, of.recipe, process)
        shard = of.layout.ranks[process.rank].share
    else:
        started = case.begin(workload, of.recipe, process)
        role, shard = started.worker, started.shard
    if isinstance(role, Server):
        role.serve()
        return None
    assert shard is not None
    set_numerics(of.recipe)
    capture = capture_steps(
        role,
        workload,
        of.recipe,
        plan=BatchPlan(global_batch=of.batch_per_step, seed=of.recipe.seed),
        shard=shard,
        steps=steps_taken(of),
        devices=[process.device],
    )
    role.close()
    return capture


def steps_taken(of: Trial) -> int:
    least = of.built_strategy.numerics(of.recipe).minimum_steps
    return max(STEPS, of.recipe.steps or 0, least)


def verdict_of(captures: Captures, name: str, case: Case) -> Verdict:
    ranks = [rank for each in captures if (rank := each[name]) is not None]
    layout = case.trial.layout
    assert len(ranks) == case.trial.world_size
    counting = [ranks[rank] for rank in layout.training_ranks if layout.ranks[rank].counts_loss]
    return verdict_on(Capture.of_shares(counting), case.trial, steps_taken(case.trial), REFERENCES)


def check_verdict(captures: Captures, name: str, case: Case) -> Verdict:
    """Equivalent, or refused and named, as the case has it."""
    verdict = verdict_of(captures, name, case)
    if case.cause is None:
        assert verdict.equivalent, [check for check in verdict.checks if not check.holds]
        assert verdict.cause is None
    else:
        assert verdict.equivalent is False
        assert verdict.cause is not None
        assert verdict.cause.text == case.cause, verdict.cause
        assert verdict.cause.evidence
    return verdict


def refusal(process: RankContext, of: Trial) -> str:
    """The message when the trial starts or takes its first steps."""
    try:
        _captured(process, Case(trial=of))
    except ShardmarkError as error:
        return str(error)
    return "not refused"
