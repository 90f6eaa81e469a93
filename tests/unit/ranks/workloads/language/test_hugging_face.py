"""Models of Hugging Face: their operations, tokenizers and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark.base.errors import InputError
from shardmark.ranks.workloads import build_workload
from shardmark.ranks.workloads.language.hugging_face import layers
from shardmark.ranks.workloads.language.options import LanguageOptions

WIDTH, LENGTH = 32, 256
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


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_of_a_family_are_those_of_the_published_formula(name: str, tmp_path: Path) -> None:
    """6 N + 12 L H Q T (Chowdhery et al., 2022), N without biases; half are attention's."""
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("some words\n" * 400)
    objective = "masked" if name == "hf:bert" else "causal"
    chosen = options(
        tmp_path,
        model=name,
        model_options=FAMILIES[name],
        objective=objective,
        sequence_length=LENGTH,
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
    assert task.sample_input_flops(model) == pytest.approx(published, rel=0.02)


def test_stored_model_takes_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with weights, and its configuration alone; the tokenizer has no mask."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # progress bars start a thread
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.txt").write_text("some words\n" * 400)
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
        chosen = options(tmp_path / "texts", model=f"hf:{tmp_path / model}", **text)
        built: Any = build_workload(chosen, 0).build_model()
        assert built.config.vocab_size == 3
        kept = torch.equal(built.transformer.wte.weight, stored.transformer.wte.weight)
        assert kept == (model == "model")
    bert = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    bert |= {"intermediate_size": 64, "vocab_size": 3}
    config = transformers.BertConfig(**bert, is_decoder=True)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    wanted: dict[str, Any] = {"model": f"hf:{tmp_path / 'bert'}", **text}
    assert build_workload(options(tmp_path / "texts", **wanted), 0).build_model()
    config.is_decoder = False
    config.save_pretrained(tmp_path / "bert")
    for model in ("bert", "bert/config.json"):
        chosen = options(tmp_path / "texts", model=f"hf:{tmp_path / model}", **text)
        with pytest.raises(InputError, match=r"is not causal.*is_decoder"):
            build_workload(chosen, 0).build_model()
    masked = options(tmp_path / "texts", **wanted, objective="masked")
    with pytest.raises(InputError, match=r"need 4 rows, one of them for the mask.* has 3.* to 4"):
        build_workload(masked, 0).build_model()


def test_a_model_that_names_no_layers_leaves_the_search_to_the_strategy() -> None:
    assert layers(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))) is None
