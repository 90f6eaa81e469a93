"""Language models by every synchronous strategy: dropout, tied weights, masks of uneven lengths."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark.core.errors import InputError
from shardmark.core.recipe import Optimizer
from shardmark.equivalence.capture import Capture
from shardmark.strategies.base import RankContext
from shardmark.workloads import build_workload, check_data
from shardmark.workloads.language.hugging_face import layers
from shardmark.workloads.language.options import LanguageOptions
from tests.distributed.captures import (
    REFERENCES,
    STEPS,
    Captures,
    Case,
    capture_all,
    check_verdict,
    recipe,
    trial,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

STRATEGIES = ("ddp", "fsdp", "fsdp1", "zero-1", "zero-3")
OTHERS = {
    "fsdp-grad-op": "tied GPT-2",
    "zro": "tied GPT-2",
    "zero-0": "tied GPT-2",
    "zero-2": "BERT, uneven",
}
"""Strategies that are tried with one model."""
IN_BF16 = ("ddp", "fsdp", "fsdp-grad-op", "zero-1", "zero-2", "zero-3")
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
WIDTH, LENGTH = 32, 256
"""Of the models whose operations are counted."""
FAMILIES: dict[str, dict[str, Any]] = {
    "hf:gpt2": {"n_layer": 2, "n_embd": WIDTH, "n_head": 4},
    **{
        f"hf:{family}": {
            "num_hidden_layers": 2,
            "hidden_size": WIDTH,
            "intermediate_size": 4 * WIDTH,
            "num_attention_heads": 4,
            **({} if family in ("gpt_neox", "bert") else {"num_key_value_heads": 4}),
            **({"num_local_experts": 4} if family == "mixtral" else {}),
            **({"head_dim": WIDTH // 4} if family == "qwen3" else {}),
        }
        for family in ("llama", "qwen3", "gpt_neox", "mixtral", "bert")
    },
}


def options(folder: Path, **fields: Any) -> LanguageOptions:
    common = {"dataset": "text", "data_dir": str(folder), "sequence_length": 24}
    return LanguageOptions.model_validate(common | fields)


def cases(folder: Path) -> dict[str, Case]:
    """Accumulated and checkpointed, but for those in bf16."""
    wanted = recipe(
        global_batch=8, optimizer=ADAM, gradient_accumulation=2, activation_checkpointing=True
    )
    tried = [*product(STRATEGIES, MODELS), *OTHERS.items()]
    made = {
        f"{strategy}, {name}": Case(
            trial=trial(strategy, wanted, workload=options(folder, **MODELS[name]))
        )
        for strategy, name in tried
    }
    half = recipe(global_batch=8, optimizer=ADAM, precision="bf16")
    tied = options(folder, dropout=0.1, width=32, heads=2)
    return made | {
        f"{name}, bf16": Case(trial=trial(name, half, workload=tied)) for name in IN_BF16
    }


def other_size(folder: Path, strategy: str) -> Case:
    """Of one process alone, or of two workers and a server: our own model with dropout, uneven."""
    fields = {"width": 32, "heads": 2, "dropout": 0.1, "objective": "masked", "packed": False}
    wanted = recipe(global_batch=8, optimizer=ADAM, gradient_accumulation=2)
    workload = options(folder, **fields)
    ranks = 1 if strategy == "single" else 2
    return Case(trial=trial(strategy, wanted, ranks=ranks, workload=workload))


def families(folder: Path) -> dict[str, tuple[int | None, float]]:
    """Operations of a sample, counted and by 6 N + 12 L H Q T (Chowdhery et al., 2022).

    N is without biases; about half of the operations are attention's.
    """
    told = {}
    for name, fields in FAMILIES.items():
        objective = "masked" if name == "hf:bert" else "causal"
        chosen = options(
            folder, model=name, model_options=fields, objective=objective, sequence_length=LENGTH
        )
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
        used = sum(
            p.numel()
            for n, p in named.items()
            if p.dim() > 1 and not any(each in n for each in passive)
        )
        idle = sum(p.numel() for n, p in named.items() if ".experts." in n) // 2  # two of four
        published = LENGTH * (6 * (used - idle) + 12 * 2 * WIDTH * LENGTH)
        told[name] = (task.sample_input_flops(model), published)
    return told


def work(process: RankContext, folder: Path) -> dict[str, Capture | None] | Any:
    captured = capture_all(process, cases(folder / "short"))
    return captured, families(folder / "long") if process.rank == 0 else {}


def work_on(process: RankContext, tried: dict[str, Case]) -> dict[str, Capture | None]:
    return capture_all(process, tried)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("texts")
    (made / "short").mkdir()
    for number in range(40):
        (made / "short" / f"{number:02}.txt").write_text(f"line {number}\n" * (1 + number % 7))
    (made / "long").mkdir()
    (made / "long" / "text.txt").write_text("some words\n" * 400)
    return made


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pytest.importorskip("transformers")
    check_data(options(folder / "short"))
    return run_ranks(work, folder, world_size=2, directory=tmp_path_factory.mktemp("language"))


def check_language(captures: Captures, name: str, case: Case) -> None:
    """Its gradient is that of the whole batch in one piece, within 1e-5 in fp32."""
    verdict = check_verdict(captures, name, case)
    (whole,) = (check for check in verdict.checks if check.name == "whole batch in one piece")
    if case.trial.recipe.precision == "fp32":
        assert isinstance(whole.found, float), "compared"
        assert whole.found < 1e-5


@pytest.mark.parametrize("name", cases(Path("x")))
def test_strategies_train_the_same_language_model(
    ranks: list[Any], folder: Path, name: str
) -> None:
    captures: Captures = [captured for captured, _ in ranks]
    check_language(captures, name, cases(folder / "short")[name])


def test_in_bf16_libraries_cast_parameters(ranks: list[Any], folder: Path) -> None:
    """The first forward pass is that of the reference to the last bit, and no other's."""
    of = cases(folder / "short")
    first = {}
    for name in IN_BF16:
        case = f"{name}, bf16"
        reference = REFERENCES.get(of[case].trial, STEPS).tolerances.reference
        first[name] = [captured[case].losses[0][0] for captured, _ in ranks]
        assert first[name] == [losses[0] for losses in reference.losses], name
    assert [name for name in IN_BF16 if first[name] == first["ddp"]] == ["ddp"]


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ps-sync", 3)])
def test_groups_of_other_sizes_train_the_same_language_model(
    folder: Path, tmp_path: Path, strategy: str, size: int
) -> None:
    case = other_size(folder / "short", strategy)
    check_data(case.trial.workload)
    captures = run_ranks(work_on, {strategy: case}, world_size=size, directory=tmp_path)
    check_language(captures, strategy, case)


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_of_the_published_formula(ranks: list[Any], name: str) -> None:
    counted, published = ranks[0][1][name]
    assert counted == pytest.approx(published, rel=0.02)


