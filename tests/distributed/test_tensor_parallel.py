"""Layers divided over ranks, alone and with FSDP2: mathematics, memory, bytes, planted traps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardmark.core.recipe import Optimizer, Recipe
from shardmark.core.wire import ModelSize, WireBytes
from shardmark.measure.step.collectives import CollectiveCounter
from shardmark.measure.step.recorder import NoSpans
from shardmark.results.schema import CollectiveRecord
from shardmark.strategies.base import RankContext, Server
from shardmark.train.probe import HeldSpans, model_counts
from shardmark.trials.trial import Trial
from shardmark.workloads import build_workload, check_data
from shardmark.workloads.base import BatchPlan, TensorPlan, Workload
from shardmark.workloads.language.options import LanguageOptions
from tests.distributed.captures import (
    Captures,
    Case,
    capture_all,
    check_verdict,
    recipe,
    refusals,
    trial,
)
from tests.distributed.faults import Started
from tests.distributed.ranks import run_ranks

if TYPE_CHECKING:
    from torch import nn

pytestmark = pytest.mark.timeout(300)

ADAM = Optimizer(name="adamw", lr=1e-3, weight_decay=0.1)
CLIPPED = {"global_batch": 8, "optimizer": ADAM, "gradient_clipping": 0.1}
AGAIN = {"gradient_accumulation": 2, "activation_checkpointing": True}
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TWO_BY_TWO = {"mesh": {"shard": 2, "tensor": 2}}


def language(folder: Path, **fields: Any) -> LanguageOptions:
    common = {"dataset": "text", "data_dir": str(folder), "sequence_length": 24}
    sizes = {} if "model" in fields else {"width": 32, "heads": 4}
    return LanguageOptions.model_validate(common | sizes | fields)


def case(
    folder: Path,
    changes: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    ranks: int = 2,
    begin: Any = None,
    cause: str | None = None,
    **options: Any,
) -> Case:
    name = "tp" if ranks == 2 else "fsdp-tp"
    chosen = TWO_BY_TWO | options if ranks == 4 else options
    wanted = recipe(**CLIPPED | changes)
    workload = language(folder, **(model or {}))
    return Case(
        trial=trial(name, wanted, ranks=ranks, workload=workload, **chosen),
        begin=begin,
        cause=cause,
    )


def hugging_face(family: str, **fields: object) -> dict[str, Any]:
    head = {"head_dim": 8} if family == "qwen3" else {}
    return {"model": f"hf:{family}", "model_options": LLAMA | head | fields}


def untied(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """As `parallelize_module` leaves tied weights."""
    from unittest.mock import patch

    with patch("shardmark.strategies.layers.divided._tied", return_value=[]):
        return started("tp", workload, wanted, process)


def norms_not_summed(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """As Qwen3's plan without `replicated_with_grad_allreduce`."""
    planned = workload.tensor_plan

    def without(model: nn.Module) -> TensorPlan:
        plan = planned(model)
        assert isinstance(plan, TensorPlan)
        styles = {name: style for name, style in plan.styles.items() if style != "summed"}
        return TensorPlan(styles=styles, units=plan.units)

    workload.tensor_plan = without  # type: ignore[method-assign]
    return started("tp", workload, wanted, process)


def started(
    name: str, workload: Workload, wanted: Recipe, process: RankContext, **options: Any
) -> Started:
    made = trial(name, wanted, ranks=process.world_size, **options)
    worker = made.built_strategy.start(workload, wanted, process)
    share = made.layout.ranks[process.rank].share
    assert share is not None
    return Started(worker, share)


def two_rank_cases(folder: Path) -> dict[str, Case]:
    both: dict[str, Any] = {"sequence_parallel": True, "loss_parallel": True}
    sgd = {"optimizer": Optimizer(name="sgd", lr=0.05, momentum=0.9)}
    return {
        "tied": case(folder, AGAIN),
        "learned positions, uneven": case(
            folder, sgd, model={"positions": "learned", "packed": False, "objective": "masked"}
        ),
        "untied, sequence, loss": case(folder, AGAIN, model={"tied": False}, **both),
        "bf16": case(folder, {"precision": "bf16"}),
        "fp16": case(folder, {"precision": "fp16"}),
        "tied Qwen3": case(folder, {}, model=hugging_face("qwen3", tie_word_embeddings=True)),
        "GPT-NeoX": case(folder, {}, model=NEOX),
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
            model={"tied": False},
            ranks=4,
            sequence_parallel=True,
            loss_parallel=True,
        ),
        "Qwen3": case(folder, {}, model=hugging_face("qwen3"), ranks=4),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    held: dict[str, int]
    collectives: dict[str, CollectiveRecord]
    needed: WireBytes


