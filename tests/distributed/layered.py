"""What tests of divided layers and of pipelines have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmark.core.recipe import Optimizer, Recipe
from shardmark.core.traffic import ModelSize, RequiredTraffic
from shardmark.costs import cost_model
from shardmark.costs.base import Cell
from shardmark.measure.memory.tensors import storage_bytes
from shardmark.measure.step.collectives import CollectiveCounter
from shardmark.measure.step.recorder import NoSpans
from shardmark.results.schema import CollectiveRecord
from shardmark.strategies.base import RankContext, Server
from shardmark.train.probe import HeldSpans, model_counts
from shardmark.trials.trial import Trial
from shardmark.workloads import TaskOptions, build_workload
from shardmark.workloads.base import BatchPlan, Workload
from shardmark.workloads.language.options import LanguageOptions
from shardmark.workloads.own.options import OwnOptions
from shardmark.workloads.vision.options import ClassificationOptions
from tests.distributed.captures import Captures, Case, check_verdict, recipe, trial
from tests.distributed.faults import Started

ADAM = Optimizer(name="adamw", lr=1e-3, weight_decay=0.1)
CLIPPED = {"optimizer": ADAM, "gradient_clipping": 0.1}
SGD = {"optimizer": Optimizer(name="sgd", lr=0.05, momentum=0.9)}
AGAIN = {"gradient_accumulation": 2, "activation_checkpointing": True}
UNTIED = {"tied": False}
WIDE = {"width": 128, "layers": 2, "vocabulary": 512, "sequence_length": 64}
"""Wide enough that what is held and sent is more than rounding."""
UNCLIPPED = {"gradient_clipping": None}
VISION = ClassificationOptions(
    model="vit_cifar",
    model_options={"num_layers": 3, "hidden_dim": 32, "mlp_dim": 64},
    dataset="digits",
    validation_samples=100,
)
"""Its class token and positions are in none of its layers, but in the model and its encoder."""


def language(folder: Path, **fields: Any) -> LanguageOptions:
    common = {"dataset": "text", "data_dir": str(folder), "sequence_length": 24}
    sizes = {} if "model" in fields else {"width": 32, "heads": 4}
    return LanguageOptions.model_validate(common | sizes | fields)


def case(
    folder: Path,
    changes: dict[str, Any],
    *,
    name: str,
    model: Mapping[str, Any] | ClassificationOptions | OwnOptions | None = None,
    ranks: int = 2,
    batch: int = 16,
    begin: Any = None,
    cause: str | None = None,
    **options: Any,
) -> Case:
    wanted = recipe(**{"global_batch": batch} | CLIPPED | changes)
    workload: TaskOptions
    if isinstance(model, ClassificationOptions | OwnOptions):
        workload = model
    else:
        workload = language(folder, **model or {})
    made = trial(name, wanted, ranks=ranks, workload=workload, **options)
    return Case(trial=made, begin=begin, cause=cause)


def started(name: str, workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    made = trial(name, wanted, ranks=process.world_size)
    worker = made.built_strategy.start(workload, wanted, process)
    share = made.layout.ranks[process.rank].share
    assert share is not None
    return Started(worker, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    held: dict[str, int]
    collectives: dict[str, CollectiveRecord]
    needed: RequiredTraffic
    draws_moved: bool
    saved_bytes: int
    """Bytes saved for the backward pass; 0 with tensor or pipeline parallelism."""


def probed(process: RankContext, of: Trial, *, warmup_steps: int = 1) -> Probed:
    """State during the first step after the warm-up, and collectives of the step after it."""
    workload = build_workload(of.workload, seed=3)
    worker = of.built_strategy.start(workload, of.recipe, process)
    assert not isinstance(worker, Server)
    share = of.layout.ranks[process.rank].share
    assert share is not None
    batches = workload.batches(BatchPlan(global_batch=of.batch_per_step, seed=3), share)
    before = torch.get_rng_state()
    for _ in range(warmup_steps):
        worker.step(next(batches), NoSpans())
    moved = not torch.equal(before, torch.get_rng_state())
    held, seen = HeldSpans(worker, process.device), set[int]()
    storage_bytes(worker.held_state().parameters, seen=seen)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if of.layout.tensor == of.layout.pipeline == 1:  # a DTensor has no storage
            saved.append(storage_bytes([tensor], seen=seen))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        worker.step(next(batches), held)
    with CollectiveCounter() as counter:
        worker.step(next(batches), NoSpans())
    counts: Any = model_counts(
        workload,
        workload.build_model(),
        of.recipe,
        tensor_ranks=of.layout.tensor,
        sequence_ranks=of.layout.sequence,
    )
    between = dict(worker.between_stages())
    known = {name: counts.get(name) for name in ModelSize.__dataclass_fields__}
    size = ModelSize(**{name: of for name, of in known.items() if of is not None} | between)
    needed = cost_model(of.built_strategy).required_traffic(
        Cell(size=size, recipe=of.recipe, world_size=of.world_size)
    )
    return Probed(
        held=held.largest,
        collectives=counter.counts,
        needed=needed,
        draws_moved=moved,
        saved_bytes=sum(saved),
    )


def check_traffic(name: str, ranks: Iterable[Mapping[str, Probed]], *, rel: float = 0.05) -> None:
    """The mean over the ranks; besides, there are losses, norms and gradients of norms."""
    probes = [probes[name] for probes in ranks]
    payloads, counted = Counter[str](), Counter[str]()
    for part in probes[0].needed.traffic:
        payloads[part.kind] += round(part.payload_bytes)
    for probe in probes:
        for kind, record in probe.collectives.items():
            counted[kind] += round(record.payload_bytes)
    others = sum(counted.pop(kind) for kind in counted.keys() - payloads.keys())
    assert others / len(probes) < 0.01 * sum(payloads.values())
    for kind, payload_bytes in payloads.items():
        assert counted[kind] / len(probes) == pytest.approx(payload_bytes, rel=rel), (name, kind)


def check_exact(ranks: list[Any], name: str, wanted: Case) -> None:
    """In fp32 the losses, of 5, are the reference's within 1e-6 of them, the update within 5e-5."""
    captures: Captures = [captured for captured, *_ in ranks]
    verdict = check_verdict(captures, name, wanted)
    if wanted.trial.recipe.precision == "fp32" and wanted.cause is None:
        found = {check.name: check.found for check in verdict.checks}
        losses, parameters = found["losses"], found["parameters after the last step"]
        assert isinstance(losses, float)
        assert isinstance(parameters, float)
        assert losses < 5 * 1e-6
        assert parameters < 5e-5


def written_texts(folder: Path) -> Path:
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"line {number}\n" * (10 + number % 7))
    return folder
