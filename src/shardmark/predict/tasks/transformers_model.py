"""A task for models of transformers that are no language models, on random inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.base.system.extras import require
from shardmark.ranks.workloads.configurations import span_corruption_targets, stored_configuration
from shardmark.ranks.workloads.language.hugging_face import layers

CLASSES = {
    "clip": "AutoModel",
    "dinov2": "AutoModelForImageClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
"""Class of transformers that computes the loss, by model type."""
DECODERS = ("t5", "whisper")
"""Model types with an encoder and a decoder, whose samples have tokens on both sides."""
LABELS = 1000
IMAGE_SIZE = 224
SAMPLES = 16


class TransformersModel:
    """Trains a model from its configuration on random inputs, so that only its cost has a meaning.

    `sequence_length` is the number of tokens of T5's input, and `target_length` that of the output
    of T5 and Whisper: by default what T5's training by span corruption has, and all positions of
    Whisper.  Other inputs have the length and size that the models were trained with.
    """

    synthetic = True
    equal_blocks = True

    def __init__(
        self, model: str, sequence_length: int = 512, target_length: int | None = None
    ) -> None:
        require("transformers", needed_for=f"model {model}")
        from transformers import AutoConfig

        stored = dict(stored_configuration(model) or {})
        self._family = str(stored.pop("model_type", None))
        if self._family not in CLASSES:
            allowed = f"allowed are models of {', '.join(CLASSES)}"
            raise InputError(f"model {model}", f"found the type {self._family}", allowed)
        if CLASSES[self._family] == "AutoModelForImageClassification":
            stored["num_labels"] = LABELS
        self._config: Any = AutoConfig.for_model(self._family, **stored)
        self._length = sequence_length
        most = getattr(self._config, "max_target_positions", None)
        self._target_length = target_length or most or span_corruption_targets(sequence_length)
        if most is not None and self._target_length > most:
            message = f"found {target_length}, {model} has {most} positions"
            raise InputError("workload.options.target_length", message, f"use at most {most}")
        if self._family in DECODERS:  # a task of images has no such method
            encoded = getattr(self._config, "max_source_positions", sequence_length)
            self.tokens = partial(_positions, encoded + self._target_length)

    def model(self) -> nn.Module:
        import transformers

        auto_class: Any = getattr(transformers, CLASSES[self._family])
        model: nn.Module = auto_class.from_config(self._config, dtype=torch.float32)
        return model

    def train_data(self) -> Sequence[Mapping[str, Tensor]]:
        return [self._sample() for _ in range(SAMPLES)]

    validation_data = train_data

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss, which the model computes itself."""
        options = {"return_loss": True} if self._family == "clip" else {}
        loss: Tensor = model(**batch, **options).loss
        return loss

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return layers(model) or []

    def _sample(self) -> dict[str, Tensor]:
        config = self._config
        if self._family == "clip":
            text, picture = config.text_config, config.vision_config
            return {
                "input_ids": _tokens(text.vocab_size, text.max_position_embeddings),
                "pixel_values": torch.randn(3, picture.image_size, picture.image_size),
            }
        if self._family == "t5":
            tokens = _tokens(config.vocab_size, self._length)
            return {"input_ids": tokens, **_answer(config.vocab_size, self._target_length)}
        if self._family == "whisper":
            frames = 2 * config.max_source_positions  # which a convolution halves
            answer = _answer(config.vocab_size, self._target_length)
            return {"input_features": torch.randn(config.num_mel_bins, frames), **answer}
        label = torch.randint(LABELS, ())
        return {"pixel_values": torch.randn(3, IMAGE_SIZE, IMAGE_SIZE), "labels": label}


def _positions(count: int, data: Sequence[object]) -> list[int]:
    """Return the same number of tokens for all samples."""
    return [count] * len(data)


def _tokens(vocabulary: int, length: int) -> Tensor:
    return torch.randint(1, vocabulary, (length,))


def _answer(vocabulary: int, length: int) -> dict[str, Tensor]:
    """Return the input of a decoder and what it has to predict."""
    return {name: _tokens(vocabulary, length) for name in ("decoder_input_ids", "labels")}
