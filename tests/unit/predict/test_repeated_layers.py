"""A few traced layers give the profile that tracing all layers gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardmark.core.layout import REPLICATED_ACTIVATIONS, ActivationSharding
from shardmark.core.recipe import Recipe
from shardmark.costs import cost_model
from shardmark.predict.profile import Profile
from shardmark.predict.trace import trace
from shardmark.strategies import build_strategy
from shardmark.workloads import build_workload, options
from shardmark.workloads.language.task import Language

LLAMA = {
    "num_hidden_layers": 7,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {name: size for name, size in LLAMA.items() if name != "num_key_value_heads"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt", "layers": 7, "width": 64},
    "llama": {"model": "hf:llama", "model_options": LLAMA},
    "bert": {"model": "hf:bert", "objective": "masked", "model_options": BERT},
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
    chosen = Recipe(per_rank_batch=4, steps=1, **recipe)
    logged: list[str] = []
    monkeypatch.setattr(
        "shardmark.predict.trace.logger.info", lambda *args: logged.append(str(args))
    )
    short = trace(workload, chosen, activations=activations)
    assert not logged
    monkeypatch.setattr(Language, "equal_blocks", False)
    return [trace(workload, chosen, activations=activations), short]


def nameless(profile: Profile) -> Profile:
    native = None if profile.native is None else nameless(profile.native)
    units = tuple(replace(unit, name="") for unit in profile.units)
    return replace(profile, units=units, native=native)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "recipe",
    [{}, {"precision": "bf16"}, {"precision": "bf16", "activation_checkpointing": True}],
    ids=["fp32", "bf16", "checkpointed"],
)
def test_the_profile_is_that_of_all_layers(
    model: str, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, short = profiles(model, monkeypatch, **recipe)
    assert len(full.units) == len(short.units)
    assert nameless(short) == nameless(full)


def test_activations_of_tensor_parallelism_are_those_of_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharding = cost_model(build_strategy("tp", {})).activation_sharding()
    full, short = profiles("llama", monkeypatch, sharding, precision="bf16")
    assert nameless(short) == nameless(full)
