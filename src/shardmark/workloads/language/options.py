"""Language modelling: which model, on which text.  Imports no torch."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from shardmark.workloads.models import check_model_name, is_user_function, looked_in
from shardmark.workloads.options import ModelOptions

HUGGING_FACE: dict[str, str] = {
    "hf:gpt2": "GPT-2 (Radford et al., 2019)",
    "hf:llama": "Llama (Touvron et al., 2023)",
    "hf:qwen3": "Qwen3 (Yang et al., 2025)",
    "hf:gpt_neox": "GPT-NeoX (Black et al., 2022)",
    "hf:mixtral": "Mixtral, a mixture of experts (Jiang et al., 2024)",
    "hf:bert": "BERT, masked (Devlin et al., 2019)",
}
"""Models of `transformers`; a line each, without their sizes."""
LANGUAGE_MODELS: dict[str, str] = {
    "gpt": "language: GPT-2's blocks with layers, width and heads of your choice",
    **{name: f"language: {line}, from transformers" for name, line in HUGGING_FACE.items()},
    "hf:FOLDER or hf:FILE.json": "language: a local folder with weights, or a configuration of"
    " transformers with weights from the seed",
}
"""A line each for `list models`."""
ENCODERS = ("hf:bert",)
EMBEDDED = ("stdlib", "torch-source")
"""Corpora that come with the installation."""
MASK_SHARE = 0.15

_GPT_KEYS = ("layers", "width", "heads", "positions", "tied", "dropout")
_SIZES = ("vocab_size", "num_classes", "vocabulary", "sequence_length")
"""Of a model's arguments: those that the workload sets."""


