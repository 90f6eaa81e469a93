"""Every reader, held against a few lines of numpy."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardmark.base.errors import DataError, InputError
from shardmark.base.layout import Shard
from shardmark.ranks.workloads import build_workload, check_data, corpora, data_paths, options
from shardmark.ranks.workloads.base import BatchPlan
from shardmark.ranks.workloads.language import tokenizers, tokens
from shardmark.ranks.workloads.language.options import LanguageOptions
from shardmark.ranks.workloads.language.tokens import token_data
from tests.unit.ranks.workloads.language.conftest import TEXTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTH = 16
END = 256
VALIDATING = {text for number, text in enumerate(TEXTS, start=1) if number % 10 == 0}
Writer = Callable[[Path, Sequence[str]], dict[str, Any]]


def as_text(folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return {"dataset": "text"}


def as_lines(folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    with gzip.open(folder / "all.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"{json.dumps({'code': text})}\n\n" for text in texts)
    return {"dataset": "jsonl", "column": "code"}


def as_parquet(folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"other": range(len(texts)), "text": list(texts)})
    parquet.write_table(table, folder / "all.parquet", row_group_size=5)
    return {"dataset": "parquet"}


def as_arrow(folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Rows upside down, and indices that turn them back."""
    pyarrow = pytest.importorskip("pyarrow")
    _write_stream(folder / "data.arrow", pyarrow.table({"text": list(texts)[::-1]}))
    order = pyarrow.array(range(len(texts)), pyarrow.uint64())[::-1]
    _write_stream(folder / "indices.arrow", pyarrow.table({"indices": order}))
    state = {
        "_data_files": [{"filename": "data.arrow"}],
        "_indices_data_files": [{"filename": "indices.arrow"}],
    }
    (folder / "state.json").write_text(json.dumps(state))
    return {"dataset": "arrow"}


def _write_stream(path: Path, table: Any) -> None:
    from pyarrow import ipc

    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def tokens_of(texts: Sequence[str]) -> NDArray[np.int64]:
    parts = [[*text.encode(), END] for text in texts]
    return np.concatenate(parts).astype(np.int64)


def by_numpy(stream: NDArray[np.int64], batch: int) -> tuple[NDArray[np.int64], ...]:
    """The first step of the first epoch."""
    samples = (len(stream) - 1) // LENGTH
    entropy = np.random.SeedSequence((7, 1, 0))  # seed, stream "order", epoch
    order = np.random.Generator(np.random.Philox(entropy)).permutation(samples)
    windows = np.stack([stream[at * LENGTH : at * LENGTH + LENGTH + 1] for at in order[:batch]])
    return windows[:, :-1], windows[:, 1:]


def check_batch(chosen: LanguageOptions, stream: NDArray[np.int64]) -> None:
    task = build_workload(chosen, 0)
    batch: Any = next(task.batches(BatchPlan(global_batch=8, seed=7), Shard(index=0, count=1)))
    inputs, targets = by_numpy(stream, 8)
    assert task.training_samples == check_data(chosen) == (len(stream) - 1) // LENGTH
    assert torch.equal(batch.inputs, torch.from_numpy(inputs))
    assert torch.equal(batch.targets, torch.from_numpy(targets))
    assert batch.weight == batch.step_weight == 8 * LENGTH


