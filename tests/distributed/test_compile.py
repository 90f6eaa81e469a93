"""Compiled ranks train as the eager reference does, and a trial tells what compiling took."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

import shardmark
from shardmark.base.evidence.captures import Capture
from shardmark.bench.launch.session import run_experiment
from shardmark.experiment.load import from_mapping
from shardmark.ranks.measure.step.compilation import Compilation
from shardmark.ranks.strategies.base import RankContext
from tests import present
from tests.distributed.captures import Case, capture_all, check_verdict, recipe, trial
from tests.distributed.experiments import experiment
from tests.distributed.ranks import run_ranks
from tests.kept_engine import KeptEngine

BLOCKS: dict[str, Any] = {"compile": "blocks"}
CASES = {
    "ddp, blocks": Case(trial=trial("ddp", recipe(**BLOCKS))),
    "fsdp, blocks": Case(trial=trial("fsdp", recipe(**BLOCKS))),
    "zero-2, blocks": Case(trial=trial("zero-2", recipe(**BLOCKS))),
    "ddp, checkpointed blocks": Case(
        trial=trial("ddp", recipe(**BLOCKS, activation_checkpointing=True))
    ),
    "ddp, model": Case(trial=trial("ddp", recipe(compile="model"), bucket_mb=1.0)),
    "fsdp, model": Case(trial=trial("fsdp", recipe(compile="model"), wrap="root")),
}


def work(process: RankContext, caches: str) -> dict[str, tuple[Capture | None, float]]:
    """Return the captures, and how long each model was compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    taken = {}
    for name, case in CASES.items():
        torch._dynamo.reset()  # else it takes what another case has compiled
        with Compilation() as compilation:
            (capture,) = capture_all(process, {name: case}).values()
        taken[name] = capture, compilation.seconds
    return taken


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    directory = tmp_path_factory.mktemp("compiled")
    caches = str(directory / "caches")
    found: list[Any] = run_ranks(work, caches, world_size=2, directory=directory)
    return found


@pytest.mark.parametrize("name", CASES)
def test_compiled_ranks_train_as_the_eager_reference(compiled: list[Any], name: str) -> None:
    check_verdict([{name: rank[name][0]} for rank in compiled], name, CASES[name])
    assert all(rank[name][1] > 0 for rank in compiled), "nothing was compiled"


def test_trial_records_compile_seconds(kept_engine: KeptEngine, tmp_path: Path) -> None:
    one = {"strategy": ["single"], "world_size": [1]}  # kernels take a processor long to build
    asked = experiment(matrix={"recipe.compile": ["none", "blocks"], **one})
    run_experiment(from_mapping(asked), tmp_path / "run", engine=kept_engine)
    trials = shardmark.load(tmp_path / "run").trials
    plain, found = sorted(trials, key=lambda t: t.trial["recipe"]["compile"], reverse=True)
    assert plain.missing["compile_seconds"] == plain.missing["recompilations"]
    assert plain.missing["compile_seconds"] == "recipe.compile is none"
    seconds, again, step = (
        found.metrics[name] for name in ("compile_seconds", "recompilations", "step_seconds_p99")
    )
    assert (present(again).value, present(seconds).value > 10 * present(step).value) == (0, True)
    assert found.ranks[0].initial_weights_sha256 == plain.ranks[0].initial_weights_sha256
