"""A task for models of transformers that are no language models, on random inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.core.errors import InputError
from shardmark.core.extras import require
from shardmark.workloads.configurations import stored_configuration
from shardmark.workloads.language.hugging_face import layers

CLASSES = {
    "clip": "AutoModel",
    "dinov2": "AutoModelForImageClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
"""Class of transformers that computes the loss, by model type."""
LABELS = 1000
IMAGE_SIZE = 224
SAMPLES = 16


class TransformersModel:
    """Trains a model from its configuration on random inputs, so that only its cost has a meaning.

    `sequence_length` is the number of tokens of T5's input and of its output; other models take
    inputs of the length and size that they were trained with.
    """

    synthetic = True
    equal_blocks = True

    def __init__(self, model: str, sequence_length: int = 512) -> None:
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
            return {"input_ids": tokens, **_answer(config.vocab_size, self._length)}
        if self._family == "whisper":
            frames = 2 * config.max_source_positions  # which a convolution halves
            answer = _answer(config.vocab_size, config.max_target_positions)
            return {"input_features": torch.randn(config.num_mel_bins, frames), **answer}
        label = torch.randint(LABELS, ())
        return {"pixel_values": torch.randn(3, IMAGE_SIZE, IMAGE_SIZE), "labels": label}


def _tokens(vocabulary: int, length: int) -> Tensor:
    return torch.randint(1, vocabulary, (length,))


def _answer(vocabulary: int, length: int) -> dict[str, Tensor]:
    """Return the input of a decoder and what it has to predict."""
    return {name: _tokens(vocabulary, length) for name in ("decoder_input_ids", "labels")}
