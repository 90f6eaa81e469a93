"""Language modelling as a workload."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.nn import functional

from shardmark.core.errors import InputError
from shardmark.workloads.base import CannotShard, LossSum, SequencePlan, TensorPlan
from shardmark.workloads.exchanging import exchanging
from shardmark.workloads.flops import flops_on_meta
from shardmark.workloads.language.batch import (
    IGNORED,
    TokenBatch,
    masked_counts,
    masked_tokens,
    next_tokens,
    part_of_sequences,
)
from shardmark.workloads.language.causality import check_causal
from shardmark.workloads.language.data import Samples, load
from shardmark.workloads.language.gpt import GPT, TENSOR_PLAN, WHOLE_BETWEEN, parts_of
from shardmark.workloads.model_building import construct, seeded, user_function
from shardmark.workloads.order import generator
from shardmark.workloads.sampled_task import SampledTask, added, checked_logits

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from shardmark.core.shares import Shard
    from shardmark.workloads.base import Batch, BatchPlan
    from shardmark.workloads.language.options import LanguageOptions
    from shardmark.workloads.order import Share

EVALUATION_TOKENS = 16_384
"""Of one batch of the validation, at most; at least one sample."""
TRIED_TOKENS = 8
"""Of a sample on which a chain of parts is compared with its model."""
VALIDATION_EPOCH = 2**32 - 1
"""Masks of the validation set are those of this epoch."""


class Language(SampledTask[Samples, TokenBatch]):
    """Cross entropy of the next token, or of masked ones."""

    def __init__(self, options: LanguageOptions, seed: int) -> None:
        self._options = options
        self._causal = options.objective == "causal"
        self._causality_known = False
        self._evaluation_batch = max(1, EVALUATION_TOKENS // options.sequence_length)
        self._data = load(options)
        super().__init__(options, seed, self._data.training, self._data.validation)
        self._training_weights = self._predicted(self._training.lengths())

    def tokens_in(self, sample_ids: Iterable[Sequence[int]]) -> int:
        """Without padding."""
        lengths = self._training.lengths
        return sum(int(lengths(np.asarray(ids, np.int64)).sum()) for ids in sample_ids)

    @property
    def corpora(self) -> Mapping[str, str]:
        return self._data.corpora

    def _predicted(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        return (lengths if self._causal else masked_counts(lengths)).astype(np.float64)

    def build_model(self) -> nn.Module:
        model = self._built()
        # Without its weights a model cannot be asked; the process that writes them asks there.
        hollow = any(p.is_meta for p in model.parameters())
        if self._causal and self._options.model != "gpt" and not (hollow or self._causality_known):
            self._check_causal(model)
            self._causality_known = True
        return model

    def _check_causal(self, model: nn.Module) -> None:
        check_causal(
            self._options.model,
            model,
            self._logits_of,
            vocabulary=self._data.vocabulary,
            sequence_length=self._options.sequence_length,
        )

    def _logits_of(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """(1, length) -> (1, length, vocabulary)."""
        documents = torch.zeros_like(inputs) if self._options.document_masks else None
        return self._logits(model, _sample(inputs, documents))

    def _built(self) -> nn.Module:
        options, vocabulary = self._options, self._data.vocabulary
        if options.from_transformers:
            from shardmark.workloads.language.hugging_face import build_model

            return build_model(options, self._data, self._seed)
        with seeded(self._seed):
            if options.model == "gpt":
                return GPT(
                    vocabulary=vocabulary,
                    sequence_length=options.sequence_length,
                    layers=options.layers,
                    width=options.width,
                    heads=options.heads,
                    rotary=options.positions == "rotary",
                    tied=options.tied,
                    dropout=options.dropout,
                    causal=self._causal,
                )
            sizes = {"vocabulary": vocabulary, "sequence_length": options.sequence_length}
            arguments = options.model_options | sizes
            model = construct(options.model, user_function(options.model), arguments)
        model.train()  # a user's method may return nothing
        return model

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """The layers; embedding and head, which may share their weights, stay together."""
        if isinstance(model, GPT):
            return list(model.blocks)
        if self._options.from_transformers:
            from shardmark.workloads.language.hugging_face import layers

            return layers(model)
        return None

    def tensor_plan(self, model: nn.Module) -> TensorPlan | CannotShard:
        options = self._options
        if options.from_transformers:
            from shardmark.workloads.language.hugging_face import tensor_plan

            return tensor_plan(model)
        if not isinstance(model, GPT):
            return super().tensor_plan(model)
        if options.dropout:
            return CannotShard(
                f"dropout {options.dropout:g} would draw other masks in divided heads",
                "set workload.dropout: 0",
            )
        # Learned positions are looked up for whole sequences, uneven batches have other lengths.
        by_position = options.positions == "rotary" and options.packed
        return TensorPlan(
            styles=TENSOR_PLAN,
            units={"heads": options.heads},
            sequence_length=options.sequence_length if by_position else None,
        )

    def sequence_plan(self, model: nn.Module) -> SequencePlan | CannotShard:
        options = self._options
        part = partial(part_of_sequences, causal=self._causal)
        if options.from_transformers:
            from shardmark.workloads.language.hugging_face import sequence_plan

            return sequence_plan(model, part, options.sequence_length)
        if not isinstance(model, GPT):
            return super().sequence_plan(model)
        return SequencePlan(
            attend=partial(exchanging, model, WHOLE_BETWEEN),
            part=part,
            units={"heads": options.heads, "positions": options.sequence_length},
        )

    def pipeline_parts(self, model: nn.Module) -> Sequence[nn.Module] | CannotShard:
        if isinstance(model, GPT):
            return parts_of(model)
        if self._options.from_transformers:
            from shardmark.workloads.language.hugging_face import pipeline_parts

            tokens = torch.arange(TRIED_TOKENS)[None] % self._data.vocabulary
            return pipeline_parts(model, lambda tried: self._logits_of(tried, tokens))
        return super().pipeline_parts(model)

    def _training_batch(self, plan: BatchPlan, share: Share) -> TokenBatch:
        return TokenBatch(
            sample_ids=tuple(share.ids.tolist()),
            step_weight=share.step_weight,
            sample_weights=share.weights,
            **self._fields(self._training, share.ids, (plan.seed, share.epoch, plan.draws)),
        )

    def _validation_batch(self, ids: NDArray[np.int64]) -> TokenBatch:
        weights = self._predicted(self._validation.lengths(ids))
        return TokenBatch(
            sample_ids=tuple(ids.tolist()),
            step_weight=weights.sum(),
            sample_weights=tuple(weights.tolist()),
            **self._fields(self._validation, ids, (self._seed, VALIDATION_EPOCH)),
        )

    def _fields(
        self, samples: Samples, ids: NDArray[np.int64], seeds: tuple[int, ...]
    ) -> dict[str, Any]:
        data, windows = self._data, samples.read(ids)
        mask = data.tokens.mask
        # A tokenizer of ours gives no other tokens; files of tokens may hold any.
        if self._options.dataset == "tokens":
            largest = int(windows.tokens.max(initial=0))
            if largest >= (data.vocabulary if mask is None else mask):
                needed = f"the data have token {largest}"
                if mask is not None:
                    needed += ", and the last of the vocabulary is the mask; set it one higher"
                raise InputError("workload.vocabulary", f"found {data.vocabulary}", needed)
        if self._causal:
            return next_tokens(windows, data.tokens.filler)
        assert mask is not None, "reserved for this objective"
        return masked_tokens(
            windows,
            data.tokens.filler,
            mask=mask,
            known_tokens=data.tokens.vocabulary,
            draws=[generator(seeds[0], "masks", *seeds[1:], sample) for sample in ids.tolist()],
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Cross entropy summed over the tokens to predict, in fp32 under every precision."""
        tokens = cast("TokenBatch", batch)
        total = self._losses(model, tokens)
        # Counted anew: the batch's own weight would be checked against itself.
        return LossSum(total=total, weight=(tokens.targets != IGNORED).sum())

    def _losses(self, model: Any, batch: TokenBatch) -> Tensor:
        logits = self._logits(model, batch)
        return functional.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )

    def _logits(self, model: Any, batch: TokenBatch) -> Tensor:
        """(batch, length, vocabulary).  `model` may be wrapped."""
        if self._options.from_transformers:
            from shardmark.workloads.language.hugging_face import arguments_of

            logits = model(**arguments_of(batch, causal=self._causal))[0]
        else:
            told = {"documents": batch.documents, "positions": batch.positions}
            known = {name: tokens for name, tokens in told.items() if tokens is not None}
            logits = model(batch.inputs, **known)
        shape = (*batch.inputs.shape, self._data.vocabulary)
        return checked_logits(logits, shape, self._options.model)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> dict[str, float]:
        """Nats and predicted tokens of the shard's validation batches."""
        total, predicted = torch.zeros((), dtype=torch.float64, device=device), 0.0
        for batch in self._validated(self._validation_batch, shard):
            total += self._losses(model, batch.to(device)).double()
            predicted += batch.weight
        return {"loss": total.item(), "predicted": predicted}

    def quality(self, parts: Iterable[object]) -> Mapping[str, float]:
        """`validation_loss` and `perplexity` by token; `bits_per_byte` of causal models of text."""
        sums = added(parts)
        if not sums.get("predicted"):
            return {}
        loss = sums["loss"] / sums["predicted"]
        metrics = {"validation_loss": loss, "perplexity": math.exp(min(loss, 200.0))}
        stream = self._data.tokens.validation
        if stream.text_bytes and self._causal:
            tokens_per_byte = len(stream.tokens) / stream.text_bytes
            metrics["bits_per_byte"] = loss / math.log(2) * tokens_per_byte
        return metrics

    def sample_input_flops(self, model: nn.Module) -> int | None:
        """Mean over the samples, attention counted in full, as is usual.

        Operations are a T + b T^2 for T tokens: counted at two lengths, which give a and b.
        """
        lengths = self._training.lengths()
        longest, mean = int(lengths.max()), float(lengths.mean())
        counted = self._flops_of(model, longest)
        if mean == longest or counted is None:
            return counted
        shorter = max(1, longest // 2)
        fewer = self._flops_of(model, shorter)
        assert fewer is not None, "a longer sample could be counted"
        square = (counted / longest - fewer / shorter) / (longest - shorter)
        linear = counted / longest - square * longest
        mean_square = float(np.square(lengths, dtype=np.float64).mean())
        return round(linear * mean + square * mean_square)

    def _flops_of(self, model: nn.Module, length: int) -> int | None:
        inputs = torch.zeros((1, length), dtype=torch.int64, device="meta")
        # transformers looks at values where it has to find out the mask by itself.
        batch = _sample(inputs, inputs if self._options.from_transformers else None)
        counted = flops_on_meta(model, lambda: self._losses(model, batch))
        if counted is None or not self._options.from_transformers:
            return counted
        from shardmark.workloads.language.hugging_face import uncounted_flops

        return counted + length * uncounted_flops(model)


def _sample(inputs: Tensor, documents: Tensor | None) -> TokenBatch:
    return TokenBatch(
        sample_ids=(0,), step_weight=1.0, inputs=inputs, targets=inputs, documents=documents
    )


build = Language
