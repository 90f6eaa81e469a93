"""A two-stage detector trains the same under every strategy, and other sampling is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

from shardmark.core.recipe import Limits, Measure, Optimizer, Recipe
from shardmark.equivalence.capture import Capture
from shardmark.equivalence.verdict import ReferenceCache, verdict_on
from shardmark.measure.step.recorder import Spans
from shardmark.results.verification import Verdict
from shardmark.strategies.base import RankContext
from shardmark.trials.trial import StrategySpec, Trial
from shardmark.workloads import check_data
from shardmark.workloads.base import Batch, Workload
from shardmark.workloads.detection.batch import DetectionBatch
from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.detection.proposals import PictureSampler
from tests.distributed.faults import Faulty, Started, clipped_by_default, ddp, scaled, start
from tests.distributed.ranks import run_ranks
from tests.distributed.test_verify import STEPS, captured

if TYPE_CHECKING:
    from torch import Tensor

SHIPPED = ("ddp", "fsdp", "fsdp-grad-op", "zero-0", "zero-1", "zero-2", "zero-3")
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated, checkpointed": {"gradient_accumulation": 2, "activation_checkpointing": True},
}
REFERENCES = ReferenceCache()


def trial(strategy: str, folder: Path, **changes: Any) -> Trial:
    optimizer = Optimizer(name="sgd", lr=0.02, momentum=0.9, weight_decay=5e-4)
    common = {"global_batch": 8, "steps": STEPS, "optimizer": optimizer, "seed": 3}
    return Trial(
        id=strategy,
        experiment="verify",
        workload=DetectionOptions(
            model="tests.distributed.models:small_detector",
            data_dir=str(folder),
            validation_samples=8,
        ),
        recipe=Recipe.model_validate(common | changes),
        strategy=StrategySpec(name=strategy),
        world_size=2,
        measure=Measure(),
        limits=Limits(),
        device_type="cpu",
    )


def torchvisions_sampler(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Proposals from the global generator, as a plain training script draws them."""
    started = ddp(workload, recipe, process)
    for owner in (started.worker._module.rpn, started.worker._module.roi_heads):
        ours = owner.fg_bg_sampler
        assert isinstance(ours, PictureSampler)
        del owner.fg_bg_sampler
        owner.fg_bg_sampler = BalancedPositiveNegativeSampler(
            ours.batch_size_per_image, ours.positive_fraction
        )
    return started


@dataclass
class OtherSeeds:
    """A worker that samples other proposals from the same pictures."""

    worker: Any

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        assert isinstance(batch, DetectionBatch)
        targets = [
            target | {"sampling_seed": target["sampling_seed"] + 1}
            for target in batch.model_targets
        ]
        return self.worker.step(replace(batch, model_targets=targets), recorder)  # type: ignore[no-any-return]


def other_seeds(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """The strategy's own seeds: only zero-1 samples so, say."""
    started = start("zero-1", workload, recipe, process)
    faulty = Faulty(started.worker, step=OtherSeeds(started.worker).step)
    return Started(faulty, started.shard)


DRAWS = "different random draws (proposal sampling)"
FAULTS: dict[str, tuple[Any, str]] = {
    "other seeds in one strategy": (other_seeds, DRAWS),
    "torchvision's sampler": (torchvisions_sampler, DRAWS),
    "sum over ranks": (scaled(2.0), "gradients are summed over the 2 ranks, not averaged"),
    "DeepSpeed's clipping": (
        clipped_by_default,
        "gradients are clipped to norm 1, DeepSpeed's default",
    ),
}


def work(process: RankContext, folder: Path) -> dict[Any, Capture]:
    found: dict[Any, Capture] = {}
    for name in SHIPPED:
        for label, changes in RECIPES.items():
            found[name, label] = captured(process, trial(name, folder, **changes))
    for fault, (begin, _) in FAULTS.items():
        found[fault] = captured(process, trial("ddp", folder), begin)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        check_data(trial("ddp", made).workload)
        yield made


@pytest.fixture(scope="module")
def gathered(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Capture]]:
    return run_ranks(work, folder, world_size=2, directory=tmp_path_factory.mktemp("detection"))


def verdict(gathered: list[dict[Any, Capture]], key: Any, tried: Trial) -> Verdict:
    return verdict_on(
        Capture.of_shares([found[key] for found in gathered]), tried, STEPS, REFERENCES
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("label", RECIPES)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_strategies_are_equivalent(
    gathered: list[dict[Any, Capture]], folder: Path, name: str, label: str
) -> None:
    found = verdict(gathered, (name, label), trial(name, folder, **RECIPES[label]))
    assert found.equivalent, [check for check in found.checks if not check.holds]
    (draws,) = [check for check in found.checks if check.name == "random draws"]
    # 3 steps of 8 pictures, each drawn once for anchors and once for proposals.
    assert draws.found == "48 draws are equal"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_and_named(
    gathered: list[dict[Any, Capture]], folder: Path, fault: str
) -> None:
    found = verdict(gathered, fault, trial("ddp", folder))
    assert found.equivalent is False
    assert found.cause is not None
    assert found.cause.text == FAULTS[fault][1], found.cause
