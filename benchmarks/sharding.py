"""Whether sharding is real: the bytes of model state that a rank holds, beside those defined.

    python benchmarks/sharding.py [--model resnet50] [--strategies ddp fsdp] [--small]

ResNet-50 with AdamW on 4 ranks.  `held` is what a trial's probe finds (the largest over ranks, and
over the marks before the backward pass and before the update).  `defined` is what the strategy's
paper says for fp32 parameters P, gradients G = P, and Adam's two moments 2 P on N ranks.

A count of another kind checks it: the C++ allocator's events from before the model was built tell
how much is alive just before the update, when activations are gone.  Taking away the batch and the
model's buffers leaves the model state, whether or not Python can see it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recording import Table, options_of, store, surroundings
from shardmark.experiment.load import from_mapping
from shardmark.launch.controller import run_experiment
from shardmark.results.store import load_run
from shardmark.strategies import build_strategy
from sides import add_sources_to_path, metric

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardmark.strategies._protocol import Process, Worker

NAME = "sharding"
RANKS = 4
GLOBAL_BATCH = 16
MOST_RATIO = 0.27
BAR = f"Bar: fsdp holds at most {MOST_RATIO} of what ddp holds"
KINDS = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
STRATEGIES = (
    *("ddp", "fsdp", "fsdp-grad-op", "fsdp-hybrid"),
    *("zero-0", "zero-1", "zero-2", "zero-3"),
)
DEFINED: dict[str, tuple[float, float, float]] = {
    "ddp": (1, 1, 1),
    "fsdp": (RANKS, RANKS, RANKS),
    "fsdp-grad-op": (1, RANKS, RANKS),
    "fsdp-hybrid": (2, 2, 2),
    "zero-0": (1, 1, 1),
    "zero-1": (1, 1, RANKS),
    "zero-2": (1, RANKS, RANKS),
    "zero-3": (RANKS, RANKS, RANKS),
}
"""In how many parts parameters, gradients and optimizer state are cut: FSDP by Zhao et al. (VLDB
2023), ZeRO by Rajbhandari et al. (SC 2020, section 5), hybrid with groups of two."""
MB = 1e6
AUDIT_SECONDS = 900


def recipe_of() -> dict[str, Any]:
    return {
        "global_batch": GLOBAL_BATCH,
        "steps": 2,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "seed": 0,
    }


def workload_of(model: str) -> dict[str, Any]:
    return {"name": "classification", "model": model, "dataset": "digits", "image_size": 32}


def held_by_trials(model: str, strategies: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Strategy -> bytes by kind, from one ordinary trial each."""
    experiment = from_mapping(
        {
            "name": "sharding",
            "workload": workload_of(model),
            "recipe": recipe_of(),
            "matrix": {"strategy": list(strategies), "world_size": [RANKS]},
            "measure": {"warmup_steps": 1, "evaluate": "never"},
            "device": "cpu",
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(run_experiment(experiment, Path(folder) / "run"))
    for trial in run.trials:
        if trial.failure is not None:
            raise SystemExit(f"{trial.strategy}: {trial.failure}")
    return {
        trial.strategy: {name: metric(trial, name) for name in (*KINDS, "peak_memory_bytes")}
        for trial in run.trials
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    at_nanoseconds: int
    held: dict[str, int]


class Marks:
    """A recorder that looks at the state held where the probe does, and notes when."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.marks: dict[str, Mark] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        import time

        from shardmark.measure.probe import held_bytes

        if name in ("backward", "optimizer"):
            held = held_bytes(self._worker.held_state())
            self.marks[name] = Mark(at_nanoseconds=time.time_ns(), held=held)
        yield


def audit_all(process: Process, model: str, strategies: tuple[str, ...]) -> dict[str, Any]:
    return {name: audit(process, model, name) for name in strategies}


def audit(process: Process, model: str, name: str) -> dict[str, int]:
    """Bytes alive just before the update by the allocator's events, and those held_state names."""
    import gc

    from shardmark.experiment.schema import Recipe
    from shardmark.measure.memory import memory_changes
    from shardmark.measure.probe import NoSpans
    from shardmark.strategies._protocol import Server, Shard
    from shardmark.workloads import build_workload
    from shardmark.workloads._protocol import BatchPlan
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # what the strategy before left must not be freed inside the profile
    workload = build_workload(workload_of(model), seed=0)
    recipe = Recipe.model_validate(recipe_of())
    plan = BatchPlan(global_batch=GLOBAL_BATCH, seed=0)
    batches = workload.batches(plan, Shard(index=process.rank, count=process.world_size))
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        worker = build_strategy(name, {}).start(workload, recipe, process)
        assert not isinstance(worker, Server)
        for _ in range(2):
            worker.step(next(batches), NoSpans())
        marks = Marks(worker)
        batch = next(batches)
        worker.step(batch, marks)
    mark = marks.marks["optimizer"]
    alive = sum(
        change for at, change in memory_changes(profiled) if at < mark.at_nanoseconds
    )
    buffers = sum(b.numel() * b.element_size() for b in worker.buffers().values())
    pictures = batch.pictures.numel() * 4 + batch.labels.numel() * 8  # type: ignore[attr-defined]
    return {
        "allocated_bytes": alive,
        "held_bytes": sum(mark.held.values()),
        "buffer_bytes": buffers,
        "batch_bytes": pictures,
        "unexplained_bytes": alive - sum(mark.held.values()) - buffers - pictures,
        **{f"before_backward_{k}": v for k, v in marks.marks["backward"].held.items()},
        **{f"before_update_{k}": v for k, v in mark.held.items()},
    }
