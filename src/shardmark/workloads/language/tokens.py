"""Tokens in files that are mapped into memory: made once of text, or found.  Imports no torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmark.core.errors import DataError, InputError
from shardmark.workloads.datasets.files import cache_folder, make_folder
from shardmark.workloads.language.corpus import (
    VALIDATED,
    Corpus,
    corpus_of,
    files_below,
    is_validation,
    unreadable,
)
from shardmark.workloads.language.options import EMBEDDED
from shardmark.workloads.language.tokenizers import tokenizer_of
from shardmark.workloads.models import looked_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.workloads.language.options import LanguageOptions

VERSION = 3
"""Goes up when the same text would give other tokens."""
_SUMMARY = "corpus.json"
_SPLITS = ("training", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """The tokens of one split."""

    tokens: NDArray[np.integer[Any]]
    """(n,), mapped into memory."""
    ends: NDArray[np.int64] | None
    """One past the last token of each document, its end included; None where nobody knows."""
    text_bytes: int | None
    """UTF-8 that the tokens stand for; None where nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """Both splits."""

    training: TokenStream
    validation: TokenStream
    vocabulary: int
    """One more than the largest token that can occur, the mask included where one is needed."""
    mask: int | None
    """Stands for masked tokens; None where nothing is masked."""
    filler: int
    """Stands where nothing is: behind the end of a padded sample."""
    sha256: str | None
    """Of the text and its tokens; None where they were given."""


def token_data(options: LanguageOptions) -> TokenData:
    """Map the tokens; of text, make them first where that has not been done yet.

    Raises `DataError` where the data are not there or cannot be read.
    """
    data = _given(options) if options.dataset == "tokens" else _made(options)
    wanted = options.vocabulary
    if wanted is not None and wanted < data.vocabulary:
        raise InputError(
            "workload.vocabulary", f"found {wanted}", f"the tokenizer needs {data.vocabulary}"
        )
    return data


def _made(options: LanguageOptions) -> TokenData:
    corpus = corpus_of(options)
    cache = cache_folder()
    folder = cache / f"tokens-{_identity(options, corpus)}"

    def is_made() -> bool:
        return (folder / _SUMMARY).is_file()

    if not is_made():
        remedy = "set $SHARDMARK_CACHE to a folder that can be written"
        with _alone(cache, remedy):
            if not is_made():  # nor did another process make it meanwhile
                shutil.rmtree(folder, ignore_errors=True)
                make_folder(folder, lambda beside: _write(options, corpus, beside), is_made, remedy)
    summary = json.loads((folder / _SUMMARY).read_bytes())
    dtype = np.dtype(summary["dtype"])

    def stream(split: str) -> TokenStream:
        file = folder / f"{split}.bin"
        empty = not file.stat().st_size
        return TokenStream(
            tokens=np.empty(0, dtype) if empty else np.memmap(file, dtype, "r"),
            ends=np.load(folder / f"{split}.ends.npy"),
            text_bytes=summary[split],
        )

    training, validation = map(stream, _SPLITS)
    vocabulary, mask = summary["vocabulary"], summary["mask"]
    if options.objective == "masked" and mask is None:
        vocabulary, mask = vocabulary + 1, vocabulary
    return TokenData(
        training=training,
        validation=validation,
        vocabulary=vocabulary,
        mask=mask,
        filler=summary["end"],
        sha256=summary["sha256"],
    )


def _identity(options: LanguageOptions, corpus: Corpus) -> str:
    """Of what the tokens are made from: where files are, their sizes and times, the tokenizer."""
    tokenizer: list[object] = [options.tokenizer]
    if options.tokenizer != "bytes" and find_spec("tokenizers") is not None:
        tokenizer.append(metadata.version("tokenizers"))
    if isinstance(options.tokenizer, str) and options.tokenizer != "bytes":
        tokenizer[0] = hashlib.sha256(_tokenizer_file(options)).hexdigest()
    python = platform.python_version() if options.dataset in EMBEDDED else ""
    digest = hashlib.sha256(
        json.dumps([VERSION, options.dataset, options.column, tokenizer, python]).encode()
    )
    for path in corpus.files:
        try:
            for file in sorted(path.iterdir()) if path.is_dir() else (path,):
                status = file.stat()
                told = f"\0{file}\0{status.st_size} {status.st_mtime_ns}"
                digest.update(told.encode(errors="surrogateescape"))
        except OSError as error:  # such as a link that leads nowhere
            raise unreadable(Path(error.filename or path), error) from error
    return digest.hexdigest()[:24]


def _tokenizer_file(options: LanguageOptions) -> bytes:
    (path,) = options.files[:1]
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"workload.tokenizer: {path}",
            f"cannot be read ({error.strerror}{looked_in(path)})",
            "set it to a JSON file that tokenizers has saved",
        ) from error


