"""A few traced layers give the profile that tracing all layers gives."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from shardmark.base.layout import REPLICATED_ACTIVATIONS, ActivationSharding
from shardmark.base.recipe import Recipe
from shardmark.predict.profile import Profile
from shardmark.predict.trace.fakes import FastFakes
from shardmark.predict.trace.repeated_layers import Repetition, shortened_copy
from shardmark.ranks.costs import cost_model
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.workloads import build_workload, options
from shardmark.ranks.workloads.base import Workload
from shardmark.ranks.workloads.language.gpt import GPT
from shardmark.ranks.workloads.language.task import Language
from shardmark.ranks.workloads.own.task import OwnTask
from tests.unit.predict.made import trace

if TYPE_CHECKING:
    from torch import nn

LLAMA = {
    "num_hidden_layers": 7,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {name: size for name, size in LLAMA.items() if name != "num_key_value_heads"}
GEMMA = {**LLAMA, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 13}
DEEPSEEK = {
    **LLAMA,
    **{"num_key_value_heads": 4, "moe_intermediate_size": 32},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt", "layers": 7, "width": 64},
    "llama": {"model": "hf:llama", "model_options": LLAMA},
    "bert": {"model": "hf:bert", "objective": "masked", "model_options": BERT},
    # Layers with a sliding window alternate with others; this last one is alone in its group.
    "gemma2": {"model": "hf:google/gemma-2-2b", "model_options": GEMMA},
    # The first layer is dense, the others have experts.
    "deepseek": {"model": "hf:deepseek-ai/DeepSeek-V2-Lite", "model_options": DEEPSEEK},
}


def profiles(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    activations: ActivationSharding = REPLICATED_ACTIVATIONS,
    **recipe: Any,
) -> list[Profile]:
    """The profile of all layers, and that of the few that are traced."""
    sizes = {"vocabulary": 300, "sequence_length": 32, "dataset": "random"}
    workload = build_workload(options({"name": "language", **MODELS[model], **sizes}), 0)
    return both(workload, Language, monkeypatch, activations, **recipe)


def both(
    workload: Workload,
    task: type[Workload],
    monkeypatch: pytest.MonkeyPatch,
    activations: ActivationSharding = REPLICATED_ACTIVATIONS,
    **recipe: Any,
) -> list[Profile]:
    chosen = Recipe(per_rank_batch=4, steps=1, **recipe)
    logged: list[str] = []
    shortened: list[Repetition] = []

    def recorded(*arguments: Any) -> tuple[nn.Module, list[Repetition]]:
        copied, repetitions = shortened_copy(*arguments)
        shortened.extend(repetitions)
        return copied, repetitions

    monkeypatch.setattr("shardmark.predict.trace.trace.shortened_copy", recorded)
    log = logging.getLogger("shardmark.predict.trace.trace")
    monkeypatch.setattr(log, "info", lambda *words: logged.append(str(words)))
    short = trace(workload, chosen, activations=activations)
    assert not logged
    assert shortened
    monkeypatch.setattr(task, "equal_blocks", False)
    return [trace(workload, chosen, activations=activations), short]


def test_the_model_that_is_shortened_does_not_change() -> None:
    sizes = {"vocabulary": 300, "sequence_length": 32, "dataset": "random", "tied": True}
    workload = build_workload(options({"name": "language", **MODELS["gpt"], **sizes}), 0)
    model = workload.build_model()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    short, _ = shortened_copy(model, workload.blocks(model))
    assert isinstance(short, GPT)
    assert short.head.weight is short.embedding.weight, "tied ones stay tied"
    assert short.head.weight.data_ptr() in before.values(), "no memory of its own"
    for parameter in short.parameters():
        parameter.data = parameter.data.double()
    after = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert after == before
    assert len(short.blocks) < len(workload.blocks(model) or ())


def test_a_model_that_counts_its_layers_is_traced_with_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real steps, which would hide a failure, are refused."""
    monkeypatch.setattr("shardmark.predict.trace.trace.REAL_PARAMETERS", 0)
    forward = GPT.forward

    def counting(model: GPT, *arguments: Any, **others: Any) -> Any:
        assert model.blocks[6] is not None
        return forward(model, *arguments, **others)

    monkeypatch.setattr(GPT, "forward", counting)
    sizes = {"vocabulary": 300, "sequence_length": 32, "dataset": "random"}
    workload = build_workload(options({"name": "language", **MODELS["gpt"], **sizes}), 0)
    profile = trace(workload, Recipe(per_rank_batch=4, steps=1))
    assert sum(unit.block for unit in profile.units) == 7