def test_a_stored_model_takes_its_own_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with weights, and its configuration alone; the tokenizer has no mask."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # progress bars start a thread
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<|endoftext|>", "some", "words"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="words"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 3, "n_positions": 32}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    stored = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    stored.save_pretrained(tmp_path / "model")
    text = {"tokenizer": str(tmp_path / "tokenizer.json"), "sequence_length": 24}
    for model in ("model", "model/config.json"):
        chosen = options(folder / "long", model=f"hf:{tmp_path / model}", **text)
        built: Any = build_workload(chosen, 0).build_model()
        assert built.config.vocab_size == 3
        kept = torch.equal(built.transformer.wte.weight, stored.transformer.wte.weight)
        assert kept == (model == "model")
    bert = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    bert |= {"intermediate_size": 64, "vocab_size": 3}
    config = transformers.BertConfig(**bert, is_decoder=True)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    wanted: dict[str, Any] = {"model": f"hf:{tmp_path / 'bert'}", **text}
    assert build_workload(options(folder / "long", **wanted), 0).build_model()
    config.is_decoder = False
    config.save_pretrained(tmp_path / "bert")
    for model in ("bert", "bert/config.json"):
        chosen = options(folder / "long", model=f"hf:{tmp_path / model}", **text)
        with pytest.raises(InputError, match=r"is not causal.*is_decoder"):
            build_workload(chosen, 0).build_model()
    masked = options(folder / "long", **wanted, objective="masked")
    with pytest.raises(InputError, match=r"need 4 rows, one of them for the mask.* has 3.* to 4"):
        build_workload(masked, 0).build_model()


def test_a_model_that_names_no_layers_leaves_the_search_to_the_strategy() -> None:
    assert layers(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))) is None
