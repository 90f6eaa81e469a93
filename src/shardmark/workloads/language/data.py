"""The data of language modelling: samples of tokens.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.core.errors import DataError
from shardmark.workloads.language.options import EMBEDDED
from shardmark.workloads.language.samples import Samples
from shardmark.workloads.language.tokens import TokenStream, token_data
from shardmark.workloads.order import reduced

if TYPE_CHECKING:
    from shardmark.workloads.language.options import LanguageOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageData:
    """Both splits, ready to be read."""

    training: Samples
    validation: Samples
    vocabulary: int
    """Rows of embedding and head."""
    known_tokens: int
    """Those that the tokenizer gives, the mask included where one is needed."""
    mask: int | None
    filler: int
    tokens_per_byte: float | None
    """Of the validation text; None where only tokens are known."""
    corpora: Mapping[str, str]
    """SHA-256 of text and tokens, by name, where the text comes with the installation."""
    synthetic: bool = False


def check(options: LanguageOptions) -> int:
    """The number of training samples; text becomes tokens here, once."""
    data = _opened(options)
    return options.check_sample_counts(len(data.training), len(data.validation))


def paths(options: LanguageOptions) -> tuple[Path, ...]:
    own = () if options.dataset in EMBEDDED else (options.folder,)
    return (*own, *options.files)


def corpora(options: LanguageOptions) -> Mapping[str, str]:
    return _opened(options).corpora if options.dataset in EMBEDDED else {}


def load(options: LanguageOptions, seed: int) -> LanguageData:
    """Map it; subsets are drawn from the seed."""
    data = _opened(options)
    options.check_sample_counts(len(data.training), len(data.validation))
    return replace(
        data,
        training=reduced(data.training, options.training_samples, seed=seed, split=0),
        validation=reduced(data.validation, options.validation_samples, seed=seed, split=1),
    )


def _opened(options: LanguageOptions) -> LanguageData:
    tokens = token_data(options)
    if options.document_masks and tokens.training.ends is None:
        raise DataError(
            str(options.folder),
            "does not tell where documents end",
            "leave document_masks out, or give Megatron's index beside the tokens",
        )
    training, validation = (_cut(options, part) for part in (tokens.training, tokens.validation))
    for split, samples in (("training", training), ("validation", validation)):
        if not len(samples):
            raise DataError(
                options.data_name,
                f"no {split} sample of {options.sequence_length} tokens can be cut of it",
                "use more text, or a smaller workload.sequence_length",
            )
    text_bytes = tokens.validation.text_bytes
    embedded = tokens.sha256 is not None and options.dataset in EMBEDDED
    return LanguageData(
        training=training,
        validation=validation,
        vocabulary=options.vocabulary or tokens.vocabulary,
        known_tokens=tokens.vocabulary,
        mask=tokens.mask,
        filler=tokens.filler,
        tokens_per_byte=len(tokens.validation.tokens) / text_bytes if text_bytes else None,
        corpora={options.corpus_name: str(tokens.sha256)} if embedded else {},
    )


def _cut(options: LanguageOptions, stream: TokenStream) -> Samples:
    return Samples(
        stream,
        options.sequence_length,
        ahead=1 if options.objective == "causal" else 0,
        packed=options.packed,
        with_documents=options.document_masks,
    )