def probed(process: RankContext, of: Trial) -> Probed:
    """The second step's state and the third one's collectives."""
    workload = build_workload(of.workload, seed=3)
    worker = of.built_strategy.start(workload, of.recipe, process)
    assert not isinstance(worker, Server)
    share = of.layout.ranks[process.rank].share
    assert share is not None
    batches = workload.batches(BatchPlan(global_batch=of.batch_per_step, seed=3), share)
    worker.step(next(batches), NoSpans())
    held = HeldSpans(worker, process.device)
    worker.step(next(batches), held)
    with CollectiveCounter() as counter:
        worker.step(next(batches), NoSpans())
    counts: Any = model_counts(
        workload, workload.build_model(), of.recipe, tensor_ranks=of.layout.tensor
    )
    size = ModelSize(
        parameters=counts["parameters"],
        trained_parameters=counts["trained_parameters"],
        divided=counts["divided"] or {},
        divided_again=counts["divided_again"],
    )
    needed = of.built_strategy.wire_bytes(size, of.recipe, of.world_size)
    return Probed(held=held.largest, collectives=counter.counts, needed=needed)


def probed_trials(folder: Path, ranks: int) -> dict[str, Trial]:
    """Wide enough that what is held and sent is more than rounding."""
    model = {"width": 128, "layers": 2, "vocabulary": 512, "sequence_length": 64}
    unclipped = {"gradient_clipping": None}
    asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "again": (AGAIN, {}),
        "sequence": (AGAIN, {"sequence_parallel": True}),
        "bf16, loss": ({"precision": "bf16"}, {"loss_parallel": True}),
    }
    chosen = asked if ranks == 2 else {"again": asked["again"]}
    trials = {
        name: case(folder, unclipped | changes, model=model, ranks=ranks, **options).trial
        for name, (changes, options) in chosen.items()
    }
    others = recipe(**CLIPPED | unclipped)
    return trials | {"ddp": trial("ddp", others, ranks=ranks, workload=language(folder, **model))}


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
    made = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (made / f"{number:02}.txt").write_text(f"line {number}\n" * (10 + number % 7))
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


def check(ranks: list[Any], name: str, wanted: Case) -> None:
    """In fp32 the losses are the reference's within 1e-6, the update within 5e-5."""
    captures: Captures = [captured for captured, *_ in ranks]
    verdict = check_verdict(captures, name, wanted)
    if wanted.trial.recipe.precision == "fp32" and wanted.cause is None:
        found = {check.name: check.found for check in verdict.checks}
        losses, parameters = found["losses"], found["parameters after the last step"]
        assert isinstance(losses, float)
        assert isinstance(parameters, float)
        assert losses < 5 * 1e-6, "of losses of 5"
        assert parameters < 5e-5


@pytest.mark.parametrize("name", two_rank_cases(Path("x")))
def test_two_ranks_train_as_one(two: list[Any], folder: Path, name: str) -> None:
    check(two, name, two_rank_cases(folder)[name])


@pytest.mark.parametrize("name", four_rank_cases(Path("x")))
def test_two_by_two_ranks_train_as_one(four: list[Any], folder: Path, name: str) -> None:
    check(four, name, four_rank_cases(folder)[name])


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_held_and_sent_is_what_the_strategy_says(
    request: pytest.FixtureRequest, ranks: int
) -> None:
    """Parameters, gradients and optimizer state, embedding and head included; within 5 %."""
    probes: dict[str, Probed] = request.getfixturevalue({2: "two", 4: "four"}[ranks])[0][1]
    whole = sum(probes.pop("ddp").held.values())
    for name, of_rank in probes.items():
        assert sum(of_rank.held.values()) < 1.1 * whole / ranks, name
        payloads: dict[str, float] = {}
        for part in of_rank.needed.traffic:
            payloads[part.kind] = payloads.get(part.kind, 0) + part.payload_bytes
        counted = {kind: record.payload_bytes for kind, record in of_rank.collectives.items()}
        others = sum(counted.pop(kind) for kind in counted.keys() - payloads.keys())
        assert counted == pytest.approx(payloads, rel=0.05), name
        assert others < 0.01 * sum(payloads.values()), "gradients of norms alone"


def test_what_cannot_be_divided_is_refused(two: list[Any]) -> None:
    told = two[0][2]
    assert "1 heads cannot be divided over 2 tensor ranks" in told["heads"]
    assert "set workload.dropout: 0" in told["dropout"]
    assert all("sequence_parallel: false" in told[name] for name in ("positions", "length"))
    assert "sequences of 25 cannot be divided" in told["length"]
    assert "fsdp" in told["no plan"]
