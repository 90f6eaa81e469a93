"""TensorBoard: one run a trial, written by TensorBoard's own record writer without TensorFlow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from shardmark.analysis.compare.rows import plain
from shardmark.core.errors import InputError
from shardmark.report.export.source import Exported, Source, require
from shardmark.report.export.tracked import TrackedTrial, tracked
from shardmark.results.files import write_files

FILE_PREFIX = "events.out.tfevents"


def export_tensorboard(sources: Sequence[Source], out: str | None) -> Exported:
    """`OUT/RUN/TRIAL/` for each trial.

    The file's name tells the measurement, so that exporting again replaces it.  Raises `InputError`
    where the folder holds another measurement of the trial: TensorBoard would draw both as one.
    """
    require("tensorboard", "tensorboard", "tensorboard")
    root = Path(out or "exports/tensorboard").expanduser()
    trials = tracked(sources)
    encoded = {}
    for trial in trials:
        started = f"{trial.result.started_at_seconds:.0f}"
        folder = root / trial.source.label / trial.result.id
        path = folder / f"{FILE_PREFIX}.{started}.shardmark.{trial.measurement}"
        if any(other != path for other in folder.glob(f"{FILE_PREFIX}.*")):
            raise InputError(
                str(folder),
                "holds another measurement of this trial",
                "delete that folder, or name another one with --out",
            )
        encoded[path] = _encoded(trial)
    write_files(encoded)
    look = f"tensorboard --logdir {quote(str(root))}"
    return Exported(where=str(root), trials=len(trials), look=look)


def _encoded(trial: TrackedTrial) -> bytes:
    """The content of one event file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    output = io.BytesIO()
    writer = RecordWriter(output)
    for event in _events(trial):
        writer.write(event.SerializeToString())
    return output.getvalue()


def _events(trial: TrackedTrial) -> Iterator[Any]:
    """Settings for the HPARAMS page, series, and final metrics under `metrics/`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    def scalar(tag: str, value: float, step: int, at_seconds: float) -> Any:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        return Event(wall_time=at_seconds, step=step, summary=summary)

    start = trial.result.started_at_seconds
    settings = {name: _setting(value) for name, value in (trial.tags | trial.settings).items()}
    yield Event(wall_time=start, file_version="brain.Event:2")
    yield Event(
        wall_time=start,
        summary=hparams_pb(
            settings,
            trial_id=f"{trial.source.label}/{trial.result.id}",
            start_time_secs=start,
        ),
    )
    for point in trial.history():
        yield scalar(point.name, point.value, point.index, point.at_seconds)
    for metric, value in trial.final.items():
        yield scalar(f"metrics/{metric}", value, 0, trial.ended_at_seconds)


def _setting(value: object) -> bool | float | str:
    """What the HPARAMS page can hold."""
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, int | float) else plain(value)