@contextmanager
def _alone(cache: Path, remedy: str) -> Iterator[None]:
    """Processes make tokens in turn, of all machines; what killed ones have left is removed."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / ".tokens.lock").open("w")
    except OSError as error:
        raise DataError(str(cache), f"cannot be written ({error.strerror})", remedy) from error
    with lock:
        with suppress(OSError):  # a file system without locks: nothing is known to be left
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in cache.glob(".tokens-*"):
                shutil.rmtree(left, ignore_errors=True)
        yield


def _write(options: LanguageOptions, corpus: Corpus, folder: Path) -> None:
    def training() -> Iterator[bytes]:
        return (document for document, validates in corpus.documents() if not validates)

    tokenizer = tokenizer_of(options, training, folder)
    dtype = _dtype_of(tokenizer.size)
    digest = hashlib.sha256()
    of_tokens = {split: hashlib.sha256() for split in _SPLITS}
    text_bytes = dict.fromkeys(_SPLITS, 0)
    ends: dict[str, list[int]] = {split: [] for split in _SPLITS}
    validating: list[bool] = []

    def read() -> Iterator[bytes]:
        for document, validates in corpus.documents():
            digest.update(f"{validates} {len(document)}\n".encode())
            digest.update(document)
            text_bytes[_SPLITS[validates]] += len(document)
            validating.append(validates)
            yield document

    files = {split: (folder / f"{split}.bin").open("wb") for split in _SPLITS}
    try:
        for number, tokens in enumerate(tokenizer.encode(read())):
            split = _SPLITS[validating[number]]
            stored = np.append(tokens, tokenizer.end).astype(dtype).tobytes()
            files[split].write(stored)
            of_tokens[split].update(stored)
            ends[split].append((ends[split] or [0])[-1] + len(tokens) + 1)
    finally:
        for file in files.values():
            file.close()
    for split in _SPLITS:
        digest.update(of_tokens[split].digest())
        np.save(folder / f"{split}.ends.npy", np.asarray(ends[split], np.int64))
    summary = {
        **text_bytes,
        "dtype": dtype.name,
        "vocabulary": tokenizer.size,
        "end": tokenizer.end,
        "mask": tokenizer.mask,
        "sha256": digest.hexdigest(),
    }
    (folder / _SUMMARY).write_text(json.dumps(summary), encoding="utf-8")


def _dtype_of(vocabulary: int) -> np.dtype[np.integer[Any]]:
    """The smallest that holds all of them."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def _given(options: LanguageOptions) -> TokenData:
    """nanoGPT's `train.bin` and `val.bin`, or Megatron's pairs of `.bin` and `.idx`."""
    assert options.vocabulary is not None, "the options ask for it"
    folder = options.folder
    by_split: dict[bool | None, list[Path]] = {True: [], False: [], None: []}
    for file in files_below(folder, ".bin"):
        by_split[is_validation(folder, file)].append(file)
    training, validation = by_split[False] + by_split[None], by_split[True]
    if not training:
        training, validation = validation, []
    if len(training) != 1 or len(validation) > 1:
        found = f"holds {len(training)} .bin files to train on and {len(validation)} to validate on"
        raise DataError(str(folder), found, "keep one of each, train.bin and val.bin, or one alone")
    known = options.vocabulary - (1 if options.objective == "masked" else 0)
    streams = [_mapped(file, known) for file in (*training, *validation)]
    first, second = streams if validation else _divided(streams[0])
    return TokenData(
        training=first,
        validation=second,
        vocabulary=options.vocabulary,
        mask=known if options.objective == "masked" else None,
        filler=0,
        sha256=None,
    )


def _mapped(file: Path, vocabulary: int) -> TokenStream:
    """As wide as so many tokens need; Megatron's index tells the type, and where documents end."""
    index = file.with_suffix(".idx")
    plain = _dtype_of(vocabulary)
    try:
        dtype, ends = _megatron(index) if index.is_file() else (plain, None)
        tokens = np.memmap(file, dtype, "r")
    except (OSError, ValueError, KeyError, struct.error) as error:
        found = f"cannot be mapped ({error})"
        raise DataError(str(file), found, f"give {plain} tokens, or Megatron's index") from error
    if ends is not None and (not len(ends) or ends[-1] != len(tokens)):
        raise DataError(str(index), f"is not of {len(tokens)} tokens", "make both files anew")
    return TokenStream(tokens=tokens, ends=ends, text_bytes=None)


_MEGATRON_TYPES: Mapping[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def _megatron(index: Path) -> tuple[np.dtype[np.integer[Any]], NDArray[np.int64]]:
    """Type of the tokens and end of each document: lengths of sequences, and documents of them."""
    content = index.read_bytes()
    magic, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", content)
    if (magic, version) != (b"MMIDIDX\0\0", 1):
        raise ValueError("no index of Megatron's, version 1")
    at = struct.calcsize("<9sQBQQ")
    lengths = np.frombuffer(content, "<i4", sequences, at)
    at += 12 * sequences  # behind the lengths stands where each begins
    bounds = np.frombuffer(content, "<i8", documents, at)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.dtype(_MEGATRON_TYPES[code]), ends[bounds[1:]]


def _divided(stream: TokenStream) -> tuple[TokenStream, TokenStream]:
    """The last tenth validates."""
    total = len(stream.tokens)
    cut = total - total // VALIDATED
    parts = []
    for first, last in ((0, cut), (cut, total)):
        ends = stream.ends
        if ends is not None:
            inside = ends[(ends > first) & (ends < last)]
            ends = np.append(inside, last) - first
        parts.append(TokenStream(tokens=stream.tokens[first:last], ends=ends, text_bytes=None))
    return parts[0], parts[1]
