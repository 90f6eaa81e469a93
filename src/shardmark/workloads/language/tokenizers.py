"""How text becomes tokens: bytes, or a tokenizer of the library `tokenizers`.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardmark.core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.workloads.language.options import LanguageOptions

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MASKS = ("[MASK]", "<mask>", "<|mask|>")
_AT_ONCE = 1000
"""Documents that are handed to the library at once."""


class Tokenizer(Protocol):
    """Gives the end of a document a token of its own, behind all others if need be."""

    @property
    def end(self) -> int: ...

    @property
    def mask(self) -> int | None:
        """None where it has no such token."""

    @property
    def size(self) -> int:
        """One more than the largest token."""

    def encode(self, documents: Iterable[bytes]) -> Iterator[NDArray[np.int64]]:
        """Tokens of each document, without its end."""


class ByteTokenizer:
    """Each byte is a token."""

    end, mask, size = 256, 257, 258

    def encode(self, documents: Iterable[bytes]) -> Iterator[NDArray[np.int64]]:
        return (np.frombuffer(document, np.uint8).astype(np.int64) for document in documents)


class LibraryTokenizer:
    """A tokenizer of the library, which adds no tokens of its own to a document."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokens: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(tokens.values()) + 1
        end, self.mask = (_first_known(tokens, names) for names in (_ENDS, _MASKS))
        self.end = self.size if end is None else end
        self.size = max(self.size, self.end + 1)

    def encode(self, documents: Iterable[bytes]) -> Iterator[NDArray[np.int64]]:
        texts = (document.decode(errors="replace") for document in documents)
        while some := list(islice(texts, _AT_ONCE)):
            for encoding in self._tokenizer.encode_batch_fast(some, add_special_tokens=False):
                yield np.asarray(encoding.ids, np.int64)


def _first_known(tokens: dict[str, int], names: Sequence[str]) -> int | None:
    return next((tokens[name] for name in names if name in tokens), None)


def tokenizer_of(
    options: LanguageOptions, training: Callable[[], Iterable[bytes]], folder: Path
) -> Tokenizer:
    """The tokenizer; one that is trained is trained on these documents, and left in the folder."""
    wanted = options.tokenizer
    if wanted == "bytes":
        return ByteTokenizer()
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "workload.tokenizer",
            "the library tokenizers is not installed",
            "pip install 'shardmark[transformers]', or use tokenizer: bytes",
        ) from None
    if isinstance(wanted, dict):
        trained = _trained(tokenizers, wanted["bpe"], training())
        trained.save(str(folder / "tokenizer.json"))
        return LibraryTokenizer(trained)
    path = Path(wanted).expanduser()
    try:
        return LibraryTokenizer(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
    except Exception as error:  # the library raises nothing more special
        raise DataError(
            str(path), f"is no tokenizer ({error})", "give a JSON file that tokenizers has saved"
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
