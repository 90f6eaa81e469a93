"""What libraries' own code takes on a processor: the constants of `predict/library.py`.

    python benchmarks/library_work.py [FOLDER]

Trains models too small to compute anything, so that a step is the libraries' own code and that of
the loop, and fits it to how often strategies say that each thing happens.  FOLDER holds the runs of
an earlier call, which are not repeated.  Strategies are started on two ranks, each of which has a
core for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import numpy as np
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Table, options_of, store, surroundings

import shardmark
from shardmark.costs import cost_model
from shardmark.costs.base import Cell
from shardmark.predict.anchor import step_of
from shardmark.predict.hardware.catalogue import NodeType
from shardmark.predict.hardware.written import node_of
from shardmark.predict.library import OPERATIONS, library_work
from shardmark.predict.models import Models
from shardmark.predict.timing import Constants
from shardmark.results.network import read_network
from shardmark.trials.trial import Trial
from shardmark.workloads.language.options import LanguageOptions

NAME = "library_work"
CLOSE = 0.1
BAR = f"Bar: the step that the fit makes is at most {CLOSE:.0%} off in the middle"
DATA_PARALLEL = (
    "single",
    "ddp",
    {"name": "ddp", "compress": "bf16"},
    {"name": "ddp", "compress": "powersgd"},
    "zro",
    *("zero-0", "zero-1", "zero-2", "zero-3"),
    *(
        {"name": name, "wrap": wrap}
        for name in ("fsdp", "fsdp-grad-op", "fsdp1")
        for wrap in ("blocks", "root")
    ),
    *({"name": f"ps-{kind}", "servers": 1} for kind in ("sync", "async", "bounded")),
    *(
        {"name": name, "period_steps": period}
        for name in ("local-sgd", "diloco")
        for period in (1, 5, 20)
    ),
)
DIVIDED = (
    "tp",
    {"name": "tp", "sequence_parallel": True},
    *({"name": "pp", "micro_batches": count} for count in (2, 4, 8)),
    *({"name": "pp", "schedule": schedule} for schedule in ("gpipe", "interleaved", "zero-bubble")),
    "ulysses",
)
EXPERIMENT: dict[str, Any] = {
    "name": "library-work",
    "workload": {
        "name": "language",
        "model": "gpt",
        "width": 32,
        "heads": 4,
        "dataset": "stdlib",
        "tokenizer": "bytes",
        "sequence_length": 16,
        "validation_samples": 64,
    },
    "recipe": {
        "global_batch": 8,
        "steps": 45,
        "threads_per_rank": 1,
        "gradient_clipping": 1.0,
    },
    "measure": {
        "warmup_steps": 5,
        "repeats": 2,
        "max_remeasure": 0,
        "probe": False,
        "verify": False,
        "evaluate": "never",
        "link_seconds": 8,
    },
    "device": "cpu",
}
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"strategy": [*DATA_PARALLEL, *DIVIDED], "workload.layers": [2, 6]},
    "sgd": {"strategy": ["single", "ddp"], "workload.layers": [2, 6]},
    "passes": {
        "strategy": ["single", "ddp", "fsdp"],
        "workload.layers": [2, 6],
        "recipe.gradient_accumulation": [2, 4],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One cell: what a step took beyond what is predicted without its library, in operations."""

    title: str
    step_operations: float
    """Of the whole step."""
    left: float
    """Of what the library's code has to explain."""
    work: dict[str, float]


def measured(folder: Path, node: NodeType) -> Iterator[Measured]:
    operation = node.card.operation_seconds
    assert operation is not None, "the run has measured it"
    models, constants = Models(), Constants()
    cells: dict[str, list[tuple[Trial, float]]] = {}
    for result in shardmark.load(folder).trials:
        rate = result.metrics.get("samples_per_second")
        if rate is not None:
            trial = Trial.model_validate(result.trial)
            assert isinstance(trial.workload, LanguageOptions)
            key = f"{trial.title}, {trial.workload.layers} layers, {trial.recipe.optimizer.name}"
            if trial.recipe.gradient_accumulation > 1:
                key += f", {trial.recipe.gradient_accumulation} passes"
            cells.setdefault(key, []).append((trial, trial.batch_per_step / rate.value))
    for title, repeats in cells.items():
        trial = repeats[0][0]
        seconds = min(seconds for _, seconds in repeats)
        step = step_of(trial, models, node, constants)
        predicted = step.time(constants)
        size = models.profile_of(trial, trial.world_size, trial.nodes, device_type="cpu").size
        cell = Cell(size=size, recipe=trial.recipe, world_size=trial.world_size)
        work = library_work(cost_model(trial.built_strategy), cell)
        left = seconds - (predicted.seconds - predicted.library_seconds)
        yield Measured(
            title=title,
            step_operations=seconds / operation,
            left=left / operation / step.slowdown,
            work=dict(work),
        )


def fitted(cells: list[Measured]) -> dict[str, float]:
    """Least squares of relative errors: none is negative."""
    names = sorted({name for cell in cells for name in cell.work})
    matrix = np.array(
        [[cell.work.get(name, 0.0) / cell.step_operations for name in names] for cell in cells]
    )
    found, _ = nnls(matrix, np.array([cell.left / cell.step_operations for cell in cells]))
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    found = surroundings()
    folder = options.folder or Path(mkdtemp(prefix=f"{NAME}-"))
    cells: list[Measured] = []
    for name, matrix in RUNS.items():
        experiment = EXPERIMENT | {"matrix": matrix | {"world_size": [1, 2]}}
        experiment["recipe"] = experiment["recipe"] | {
            "optimizer": {"name": "sgd" if name == "sgd" else "adamw", "lr": 1e-3}
        }
        run = shardmark.run(experiment, out=folder / name, progress=False)
        record = read_network(run.path)
        assert record is not None, "the run has measured its links"
        cells += measured(run.path, node_of(record, device="cpu"))
    constants = fitted(cells)
    errors = {
        cell.title: (sum(constants[name] * count for name, count in cell.work.items()) - cell.left)
        / cell.step_operations
        for cell in cells
    }
    middle = median(map(abs, errors.values()))
    store(
        NAME,
        options=options,
        around=found,
        bar=BAR,
        holds=middle <= CLOSE,
        table=Table(
            columns=("what", "operations", "in the package"),
            rows=tuple(
                (name, f"{value:.0f}", f"{OPERATIONS.get(name, float('nan')):.0f}")
                for name, value in constants.items()
            ),
            notes=(
                f"Fitted to {len(cells)} cells: steps are {middle:.1%} off in the middle, the"
                f" worst {max(map(abs, errors.values())):.0%}.",
            ),
        ),
        numbers={"operations": constants, "errors": errors, "median": middle},
    )


if __name__ == "__main__":
    main()
