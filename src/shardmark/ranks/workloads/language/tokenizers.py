"""Converts text to tokens: bytes, or a tokenizer of the library `tokenizers`.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmark.base.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.ranks.workloads.language.options import LanguageOptions

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MASKS = ("[MASK]", "<mask>", "<|mask|>")
_BATCH_DOCUMENTS = 1000
"""Number of documents that the library encodes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer with a token for the end of a document, appended if the library has none."""

    encode: Callable[[Iterable[bytes]], Iterator[NDArray[np.int64]]]
    """Yields the tokens of each document, without the end token."""
    size: int
    """The largest token plus one."""
    end: int
    mask: int | None
    """Mask token, or None."""


def _bytes(documents: Iterable[bytes]) -> Iterator[NDArray[np.int64]]:
    return (np.frombuffer(document, np.uint8).astype(np.int64) for document in documents)


BYTES = Tokenizer(encode=_bytes, size=258, end=256, mask=257)
"""A tokenizer in which every byte is a token."""


def _of_library(tokenizer: Any) -> Tokenizer:
    """Wrap a tokenizer of the library, without truncation, padding and special tokens."""
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(documents: Iterable[bytes]) -> Iterator[NDArray[np.int64]]:
        texts = (document.decode(errors="replace") for document in documents)
        while batch := list(islice(texts, _BATCH_DOCUMENTS)):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.asarray(encoding.ids, np.int64)

    tokens: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    size = max(tokens.values()) + 1
    end, mask = (
        next((tokens[name] for name in names if name in tokens), None) for names in (_ENDS, _MASKS)
    )
    end = size if end is None else end
    return Tokenizer(encode=encode, size=max(size, end + 1), end=end, mask=mask)


def rows_without_text(options: LanguageOptions) -> int | None:
    """Return the rows of embedding and head if they follow without reading text, else None.

    Samples that are not packed depend on the text themselves.
    """
    tokenizer = options.tokenizer
    if not options.packed:
        return None
    if options.model_rows is not None:
        return options.model_rows
    if isinstance(tokenizer, dict):  # which has no mask of its own
        return tokenizer["bpe"] + (options.objective == "masked")
    return BYTES.size if tokenizer == "bytes" else None


def tokenizer_of(
    options: LanguageOptions, training: Callable[[], Iterable[bytes]], folder: Path
) -> Tokenizer:
    """Load the tokenizer, or train it on the documents and store it in the folder."""
    setting = options.tokenizer
    if setting == "bytes":
        return BYTES
    import tokenizers

    if isinstance(setting, dict):
        trained = _trained(tokenizers, setting["bpe"], training())
        trained.save(str(folder / "tokenizer.json"))
        return _of_library(trained)
    path = Path(setting).expanduser()
    try:
        return _of_library(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
    except Exception as error:  # the library raises no narrower class
        raise DataError(
            str(path), f"is no tokenizer ({error})", "use a JSON file that tokenizers has saved"
        ) from error


def _trained(tokenizers: Any, size: int, documents: Iterable[bytes]) -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(_ENDS[:1]),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document.decode(errors="replace") for document in documents)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
