"""Targets and weights of a language task, and the loss of its model."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard
from shardmark.ranks.train.probe import model_counts
from shardmark.ranks.workloads import build_workload
from shardmark.ranks.workloads.base import BatchPlan
from shardmark.ranks.workloads.language.batch import IGNORED
from shardmark.ranks.workloads.language.causality import check_causal
from shardmark.ranks.workloads.language.gpt import GPT
from shardmark.ranks.workloads.language.options import LanguageOptions
from shardmark.ranks.workloads.language.tokens import token_data
from shardmark.ranks.workloads.model_building import build_on_meta
from tests.unit.ranks.train.toy import recipe

PLAN = BatchPlan(global_batch=8, seed=3)
WHOLE = Shard(index=0, count=1)
SMALL = {"width": 32, "heads": 2}


def changed(chosen: LanguageOptions, **changes: Any) -> LanguageOptions:
    return LanguageOptions.model_validate(chosen.model_dump(exclude_unset=True) | SMALL | changes)


def test_padded_samples_end_with_their_document(chosen: LanguageOptions) -> None:
    """Each token of each document is predicted once in an epoch, its end too, its first never."""
    chosen = changed(chosen, packed=False)
    task = build_workload(chosen, 0)
    batches: Any = task.batches(BatchPlan(global_batch=task.training_samples, seed=0), WHOLE)
    batch = next(batches)
    stream = token_data(chosen).training
    assert stream.ends is not None
    learned = np.delete(stream.tokens, [0, *stream.ends[:-1]])
    predicted = batch.targets[batch.targets != IGNORED]
    assert sorted(predicted.tolist()) == sorted(learned.tolist())
    assert task.tokens_in([batch.sample_ids]) == len(learned) == batch.weight


def test_fifteen_percent_of_the_tokens_are_masked(chosen: LanguageOptions) -> None:
    chosen = changed(chosen, objective="masked", sequence_length=64)
    task, data = build_workload(chosen, 0), token_data(chosen)
    batch: Any = next(task.batches(PLAN, WHOLE))
    chosen_places = batch.targets != IGNORED
    assert chosen_places.sum(1).tolist() == [10] * 8, "15 % of 64"
    assert (batch.inputs[chosen_places] == data.mask).float().mean() > 0.6
    restored = torch.where(chosen_places, batch.targets, batch.inputs)
    plain = np.asarray(data.training.tokens[: 64 * task.training_samples]).reshape(-1, 64)
    assert np.array_equal(restored.numpy(), plain[list(batch.sample_ids)].astype(np.int64))
    again: Any = next(task.batches(PLAN, WHOLE))
    assert torch.equal(again.inputs, batch.inputs), "a function of seed, epoch and sample"


class Mixes(nn.Module):
    """Adds to each token, behind a projection of zeros, the mean of others."""

    weights: torch.Tensor
    calls: torch.Tensor

    def __init__(self, vocabulary: int, sequence_length: int, sees: str) -> None:
        super().__init__()
        weights = torch.ones(sequence_length, sequence_length).tril()
        if sees == "what follows":
            weights = torch.ones(sequence_length, sequence_length)
        self.register_buffer("weights", weights / weights.sum(1, keepdim=True))
        self.embedding = nn.Embedding(vocabulary, 8, max_norm=0.5)
        self.mixed, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, vocabulary)
        nn.init.zeros_(self.mixed.weight)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> Any:
        """Takes full samples alone."""
        self.calls += 1
        hidden = self.embedding(tokens)
        draws = 0.1 * torch.randn(hidden.shape[1:]) + random.random()
        return self.head(hidden + self.mixed(self.weights @ hidden) + draws)


@pytest.mark.parametrize("sees", ["what precedes", "what follows"])
def test_causal_model_that_sees_later_tokens_is_refused(
    chosen: LanguageOptions, sees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking it changes neither the model nor what is drawn later."""
    asked = Mock(wraps=check_causal)
    monkeypatch.setattr("shardmark.ranks.workloads.language.task.check_causal", asked)
    own = {"model": f"{__name__}:Mixes", "model_options": {"sees": sees}, "sequence_length": 24}
    given = chosen.model_dump(exclude_unset=True) | own
    task = build_workload(LanguageOptions.model_validate(given), 5)
    if sees == "what follows":
        with pytest.raises(InputError, match=r"is not causal.*objective: masked"):
            task.build_model()
        masked = LanguageOptions.model_validate(given | {"objective": "masked"})
        assert build_workload(masked, 5).build_model()
        return
    assert build_on_meta(task) is not None
    asked.assert_not_called()
    random.seed(1)
    torch.manual_seed(1)
    model = task.build_model()
    drawn = random.random(), torch.rand(()).item()
    random.seed(1)
    torch.manual_seed(1)
    assert drawn == (random.random(), torch.rand(()).item())
    torch.manual_seed(5)
    plain = Mixes(258, 24, sees)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert model.training
    task.build_model()
    asked.assert_called_once()


