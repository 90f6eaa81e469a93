"""Layers in stages on several ranks: mathematics, memory, bytes, planted traps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardmark.core.recipe import Recipe
from shardmark.strategies.base import RankContext
from shardmark.trials.trial import Trial
from shardmark.workloads import check_data
from shardmark.workloads.base import Workload
from shardmark.workloads.own.options import OwnOptions
from tests.distributed import layered
from tests.distributed.captures import Case, capture_all, recipe, refusals, trial
from tests.distributed.faults import Started
from tests.distributed.layered import (
    AGAIN,
    SGD,
    UNCLIPPED,
    UNTIED,
    VISION,
    WIDE,
    check_exact,
    check_traffic,
    probed,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)


def hugging_face(family: str, **fields: object) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    return {"model": f"hf:{family}", "model_options": sizes | fields}


NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 64}
NEOX = {"intermediate_size": 64, "hidden_dropout": 0, "attention_dropout": 0}
QWEN3 = hugging_face("qwen3", head_dim=8, tie_word_embeddings=True, **GROUPED)
ONE_GRADIENT = "the gradients of some parameters alone are wrong"
CLIPPED_IN_PARTS = "gradients are clipped by the norms of parts of the model, not by that of all"
case = partial(layered.case, name="pp")
begun = partial(layered.started, "pp")
four_ranks = partial(layered.case, ranks=4)
PADDED = OwnOptions(task="tests.distributed.models:PaddedSequences")
BOTH: dict[str, Any] = {"name": "fsdp-tp-pp", "mesh": {"tensor": 2, "pipeline": 2}}


def untied(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """As stages leave tied weights that nobody ties again: each has the gradient of its place."""
    started = begun(workload, wanted, process)
    started.worker._tied = {}
    return started


def clipped_by_stage(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    started = begun(workload, wanted, process)
    worker: Any = started.worker
    worker._clip = lambda largest: nn.utils.clip_grad_norm_(worker._parameters, largest)
    return started


def two_rank_cases(folder: Path) -> dict[str, Case]:
    return {
        "tied": case(folder, {}),
        "untied, gpipe": case(folder, SGD, model=UNTIED, schedule="gpipe"),
        "untied, interleaved": case(
            folder, {}, model=UNTIED | {"layers": 4}, schedule="interleaved", micro_batches=8
        ),
        "zero bubble": case(folder, {}, model={"layers": 4}, schedule="zero-bubble"),
        "again": case(folder, AGAIN),
        "bf16": case(folder, {"precision": "bf16"}),
        "learned positions, uneven": case(
            folder, {}, model={"positions": "learned", "packed": False, "objective": "masked"}
        ),
        "documents": case(folder, {}, model={"document_masks": True}),
        "GPT-2": case(folder, AGAIN, model=hugging_face("gpt2", **NO_DROPOUT)),
        "untied Llama": case(folder, {}, model=hugging_face("llama", **GROUPED)),
        "GPT-NeoX, documents": case(
            folder, {}, model=hugging_face("gpt_neox", **NEOX) | {"document_masks": True}
        ),
        "vision transformer": case(folder, {}, model=VISION),
        "tied weights without their sum": case(folder, {}, begin=untied, cause=ONE_GRADIENT),
        "clipped by stage": case(
            folder, SGD, model=UNTIED, begin=clipped_by_stage, cause=CLIPPED_IN_PARTS
        ),
    }


def four_rank_cases(folder: Path) -> dict[str, Case]:
    """Two pipelines of two stages: with samples of their own, or of layers that are divided."""
    deep = {"layers": 4}
    by_position = {"sequence_parallel": True, "loss_parallel": True}
    return {
        "ddp-pp, tied": four_ranks(folder, AGAIN, name="ddp-pp"),
        "ddp-pp, weights of the loss": four_ranks(folder, AGAIN, name="ddp-pp", model=PADDED),
        "ddp-pp, interleaved": four_ranks(
            folder, SGD, name="ddp-pp", model=UNTIED | deep, schedule="interleaved"
        ),
        "fsdp-pp, tied": four_ranks(folder, AGAIN, name="fsdp-pp"),
        "fsdp-pp, zero bubble": four_ranks(
            folder, {}, name="fsdp-pp", model=deep, schedule="zero-bubble"
        ),
        "fsdp-pp, gpipe": four_ranks(folder, SGD, name="fsdp-pp", model=UNTIED, schedule="gpipe"),
        "fsdp-pp, vision transformer": four_ranks(folder, {}, name="fsdp-pp", model=VISION),
        "fsdp-pp, tied Qwen3": four_ranks(folder, {}, name="fsdp-pp", model=QWEN3),
        "divided, tied": four_ranks(folder, AGAIN, **BOTH),
        "divided, sequence, loss": four_ranks(folder, SGD, model=UNTIED, **BOTH | by_position),
        "divided, zero bubble": four_ranks(folder, {}, model=deep, schedule="zero-bubble", **BOTH),
        "divided, vision transformer": four_ranks(folder, {}, model=VISION, **BOTH),
        "divided, tied Qwen3": four_ranks(folder, AGAIN, model=QWEN3, **BOTH),
        "divided copies": four_ranks(folder, {}, **BOTH | {"mesh": {"data": 2, "tensor": 2}}),
    }


def eight_rank_cases(folder: Path) -> dict[str, Case]:
    """Two of each axis."""
    return {"sharded": layered.case(folder, AGAIN, name="fsdp-tp-pp", ranks=8)}


def probed_trials(folder: Path, ranks: int = 2) -> dict[str, Trial]:
    if ranks == 4:
        asked = {name: {"name": name} for name in ("ddp-pp", "fsdp-pp")} | {"fsdp-tp-pp": BOTH}
        return {
            name: four_ranks(folder, UNCLIPPED | AGAIN, model=WIDE, **options).trial
            for name, options in asked.items()
        }
    deep = {"layers": 4}
    made = {
        "tied": case(folder, UNCLIPPED, model=WIDE),
        "untied": case(folder, UNCLIPPED | AGAIN, model=WIDE | UNTIED),
        "zero bubble": case(folder, UNCLIPPED, model=WIDE | deep, schedule="zero-bubble"),
        "ddp": case(folder, UNCLIPPED, name="ddp", model=WIDE | UNTIED),
    }
    return {name: each.trial for name, each in made.items()}


def refused(process: RankContext, folder: Path) -> dict[str, str]:
    """What is told of models that cannot be cut."""
    asked = {
        "dropout": case(folder, {}, model={"dropout": 0.1}).trial,
        "few": case(folder, {}, model={"layers": 1}, schedule="interleaved").trial,
        "batch norm": trial("pp", recipe()),
        "GPT-2's dropout": case(folder, {}, model=hugging_face("gpt2", embd_pdrop=0)).trial,
    }
    return refusals(process, asked)


def work_on_two(process: RankContext, folder: Path) -> Any:
    captured = capture_all(process, two_rank_cases(folder))
    probes = {name: probed(process, of) for name, of in probed_trials(folder).items()}
    return captured, probes, refused(process, folder)


def work_on_four(process: RankContext, folder: Path) -> Any:
    captured = capture_all(process, four_rank_cases(folder))
    return captured, {name: probed(process, of) for name, of in probed_trials(folder, 4).items()}


def work_on_eight(process: RankContext, folder: Path) -> Any:
    return (capture_all(process, eight_rank_cases(folder)),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = layered.written_texts(tmp_path_factory.mktemp("texts"))
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        for each in two_rank_cases(made).values():
            check_data(each.trial.workload)
        for of in probed_trials(made).values():
            check_data(of.workload)
        yield made


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pytest.importorskip("transformers")
    return run_ranks(work_on_two, folder, world_size=2, directory=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pytest.importorskip("transformers")
    return run_ranks(work_on_four, folder, world_size=4, directory=tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", two_rank_cases(Path("x")))
def test_two_stages_train_as_one(two: list[Any], folder: Path, name: str) -> None:
    check_exact(two, name, two_rank_cases(folder)[name])


@pytest.mark.parametrize("name", four_rank_cases(Path("x")))
def test_two_pipelines_train_as_one(four: list[Any], folder: Path, name: str) -> None:
    check_exact(four, name, four_rank_cases(folder)[name])


def test_sharded_pipelines_of_divided_layers_train_as_one(folder: Path, tmp_path: Path) -> None:
    ranks = run_ranks(work_on_eight, folder, world_size=8, directory=tmp_path)
    check_exact(ranks, "sharded", eight_rank_cases(folder)["sharded"])


def test_what_is_held_is_a_part(two: list[Any], four: list[Any]) -> None:
    """Parameters, gradients and optimizer state of the rank that has most."""
    whole = sum(two[0][1]["ddp"].held.values())
    for ranks, name, part in ((two, "untied", 0.55), (four, "fsdp-tp-pp", 0.3)):
        assert max(sum(probes[name].held.values()) for _, probes, *_ in ranks) < part * whole


@pytest.mark.parametrize(
    ("ranks", "name"),
    [("two", "tied"), ("two", "untied"), ("two", "zero bubble"), ("four", "ddp-pp"),
     ("four", "fsdp-pp"), ("four", "fsdp-tp-pp")],
)  # fmt: skip
def test_the_network_carries_what_the_formula_says(
    request: pytest.FixtureRequest, ranks: str, name: str
) -> None:
    check_traffic(name, [probes for _, probes, *_ in request.getfixturevalue(ranks)])


def test_no_pass_besides_the_schedule_s(two: list[Any]) -> None:
    assert not any(probe.draws_moved for _, probes, _ in two for probe in probes.values())


def test_what_cannot_be_cut_is_refused(two: list[Any]) -> None:
    told = two[0][2]
    assert "a dropout" in told["dropout"]
    assert "do not make 4 stages" in told["few"]
    assert "batch norm" in told["batch norm"]
    assert "set resid_pdrop, attn_pdrop" in told["GPT-2's dropout"]
