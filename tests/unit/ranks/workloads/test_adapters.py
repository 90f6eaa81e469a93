"""Adapters: which parameters they train, where they are added, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from shardmark.base.errors import InputError
from shardmark.base.system.extras import EXTRAS
from shardmark.base.traffic import frozen_element_bytes, stored_element_bytes
from shardmark.bench.launch.input_checks import check_plan
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand
from shardmark.ranks.workloads import build_workload, options
from shardmark.ranks.workloads.adapters import NF4_BYTES
from shardmark.ranks.workloads.base import CannotShard, Workload
from shardmark.ranks.workloads.language.gpt import GPT
from shardmark.ranks.workloads.model_building import build_on_meta

LAYERS, WIDTH = 2, 32
QWEN3 = {
    "model": "hf:qwen3",
    "model_options": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
    },
}


MIXTRAL = {
    "model": "hf:mixtral",
    "model_options": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "num_local_experts": 4,
    },
}
"""A model whose experts are one parameter of three dimensions."""


def adapted(adapter: dict[str, Any] | None = None, **fields: Any) -> Workload:
    chosen: dict[str, Any] = {
        "name": "language",
        "dataset": "random",
        "vocabulary": 64,
        "sequence_length": 16,
        "adapter": {"name": "lora", **(adapter or {})},
    }
    sizes = {} if "model" in fields else {"layers": LAYERS, "width": WIDTH, "heads": 2}
    return build_workload(options(chosen | sizes | fields), seed=1)


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_all_linear_layers_of_the_blocks_get_two_matrices() -> None:
    workload = adapted({"rank": 4})
    model = workload.build_model()
    assert isinstance(model, GPT)
    names = trained_names(model)
    assert len(names) == 2 * 4 * LAYERS
    assert all("lora_" in name and name.startswith("blocks.") for name in names)
    assert workload.blocks(model) == list(model.blocks)
    again = workload.build_model()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    seconds = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert seconds
    assert not any(matrix.any() for matrix in seconds), "the model begins as it was"


def test_chosen_targets() -> None:
    names = trained_names(adapted({"targets": ["widen"]}).build_model())
    assert len(names) == 2 * LAYERS
    assert all(".widen." in name for name in names)
    for model in (QWEN3, {"model": "hf:gpt2"}):
        family = adapted(**model).build_model()
        assert len(trained_names(family)) > 0
    with pytest.raises(InputError, match="no_such_layer"):
        adapted({"targets": ["no_such_layer"]}).build_model()


@pytest.mark.parametrize("base", ["fp32", "bf16", "fp16", "nf4"])
def test_the_frozen_weights_have_the_type_of_the_base(base: str) -> None:
    workload = adapted({"base": base})
    model = workload.build_model()
    types = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert types == {{"fp32": torch.float32, "fp16": torch.float16}.get(base, torch.bfloat16)}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    stored = frozen_element_bytes(model.parameters())
    if base == "nf4":
        in_blocks = [p for p in model.blocks.parameters() if p.dim() == 2 and not p.requires_grad]  # type: ignore[union-attr]
        assert {stored_element_bytes(p) for p in in_blocks} == {NF4_BYTES}
        assert NF4_BYTES < stored < 2
    else:
        assert stored == {"fp32": 4, "bf16": 2, "fp16": 2}[base]
    meta = build_on_meta(workload)
    assert meta is not None
    assert trained_names(meta) == trained_names(model)


@pytest.mark.parametrize("model_fields", [{}, MIXTRAL])
def test_weights_in_four_bits_compute_like_those_in_16_bits(model_fields: dict[str, Any]) -> None:
    """`plan` traces them so: their product is the same, and each pass widens them again."""
    tokens = torch.arange(16)[None]
    results = []
    for base in ("bf16", "nf4"):
        model = adapted({"base": base}, **model_fields).build_model()
        with torch.autocast("cpu", torch.bfloat16):
            found = model(tokens)
            logits = found if isinstance(found, torch.Tensor) else found.logits
        logits.float().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append((logits, torch.cat([gradient.flatten() for gradient in gradients])))
    (one, of_one), (other, of_other) = results
    assert torch.equal(one, other)
    torch.testing.assert_close(of_one, of_other, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "layers", "parts"),
    [("falcon-7b", 4 * 32, "query_key_value"), ("Falcon-H1-1.5B-Base", 8 * 24, "in_proj")],
)
def test_classes_of_linear_layers_of_their_own(name: str, layers: int, parts: str) -> None:
    """Falcon has its own class, and the kernel of Mamba takes no matrices beside `out_proj`."""
    model = f"hf:tiiuae/{name}"
    trained = trained_names(build_on_meta(adapted(model=model, vocabulary=None)) or nn.Module())
    assert len(trained) == 2 * layers
    assert any(parts in one for one in trained)
    assert not any("out_proj" in one for one in trained)


def test_experts_are_in_four_bits() -> None:
    """Most of the weights of such a model."""
    for base, width in (("nf4", NF4_BYTES), ("bf16", 2)):
        model = adapted({"base": base}, **MIXTRAL).build_model()
        stacks = [p for p in model.parameters() if p.dim() == 3]
        assert sum(p.numel() for p in stacks) == 4 * 3 * 64 * 32
        assert {stored_element_bytes(p) for p in stacks} == {width}


def test_layers_with_matrices_cannot_be_divided() -> None:
    workload = adapted()
    assert isinstance(workload.tensor_plan(workload.build_model()), CannotShard)


def test_an_absent_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EXTRAS["peft"] == "lora"
    monkeypatch.setattr(
        "shardmark.base.system.extras.is_installed", lambda module: module != "peft"
    )
    with pytest.raises(InputError, match=r"pip install 'shardmark\[lora\]'"):
        adapted()


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("workload.adapter={name: lora, base: nf4}", "nf4"),
        ("recipe.optimizer={name: adamw, state_bits: 8}", "8"),
    ],
)
def test_only_a_plan_takes_bitsandbytes(setting: str, found: str) -> None:
    message = f"found {found}, which needs bitsandbytes and a GPU; only `plan` knows it"
    with pytest.raises(InputError, match=message):
        check_plan(expand(load_experiment("language-quickstart", [setting])))


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"name": "other"}, {"base": "int8"}])
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        adapted(wrong)


def test_a_task_of_your_own() -> None:
    task = {"name": "own", "task": "tests.distributed.models:GroupedTokens"}
    workload = build_workload(options(task | {"adapter": {"name": "lora"}}), seed=1)
    model = workload.build_model()
    assert all("lora_" in name for name in trained_names(model))