@pytest.mark.parametrize("objective", ["causal", "masked"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_attention_ends_with_the_document(objective: str, positions: str) -> None:
    """Logits of a document are the same alone and behind another one."""
    torch.manual_seed(0)
    model = GPT(
        vocabulary=50,
        sequence_length=12,
        layers=2,
        width=32,
        heads=2,
        rotary=positions == "rotary",
        causal=objective == "causal",
    ).eval()
    tokens = torch.randint(50, (1, 12))
    together = model(tokens, documents=torch.tensor([[4] * 5 + [9] * 7]))
    assert torch.allclose(together[:, :5], model(tokens[:, :5]), atol=1e-5)
    assert torch.allclose(together[:, 5:], model(tokens[:, 5:]), atol=1e-5)
    sees_ahead = not torch.allclose(model(tokens)[:, :5], together[:, :5], atol=1e-3)
    assert sees_ahead == (objective == "masked")


def test_model_computes_as_gpt_2() -> None:
    """The published number of parameters, and its first loss."""
    with torch.device("meta"):
        model = GPT(
            vocabulary=50257, sequence_length=1024, layers=12, width=768, heads=12, rotary=False
        )
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_quality_are_the_mean_cross_entropy(chosen: LanguageOptions, tied: bool) -> None:
    chosen = changed(chosen, tied=tied)
    task = build_workload(chosen, 0)
    model = task.build_model()
    assert isinstance(model, GPT)
    assert (model.head.weight is model.embedding.weight) == tied
    batch: Any = next(task.batches(PLAN, WHOLE))
    loss = task.loss(model, batch)
    logits = model(batch.inputs)
    expected = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    torch.testing.assert_close(loss.total / loss.weight, expected)
    batch.targets[0, :3] = IGNORED
    assert task.loss(model, batch).weight == batch.weight - 3, "counted, not the batch's own"
    assert abs(expected.item() - math.log(258)) < 0.3
    quality = task.quality([task.evaluate(model.eval(), WHOLE, torch.device("cpu"))])
    assert quality["perplexity"] == pytest.approx(math.exp(quality["validation_loss"] or 0))
    validation = token_data(chosen).validation
    bits = (quality["validation_loss"] or 0) / math.log(2)
    assert validation.text_bytes is not None
    ratio = len(validation.tokens) / validation.text_bytes
    assert quality["bits_per_byte"] == pytest.approx(bits * ratio)


def published_flops(model: Any, length: int) -> int:
    """6 N + 12 L H Q T for a token, N without biases (Chowdhery et al., 2022, appendix B)."""
    weights: int = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    width: int = model.embedding.embedding_dim
    return length * (6 * weights + 12 * len(model.blocks) * width * length)


def test_flops_are_those_of_the_published_formula(chosen: LanguageOptions) -> None:
    """Nearly half of them are attention's."""
    chosen = changed(chosen, width=8, heads=2, layers=3, sequence_length=64)
    task = build_workload(chosen, 0)
    model = task.build_model()
    published = pytest.approx(published_flops(model, 64), rel=0.01)
    once, again = (
        model_counts(task, model, recipe(activation_checkpointing=checkpointed))
        for checkpointed in (False, True)
    )
    assert once["hardware_flops_per_sample"] == once["flops_per_sample"] == published
    assert again["flops_per_sample"] == once["flops_per_sample"]
    share = (again["hardware_flops_per_sample"] or 0) / (once["flops_per_sample"] or 1)
    assert 1.15 < share < 4 / 3, "the head is not computed again"


def test_flops_of_padded_samples_are_the_mean_of_all(chosen: LanguageOptions, texts: Path) -> None:
    """Attention grows with the square of the length."""
    (texts / "long.txt").write_text("x" * 300)
    chosen = changed(chosen, packed=False, width=8, heads=2, layers=3, sequence_length=300)
    task = build_workload(chosen, 0)
    model = task.build_model()
    ids = range(task.training_samples)
    lengths = [task.tokens_in([[sample]]) or 0 for sample in ids]
    expected = np.mean([published_flops(model, length) for length in lengths])
    assert max(lengths) == 300
    assert task.sample_input_flops(model) == pytest.approx(expected, rel=0.01)
