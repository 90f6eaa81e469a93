"""Token files mapped into memory: tokenised text in the cache, or the user's.  Imports no torch."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmark.base.errors import DataError, InputError
from shardmark.base.system.extras import is_installed
from shardmark.base.system.modules import looked_in
from shardmark.ranks.workloads.datasets.files import cache_folder, make_folder
from shardmark.ranks.workloads.language.corpus import (
    VALIDATED,
    Corpus,
    corpus_of,
    files_below,
    is_validation,
    unreadable,
)
from shardmark.ranks.workloads.language.options import EMBEDDED
from shardmark.ranks.workloads.language.tokenizers import tokenizer_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.ranks.workloads.language.options import LanguageOptions

VERSION = 3
"""Version of the cache; must increase when the same text would get other tokens."""
RANDOM_SAMPLES = (1024, 256)
"""Training and validation samples of the dataset `random`, unless their numbers are given."""
_SUMMARY = "corpus.json"
_SPLITS = ("training", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """The tokens of one split."""

    tokens: NDArray[np.integer[Any]]
    """(n,), mapped into memory."""
    ends: NDArray[np.int64] | None
    """Index behind the end token of each document, (documents,); None if unknown."""
    text_bytes: int | None
    """Size in UTF-8 of the text of the tokens; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """The tokens of both splits."""

    training: TokenStream
    validation: TokenStream
    vocabulary: int
    """The largest possible token plus one, including the mask if one is needed."""
    mask: int | None
    """Token that replaces masked ones; None if nothing is masked."""
    filler: int
    """Token behind the end of a padded sample."""
    sha256: str | None
    """Digest of the text and its tokens; None for the user's token files."""


def token_data(options: LanguageOptions) -> TokenData:
    """Map the tokens into memory, after tokenising text that is not in the cache.

    Raises `DataError` for missing or unreadable data, and `InputError` for a tokenizer with more
    tokens than the model has rows.
    """
    vocabulary = options.model_rows
    if options.dataset == "random":
        return _random_tokens(options, vocabulary)
    data = _user_tokens(options) if options.dataset == "tokens" else _tokenised(options)
    if vocabulary is not None and vocabulary < data.vocabulary:
        rows = data.vocabulary
        place, problem = "workload.vocabulary", f"found {vocabulary}"
        remedy = f"the tokenizer needs {rows}"
        if options.vocabulary is None:
            mask = ", one of them for the mask" if data.mask == rows - 1 else ""
            place = "workload.tokenizer"
            problem = f"the tokens need {rows} rows{mask}, {options.model} has {vocabulary}"
            change = "resize its embedding" if options.has_weights else "set workload.vocabulary"
            remedy = f"use the tokenizer of this model, or {change} to {rows}"
        raise InputError(place, problem, remedy)
    return data


def _random_tokens(options: LanguageOptions, vocabulary: int | None) -> TokenData:
    """Draw tokens uniformly; the last one is the mask if one is needed."""
    if vocabulary is None:
        problem = f"{options.model} says nowhere how many tokens there are"
        raise InputError("workload.dataset random", problem, "set workload.vocabulary")
    mask = vocabulary - 1 if options.objective == "masked" else None
    generator = np.random.default_rng(0)

    def stream(samples: int) -> TokenStream:
        tokens = samples * options.sequence_length + 1
        drawn = generator.integers(0, vocabulary if mask is None else mask, tokens)
        ends = np.array([tokens], np.int64)
        return TokenStream(tokens=drawn.astype(_dtype_of(vocabulary)), ends=ends, text_bytes=None)

    return TokenData(
        training=stream(options.training_samples or RANDOM_SAMPLES[0]),
        validation=stream(options.validation_samples or RANDOM_SAMPLES[1]),
        vocabulary=vocabulary,
        mask=mask,
        filler=0,
        sha256=None,
    )


