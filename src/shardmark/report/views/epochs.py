"""Every row epoch by epoch: loss, seconds and quality."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.epochs import EpochsOfRow, epochs_of
from shardmark.report.table.columns import metric, table_by_row
from shardmark.report.table.notes import by_reason, left_out, seeds_note
from shardmark.report.table.table import Column, Table

SHOWN = (
    "train_loss",
    "epoch_seconds",
    "elapsed_seconds",
    "evaluation_seconds",
    "map",
    "map_50",
    "accuracy_top1",
    "bits_per_byte",
    "perplexity",
)
"""For people; CSV and JSON hold every quality."""


def epochs_tables(comparison: Comparison) -> list[Table]:
    """One line for each epoch of each row."""
    known = [epochs_of(row) for row in comparison.rows]
    lines = [(epochs.row, epoch) for epochs in known for epoch in epochs.epochs]
    recorded = dict.fromkeys(name for _, epoch in lines for name in epoch.metrics)
    names = dict.fromkeys((*(name for name in SHOWN if name in recorded), *recorded))
    measured = [epochs.row for epochs in known if epochs.epochs]
    table = table_by_row(
        "Epoch by epoch",
        lines,
        [
            (Column(key="epoch", title="epoch", names_row=True), lambda epoch: epoch.number),
            *(
                metric(name, interval="±", shown_to="all" if name in SHOWN else "programs")
                for name in names
            ),
        ],
        [*_notes(known, SHOWN), *seeds_note(measured), *left_out(comparison.rows)],
    )
    return [table]


def _notes(known: Sequence[EpochsOfRow], names: Collection[str]) -> list[str]:
    """What the seconds of an epoch are, and why a row or one of these metrics is not there."""
    timed = [epochs for epochs in known if epochs.epochs]
    notes = []
    if timed:
        notes.append("Time of an epoch: training alone, on the slowest rank, without evaluation.")
    if any(len(epochs.row.ok_trials) > 1 for epochs in timed):
        notes.append("Mean over the repeats, ± 95 % interval of the mean (Student's t).")
    warmup = sorted({epochs.warmup_steps for epochs in timed} - {0})
    if warmup:
        steps = " or ".join(map(str, warmup))
        notes.append(f"Only here, the first epoch's time includes its {steps} warm-up steps.")
    measured = [epochs for epochs in known if epochs.row.ok_trials]
    reasons = [
        *((f"No epochs: {each.reason}", each.row.place) for each in measured if each.reason),
        *(
            (f"Not known: {name} of epoch {epoch.number}: {epoch.missing[name]}", epochs.row.place)
            for epochs in measured
            for epoch in epochs.epochs
            for name in epoch.missing
            if name in names
        ),
    ]
    return [*notes, *by_reason(reasons, len(measured))]