class LanguageOptions(ModelOptions):
    """A model that predicts the tokens of a text: the next one, or masked ones."""

    verified_samples: ClassVar[int] = 16
    on_pictures: ClassVar[bool] = False

    name: Literal["language"] = "language"
    objective: Literal["causal", "masked"] = "causal"
    """`causal`: the next token.  `masked`: 15 % of the tokens from all others, as BERT does."""
    model: str = "gpt"
    """`gpt`, `hf:gpt2`, ..., `hf:FOLDER`, `hf:FILE.json`, or `package.module:function`."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keys of the `hf:` model's configuration, or arguments of your own function."""
    layers: PositiveInt = 2
    """`gpt` only, as are the keys up to `dropout`."""
    width: PositiveInt = 128
    heads: PositiveInt = 4
    positions: Literal["rotary", "learned"] = "rotary"
    tied: bool = True
    """Embedding and head share their weights."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    vocabulary: PositiveInt | None = None
    """Rows of embedding and head; null is what the tokenizer needs.  `tokens` needs a number: one
    more than the largest token, or two more with `objective: masked`, whose mask is the last."""
    sequence_length: Annotated[int, Field(ge=2)] = 256
    """Tokens that a sample has at most."""
    dataset: Literal["stdlib", "torch-source", "text", "jsonl", "parquet", "arrow", "tokens"] = (
        "stdlib"
    )
    column: str = "text"
    """Key or column of a document in `jsonl`, `parquet` and `arrow`."""
    tokenizer: str | dict[Literal["bpe"], Annotated[int, Field(ge=258)]] = "bytes"
    """`bytes`, a JSON file of `tokenizers`, or `{bpe: SIZE}`, learned from the text once."""
    packed: bool = True
    """Documents end to end, every sample full; false: samples end with their document, padded."""
    document_masks: bool = False
    """Packed samples: attention ends at the ends of documents."""

    @field_validator("model")
    @classmethod
    def _known(cls, name: str) -> str:
        if is_user_function(name):
            check_model_name(name)
        elif name != "gpt" and name not in HUGGING_FACE:
            path = Path(name.removeprefix("hf:")).expanduser()
            if not name.startswith("hf:") or not (path.is_dir() or path.suffix == ".json"):
                near = get_close_matches(name, ("gpt", *HUGGING_FACE), n=3) or [*HUGGING_FACE]
                raise ValueError(
                    f"unknown model {name!r}; nearest: {', '.join(near)}; or hf:FOLDER,"
                    " hf:FILE.json, package.module:function of your own"
                )
            if not path.exists():
                raise ValueError(f"model {name!r}: no such file{looked_in(path)}; name another")
        return name

    @field_validator("tokenizer")
    @classmethod
    def _bytes_or_file(cls, tokenizer: Any) -> Any:
        known = tokenizer == "bytes" or str(tokenizer).endswith((".json", "}"))
        if not (known and tokenizer):
            raise ValueError(f"found {tokenizer!r}; allowed are bytes, FILE.json and {{bpe: SIZE}}")
        return tokenizer

    @model_validator(mode="after")
    def _agree(self) -> LanguageOptions:
        fields = type(self).model_fields  # a stored experiment gives every key, defaults too
        given = [key for key in _GPT_KEYS if getattr(self, key) != fields[key].default]
        if self.model != "gpt" and given:
            raise ValueError(
                f"{self.model} has no {' and no '.join(given)}; its sizes go into model_options"
            )
        if self.model_options and self._has_weights:
            raise ValueError(
                f"model_options cannot be given, {self.model} has its own; change its config.json,"
                " or give that file as the model for weights from the seed"
            )
        if self.model == "gpt" and self.model_options:
            raise ValueError("gpt has no model_options; its keys are " + ", ".join(_GPT_KEYS))
        for key in _SIZES:
            if key in self.model_options:
                raise ValueError(
                    f"model_options.{key} cannot be given; use workload.vocabulary and"
                    " workload.sequence_length"
                )
        if self.model == "gpt" and (self.width % self.heads or self.width // self.heads % 2):
            raise ValueError(
                f"width {self.width} and heads {self.heads}; each head needs an even number of"
                " channels, width / heads"
            )
        if self.model in ENCODERS and self.objective == "causal":
            raise ValueError(f"{self.model} sees what follows; it needs objective: masked")
        if self.model in HUGGING_FACE.keys() - set(ENCODERS) and self.objective == "masked":
            raise ValueError(f"{self.model} is causal; masked are gpt and {', '.join(ENCODERS)}")
        if self.dataset not in EMBEDDED and not self.data_dir:
            raise ValueError(f"data_dir is missing; {self.dataset} needs the folder that holds it")
        if self.dataset == "tokens" and self.vocabulary is None:
            raise ValueError("vocabulary is missing; tokens needs the number of different ones")
        if self.dataset == "tokens" and not self.packed:
            raise ValueError("packed is false; tokens are packed, documents or not")
        if self.document_masks and not self.packed:
            raise ValueError("document_masks needs packed samples; padded ones have one document")
        return self

    @property
    def tokens_per_sample(self) -> int | None:
        return self.sequence_length if self.packed else None

    @property
    def from_transformers(self) -> bool:
        return self.model.startswith("hf:")

    @property
    def _has_weights(self) -> bool:
        """Whether the model is a local folder."""
        named = self.from_transformers and self.model not in HUGGING_FACE
        return named and Path(self.model.removeprefix("hf:")).expanduser().is_dir()

    @property
    def corpus_name(self) -> str:
        """The data set, and the tokenizer unless it is bytes."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, dict):
            tokenizer = f"bpe {tokenizer['bpe']}"
        return self.dataset if tokenizer == "bytes" else f"{self.dataset} by {tokenizer}"

    def loads(self) -> tuple[str, ...]:
        family = self.model.removeprefix("hf:")
        known = self.model in HUGGING_FACE
        return (f"transformers.models.{family}.modeling_{family}",) if known else ()

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read beside the data: a tokenizer, a model's configuration or its weights."""
        named = [self.tokenizer] if isinstance(self.tokenizer, str) else []
        if self.from_transformers and self.model not in HUGGING_FACE:
            named.append(self.model.removeprefix("hf:"))
        return tuple(Path(name).expanduser() for name in named if name != "bytes")
