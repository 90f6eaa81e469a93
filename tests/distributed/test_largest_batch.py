"""The largest batch by real steps, within a limit that only some batches keep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardmark
from shardmark.base.errors import InputError
from shardmark.base.results.store import load_run
from shardmark.cli import main
from tests.distributed.experiments import experiment
from tests.json_fields import problems_of


def test_batches_are_tried_stored_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    of = experiment(matrix={"strategy": ["ddp", "fsdp"], "world_size": [2]})
    run = tmp_path / "tries"
    limit_gib = 0.012
    found = shardmark.largest_batches(of, run, memory_gib=limit_gib, progress=False)
    for each in found:
        assert each.reason is None
        assert each.best is not None
        assert each.per_rank_batch == each.best.samples
        assert 1 <= len(each.tries) <= 4
        assert each.best.peak_bytes is not None
        assert 0.9 * limit_gib * 2**30 < each.best.peak_bytes <= limit_gib * 2**30
        assert each.predicted
    tried = {trial.id for trial in load_run(run).trials}
    assert len(tried) == sum(len(each.tries) for each in found)
    file = tmp_path / "of.yaml"
    file.write_text(json.dumps(of))
    words = ["batch", str(file), "--memory-gib", str(limit_gib), "--out", str(run)]
    assert main([*words, "--format", "json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert problems_of("Batch", again) == []
    assert [row["per_rank_batch"] for row in again["rows"]] == [f.per_rank_batch for f in found]
    assert {trial.id for trial in load_run(run).trials} == tried


def test_other_engines_are_refused(tmp_path: Path) -> None:
    of = experiment(engine={"name": "torchrun", "rendezvous": "127.0.0.1:29400"})
    with pytest.raises(InputError, match="found torchrun; allowed is local"):
        shardmark.largest_batches(of, tmp_path / "tries", progress=False)