def _tokenised(options: LanguageOptions) -> TokenData:
    corpus = corpus_of(options)
    cache = cache_folder()
    folder = cache / f"tokens-{_identity(options, corpus)}"

    def is_made() -> bool:
        return (folder / _SUMMARY).is_file()

    if not is_made():
        remedy = "set $SHARDMARK_CACHE to a folder that can be written"
        with _locked(cache, remedy):
            if not is_made():  # no other process has made it meanwhile
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
    """Digest of the tokens' sources: paths, sizes and times of files, and the tokenizer."""
    tokenizer: list[object] = [options.tokenizer]
    if options.tokenizer != "bytes" and is_installed("tokenizers"):
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
                entry = f"\0{file}\0{status.st_size} {status.st_mtime_ns}"
                digest.update(entry.encode(errors="surrogateescape"))
        except OSError as error:  # such as a broken link
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
def _locked(cache: Path, remedy: str) -> Iterator[None]:
    """Lock the cache for one process of all machines; remove the files of killed processes."""
    import fcntl  # Windows has none

    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / ".tokens.lock").open("w")
    except OSError as error:
        raise DataError(str(cache), f"cannot be written ({error.strerror})", remedy) from error
    with lock:
        with suppress(OSError):  # without locks, other processes may be at work: remove nothing
            fcntl.flock(lock, fcntl.LOCK_EX)
            for folder in cache.glob(".tokens-*"):
                shutil.rmtree(folder, ignore_errors=True)
        yield


def _write(options: LanguageOptions, corpus: Corpus, folder: Path) -> None:
    def training() -> Iterator[bytes]:
        return (document for document, validates in corpus.documents() if not validates)

    tokenizer = tokenizer_of(options, training, folder)
    dtype = _dtype_of(tokenizer.size)
    digest = hashlib.sha256()
    token_digests = {split: hashlib.sha256() for split in _SPLITS}
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
            token_digests[split].update(stored)
            ends[split].append((ends[split] or [0])[-1] + len(tokens) + 1)
    finally:
        for file in files.values():
            file.close()
    for split in _SPLITS:
        digest.update(token_digests[split].digest())
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
    """The smallest integer type that holds all tokens."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def _user_tokens(options: LanguageOptions) -> TokenData:
    """Map nanoGPT's `train.bin` and `val.bin`, or Megatron's pairs of `.bin` and `.idx`."""
    assert options.vocabulary is not None, "the options require it"
    folder = options.folder
    by_split: dict[bool | None, list[Path]] = {True: [], False: [], None: []}
    for file in files_below(folder, ".bin"):
        by_split[is_validation(folder, file)].append(file)
    training, validation = by_split[False] + by_split[None], by_split[True]
    if not training:
        training, validation = validation, []
    if len(training) != 1 or len(validation) > 1:
        counts = f"{len(training)} .bin files for training and {len(validation)} for validation"
        remedy = "use one of each, train.bin and val.bin, or a single file"
        raise DataError(str(folder), f"has {counts}", remedy)
    num_tokens = options.vocabulary - (1 if options.objective == "masked" else 0)
    streams = [_mapped(file, num_tokens) for file in (*training, *validation)]
    first, second = streams if validation else _split_stream(streams[0])
    return TokenData(
        training=first,
        validation=second,
        vocabulary=options.vocabulary,
        mask=num_tokens if options.objective == "masked" else None,
        filler=0,
        sha256=None,
    )


def _mapped(file: Path, vocabulary: int) -> TokenStream:
    """Map a token file; its type comes from Megatron's index, or else from the vocabulary."""
    index = file.with_suffix(".idx")
    plain = _dtype_of(vocabulary)
    try:
        dtype, ends = _megatron(index) if index.is_file() else (plain, None)
        tokens = np.memmap(file, dtype, "r")
    except (OSError, ValueError, KeyError, struct.error) as error:
        remedy = f"use {plain} tokens, or add Megatron's index"
        raise DataError(str(file), f"cannot be mapped ({error})", remedy) from error
    if ends is not None and (not len(ends) or ends[-1] != len(tokens)):
        problem = f"does not describe the {len(tokens)} tokens of its .bin file"
        raise DataError(str(index), problem, "create both files again")
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
    """Type of the tokens and end of each document, from Megatron's index file."""
    content = index.read_bytes()
    magic, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", content)
    if (magic, version) != (b"MMIDIDX\0\0", 1):
        raise ValueError("not an index of Megatron, version 1")
    at = struct.calcsize("<9sQBQQ")
    lengths = np.frombuffer(content, "<i4", sequences, at)
    at += 12 * sequences  # skip the lengths, int32, and the offsets, int64
    bounds = np.frombuffer(content, "<i8", documents, at)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.dtype(_MEGATRON_TYPES[code]), ends[bounds[1:]]


def _split_stream(stream: TokenStream) -> tuple[TokenStream, TokenStream]:
    """Split a stream; the last tenth validates."""
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
