"""Samples of tokens, packed or ending with their document.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmark.base.errors import DataError
from shardmark.ranks.workloads.language.options import EMBEDDED, WITHOUT_FOLDER
from shardmark.ranks.workloads.language.tokens import TokenData, TokenStream, token_data

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.ranks.workloads.language.options import LanguageOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Samples as slices of the token stream."""

    tokens: NDArray[np.int64]
    """(n, width); tokens behind the end of a shorter sample have no meaning."""
    lengths: NDArray[np.int64]
    """(n,)."""
    documents: NDArray[np.int64] | None
    """(n, width), number of each token's document; None without `document_masks`."""


class Samples:
    """Consecutive slices of a stream, each at most `sequence_length` tokens and `ahead` more.

    The tokens ahead are also the first of the next slice: a causal model learns to predict them.
    Packed slices run across documents and are all full; the incomplete last slice is dropped.
    """

    def __init__(self, stream: TokenStream, options: LanguageOptions) -> None:
        self._stream, self._length = stream, options.sequence_length
        self._ahead = 1 if options.objective == "causal" else 0
        self._with_documents = options.document_masks
        bounds = np.asarray([len(stream.tokens)]) if options.packed else stream.ends
        assert bounds is not None, "the options require packed samples for these tokens"
        self._starts = np.concatenate([[0], bounds[:-1]])
        self._ends = bounds
        learned = np.maximum(bounds - self._starts - self._ahead, 0)
        slices = learned // self._length if options.packed else -(-learned // self._length)
        self._first = np.concatenate([[0], np.cumsum(slices)])
        """Index of the first slice of each document, and the number of all slices."""
        self._chosen: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self._first[-1]) if self._chosen is None else len(self._chosen)

    def select(self, ids: NDArray[np.int64]) -> Samples:
        """These samples only, numbered from 0."""
        selected = object.__new__(Samples)
        selected.__dict__.update(self.__dict__)
        selected._chosen = ids if self._chosen is None else self._chosen[ids]
        return selected

    def lengths(self, ids: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Number of tokens in each sample, without those ahead; of all samples if `ids` is None."""
        starts, ends = self._spans(np.arange(len(self)) if ids is None else ids)
        lengths: NDArray[np.int64] = ends - starts - self._ahead
        return lengths

    def _spans(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of each sample in the stream, including the tokens ahead."""
        slices = ids if self._chosen is None else self._chosen[ids]
        document = np.searchsorted(self._first, slices, side="right") - 1
        starts = self._starts[document] + (slices - self._first[document]) * self._length
        return starts, np.minimum(starts + self._length + self._ahead, self._ends[document])

    def read(self, ids: NDArray[np.int64]) -> Windows:
        """Read these samples, in this order."""
        starts, ends = self._spans(ids)
        lengths = ends - starts
        indices = starts[:, None] + np.arange(lengths.max(initial=0))
        indices = np.minimum(indices, len(self._stream.tokens) - 1)
        documents = None
        if self._with_documents:
            assert self._stream.ends is not None, "checked when the data were opened"
            documents = np.searchsorted(self._stream.ends, indices, side="right")
        tokens: NDArray[Any] = self._stream.tokens[indices]
        return Windows(tokens=tokens.astype(np.int64), lengths=lengths, documents=documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageData:
    """A token data set with both splits, ready to be read."""

    training: Samples
    validation: Samples
    tokens: TokenData
    vocabulary: int
    """Number of rows of embedding and head."""
    corpora: Mapping[str, str]
    """SHA-256 of text and tokens, by name, for an embedded corpus; empty for other data."""


def check(options: LanguageOptions) -> int:
    """Number of training samples; tokenises text if that has not been done before."""
    samples = len(load(options).training)
    return options.training_samples or samples


def paths(options: LanguageOptions) -> tuple[Path, ...]:
    folders = () if options.dataset in WITHOUT_FOLDER else (options.folder,)
    return (*folders, *options.files)


def corpora(options: LanguageOptions) -> Mapping[str, str]:
    return load(options).corpora if options.dataset in EMBEDDED else {}


def load(options: LanguageOptions) -> LanguageData:
    """Map the tokens of both splits into memory."""
    tokens = token_data(options)
    if options.document_masks and tokens.training.ends is None:
        raise DataError(
            str(options.folder),
            "has no index of where documents end",
            "remove document_masks, or add Megatron's index beside the tokens",
        )
    training, validation = Samples(tokens.training, options), Samples(tokens.validation, options)
    for split, samples in (("training", training), ("validation", validation)):
        if not len(samples):
            raise DataError(
                options.data_name,
                f"is too short for a {split} sample of {options.sequence_length} tokens",
                "use more text, or a smaller workload.sequence_length",
            )
    options.check_sample_counts(len(training), len(validation))
    embedded = options.dataset in EMBEDDED
    return LanguageData(
        training=training,
        validation=validation,
        tokens=tokens,
        vocabulary=options.model_rows or tokens.vocabulary,
        corpora={options.corpus_name: str(tokens.sha256)} if embedded else {},
    )
