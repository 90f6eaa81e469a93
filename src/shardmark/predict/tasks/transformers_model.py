"""A task for models of transformers that are no language models, on random inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.base.system.extras import require
from shardmark.ranks.workloads.configurations import (
    SOUND,
    SOUND_SECONDS,
    span_corruption_targets,
    stored_configuration,
)
from shardmark.ranks.workloads.language.hugging_face import layers

CONTRASTIVE = ("clip", "siglip")
"""Model types that compare images with texts."""
CLASSES = {
    **dict.fromkeys((*CONTRASTIVE, "dinov3_vit"), "AutoModel"),
    **dict.fromkeys(("dinov2", "vit"), "AutoModelForImageClassification"),
    **dict.fromkeys(("d_fine", "rt_detr", "rt_detr_v2"), "AutoModelForObjectDetection"),
    **dict.fromkeys(SOUND, "AutoModelForCTC"),
    "t5": "AutoModelForSeq2SeqLM",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
"""Class of transformers by model type.  It computes the loss, but that of DINOv3, whose loss here
is a mean of its features."""
DECODERS = ("t5", "whisper")
"""Model types with an encoder and a decoder, whose samples have tokens on both sides."""
LABELS = 1000
IMAGE_SIZE = 224
DETECTED_SIZE = 640
BOXES = 8
SAMPLES_A_SECOND = 16_000
LETTERS_A_SECOND = 15
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
        if self._family in SOUND:
            stored["layerdrop"] = 0.0  # a step in which each layer computes
        self._config: Any = AutoConfig.for_model(self._family, **stored)
        self._config.use_cache = False  # a checkpointed layer would compute less the second time
        self._tied = stored.get("tie_word_embeddings", True)
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
        if not self._tied:  # transformers ties those of T5 always
            model.lm_head = nn.Linear(self._config.d_model, self._config.vocab_size, bias=False)
        return model

    def train_data(self) -> Sequence[Mapping[str, Tensor]]:
        return [self._sample() for _ in range(SAMPLES)]

    validation_data = train_data

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss."""
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
        return outputs.pooler_output.float().mean() if loss is None else loss

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
        if self._family == "t5":
            tokens = _tokens(config.vocab_size, self._length)
            return {"input_ids": tokens, **_answer(config.vocab_size, self._target_length)}
        if self._family == "whisper":
            frames = 2 * config.max_source_positions  # which a convolution halves
            answer = _answer(config.vocab_size, self._target_length)
            return {"input_features": torch.randn(config.num_mel_bins, frames), **answer}
        if self._family in SOUND:
            letters = _tokens(config.vocab_size, LETTERS_A_SECOND * SOUND_SECONDS)
            return {
                "input_values": torch.randn(SAMPLES_A_SECOND * SOUND_SECONDS),
                "labels": letters,
            }
        if CLASSES[self._family] == "AutoModelForObjectDetection":
            return {
                "pixel_values": torch.randn(3, DETECTED_SIZE, DETECTED_SIZE),
                "class_labels": torch.randint(config.num_labels, (BOXES,)),
                "boxes": torch.rand(BOXES, 4) / 4 + 0.25,
            }
        image = {"pixel_values": torch.randn(3, IMAGE_SIZE, IMAGE_SIZE)}
        labelled = CLASSES[self._family] == "AutoModelForImageClassification"
        return {**image, "labels": torch.randint(LABELS, ())} if labelled else image


def _positions(count: int, data: Sequence[object]) -> list[int]:
    """Return the same number of tokens for all samples."""
    return [count] * len(data)


def _tokens(vocabulary: int, length: int) -> Tensor:
    return torch.randint(1, vocabulary, (length,))


def _answer(vocabulary: int, length: int) -> dict[str, Tensor]:
    """Return the input of a decoder and what it has to predict."""
    return {name: _tokens(vocabulary, length) for name in ("decoder_input_ids", "labels")}
