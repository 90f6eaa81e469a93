"""Parts of sequences on several ranks: mathematics, memory, bytes, planted traps."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from shardmark.workloads import TaskOptions, build_workload, check_data
from shardmark.workloads.base import BatchPlan, Workload
from shardmark.workloads.language.batch import TokenBatch
from shardmark.workloads.language.options import LanguageOptions
from shardmark.workloads.own.options import OwnOptions
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

pytestmark = pytest.mark.timeout(300)

RANKS = 4
CLIPPED = {
    "global_batch": 8,
    "optimizer": Optimizer(name="adamw", lr=1e-3, weight_decay=0.1),
    "gradient_clipping": 0.1,
}
SGD = {"optimizer": Optimizer(name="sgd", lr=0.05, momentum=0.9)}
AGAIN = {"gradient_accumulation": 2, "activation_checkpointing": True}
LEARNED = {"positions": "learned"}
TWO_BY_TWO: dict[str, Any] = {"mesh": {"data": 2, "sequence": 2}}
SHARDED: dict[str, Any] = {"mesh": {"shard": 2, "sequence": 2}}
QWEN3 = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}


def language(folder: Path, **fields: Any) -> LanguageOptions:
    common = {"dataset": "text", "data_dir": str(folder), "sequence_length": 24}
    sizes = {} if "model" in fields else {"width": 32, "heads": 4}
    return LanguageOptions.model_validate(common | sizes | fields)


def case(
    workload: TaskOptions,
    changes: dict[str, Any],
    *,
    name: str = "ulysses",
    begin: Any = None,
    cause: str | None = None,
    **options: Any,
) -> Case:
    made = trial(name, recipe(**CLIPPED | changes), ranks=RANKS, workload=workload, **options)
    return Case(trial=made, begin=begin, cause=cause)


def not_summed(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """Each rank updates with the gradients of its part."""
    started = begun(workload, wanted, process)
    started.worker._model.require_backward_grad_sync = False
    return started


def without_offset(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """Each part begins at the first position."""
    started = begun(workload, wanted, process)
    part = started.worker._part

    def moved(batch: TokenBatch, index: int, count: int) -> TokenBatch:
        cut: TokenBatch = part(batch, index, count)
        assert cut.positions is not None
        return replace(cut, positions=cut.positions - cut.positions[:, :1])

    started.worker._part = moved
    return started


def begun(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    made = trial("ulysses", wanted, ranks=process.world_size)
    worker = made.built_strategy.start(workload, wanted, process)
    share = made.layout.ranks[process.rank].share
    assert share is not None
    return Started(worker, share)


def cases(folder: Path) -> dict[str, Case]:
    uneven = {"packed": False, "objective": "masked", "tied": False}
    qwen3 = {"model": "hf:qwen3", "model_options": QWEN3}
    bert = {"model": "hf:bert", "model_options": BERT, "packed": False, "objective": "masked"}
    own = OwnOptions(task="tests.distributed.models:SharedSequences")
    padded = OwnOptions(task="tests.distributed.models:PaddedSequences")
    return {
        "tied": case(language(folder), AGAIN),
        "untied, uneven": case(language(folder, **LEARNED, **uneven), SGD, **TWO_BY_TWO),
        "documents": case(language(folder, **LEARNED, document_masks=True), {}, **TWO_BY_TWO),
        "bf16": case(language(folder), {"precision": "bf16"}),
        "fp16, sharded": case(language(folder), {"precision": "fp16"}, name="fsdp-ulysses"),
        "sharded": case(language(folder), AGAIN, name="fsdp-ulysses", **SHARDED),
        "bf16, sharded": case(
            language(folder), {"precision": "bf16"}, name="fsdp-ulysses", **SHARDED
        ),
        "Qwen3": case(language(folder, **qwen3), AGAIN, **TWO_BY_TWO),
        "BERT, uneven": case(language(folder, **bert), {}, **TWO_BY_TWO),
        "own": case(own, {}),
        "weights of the loss": case(padded, AGAIN, **TWO_BY_TWO),
        "gradients not summed": case(
            language(folder),
            {},
            begin=not_summed,
            cause="gradients are wrong where losses hold",
        ),
        "positions without their offset": case(
            language(folder, **LEARNED),
            {},
            begin=without_offset,
            cause="the model computes something else of the same samples",
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    held: dict[str, int]
    saved_bytes: int
    """Of activations for the backward pass."""
    collectives: dict[str, CollectiveRecord]
    needed: RequiredTraffic


def probed(process: RankContext, of: Trial) -> Probed:
    workload = build_workload(of.workload, seed=3)
    worker = of.built_strategy.start(workload, of.recipe, process)
    assert not isinstance(worker, Server)
    share = of.layout.ranks[process.rank].share
    assert share is not None
    batches = workload.batches(BatchPlan(global_batch=of.batch_per_step, seed=3), share)
    worker.step(next(batches), NoSpans())
    held, seen = HeldSpans(worker, process.device), set[int]()
    storage_bytes(worker.held_state().parameters, seen=seen)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(storage_bytes([tensor], seen=seen))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        worker.step(next(batches), held)
    with CollectiveCounter() as counter:
        worker.step(next(batches), NoSpans())
    counts: Any = model_counts(
        workload, workload.build_model(), of.recipe, sequence_ranks=of.layout.sequence
    )
    names = ("parameters", "trained_parameters", "divided", "divided_again")
    told: dict[str, Any] = {name: counts[name] or {} for name in names}
    return Probed(
        held=held.largest,
        saved_bytes=sum(saved),
        collectives=counter.counts,
        needed=cost_model(of.built_strategy).required_traffic(
            Cell(size=ModelSize(**told), recipe=of.recipe, world_size=of.world_size)
        ),
    )


def probed_trials(folder: Path) -> dict[str, Trial]:
    """Wide enough that what is held and sent is more than rounding."""
    model = {"width": 128, "layers": 2, "vocabulary": 512, "sequence_length": 64}
    gpt = language(folder, **model)
    qwen3 = language(
        folder, model="hf:qwen3", model_options=QWEN3, vocabulary=512, sequence_length=64
    )
    plain: dict[str, Any] = {"gradient_clipping": None}
    made = {
        "ddp": case(gpt, plain, name="ddp"),
        "ulysses": case(gpt, plain),
        "again": case(gpt, plain | AGAIN),
        "bf16, two by two": case(gpt, plain | {"precision": "bf16"}, **TWO_BY_TWO),
        "fsdp-ulysses": case(gpt, plain, name="fsdp-ulysses", **SHARDED),
        "Qwen3": case(qwen3, plain | {"precision": "bf16"}, **TWO_BY_TWO),
    }
    return {name: each.trial for name, each in made.items()}


def refused(process: RankContext, folder: Path) -> dict[str, str]:
    """What is told of models whose sequences cannot be shared."""
    asked = {
        "heads": case(language(folder, heads=2), {}),
        "length": case(language(folder, sequence_length=25), {}),
        "dropout": case(language(folder, dropout=0.1), {}),
        "no plan": case(OwnOptions(task="tests.distributed.models:GroupedTokens"), {}),
    }
    return refusals(process, {name: each.trial for name, each in asked.items()})


def work(process: RankContext, folder: Path) -> Any:
    captured = capture_all(process, cases(folder))
    probes = {name: probed(process, of) for name, of in probed_trials(folder).items()}
    return captured, probes, refused(process, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (made / f"{number:02}.txt").write_text(f"line {number}\n" * (10 + number % 7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        for each in cases(made).values():
            check_data(each.trial.workload)
        for of in probed_trials(made).values():
            check_data(of.workload)
        check_data(language(made, sequence_length=25))
        yield made


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pytest.importorskip("transformers")
    return run_ranks(work, folder, world_size=RANKS, directory=tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", cases(Path("x")))
def test_ranks_train_as_one(ranks: list[Any], folder: Path, name: str) -> None:
    """In fp32 the losses are the reference's within 1e-6, the update within 5e-5."""
    captures: Captures = [captured for captured, *_ in ranks]
    wanted = cases(folder)[name]
    verdict = check_verdict(captures, name, wanted)
    if wanted.trial.recipe.precision == "fp32" and wanted.cause is None:
        found = {check.name: check.found for check in verdict.checks}
        losses, parameters = found["losses"], found["parameters after the last step"]
        assert isinstance(losses, float)
        assert isinstance(parameters, float)
        assert losses < 5 * 1e-6, "of losses of 5"
        assert parameters < 5e-5


