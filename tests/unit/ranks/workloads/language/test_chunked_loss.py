"""The loss of a language model, computed with the logits of a piece of the sequence at a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn.modules.module import register_module_forward_hook

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard
from shardmark.predict.memory import rank_memory
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.workloads import build_workload, options
from shardmark.ranks.workloads.base import BatchPlan, Workload
from shardmark.ranks.workloads.model_building import build_on_meta
from tests.unit.predict.made import trace
from tests.unit.ranks.train.toy import recipe
from tests.unit.ranks.workloads.test_adapters import QWEN3

VOCABULARY, LENGTH = 4000, 32


def task(chunks: int, **fields: Any) -> Workload:
    common: dict[str, Any] = {
        "name": "language",
        "dataset": "random",
        "vocabulary": VOCABULARY,
        "sequence_length": LENGTH,
        "loss_chunks": chunks,
    }
    sizes = {} if "model" in fields else {"layers": 1, "width": 16, "heads": 2}
    return build_workload(options(common | sizes | fields), seed=1)


@pytest.mark.parametrize("fields", [{}, QWEN3])
@pytest.mark.parametrize("chunks", [2, 5])
def test_loss_and_gradients_are_those_of_all_logits(fields: dict[str, Any], chunks: int) -> None:
    results = []
    for number in (1, chunks):
        workload = task(number, **fields)
        model = workload.build_model()
        plan = BatchPlan(global_batch=2, seed=0)
        batch = next(iter(workload.batches(plan, Shard(index=0, count=1))))
        loss = workload.loss(model, batch)
        loss.total.backward()  # type: ignore[no-untyped-call]
        results.append((loss, [p.grad for p in model.parameters()]))
    (one, of_one), (other, of_other) = results
    torch.testing.assert_close(other.total, one.total)
    assert float(other.weight) == float(one.weight)
    torch.testing.assert_close(of_other, of_one)


def test_a_plan_stores_the_logits_of_one_piece() -> None:
    """The logits are in fp32, with their gradient: the backward pass has two of them."""
    chosen = recipe()
    peaks = []
    for chunks in (1, 32):
        profile = trace(task(chunks, sequence_length=4 * LENGTH), chosen)
        memory = rank_memory(profile, build_strategy("ddp", {}), chosen, 2)
        peaks.append(memory.activations + memory.temporary)
    samples = (chosen.global_batch or 0) / 2
    full = 4 * VOCABULARY * 4 * LENGTH * samples
    assert peaks[0] > 2 * full
    assert peaks[1] < 0.5 * full


def test_models_that_change_their_logits_are_refused(tmp_path: Path) -> None:
    configuration = {
        "model_type": "gemma2",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 32,
        "final_logit_softcapping": 0.01,
    }
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    workload = task(2, model=f"hf:{tmp_path}/config.json", vocabulary=None)
    for build in (workload.build_model, partial(build_on_meta, workload)):
        with pytest.raises(InputError, match="changes its logits after the output layer"):
            build()
    assert build_on_meta(task(2, **QWEN3)) is not None
    assert build_on_meta(task(2)) is not None
    with pytest.raises(ValidationError, match="the output layer of"):
        task(2, model="tests.distributed.models:small")


def test_what_follows_the_output_layer_is_checked_with_one_layer() -> None:
    """A plan builds models of a hundred layers once for each variant."""
    sizes = {"num_hidden_layers": 5, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    workload = task(2, model="hf:llama", model_options=sizes | heads)
    computed: list[str] = []
    handle = register_module_forward_hook(lambda module, *_: computed.append(type(module).__name__))
    model = build_on_meta(workload)
    handle.remove()
    assert computed.count("LlamaMLP") == 1
    assert model is not None
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    assert len(layers) == 5
    assert not any("forward" in vars(layer) for layer in layers)


def test_calls_from_other_threads_are_refused() -> None:
    model = task(2).build_model()
    with pytest.raises(InputError, match="use ddp"):
        model(torch.zeros((1, 4), dtype=torch.int64))
