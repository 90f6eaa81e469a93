"""Layers divided over ranks, alone and with FSDP2: mathematics, memory, bytes, planted traps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardmark.core.recipe import Recipe
from shardmark.strategies.base import RankContext
from shardmark.trials.trial import Trial
from shardmark.workloads import check_data
from shardmark.workloads.base import TensorPlan, Workload
from tests.distributed import layered
from tests.distributed.captures import Case, capture_all, refusals
from tests.distributed.faults import Started
from tests.distributed.layered import (
    AGAIN,
    SGD,
    UNCLIPPED,
    UNTIED,
    VISION,
    WIDE,
    Probed,
    check_exact,
    check_traffic,
    language,
    probed,
)
from tests.distributed.ranks import run_ranks

if TYPE_CHECKING:
    from torch import nn

pytestmark = pytest.mark.timeout(300)

started = partial(layered.started, "tp")
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TWO_BY_TWO = {"mesh": {"shard": 2, "tensor": 2}}


def case(folder: Path, changes: dict[str, Any], *, ranks: int = 2, **options: Any) -> Case:
    chosen = {"name": "tp"} if ranks == 2 else {"name": "fsdp-tp"} | TWO_BY_TWO
    return layered.case(folder, changes, ranks=ranks, batch=8, **chosen | options)


def hugging_face(family: str, **fields: object) -> dict[str, Any]:
    head = {"head_dim": 8} if family == "qwen3" else {}
    return {"model": f"hf:{family}", "model_options": LLAMA | head | fields}


def untied(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """As `parallelize_module` leaves tied weights."""
    from unittest.mock import patch

    with patch("shardmark.strategies.layers.divided._tied", return_value=[]):
        return started(workload, wanted, process)


def norms_not_summed(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """As Qwen3's plan without `replicated_with_grad_allreduce`."""
    planned = workload.tensor_plan

    def without(model: nn.Module) -> TensorPlan:
        plan = planned(model)
        assert isinstance(plan, TensorPlan)
        styles = {name: style for name, style in plan.styles.items() if style != "summed"}
        return TensorPlan(styles=styles, units=plan.units)

    workload.tensor_plan = without  # type: ignore[method-assign]
    return started(workload, wanted, process)


def from_a_set(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """A plan in another order on each rank, as one has that was made from a set of names."""
    planned = workload.tensor_plan

    def shuffled(model: nn.Module) -> TensorPlan:
        plan = planned(model)
        assert isinstance(plan, TensorPlan)
        order = sorted(plan.styles, reverse=process.rank == 1)
        styles = {pattern: plan.styles[pattern] for pattern in order}
        return TensorPlan(styles=styles, units=plan.units)

    workload.tensor_plan = shuffled  # type: ignore[method-assign]
    return started(workload, wanted, process)


def two_rank_cases(folder: Path) -> dict[str, Case]:
    both: dict[str, Any] = {"sequence_parallel": True, "loss_parallel": True}
    return {
        "tied": case(folder, AGAIN),
        "learned positions, uneven": case(
            folder, SGD, model={"positions": "learned", "packed": False, "objective": "masked"}
        ),
        "untied, sequence, loss": case(folder, AGAIN, model=UNTIED, **both),
        "bf16": case(folder, {"precision": "bf16"}),
        "fp16": case(folder, {"precision": "fp16"}),
        "tied Qwen3": case(folder, {}, model=hugging_face("qwen3", tie_word_embeddings=True)),
        "GPT-NeoX": case(folder, {}, model=NEOX),
        "vision transformer": case(folder, AGAIN, model=VISION),
        "a plan from a set": case(folder, {}, begin=from_a_set),
        "untied by mistake": case(
            folder, {}, begin=untied, cause="tied weights are not tied any more: head.weight"
        ),
        "norms not summed": case(
            folder,
            {},
            model=hugging_face("qwen3"),
            begin=norms_not_summed,
            cause="the gradients of some parameters alone are wrong",
        ),
    }


NEOX = {
    "model": "hf:gpt_neox",
    "model_options": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "hidden_dropout": 0.1,
    },
}
"""Its dropout is on whole activations."""