@pytest.mark.parametrize("write", [as_text, as_lines, as_parquet, as_arrow])
def test_documents_are_read_and_split(write: Writer, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    given = write(folder, TEXTS) | {"data_dir": str(folder), "sequence_length": LENGTH}
    chosen = LanguageOptions.model_validate(given)
    stream = tokens_of([text for text in TEXTS if text not in VALIDATING])
    check_batch(chosen, stream)
    data = token_data(chosen)
    assert np.array_equal(data.validation.tokens, tokens_of(sorted(VALIDATING, key=TEXTS.index)))
    assert data.validation.text_bytes == sum(len(text.encode()) for text in VALIDATING)
    assert folder in data_paths(chosen)


@pytest.mark.parametrize(
    ("megatron", "vocabulary"), [(False, 900), (False, 2**16), (False, 100_000), (True, 900)]
)
def test_token_files_are_read(megatron: bool, vocabulary: int, tmp_path: Path) -> None:
    """Megatron's pair has one split: its last tenth validates."""
    stream = np.arange(1000) * 7 % 900 + vocabulary - 900
    given: dict[str, Any] = {"data_dir": str(tmp_path), "vocabulary": vocabulary}
    if megatron:
        stream.astype("<i4").tofile(tmp_path / "text_document.bin")
        lengths, documents = [300, 200, 500], [0, 2, 3]
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(lengths), len(documents))
        pointers = np.cumsum([0, *lengths[:-1]]) * 4
        index = np.asarray(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes()
        index += np.asarray(documents, "<i8").tobytes()
        (tmp_path / "text_document.idx").write_bytes(header + index)
    else:
        dtype = "<u4" if vocabulary > 2**16 else "<u2"
        stream[:900].astype(dtype).tofile(tmp_path / "train.bin")
        stream[900:].astype(dtype).tofile(tmp_path / "val.bin")
    chosen = LanguageOptions(
        **given, dataset="tokens", sequence_length=LENGTH, document_masks=megatron
    )
    check_batch(chosen, stream[:900])
    data = token_data(chosen)
    assert np.array_equal(data.validation.tokens, stream[900:])
    if megatron:
        assert data.training.ends is not None
        assert data.training.ends.tolist() == [500, 900]


@pytest.mark.parametrize(
    ("files", "trains", "validates"),
    [
        (
            {"train-0": "abc" * 20, "train-1": "de" * 20, "validation": "fgh" * 20},
            ["abc" * 20, "de" * 20],
            ["fgh" * 20],
        ),
        (  # what is not named trains
            {"books-1": "abc" * 20, "books-2": "de" * 20, "val": "fgh" * 20},
            ["abc" * 20, "de" * 20],
            ["fgh" * 20],
        ),
        (  # few documents are divided between characters
            {"1": "ab" * 200, "2": "é" * 301},
            ["ab" * 200, "é" * 251],
            ["é" * 50],
        ),
    ],
)
def test_validation_documents_are_split_off(
    files: dict[str, str], trains: list[str], validates: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    data = token_data(LanguageOptions(dataset="text", data_dir=str(tmp_path)))
    assert np.array_equal(data.training.tokens, tokens_of(trains))
    assert np.array_equal(data.validation.tokens, tokens_of(validates))


def test_tokenizer_is_trained_on_training_documents_alone(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "input.txt").write_text("ab " * 300 + "xy " * 30)
    token_data(
        LanguageOptions(dataset="text", data_dir=str(tmp_path / "data"), tokenizer={"bpe": 300})
    )
    (file,) = tmp_path.glob("cache/*/tokenizer.json")
    learned = library.Tokenizer.from_file(str(file)).get_vocab()
    assert "ab" in learned
    assert "xy" not in learned


def test_incomplete_files_of_killed_processes_are_replaced(
    chosen: LanguageOptions, tmp_path: Path
) -> None:
    before = token_data(chosen)
    cache = tmp_path / "cache"
    (summary,) = cache.glob("tokens-*/corpus.json")
    summary.unlink()
    left = cache / ".tokens-0123-4567"
    left.mkdir()
    assert np.array_equal(token_data(chosen).training.tokens, before.training.tokens)
    assert summary.is_file()
    assert not left.exists()


def test_tokens_are_made_once_by_processes_that_start_together(
    chosen: LanguageOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    write = tokens._write

    def slow(*arguments: Any) -> None:
        made.append(arguments)
        write(*arguments)

    monkeypatch.setattr(tokens, "_write", slow)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(token_data, [chosen] * 4))
    assert len(made) == 1


def test_other_tokens_or_text_are_another_corpus(
    chosen: LanguageOptions, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = token_data(chosen)
    monkeypatch.setattr(tokenizers, "BYTES", replace(tokenizers.BYTES, end=255))
    monkeypatch.setattr(tokens, "VERSION", "other")
    after = token_data(chosen)
    assert after.sha256 != before.sha256
    (texts / "00.txt").write_text("other")
    assert token_data(chosen).sha256 != after.sha256


def test_tokenizer_is_trained_and_stored(chosen: LanguageOptions, tmp_path: Path) -> None:
    """It comes back to the text, and its file gives the same tokens."""
    library = pytest.importorskip("tokenizers")
    wanted = chosen.model_dump() | {"tokenizer": {"bpe": 300}}
    data = token_data(LanguageOptions.model_validate(wanted))
    (file,) = tmp_path.glob("cache/*/tokenizer.json")
    loaded = library.Tokenizer.from_file(str(file))
    text = loaded.decode(data.training.tokens.tolist(), skip_special_tokens=True)
    assert text == "".join(text for text in TEXTS if text not in VALIDATING)
    assert len(data.training.tokens) < 0.8 * len(tokens_of(TEXTS))
    again = token_data(chosen.model_copy(update={"tokenizer": str(file)}))
    assert np.array_equal(again.training.tokens, data.training.tokens)
    assert data.vocabulary == again.vocabulary == 300
    loaded.enable_truncation(8)
    loaded.enable_padding(length=100)
    file = tmp_path / "cuts_and_pads.json"
    loaded.save(str(file))
    whole = token_data(chosen.model_copy(update={"tokenizer": str(file)}))
    assert np.array_equal(whole.training.tokens, data.training.tokens), "no more and no fewer"
    masked = token_data(chosen.model_copy(update={"tokenizer": str(file), "objective": "masked"}))
    assert (masked.vocabulary, masked.mask) == (301, 300)


def test_standard_library_is_a_data_set() -> None:
    """Without tests; its digest is known before anything is started."""
    chosen = LanguageOptions()
    data = token_data(chosen)
    documents = sum(0 if s.ends is None else len(s.ends) for s in (data.training, data.validation))
    assert 480 < documents < 560
    assert 8e6 < len(data.training.tokens) + len(data.validation.tokens) < 10e6
    assert corpora(chosen) == build_workload(chosen, 0).corpora == {"stdlib": data.sha256}


@pytest.mark.parametrize(
    ("dataset", "files", "message"),
    [
        ("text", {}, "has no files of the format text"),
        ("text", {"a.txt": b"short"}, "too short for a training sample of 256"),
        ("jsonl", {"a.jsonl": b'{"other": 1}'}, r"a.jsonl:1: has no JSON object with a string"),
        ("jsonl", {"a.jsonl": b'{"text": 1}'}, "a.jsonl:1: has no JSON object"),
        ("parquet", {"a.parquet": b"PAR1"}, "cannot be read"),
        ("arrow", {"state.json": b"{}"}, "cannot be read"),
        ("jsonl", {"a.jsonl.gz": b"text"}, "a.jsonl.gz: cannot be read .Not a gzipped file"),
        ("jsonl", {"a.jsonl.gz": gzip.compress(b"{}")[:-9]}, "a.jsonl.gz: cannot be read .Compr"),
        ("text", {"a.txt": "/nowhere"}, r"a.txt: cannot be read .No such file"),
        ("text", {"a.txt": "/proc/self/mem"}, "a.txt: cannot be read .Input/output error"),
        ("tokens", {}, "has 0 .bin files"),
        ("tokens", {"a.bin": b"123"}, "cannot be mapped"),
        ("tokens", {"a.bin": b"1234", "a.idx": b"x" * 40}, "cannot be mapped"),
    ],
)
def test_broken_data_are_refused(
    dataset: str, files: dict[str, bytes | str], message: str, tmp_path: Path
) -> None:
    """Text in place of content is where a link leads."""
    for name, content in files.items():
        if isinstance(content, str):
            (tmp_path / name).symlink_to(content)
        else:
            (tmp_path / name).write_bytes(content)
    given = {"name": "language", "dataset": dataset, "data_dir": str(tmp_path), "vocabulary": 300}
    with pytest.raises(DataError, match=message):
        check_data(options(given))


def test_vocabulary_that_is_too_small_is_refused(chosen: LanguageOptions, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found 100; the tokenizer needs 258"):
        check_data(chosen.model_copy(update={"vocabulary": 100}))
    (tmp_path / "few").mkdir()
    (np.arange(999) % 300).astype("<u2").tofile(tmp_path / "few" / "a.bin")
    few = LanguageOptions(
        dataset="tokens", data_dir=str(tmp_path / "few"), vocabulary=300, sequence_length=LENGTH
    )

    def read(**fields: Any) -> Any:
        task = build_workload(few.model_copy(update=fields), 0)
        return next(task.batches(BatchPlan(global_batch=55, seed=0), Shard(index=0, count=1)))

    read()
    read(objective="masked", vocabulary=301)
    with pytest.raises(InputError, match="200 is too small: the data have token"):
        read(vocabulary=200)
    with pytest.raises(InputError, match=r"300 is too small: .*set it to at least 301"):
        read(objective="masked")
