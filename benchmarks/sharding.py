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

from groups import run_ranks
from recording import Table, options_of, store, surroundings
from shardmark.config.load import from_mapping
from shardmark.launch.controller import run_experiment
from shardmark.results.store import load_run
from shardmark.strategies import build_strategy
from sides import add_sources_to_path, metric

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardmark.strategies.base import RankContext, Worker

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
            "measure": {"repeats": 1, "warmup_steps": 1, "evaluate": "never"},
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

        import torch

        from shardmark.train.probe import held_bytes

        if name in ("backward", "optimizer"):
            held = held_bytes(self._worker.held_state(), torch.device("cpu"))
            self.marks[name] = Mark(at_nanoseconds=time.time_ns(), held=held)
        yield


def audit_all(process: RankContext, model: str, strategies: tuple[str, ...]) -> dict[str, Any]:
    return {name: audit(process, model, name) for name in strategies}


def audit(process: RankContext, model: str, name: str) -> dict[str, int]:
    """Bytes alive just before the update by the allocator's events, and those held_state names."""
    import gc

    from torch.profiler import ProfilerActivity, profile

    from shardmark.core.recipe import Recipe
    from shardmark.core.shares import Shard
    from shardmark.measure.memory.tensors import memory_changes
    from shardmark.measure.step.recorder import NoSpans
    from shardmark.strategies.base import Server
    from shardmark.workloads import build_workload, options
    from shardmark.workloads.base import BatchPlan

    gc.collect()  # what the strategy before left must not be freed inside the profile
    workload = build_workload(options(workload_of(model)), seed=0)
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
    alive = sum(change for at, change in memory_changes(profiled) if at < mark.at_nanoseconds)
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


EXPLAINED = {
    "ddp": "gradients are views of the buckets, so that there is no second copy",
    "fsdp": "rows are padded to a multiple of the ranks",
    "fsdp-grad-op": "before the backward pass the gathered parameters exist beside the shards",
    "fsdp-hybrid": "groups of two ranks hold one copy",
    "zero-0": "nothing is sharded",
    "zero-1": "DeepSpeed adds an fp32 copy of the rank's partition, and keeps averaged gradients "
    "of that partition beside the gradients that await reduction",
    "zero-2": "DeepSpeed adds an fp32 copy of the rank's partition, and a bucket of 25 MiB",
    "zero-3": "every parameter stays whole between its forward and its backward pass, since "
    "max_reuse_distance and max_live_parameters, 1e9 elements each, exceed the model, and lies "
    "beside its shard; DeepSpeed adds an fp32 copy of the partition and a bucket of 25 MiB",
}
"""Why `held` differs from `defined`, from the libraries' sources."""


def defined_bytes(strategy: str, parameters: float) -> dict[str, float]:
    """Bytes by kind as the paper defines them, for Adam's two moments."""
    cut = DEFINED[strategy]
    whole = (parameters, parameters, 2 * parameters)
    return {kind: size / parts for kind, size, parts in zip(KINDS, whole, cut, strict=True)}


def rows_of(
    held: Mapping[str, Mapping[str, float]], audits: Mapping[str, Mapping[str, int]]
) -> tuple[tuple[str, ...], ...]:
    whole = sum(held["ddp"][kind] for kind in KINDS)
    rows = []
    for name, found in held.items():
        expected = defined_bytes(name, held["ddp"]["parameter_bytes"])
        total = sum(found[kind] for kind in KINDS)
        rows.append(
            (
                name,
                *(f"{found[kind] / MB:.1f} / {expected[kind] / MB:.1f}" for kind in KINDS),
                f"{total / MB:.1f} / {sum(expected.values()) / MB:.1f}",
                f"{total / whole:.3f}",
                f"{found['peak_memory_bytes'] / MB:.0f}",
                f"{audits[name]['unexplained_bytes'] / MB:+.1f}" if name in audits else "",
                EXPLAINED[name],
            )
        )
    return tuple(rows)


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    options = parser.parse_args()
    add_sources_to_path()
    model = "resnet18" if options.small else options.model
    strategies = tuple(dict.fromkeys(("ddp", *options.strategies)))
    around = surroundings()
    held = held_by_trials(model, strategies)
    ranks = run_ranks(audit_all, model, strategies, ranks=RANKS, seconds=AUDIT_SECONDS)
    audits = {name: max((r[name] for r in ranks), key=_unexplained) for name in strategies}
    whole = sum(held["ddp"][kind] for kind in KINDS)
    ratio = sum(held["fsdp"][kind] for kind in KINDS) / whole if "fsdp" in held else None
    columns = ("strategy", "parameters", "gradients", "optimizer state", "sum", "of ddp's", "peak")
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=ratio is not None and ratio <= MOST_RATIO,
        table=Table(
            columns=(*columns, "unnamed", "why held is not defined"),
            rows=rows_of(held, audits),
            notes=(
                f"{model} with AdamW on {RANKS} ranks, MB (10^6 bytes), held / defined, largest "
                "rank.  `unnamed`: alive by the allocator's events just before the update, beyond "
                "the state named then, buffers and the batch.",
            ),
        ),
        numbers={"held": held, "audits": audits},
    )


def _unexplained(found: Mapping[str, int]) -> int:
    return abs(found["unexplained_bytes"])


if __name__ == "__main__":
    main()