def test_results_that_are_looked_up_by_a_shorter_key_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views, changes in place, experts and casts of a model in 16 bits are among them."""
    recipe = Recipe.model_validate({"per_rank_batch": 4, "steps": 1, **CHECKPOINTED})
    sizes = {"vocabulary": 300, "sequence_length": 32, "dataset": "random"}
    workload = build_workload(options({"name": "language", **MODELS["deepseek"], **sizes}), 0)
    keys: list[object] = []

    class Watched(FastFakes):  # type: ignore[no-untyped-call]  # torch's
        def _cache_key(self, *arguments: Any) -> Any:
            keys.append(super()._cache_key(*arguments))
            return keys[-1]

    monkeypatch.setattr("shardmark.predict.trace.trace.FastFakes", Watched)
    fast = trace(workload, recipe)
    assert len({*keys}) < len(keys) / 2
    assert sum(type(key) is tuple for key in keys) > 0.9 * len(keys)
    FakeTensorMode.cache_clear()
    monkeypatch.setattr("shardmark.predict.trace.trace.FastFakes", FakeTensorMode)
    assert trace(workload, recipe) == fast


def test_encoder_and_decoder_repeat_their_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        **{"d_model": 16, "encoder_layers": 6, "decoder_layers": 7},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
        **{"max_source_positions": 20, "max_target_positions": 8},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "whisper", "vocab_size": 60_000, **sizes}))
    task = "shardmark.predict.tasks.transformers_model:TransformersModel"
    chosen = {"name": "own", "task": task, "options": {"model": f"hf:{file}"}}
    workload = build_workload(options(chosen), 0)
    full, short = both(workload, OwnTask, monkeypatch, precision="bf16")
    assert nameless(short) == nameless(full)


def nameless(profile: Profile) -> Profile:
    native = None if profile.native is None else nameless(profile.native)
    units = tuple(replace(unit, name="") for unit in profile.units)
    return replace(profile, units=units, native=native)


BF16: dict[str, Any] = {"precision": "bf16"}  # traced under autocast and with cast parameters
CHECKPOINTED: dict[str, Any] = {**BF16, "activation_checkpointing": True}
RECIPES: dict[str, dict[str, Any]] = {
    **{"gpt, fp32": {}, "bert, fp32": {}, "gpt, bf16": BF16, "llama, bf16": BF16},
    **{f"{model}, checkpointed": CHECKPOINTED for model in ("llama", "gemma2", "deepseek")},
}


@pytest.mark.parametrize("case", RECIPES)
def test_the_profile_is_that_of_all_layers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full, short = profiles(case.partition(",")[0], monkeypatch, **RECIPES[case])
    assert len(full.units) == len(short.units)
    assert nameless(short) == nameless(full)


def test_activations_of_tensor_parallelism_are_those_of_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharding = cost_model(build_strategy("tp", {})).activation_sharding()
    full, short = profiles("llama", monkeypatch, sharding, precision="bf16")
    assert nameless(short) == nameless(full)


def llama_4(folder: Path, **fields: Any) -> Workload:
    """A task with 4 layers of 8 experts, of 3 matrices each."""
    sizes = {
        **{"hidden_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64},
        **{"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 1},
        **{"interleave_moe_layer_step": 1, "vocab_size": 300},
    }
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "llama4_text", **sizes}))
    chosen = {"name": "language", "model": f"hf:{file}", "dataset": "random"}
    return build_workload(options(chosen | {"sequence_length": 32} | fields), 0)


@pytest.mark.parametrize(
    ("precision", "software"), [("bf16", "flash"), ("fp16", "routed"), ("fp32", "routed")]
)
def test_experts_of_llama_4_compute_the_tokens_sent_to_them(
    precision: str, software: str, tmp_path: Path
) -> None:
    """The experts of transformers compute all tokens."""
    workload = llama_4(tmp_path)
    recipe = Recipe.model_validate({"per_rank_batch": 4, "steps": 1, "precision": precision})
    routed, computed = (
        sum(
            operation.flops.per_sample
            for unit in trace(workload, recipe, **chosen_software).units
            for operation in unit.forward
            if operation.kind == "product"
        )
        for chosen_software in ({software: True}, {})
    )
    assert computed - routed == pytest.approx(4 * 32 * (8 - 1) * 2 * 3 * 32 * 64)


def test_routers_are_no_linear_layers_in_4_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They return two tensors; real steps, which would hide a failure, are refused."""
    monkeypatch.setattr("shardmark.predict.trace.trace.REAL_PARAMETERS", 0)
    workload = llama_4(tmp_path, adapter={"base": "nf4", "rank": 4})
    recipe = Recipe(per_rank_batch=4, steps=1, precision="bf16", activation_checkpointing=True)
    profile = trace(workload, recipe, flash=True)
    assert 0.5 < profile.size.frozen_element_bytes < 1.5
