"""The language modelling task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from shardmark.base.errors import InputError
from shardmark.ranks.workloads.base import (
    NOT_DIVIDED,
    CannotShard,
    LossSum,
    SequencePlan,
    TensorPlan,
)
from shardmark.ranks.workloads.exchanging import exchanging
from shardmark.ranks.workloads.flops import flops_on_meta
from shardmark.ranks.workloads.language.batch import (
    IGNORED,
    TokenBatch,
    masked_counts,
    masked_tokens,
    next_tokens,
    part_of_sequences,
)
from shardmark.ranks.workloads.language.causality import check_causal
from shardmark.ranks.workloads.language.chunked_loss import (
    ChunkedLoss,
    predicting,
    summed_cross_entropy,
)
from shardmark.ranks.workloads.language.data import Samples, load
from shardmark.ranks.workloads.language.gpt import FULL_SEQUENCES, GPT, TENSOR_PLAN, parts_of
from shardmark.ranks.workloads.model_building import construct, seeded, user_function
from shardmark.ranks.workloads.order import generator
from shardmark.ranks.workloads.sampled_task import SampledTask, added, checked_logits

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from shardmark.base.layout import Shard
    from shardmark.ranks.workloads.base import Batch, BatchPlan
    from shardmark.ranks.workloads.language.options import LanguageOptions
    from shardmark.ranks.workloads.order import Share

EVALUATION_TOKENS = 16_384
"""Maximum number of tokens in a validation batch, which has at least one sample."""
COMPARED_TOKENS = 8
"""Length of the sample on which pipeline parts are compared with their model."""
NOT_CHUNKED = CannotShard(
    "the loss of chunks needs the full output layer and its targets on each rank",
    "set workload.loss_chunks: 1",
)
SAME_LOSS = 1e-4
"""Largest relative difference of equal losses that are summed in another order."""
VALIDATION_EPOCH = 2**32 - 1
"""Epoch number from which the masks of the validation set are drawn."""


class Language(SampledTask[Samples, TokenBatch]):
    """Language modelling: cross entropy of the next token, or of masked tokens."""

    def __init__(self, options: LanguageOptions, seed: int) -> None:
        self._options = options
        self._causal = options.objective == "causal"
        self._causality_known = self._output_layer_checked = False
        self._evaluation_batch = max(1, EVALUATION_TOKENS // options.sequence_length)
        self._data = load(options)
        super().__init__(
            options,
            seed,
            self._data.training,
            self._data.validation,
            synthetic=options.dataset == "random",
        )
        self.corpora = self._data.corpora
        self.equal_blocks = options.model == "gpt" or options.from_transformers
        self._training_weights = self._predicted(self._training.lengths())

    def active_parameters(self, model: nn.Module) -> int | None:
        if not self._options.from_transformers:
            return None
        from shardmark.ranks.workloads.language.hugging_face import active_parameters

        return active_parameters(model)

    def tokens_in(self, sample_ids: Iterable[Sequence[int]]) -> int:
        """Number of tokens in the samples of some steps, without padding."""
        lengths = self._training.lengths
        return sum(int(lengths(np.asarray(ids, np.int64)).sum()) for ids in sample_ids)

    def _predicted(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        return (lengths if self._causal else masked_counts(lengths)).astype(np.float64)

    def build_model(self) -> nn.Module:
        model = self._built()
        # A model on the meta device cannot be checked; the process that initialises it checks it.
        on_meta = any(p.is_meta for p in model.parameters())
        if self._causal and self._options.model != "gpt" and not (on_meta or self._causality_known):
            check_causal(self._options, model, self._logits_of, vocabulary=self._data.vocabulary)
            self._causality_known = True
        chunks = self._options.loss_chunks
        if chunks > 1 and on_meta:
            self._check_output_layer(model)
        elif chunks > 1:
            self._check_chunks(model)
        if self._options.adapter is not None:
            from shardmark.ranks.workloads.adapters import add_adapter

            add_adapter(model, self._options.adapter, self.blocks(model), seed=self._seed)
        if chunks > 1:
            head = self._output_layer(model)
            head.forward = ChunkedLoss(head, chunks)
        return model

    def _output_layer(self, model: nn.Module) -> nn.Module:
        get: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = model.head if isinstance(model, GPT) else get()
        if isinstance(head, torch.nn.Module):
            return head
        problem = f"transformers does not name the output layer of {self._options.model}"
        raise InputError("workload.loss_chunks", problem, "set it to 1")

    def _check_chunks(self, model: nn.Module) -> None:
        """Raise `InputError` for a model that changes its logits after the output layer."""
        tokens = torch.arange(min(COMPARED_TOKENS, self._options.sequence_length))[None]
        tokens = tokens % self._data.vocabulary
        documents = torch.zeros_like(tokens) if self._options.document_masks else None
        example, head = _example_batch(tokens, documents), self._output_layer(model)
        model.eval()
        with torch.no_grad():
            of_logits = summed_cross_entropy(self._logits(model, example), example.targets)
            head.forward = ChunkedLoss(head, self._options.loss_chunks)
            of_chunks = self._losses(model, example)
        del head.forward
        model.train()
        if of_chunks.dim() or not torch.allclose(of_chunks, of_logits, rtol=SAME_LOSS):
            raise self._changed_logits()

    def _check_output_layer(self, model: nn.Module) -> None:
        """Raise `InputError` for a model on the meta device with operations after that layer."""
        if self._output_layer_checked:
            return
        inputs = torch.zeros((1, COMPARED_TOKENS), dtype=torch.long, device="meta")
        batch = _example_batch(inputs, inputs if self._options.from_transformers else None)
        changed: list[bool] = []
        outputs: list[Tensor] = []

        def summed() -> Tensor:
            logits = self._output(model, batch)
            is_cast = logits.dtype != outputs[-1].dtype
            is_view = logits._base is outputs[-1] and logits.numel() == outputs[-1].numel()
            changed.append(not (logits is outputs[-1] or is_view or is_cast))
            return logits.sum()

        first, *others = self.blocks(model) or (model,)
        of_first: list[Any] = []  # other blocks return the same: what they compute does not matter
        for block in others:
            block.forward = lambda *_, **__: of_first[-1]
        hooked = ((self._output_layer(model), outputs), (first, of_first))
        handles = [m.register_forward_hook(lambda *a, to=to: to.append(a[-1])) for m, to in hooked]
        flops_on_meta(model, summed)
        for handle in handles:
            handle.remove()
        for block in others:
            del block.forward
        if any(changed):  # empty if the model looks at values: a run checks it
            raise self._changed_logits()
        self._output_layer_checked = True

    def _changed_logits(self) -> InputError:
        return InputError(
            "workload.loss_chunks",
            f"{self._options.model} changes its logits after the output layer",
            "set it to 1",
        )

    def _logits_of(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Logits (1, length, vocabulary) of inputs (1, length)."""
        documents = torch.zeros_like(inputs) if self._options.document_masks else None
        return self._logits(model, _example_batch(inputs, documents))

    def _built(self) -> nn.Module:
        options, vocabulary = self._options, self._data.vocabulary
        if options.from_transformers:
            from shardmark.ranks.workloads.language.hugging_face import build_model

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
        """The layers; embedding and head, which may share their weights, form one more unit."""
        if isinstance(model, GPT):
            return list(model.blocks)
        if self._options.from_transformers:
            from shardmark.ranks.workloads.language.hugging_face import text_layers

            return text_layers(model)
        return None

    def tensor_plan(self, model: nn.Module) -> TensorPlan | CannotShard:
        options = self._options
        if options.adapter is not None:
            return NOT_DIVIDED
        if options.loss_chunks > 1:
            return NOT_CHUNKED
        if options.from_transformers:
            from shardmark.ranks.workloads.language.hugging_face import tensor_plan

            return tensor_plan(model)
        if not isinstance(model, GPT):
            return super().tensor_plan(model)
        if options.dropout:
            return CannotShard(
                f"dropout {options.dropout:g} would draw other masks in sharded heads",
                "set workload.dropout: 0",
            )
        # Learned positions need full sequences, and unpacked batches have other lengths.
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
            from shardmark.ranks.workloads.language.hugging_face import sequence_plan

            return sequence_plan(model, part, options.sequence_length)
        if not isinstance(model, GPT):
            return super().sequence_plan(model)
        return SequencePlan(
            attend=partial(exchanging, model, FULL_SEQUENCES),
            part=part,
            units={"heads": options.heads, "positions": options.sequence_length},
        )

    def pipeline_parts(self, model: nn.Module) -> Sequence[nn.Module] | CannotShard:
        if self._options.loss_chunks > 1:
            return NOT_CHUNKED
        if isinstance(model, GPT):
            return parts_of(model)
        if self._options.from_transformers:
            from shardmark.ranks.workloads.language.hugging_face import pipeline_parts

            tokens = torch.arange(COMPARED_TOKENS)[None] % self._data.vocabulary
            return pipeline_parts(model, lambda module: self._logits_of(module, tokens))
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
        # Our tokenizers return valid tokens only, but the user's token files may have any.
        if self._options.dataset == "tokens":
            largest = int(windows.tokens.max(initial=0))
            if largest >= (data.vocabulary if mask is None else mask):
                least = largest + (1 if mask is None else 2)
                reason = f"{data.vocabulary} is too small: the data have token {largest}"
                if mask is not None:
                    reason += ", and the last row is the mask"
                raise InputError("workload.vocabulary", reason, f"set it to at least {least}")
        if self._causal:
            return next_tokens(windows, data.tokens.filler)
        assert mask is not None, "this objective always has a mask"
        return masked_tokens(
            windows,
            data.tokens.filler,
            mask=mask,
            num_tokens=data.tokens.vocabulary,
            draws=[generator(seeds[0], "masks", *seeds[1:], sample) for sample in ids.tolist()],
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Cross entropy summed over the predicted tokens, in fp32 under every precision."""
        tokens = cast("TokenBatch", batch)
        total = self._losses(model, tokens)
        # Count the targets here: the weight of the batch would be checked against itself.
        return LossSum(total=total, weight=(tokens.targets != IGNORED).sum())

    def _losses(self, model: Any, batch: TokenBatch) -> Tensor:
        if self._options.loss_chunks == 1:
            return summed_cross_entropy(self._logits(model, batch), batch.targets)
        with predicting(batch.targets):
            return self._output(model, batch)

    def _output(self, model: Any, batch: TokenBatch) -> Tensor:
        """First output of a model, which may be wrapped: logits, or the loss of chunks."""
        if self._options.from_transformers:
            from shardmark.ranks.workloads.language.hugging_face import arguments_of

            returned = model(**arguments_of(batch, causal=self._causal))[0]
        else:
            arguments = {"documents": batch.documents, "positions": batch.positions}
            given_arguments = {key: value for key, value in arguments.items() if value is not None}
            returned = model(batch.inputs, **given_arguments)
        output: Tensor = returned
        return output

    def _logits(self, model: Any, batch: TokenBatch) -> Tensor:
        """Logits (batch, length, vocabulary) of a model, which may be wrapped."""
        logits = self._output(model, batch)
        shape = (*batch.inputs.shape, self._data.vocabulary)
        return checked_logits(logits, shape, self._options.model)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> dict[str, float]:
        """Summed loss in nats and predicted tokens of the shard's validation batches."""
        total, predicted = torch.zeros((), dtype=torch.float64, device=device), 0.0
        for batch in self._validated(self._validation_batch, shard):
            total += self._losses(model, batch.to(device)).double()
            predicted += batch.weight
        return {"loss": total.item(), "predicted": predicted}

    def quality(self, parts: Iterable[object]) -> Mapping[str, float]:
        """`validation_loss` and `perplexity` per token; `bits_per_byte` of causal models."""
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
        """Mean number of operations per sample; causal attention is counted in full, as is usual.

        T tokens need a T + b T^2 operations, with a and b from counts at two lengths.
        """
        lengths = self._training.lengths()
        longest, mean = int(lengths.max()), float(lengths.mean())
        counted = self._flops_of(model, longest)
        if mean == longest or counted is None:
            return counted
        shorter = max(1, longest // 2)
        fewer = self._flops_of(model, shorter)
        assert fewer is not None, "the count of a longer sample succeeded"
        square = (counted / longest - fewer / shorter) / (longest - shorter)
        linear = counted / longest - square * longest
        mean_square = float(np.square(lengths, dtype=np.float64).mean())
        return round(linear * mean + square * mean_square)

    def _flops_of(self, model: nn.Module, length: int) -> int | None:
        inputs = torch.zeros((1, length), dtype=torch.int64, device="meta")
        # transformers reads values of tensors to build a mask, so it gets one.
        batch = _example_batch(inputs, inputs if self._options.from_transformers else None)
        return flops_on_meta(model, lambda: self._losses(model, batch))


def _example_batch(inputs: Tensor, documents: Tensor | None) -> TokenBatch:
    return TokenBatch(
        sample_ids=(0,), step_weight=1.0, inputs=inputs, targets=inputs, documents=documents
    )


build = Language
