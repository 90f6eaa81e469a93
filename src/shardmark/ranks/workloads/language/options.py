"""Options of language modelling.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from shardmark.base.errors import InputError
from shardmark.base.system.modules import looked_in
from shardmark.ranks.workloads.configurations import (
    CLASS,
    CLASSES,
    NOISE_MODELS,
    shipped,
    stored_configuration,
    text_sizes,
)
from shardmark.ranks.workloads.models import check_model_name, is_user_function
from shardmark.ranks.workloads.options import Adapter, ModelOptions, modules_of

HUGGING_FACE: dict[str, str] = {
    "hf:gpt2": "GPT-2 (Radford et al., 2019)",
    "hf:llama": "Llama (Touvron et al., 2023)",
    "hf:qwen3": "Qwen3 (Yang et al., 2025)",
    "hf:gpt_neox": "GPT-NeoX (Black et al., 2022)",
    "hf:mixtral": "Mixtral, a mixture of experts (Jiang et al., 2024)",
    "hf:bert": "BERT, masked (Devlin et al., 2019)",
}
"""Description of each model family of `transformers`, in one line."""
LANGUAGE_MODELS: dict[str, str] = {
    "gpt": "language: GPT-2's blocks with configurable layers, width and heads",
    **{name: f"language: {line}, from transformers" for name, line in HUGGING_FACE.items()},
    "hf:FOLDER or hf:FILE.json": "language: a local folder with weights, or a configuration of"
    " transformers with weights from the seed",
}
"""Description of each model for `list models`, in one line."""
ENCODERS = (
    *("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta"),
    "xlm-roberta",
)
"""Model types of transformers that learn masked tokens."""
EMBEDDED = ("stdlib", "torch-source")
"""Data sets that are part of the installation."""
WITHOUT_FOLDER = (*EMBEDDED, "random")
MASK_SHARE = 0.15

ATTENTION = "attn_implementation"
"""Key of `model_options` that no configuration has: `sdpa`, `flash_attention_2`, or `eager`, which
stores all scores."""
_GPT_KEYS = ("layers", "width", "heads", "positions", "tied", "dropout")
_SIZES = ("vocab_size", "num_classes", "vocabulary", "sequence_length")
"""Arguments of a model that the workload sets."""


class LanguageOptions(ModelOptions):
    """Language modelling: the model predicts the next token, or masked tokens."""

    verified_samples: ClassVar[int] = 16
    on_pictures: ClassVar[bool] = False
    models: ClassVar[Mapping[str, str]] = LANGUAGE_MODELS

    name: Literal["language"] = "language"
    objective: Literal["causal", "masked"] = "causal"
    """`causal`: predict the next token.  `masked`: predict 15 % of the tokens, like BERT."""
    model: str = "gpt"
    """`gpt`, `hf:gpt2`, ..., `hf:FOLDER`, `hf:FILE.json`, the name of a well-known configuration
    such as `hf:Qwen/Qwen3-8B`, or `package.module:function`."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keys of the configuration of an `hf:` model, or arguments of your own function."""
    adapter: Adapter | None = None
    """Trains an adapter beside the frozen weights, instead of the weights."""
    layers: PositiveInt = 2
    """Number of transformer blocks; the keys from `layers` to `dropout` are for `gpt` only."""
    width: PositiveInt = 128
    heads: PositiveInt = 4
    positions: Literal["rotary", "learned"] = "rotary"
    tied: bool = True
    """Share the weights of embedding and head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    vocabulary: PositiveInt | None = None
    """Rows of embedding and head; null is the number that the model's configuration has, or else
    the size of the tokenizer.  The datasets `tokens` and `random` need one of the former: one more
    than the largest token, and another one for the mask of `objective: masked`."""
    sequence_length: Annotated[int, Field(ge=2)] = 256
    """Maximum number of tokens of a sample."""
    loss_chunks: PositiveInt = 1
    """Number of pieces of a sequence whose logits are computed one after the other, and again in
    the backward pass, so that they are never stored in full; for `gpt` and `hf:` models."""
    dataset: Literal[
        "stdlib", "torch-source", "text", "jsonl", "parquet", "arrow", "tokens", "random"
    ] = "stdlib"
    """`random` draws tokens for 1,024 + 256 samples unless the numbers of samples are given."""
    column: str = "text"
    """Key or column of the text in `jsonl`, `parquet` and `arrow`."""
    tokenizer: str | dict[Literal["bpe"], Annotated[int, Field(ge=258)]] = "bytes"
    """`bytes`, a JSON file of `tokenizers`, or `{bpe: SIZE}`, trained on the text once."""
    packed: bool = True
    """Concatenate documents into full samples; false: samples end with their document, padded."""
    document_masks: bool = False
    """Restrict attention in packed samples to tokens of the same document."""

    @field_validator("model")
    @classmethod
    def _check_model(cls, name: str) -> str:
        if is_user_function(name):
            check_model_name(name)
        elif name != "gpt" and name not in HUGGING_FACE:
            path = Path(name.removeprefix("hf:")).expanduser()
            is_path = path.is_dir() or path.suffix == ".json"
            configured = name.removeprefix("hf:") in shipped()
            if not name.startswith("hf:") or not (is_path or configured):
                names = ("gpt", *HUGGING_FACE, *(f"hf:{other}" for other in shipped()))
                nearest = get_close_matches(name, names, n=3) or [*HUGGING_FACE]
                raise ValueError(
                    f"unknown model {name!r}; nearest: {', '.join(nearest)}; or hf:FOLDER,"
                    " hf:FILE.json, package.module:function of your own"
                )
            if is_path and not path.exists():
                raise ValueError(f"model {name!r}: no such file{looked_in(path)}")
            if not is_path and _type_of(name) in (*CLASSES, *NOISE_MODELS):
                raise ValueError(
                    f"{name} is neither a causal nor a masked language model; `shardmark plan"
                    f" {name}` predicts it, and a task of your own trains it"
                )
        return name

    @field_validator("tokenizer")
    @classmethod
    def _bytes_or_file(cls, tokenizer: Any) -> Any:
        valid = tokenizer == "bytes" or str(tokenizer).endswith((".json", "}"))
        if not (valid and tokenizer):
            raise ValueError(f"found {tokenizer!r}; allowed are bytes, FILE.json and {{bpe: SIZE}}")
        return tokenizer

    @model_validator(mode="after")
    def _agree(self) -> LanguageOptions:
        fields = type(self).model_fields  # a stored experiment sets every key, defaults too
        changed = [key for key in _GPT_KEYS if getattr(self, key) != fields[key].default]
        if self.model != "gpt" and changed:
            raise ValueError(
                f"{self.model} has no {' and no '.join(changed)}; set its sizes in model_options"
            )
        if self.loss_chunks > 1 and is_user_function(self.model):
            raise ValueError(
                f"loss_chunks is {self.loss_chunks}, and the output layer of {self.model} is not"
                " known; leave it out, or use gpt or an hf: model"
            )
        if self.model_options and self.has_weights:
            raise ValueError(
                f"model_options has no effect on the stored model {self.model}; change its"
                " config.json,"
                " or use that file as the model to start with weights from the seed"
            )
        if self.model == "gpt" and self.model_options:
            raise ValueError("gpt has no model_options; set " + ", ".join(_GPT_KEYS))
        for key in _SIZES:
            if key in self.model_options:
                raise ValueError(
                    f"model_options.{key} is set by the workload; use workload.vocabulary and"
                    " workload.sequence_length"
                )
        if self.model == "gpt" and (self.width % self.heads or self.width // self.heads % 2):
            raise ValueError(
                f"width {self.width} and heads {self.heads}; each head needs an even number of"
                " channels, width / heads"
            )
        by_name = self.from_transformers and not self.has_file
        masked = by_name and _type_of(self.model) in ENCODERS
        if masked and self.objective == "causal":
            raise ValueError(f"{self.model} is not causal; it needs objective: masked")
        if by_name and not masked and self.objective == "masked":
            names = ", ".join(f"hf:{name}" for name in ENCODERS)
            raise ValueError(
                f"{self.model} is causal; objective: masked works with gpt and {names}"
            )
        return self

    @model_validator(mode="after")
    def _data_agree(self) -> LanguageOptions:
        if self.dataset not in WITHOUT_FOLDER and not self.data_dir:
            raise ValueError(f"data_dir is missing; {self.dataset} needs the folder of its files")
        if self.dataset == "tokens" and self.vocabulary is None:
            raise ValueError("vocabulary is missing; dataset: tokens needs the number of tokens")
        if self.dataset == "random" and self.tokenizer != "bytes":
            raise ValueError("tokenizer has no effect with dataset: random; leave it out")
        if self.dataset == "tokens" and not self.packed:
            raise ValueError("packed is false; dataset: tokens supports packed samples only")
        if self.document_masks and not self.packed:
            raise ValueError("document_masks needs packed: true; padded samples have one document")
        return self

    @property
    def tokens_per_sample(self) -> int | None:
        return self.sequence_length if self.packed else None

    @property
    def from_transformers(self) -> bool:
        return self.model.startswith("hf:")

    @property
    def has_weights(self) -> bool:
        """True if the model is a local folder, with its weights."""
        return self.has_file and Path(self.model.removeprefix("hf:")).expanduser().is_dir()

    @property
    def corpus_name(self) -> str:
        """Name of the data set, and of the tokenizer unless it is bytes."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, dict):
            tokenizer = f"bpe {tokenizer['bpe']}"
        return self.dataset if tokenizer == "bytes" else f"{self.dataset} by {tokenizer}"

    def optional_modules(self) -> dict[str, str]:
        modules = modules_of(self.adapter)
        if self.from_transformers:
            modules["transformers"] = f"workload.model {self.model}"
        if self.tokenizer != "bytes":
            modules["tokenizers"] = f"workload.tokenizer {self.tokenizer}"
        if self.dataset in ("parquet", "arrow"):
            modules["pyarrow"] = f"workload.dataset {self.dataset}"
        return modules

    @property
    def configuration(self) -> Mapping[str, Any] | None:
        """Keys of the model's file, or of a shipped configuration; None for other models.

        Raises `InputError` for a file that is no configuration.
        """
        if self.model in HUGGING_FACE:
            return None
        try:
            return stored_configuration(self.model)
        except (OSError, ValueError) as error:
            remedy = (
                "use a config.json of transformers, or a folder that save_pretrained has written"
            )
            raise InputError(
                "workload.model", f"{self.model} cannot be built: {error}", remedy
            ) from error

    @property
    def model_rows(self) -> int | None:
        """`vocabulary`, or that of the model's configuration; None if the tokens decide."""
        rows = self.vocabulary or text_sizes(self.configuration or {}).get("vocab_size")
        return rows if isinstance(rows, int) and rows > 0 else None

    @property
    def has_file(self) -> bool:
        """True if the model is a file or folder, and neither a family nor a shipped name."""
        name = self.model.removeprefix("hf:")
        by_name = self.model in HUGGING_FACE or not Path(name).expanduser().exists()
        return self.from_transformers and not by_name

    def loads(self) -> tuple[str, ...]:
        libraries = tuple(modules_of(self.adapter))
        if not self.from_transformers or self.has_file:
            return libraries
        family = _type_of(self.model).replace("-", "_")
        return (*libraries, f"transformers.models.{family}.modeling_{family}")

    @property
    def files(self) -> tuple[Path, ...]:
        """Files read besides the data: a tokenizer, a model's configuration or its weights."""
        names = [self.tokenizer] if isinstance(self.tokenizer, str) else []
        if self.has_file:
            names.append(self.model.removeprefix("hf:"))
        return tuple(Path(name).expanduser() for name in names if name != "bytes")


def _type_of(name: str) -> str:
    """Model type of a family or of a shipped configuration."""
    configuration = shipped().get(name.removeprefix("hf:"), {}).get("configuration", {})
    other: str = configuration.get(CLASS, name.removeprefix("hf:"))
    family: str = configuration.get("model_type", other)
    # Text models of families with images are defined in the folder of the family.
    return family.removesuffix("_text")
