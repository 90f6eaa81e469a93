"""Language models by every synchronous strategy: dropout, tied weights, masks of uneven lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.core.recipe import Optimizer
from shardmark.equivalence.capture import Capture
from shardmark.strategies.base import RankContext
from shardmark.workloads import build_workload, check_data
from shardmark.workloads.language.options import LanguageOptions
from tests.distributed.captures import Captures, Case, capture_all, check_verdict, recipe, trial
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

STRATEGIES = ("ddp", "fsdp", "fsdp-grad-op", "zero-1", "zero-3", "ps-sync")
ADAM = Optimizer(name="adamw", lr=1e-3, weight_decay=0.1)
MODELS: dict[str, dict[str, Any]] = {
    "tied GPT-2": {
        "model": "hf:gpt2",
        "model_options": {"n_layer": 2, "n_embd": 32, "n_head": 2},  # its dropout is 0.1
    },
    "untied Llama": {
        "model": "hf:llama",
        "model_options": {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "document_masks": True,
    },
    "BERT, uneven": {
        "model": "hf:bert",
        "model_options": {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
        },
        "objective": "masked",
        "packed": False,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "hf:gpt2": {"n_layer": 2, "n_embd": 128, "n_head": 4},
    **{
        f"hf:{family}": {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            **({} if family in ("gpt_neox", "bert") else {"num_key_value_heads": 4}),
            **({"num_local_experts": 4} if family == "mixtral" else {}),
            **({"head_dim": 32} if family == "qwen3" else {}),
        }
        for family in ("llama", "qwen3", "gpt_neox", "mixtral", "bert")
    },
}


def options(folder: Path, **fields: Any) -> LanguageOptions:
    common = {"dataset": "text", "data_dir": str(folder), "sequence_length": 24}
    return LanguageOptions.model_validate(common | fields)


def cases(folder: Path) -> dict[str, Case]:
    """Accumulated and checkpointed, but for one in bf16."""
    wanted = recipe(
        global_batch=8, optimizer=ADAM, gradient_accumulation=2, activation_checkpointing=True
    )
    found = {
        f"{strategy}, {name}": Case(
            trial=trial(strategy, wanted, workload=options(folder, **fields))
        )
        for name, fields in MODELS.items()
        for strategy in STRATEGIES
        if strategy != "ps-sync"  # its server is one rank more
    }
    half = recipe(global_batch=8, optimizer=ADAM, precision="bf16")
    tied = options(folder, dropout=0.1, width=32, heads=2)
    return found | {"ddp, bf16": Case(trial=trial("ddp", half, workload=tied))}


def families(folder: Path) -> dict[str, tuple[int | None, float]]:
    """Operations of a sample, counted and by 6 N + 12 L H Q T (Chowdhery et al., 2022)."""
    told = {}
    for name, fields in FAMILIES.items():
        objective = "masked" if name == "hf:bert" else "causal"
        chosen = options(folder, model=name, model_options=fields, objective=objective)
        task = build_workload(chosen, 0)
        model: Any = task.build_model()
        named = dict(model.named_parameters())
        passive = (
            "wpe",
            "position_embeddings",
            "token_type_embeddings",
            "embed_in",
            "embed_tokens",
        )
        used = sum(p.numel() for n, p in named.items() if not any(each in n for each in passive))
        idle = sum(p.numel() for n, p in named.items() if ".experts." in n) // 2  # two of four
        published = 24 * (6 * (used - idle) + 12 * 2 * 128 * 24)
        told[name] = (task.sample_input_flops(model), published)
    return told


def work(process: RankContext, folder: Path) -> dict[str, Capture | None] | Any:
    captured = capture_all(process, cases(folder))
    return captured, families(folder) if process.rank == 0 else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (made / f"{number:02}.txt").write_text(f"line {number}\n" * (1 + number % 7))
    return made


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pytest.importorskip("transformers")
    check_data(options(folder))
    return run_ranks(work, folder, world_size=2, directory=tmp_path_factory.mktemp("language"))


@pytest.mark.parametrize("name", cases(Path("x")))
def test_strategies_train_the_same_language_model(
    ranks: list[Any], folder: Path, name: str
) -> None:
    captures: Captures = [captured for captured, _ in ranks]
    check_verdict(captures, name, cases(folder)[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_of_the_published_formula(ranks: list[Any], name: str) -> None:
    counted, published = ranks[0][1][name]
    assert counted == pytest.approx(published, rel=0.02)
