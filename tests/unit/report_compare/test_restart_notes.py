"""What is said below the table of restarts and of what checkpoints cost."""

from __future__ import annotations

from shardmark.report.table.notes import NoteKind, notes_of
from shardmark.results.schema import CheckpointRecord, Summary, TrialResult
from tests.unit.report_compare.runs import compared, learning_trial


def with_checkpoints(trial: TrialResult, count: int, seconds: float) -> TrialResult:
    """Rank 1's windows are the longest: two of `seconds` + 1."""
    written = tuple(
        CheckpointRecord(step=step, seconds=seconds, written_bytes=10) for step in range(count)
    )
    ranks = tuple(rank.model_copy(update={"checkpoints": written}) for rank in trial.ranks)
    metrics = trial.metrics | {"checkpoint_seconds": Summary(value=seconds, over="mean")}
    return trial.model_copy(update={"ranks": ranks, "metrics": metrics})


def costs(*trials: TrialResult) -> list[str]:
    return [note.text for note in notes_of(compared(*trials)) if note.kind is NoteKind.CHECKPOINTS]


def test_without_checkpoints_nothing_is_said() -> None:
    assert costs(learning_trial()) == []


def test_one_row() -> None:
    trial = with_checkpoints(learning_trial(seconds=9.0), 3, 0.5)
    assert costs(trial) == [
        "CHECKPOINTS: 3 a trial, 0.5 s each: they add 7.5 % to the measured training time;"
        " samples/s and all other rates leave them out."
    ]


def test_several_rows_name_the_dearest() -> None:
    cheap = with_checkpoints(learning_trial("ddp", seconds=9.0), 2, 0.25)
    dear = with_checkpoints(learning_trial("fsdp", seconds=9.0), 4, 1.0)
    (text,) = costs(cheap, dear)
    assert "2 to 4 a trial, 0.25 to 1 s each: they add 2.5 to 20 % to the measured" in text
    assert "training time, most with fsdp" in text
