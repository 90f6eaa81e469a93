"""Questions that people asked in public threads about memory and speed, and their own answers.

Each test asks `plan` as they would have asked it, and holds what the thread's facts decide.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardmark import plan
from shardmark.predict.models import Models
from shardmark.predict.plan import Prediction
from tests import present

GB = 1e9
LLAMA = "hf:meta-llama/Llama-2-7b-hf"


@cache
def models() -> Models:
    """A cache of the traced models that all questions share."""
    return Models()


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmark.predict.models.Models", models)


@pytest.fixture
def _no_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what would make it fit, for which the model is traced three times more."""
    monkeypatch.setattr("shardmark.predict.plan.remedies_of", lambda *_: iter(()))


def asked(
    model: str, on: str, strategy: str, *, tokens: int, batch: int = 1, **recipe: Any
) -> Prediction:
    """The row of a strategy for sequences of so many tokens, `batch` of them on a GPU."""
    keys = {"per_rank_batch": batch, **recipe}
    row, *_ = plan(  # then those on fewer cards
        model,
        on,
        **{
            "workload.sequence_length": tokens,
            "matrix.strategy": [strategy],
            **{f"recipe.{key}": value for key, value in keys.items()},
        },
    ).rows
    return row


def holds_speed(row: Prediction, samples_per_second: float) -> bool:
    return present(row.low_seconds) <= row.samples / samples_per_second <= present(row.high_seconds)


@pytest.mark.usefixtures("_no_remedies")
def test_6_billion_parameters_fit_on_t4_cards_with_offload() -> None:
    """huggingface/transformers issue 13329: ZeRO-3 of GPT-J in fp16 with 12 of a T4's 16 GB and
    100 GB of the host, 512 tokens at a time."""
    recipe: dict[str, Any] = {"activation_checkpointing": True, "cpu_offload": True}
    row = asked("EleutherAI/gpt-j-6b", "2xt4", "zero-3", tokens=512, **recipe)
    assert row.fit == "yes"
    assert present(row.device_bytes) < 12 * GB
    assert row.host_bytes == pytest.approx(100 * GB, rel=0.1)


def test_7_billion_parameters_do_not_fit_on_one_a100_with_80_gb() -> None:
    """meta-llama/llama-cookbook issue 413: out of memory without LoRA and quantization."""
    short: dict[str, Any] = {"workload.sequence_length": 512}
    answer = plan(LLAMA, "1xa100-80", **short)
    (row,) = answer.rows
    assert row.fit == "no"
    assert not answer.answered
    assert answer.remedies  # what would make it fit


@pytest.mark.usefixtures("_no_remedies")
def test_7_billion_parameters_fit_on_four_a100_with_40_gb() -> None:
    """meta-llama/llama-cookbook issue 100: FSDP reserved at most 29 GB of the 40 of each card.

    Its optimizer updated one layer after the other, so that it had no temporary of the full shard.
    """
    recipe: dict[str, Any] = {"activation_checkpointing": True, "optimizer.implementation": "fused"}
    row = asked(LLAMA, "4xa100-40", "fsdp", tokens=512, **recipe)
    assert row.fit == "yes"
    assert present(row.memory).peak_bytes == pytest.approx(29 * GB, rel=0.15)
    assert asked(LLAMA, "4xrtx-3090", "fsdp", tokens=512, **recipe).fit == "no"  # 24 GB


def test_offloaded_fsdp_trains_alpaca_on_cards_with_40_gb() -> None:
    """tatsu-lab/stanford_alpaca issue 280: 8 A100 of 40 GB did, and 4 with batches of 2.

    3 epochs of 52,002 samples of at most 512 tokens took 58 hours on 4.
    """
    for cards in (4, 8):
        row = asked(LLAMA, f"{cards}xa100-40", "fsdp", tokens=512, batch=2, cpu_offload=True)
        assert row.fit == "yes"
        if cards == 4:
            assert holds_speed(row, 3 * 52_002 / (58 * 3600))


@pytest.mark.usefixtures("_no_remedies")
@pytest.mark.parametrize(
    ("on", "tokens", "fits"),
    [("8xh100", 20_000, False), ("2x8xh100", 20_000, True), ("2x8xh100", 32_768, False)],
)
def test_32_billion_parameters_need_sixteen_h100(on: str, tokens: int, fits: bool) -> None:
    """simplescaling/s1 issue 13: 8 ran out of memory, and 16 with 32,000 tokens; 20,000 ran."""
    row = asked("hf:Qwen/Qwen2.5-32B", on, "fsdp", tokens=tokens, activation_checkpointing=True)
    assert row.fits is fits


@pytest.mark.usefixtures("_no_remedies")
@pytest.mark.parametrize(
    ("changes", "fit"),
    [
        ({}, "no"),
        ({"weights": "bf16"}, "no"),
        ({"optimizer.state_bits": 8}, "no"),
        ({"weights": "bf16", "optimizer.state_bits": 8}, "yes"),
    ],
)
def test_70_billion_parameters_fit_on_eight_a100_by_small_weights_and_state(
    changes: dict[str, Any], fit: str
) -> None:
    """meta-pytorch/torchtune issue 987: 16-bit weights and a paged optimizer made it fit.

    Neither is enough alone.  `plan` has no paged state, and one of 8 bits in its place.
    """
    row = asked(
        "hf:meta-llama/Llama-2-70b-hf",
        "8xa100-80",
        "fsdp",
        tokens=512,
        activation_checkpointing=True,
        **changes,
    )
    assert row.fit == fit


def test_four_a40_train_a_small_model_almost_four_times_as_fast(tmp_path: Path) -> None:
    """Lightning-AI/litgpt issue 864: Pythia of 70 M parameters, batches of 5 x 2048 tokens.

    One GPU took 3.95 batches a second; each of four took 3.8 under DDP, and 2.7 under FSDP with
    activation checkpointing.  How fast one is depends on its loader and logger, which no plan sees.
    """
    sizes = {
        **{"model_type": "gpt_neox", "hidden_size": 512, "num_hidden_layers": 6},
        **{"num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 50304},
        **{"max_position_embeddings": 2048, "architectures": ["GPTNeoXForCausalLM"]},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(sizes))
    batch = {"tokens": 2048, "batch": 125, "gradient_accumulation": 25}
    alone = asked(f"hf:{file}", "1xa40", "single", **batch)
    ddp = asked(f"hf:{file}", "4xa40", "ddp", **batch)
    fsdp = asked(f"hf:{file}", "4xa40", "fsdp", **batch, activation_checkpointing=True)
    rates = [row.work_per_second / row.devices for row in (alone, ddp, fsdp)]
    assert rates[1] / rates[0] == pytest.approx(3.8 / 3.95, rel=0.1)
    assert rates[2] / rates[0] == pytest.approx(2.7 / 3.95, rel=0.2)


def test_two_rtx_4090_under_ddp_are_slower_than_one() -> None:
    """cortwave.github.io/posts/multi-gpu: 1.7 billion parameters, 15.4 samples/s on one card.

    Two took 4.5, since they cannot write to each other's memory.  In fp32 its state has 27 GB.
    """
    name = "hf:HuggingFaceTB/SmolLM2-1.7B"
    one, two = (
        asked(name, f"{cards}xrtx-4090", strategy, tokens=512, weights="bf16")
        for cards, strategy in ((1, "single"), (2, "ddp"))
    )
    assert two.work_per_second / one.work_per_second == pytest.approx(4.5 / 15.4, rel=0.5)
    assert present(two.time).bound == "communication"