def test_a_rank_keeps_the_activations_of_its_part(ranks: list[Any]) -> None:
    """As many as a rank of `ddp` with as many tokens, four times the samples; state as told."""
    probes: dict[str, Probed] = ranks[0][1]
    ddp, shared, sharded = (probes[name] for name in ("ddp", "ulysses", "fsdp-ulysses"))
    assert shared.saved_bytes < 1.1 * ddp.saved_bytes
    assert shared.held == ddp.held
    assert sum(sharded.held.values()) < 1.1 * sum(ddp.held.values()) / RANKS


def test_what_is_sent_is_what_the_strategy_says(ranks: list[Any]) -> None:
    """Within 5 %, by kind."""
    for name, of_rank in ranks[0][1].items():
        payloads = {part.kind: part.payload_bytes for part in of_rank.needed.traffic}
        counted = {kind: of_rank.collectives[kind].payload_bytes for kind in payloads}
        assert counted == pytest.approx(payloads, rel=0.05), name


def test_what_cannot_be_shared_is_refused(ranks: list[Any]) -> None:
    told = ranks[0][2]
    assert "2 heads cannot be divided over 4 ranks; use 2 ranks of sequence" in told["heads"]
    assert "25 positions cannot be divided" in told["length"]
    assert "dropout, a dropout, would draw other masks" in told["dropout"]
    assert "sequence_plan(model)" in told["no plan"]