def four_rank_cases(folder: Path) -> dict[str, Case]:
    return {
        "tied": case(folder, AGAIN, ranks=4),
        "untied, sequence, loss": case(
            folder,
            {},
            model=UNTIED,
            ranks=4,
            sequence_parallel=True,
            loss_parallel=True,
        ),
        "Qwen3": case(folder, {}, model=hugging_face("qwen3"), ranks=4),
    }


def probed_trials(folder: Path, ranks: int) -> dict[str, Trial]:
    asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "again": (AGAIN, {}),
        "sequence": (AGAIN, {"sequence_parallel": True}),
        "bf16, loss": ({"precision": "bf16"}, {"loss_parallel": True}),
    }
    chosen = asked if ranks == 2 else {"again": asked["again"]}
    made = {
        name: case(folder, UNCLIPPED | changes, model=WIDE, ranks=ranks, **options)
        for name, (changes, options) in chosen.items()
    }
    made["ddp"] = layered.case(folder, UNCLIPPED, name="ddp", model=WIDE, ranks=ranks, batch=8)
    return {name: each.trial for name, each in made.items()}


def refused(process: RankContext, folder: Path) -> dict[str, str]:
    """What is told of models that cannot be divided."""
    asked = {
        "heads": case(folder, {}, model={"heads": 1}),
        "dropout": case(folder, {}, model={"dropout": 0.1}),
        "positions": case(folder, {}, model={"positions": "learned"}, sequence_parallel=True),
        "length": case(folder, {}, model={"sequence_length": 25}, sequence_parallel=True),
        "no plan": case(folder, {}, model={"model": "hf:gpt2", "model_options": {"n_layer": 1}}),
    }
    return refusals(process, {name: each.trial for name, each in asked.items()})


def work_on_two(process: RankContext, folder: Path) -> Any:
    captured = capture_all(process, two_rank_cases(folder))
    probes = {name: probed(process, of) for name, of in probed_trials(folder, 2).items()}
    return captured, probes, refused(process, folder)


def work_on_four(process: RankContext, folder: Path) -> Any:
    captured = capture_all(process, four_rank_cases(folder))
    return captured, {name: probed(process, of) for name, of in probed_trials(folder, 4).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = layered.written_texts(tmp_path_factory.mktemp("texts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        for each in (*two_rank_cases(made).values(), *four_rank_cases(made).values()):
            check_data(each.trial.workload)
        for length in (64, 25):
            check_data(language(made, sequence_length=length))
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
def test_two_ranks_train_as_one(two: list[Any], folder: Path, name: str) -> None:
    check_exact(two, name, two_rank_cases(folder)[name])


@pytest.mark.parametrize("name", four_rank_cases(Path("x")))
def test_two_by_two_ranks_train_as_one(four: list[Any], folder: Path, name: str) -> None:
    check_exact(four, name, four_rank_cases(folder)[name])


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_held_and_sent_is_what_the_strategy_says(
    request: pytest.FixtureRequest, ranks: int
) -> None:
    """Parameters, gradients and optimizer state, embedding and head included; within 5 %."""
    of_ranks = [probes for _, probes, *_ in request.getfixturevalue({2: "two", 4: "four"}[ranks])]
    probes: dict[str, Probed] = of_ranks[0]
    whole = sum(probes["ddp"].held.values())
    for name in probes.keys() - {"ddp"}:
        assert sum(probes[name].held.values()) < 1.1 * whole / ranks, name
        check_traffic(name, of_ranks)


def test_what_cannot_be_divided_is_refused(two: list[Any]) -> None:
    told = two[0][2]
    assert "1 heads cannot be divided over 2 tensor ranks" in told["heads"]
    assert "set workload.dropout: 0" in told["dropout"]
    assert all("sequence_parallel: false" in told[name] for name in ("positions", "length"))
    assert "sequences of 25 cannot be divided" in told["length"]
    assert "fsdp" in told["no plan"]
