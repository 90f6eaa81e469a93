"""A task for models of transformers that are no language models, on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.base.system.extras import require
from shardmark.ranks.workloads.configurations import (
    CLASSES,
    CONTRASTIVE,
    SOUND,
    SOUND_SECONDS,
    TEXT_TO_TEXT,
    stored_configuration,
    target_tokens,
)
from shardmark.ranks.workloads.language.hugging_face import layers

LABELS = 1000
IMAGE_SIZE = 224
DETECTED_SIZE = 640
BOXES = 8
SAMPLES_A_SECOND = 16_000
SAMPLES = 16


class TransformersModel:
    """Trains a model from its configuration on random inputs, so that only its cost has a meaning.

    `sequence_length` is the number of tokens of a text that is encoded, and `target_length` that
    of one that is decoded: by default what T5's training by span corruption has, all positions of
    Whisper, and for others as many as are encoded.  Other inputs have the length and size that the
    models were trained with.  `attention` is `sdpa` or `eager`.
    """

    synthetic = True
    equal_blocks = True

    def __init__(
        self,
        model: str,
        sequence_length: int = 512,
        target_length: int | None = None,
        attention: str | None = None,
    ) -> None:
        require("transformers", needed_for=f"model {model}")
        from transformers import AutoConfig

        self._attention = attention
        stored = dict(stored_configuration(model) or {})
        self._family = str(stored.pop("model_type", None))
        if self._family not in CLASSES:
            allowed = f"allowed are models of {', '.join(CLASSES)}"
            raise InputError(f"model {model}", f"found the type {self._family}", allowed)
        if CLASSES[self._family] == "AutoModelForImageClassification":
            stored["num_labels"] = LABELS
        self._config: Any = AutoConfig.for_model(self._family, **stored)
        self._config.use_cache = False  # a checkpointed layer would compute less the second time
        self._config.apply_spec_augment = False  # the shapes of its masks depend on values
        for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            setattr(self._config, key, 0.0)  # a step in which each layer computes
        self._tied = stored.get("tie_word_embeddings", True)
        self._length = sequence_length
        most = getattr(self._config, "max_target_positions", None)
        self._target_length = target_length or most or target_tokens(self._family, sequence_length)
        lengths = {"target_length": self._target_length}
        if self._family in TEXT_TO_TEXT:
            most = getattr(self._config, "max_position_embeddings", None)
            lengths = {"sequence_length": sequence_length} | lengths
        for key, length in lengths.items():
            if most is not None and length > most:
                message = f"found {length}, {model} has {most} positions"
                raise InputError(f"workload.options.{key}", message, f"use at most {most}")
        if "Seq2Seq" in CLASSES[self._family]:  # a task of images has no such method
            encoded = getattr(self._config, "max_source_positions", sequence_length)
            tokens = encoded + self._target_length
            self.tokens: Callable[[Sequence[Any]], list[int]] = lambda data: [tokens] * len(data)

    def model(self) -> nn.Module:
        import transformers

        auto_class: Any = getattr(transformers, CLASSES[self._family])
        kernels = {"attn_implementation": self._attention}
        model: nn.Module = auto_class.from_config(self._config, dtype=torch.float32, **kernels)
        if not self._tied:  # transformers ties those of T5 always
            model.lm_head = nn.Linear(self._config.d_model, self._config.vocab_size, bias=False)
        return model

    def train_data(self) -> Sequence[Mapping[str, Tensor]]:
        return [self._sample() for _ in range(SAMPLES)]

    validation_data = train_data

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss, or a mean of what is predicted: CTC costs little beside sound."""
        options: dict[str, Any] = {}
        if self._family in CONTRASTIVE:
            options["return_loss"] = True
        if "boxes" in batch:  # a detector takes the labels of each image apart
            images, *labels = (batch[name] for name in ("pixel_values", "class_labels", "boxes"))
            pairs = zip(*labels, strict=True)
            targets = [{"class_labels": kinds, "boxes": boxes} for kinds, boxes in pairs]
            batch, options["labels"] = {"pixel_values": images}, targets
        outputs = model(**batch, **options)
        loss: Tensor | None = getattr(outputs, "loss", None)
        predicted = outputs.logits if "logits" in outputs else outputs.get("pooler_output")
        return predicted.float().mean() if loss is None else loss

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers that the model declares, or else those of its largest list."""
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        largest = max(lists, key=lambda one: sum(weight.numel() for weight in one.parameters()))
        return layers(model) or [*largest]

    def _sample(self) -> dict[str, Tensor]:
        config = self._config
        if self._family in CONTRASTIVE:
            text, picture = config.text_config, config.vision_config
            return {
                "input_ids": _tokens(text.vocab_size, text.max_position_embeddings),
                "pixel_values": torch.randn(3, picture.image_size, picture.image_size),
            }
        if self._family in TEXT_TO_TEXT:
            answer = _answer(config.vocab_size, self._target_length)
            return {"input_ids": _tokens(config.vocab_size, self._length), **answer}
        if self._family == "whisper":
            frames = 2 * config.max_source_positions  # which a convolution halves
            answer = _answer(config.vocab_size, self._target_length)
            return {"input_features": torch.randn(config.num_mel_bins, frames), **answer}
        if self._family in SOUND:
            return {"input_values": torch.randn(SAMPLES_A_SECOND * SOUND_SECONDS)}
        if CLASSES[self._family] == "AutoModelForObjectDetection":
            return {
                "pixel_values": torch.randn(3, DETECTED_SIZE, DETECTED_SIZE),
                "class_labels": torch.randint(config.num_labels, (BOXES,)),
                "boxes": torch.rand(BOXES, 4) / 4 + 0.25,
            }
        image = {"pixel_values": torch.randn(3, IMAGE_SIZE, IMAGE_SIZE)}
        labelled = CLASSES[self._family] == "AutoModelForImageClassification"
        return {**image, "labels": torch.randint(LABELS, ())} if labelled else image


def _tokens(vocabulary: int, length: int) -> Tensor:
    return torch.randint(1, vocabulary, (length,))


def _answer(vocabulary: int, length: int) -> dict[str, Tensor]:
    """Return the input of a decoder and what it has to predict."""
    return {name: _tokens(vocabulary, length) for name in ("decoder_input_ids", "labels")}
