"""A two-stage detector trains the same under every strategy, and other sampling is noticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

from shardmark.core.recipe import Optimizer, Recipe
from shardmark.equivalence.capture import Capture
from shardmark.measure.step.recorder import Spans
from shardmark.strategies.base import RankContext
from shardmark.workloads import check_data
from shardmark.workloads.base import Batch, Workload
from shardmark.workloads.detection.batch import DetectionBatch
from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.detection.proposals import PictureSampler
from tests.distributed.captures import (
    RECIPES,
    SYNCHRONISED,
    Captures,
    Case,
    capture_all,
    check_verdict,
    recipe,
    trial,
)
from tests.distributed.faults import Faulty, Started, ddp, start
from tests.distributed.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.timeout(400)


def torchvisions_sampler(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Proposals from the global generator, as a plain training script draws them."""
    started = ddp(workload, recipe, process)
    for owner in (started.worker.module.rpn, started.worker.module.roi_heads):
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
        targets = tuple(
            target | {"sampling_seed": target["sampling_seed"] + 1} for target in batch.targets
        )
        return self.worker.step(replace(batch, targets=targets), recorder)  # type: ignore[no-any-return]


def other_seeds(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """The strategy's own seeds: only zero-1 samples so, say."""
    started = start("zero-1", workload, recipe, process)
    faulty = Faulty(started.worker, step=OtherSeeds(started.worker).step)
    return Started(faulty, started.shard)


DRAWS = "different random draws (proposal sampling)"
FAULTY = {
    "other seeds in one strategy": (other_seeds, DRAWS),
    "torchvision's sampler": (torchvisions_sampler, DRAWS),
}
EQUIVALENT = {
    **dict.fromkeys(("ddp", "zero-3"), "sgd"),
    "fsdp": "synchronised",
    "fsdp-grad-op": "accumulated, checkpointed",
}
"""The table of strategies has each recipe, on a smaller model."""


def cases(folder: Path) -> Mapping[str, Case]:
    optimizer = Optimizer(name="sgd", lr=0.02, momentum=0.9, weight_decay=5e-4)
    common = {"global_batch": 8, "optimizer": optimizer}
    workload = DetectionOptions(
        model="tests.distributed.models:small_detector",
        data_dir=str(folder),
        validation_samples=8,
    )
    asked = RECIPES | {"synchronised": SYNCHRONISED}
    wrong = trial("ddp", recipe(**common), workload=workload)
    return {
        name: Case(trial=trial(name, recipe(**common | asked[label]), workload=workload))
        for name, label in EQUIVALENT.items()
    } | {
        name: Case(trial=wrong, begin=begin, cause=cause) for name, (begin, cause) in FAULTY.items()
    }


def work(process: RankContext, folder: Path) -> dict[str, Capture | None]:
    return capture_all(process, cases(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        check_data(cases(made)["ddp"].trial.workload)
        yield made


@pytest.fixture(scope="module")
def captures(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Captures:
    return run_ranks(work, folder, world_size=2, directory=tmp_path_factory.mktemp("detection"))


@pytest.mark.parametrize("name", EQUIVALENT)
def test_shipped_strategies_are_equivalent(captures: Captures, folder: Path, name: str) -> None:
    verdict = check_verdict(captures, name, cases(folder)[name])
    (draws,) = [check for check in verdict.checks if check.name == "random draws"]
    # 3 steps of 8 pictures, each drawn once for anchors and once for proposals.
    assert draws.found == "48 draws are equal"


@pytest.mark.parametrize("fault", FAULTY)
def test_a_planted_fault_is_refused_and_named(captures: Captures, folder: Path, fault: str) -> None:
    check_verdict(captures, fault, cases(folder)[fault])
