"""TensorBoard: one run a trial, written by TensorBoard's own record writer without TensorFlow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from shardmark.analysis.compare.rows import plain
from shardmark.core.errors import InputError
from shardmark.report.export.history import history
from shardmark.report.export.source import (
    Exported,
    Source,
    ended_at_seconds,
    measurement_id,
    require,
    settings_of,
    tags_of,
    unwritable,
    values_of,
)
from shardmark.results.files import write_whole
from shardmark.results.schema import Outcome, TrialResult

USUAL_PLACE = "exports/tensorboard"
FILE_PREFIX = "events.out.tfevents"
COLUMNS_FILE = f"{FILE_PREFIX}.0.shardmark.columns"


def export_tensorboard(sources: Sequence[Source], out: str | None) -> Exported:
    """`OUT/RUN/TRIAL/` for each trial, and the HPARAMS page's columns in `OUT/RUN/`.

    The file's name tells the measurement, so that exporting again replaces it.
    """
    require("tensorboard", "tensorboard", "tensorboard")
    root = Path(out or USUAL_PLACE).expanduser()
    encoded: dict[Path, bytes] = {}
    for source in sources:
        folder = root / source.label
        _refuse_another_run(folder, source)
        start = min(trial.started_at_seconds for trial in source.trials)
        encoded[folder / COLUMNS_FILE] = _records(start, [_columns_event(source.trials, start)])
        for trial in source.trials:
            name = f"{FILE_PREFIX}.{trial.started_at_seconds:.0f}.shardmark.{measurement_id(trial)}"
            path = folder / trial.id / name
            _refuse_another_measurement(path)
            encoded[path] = _records(trial.started_at_seconds, _trial_events(source, trial))
    try:
        for path, content in encoded.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
    except OSError as error:
        raise unwritable(str(root), error) from None
    trials = sum(len(source.trials) for source in sources)
    return Exported(where=str(root), trials=trials, look=f"tensorboard --logdir {quote(str(root))}")


def _refuse_another_run(folder: Path, source: Source) -> None:
    """A trial that the run's folder does not know is of another run, of the same label."""
    for path in sorted(folder.glob(f"*/{FILE_PREFIX}.*")):
        trial = path.parent.name
        if path.name != COLUMNS_FILE and not source.folder(trial).is_dir():
            raise InputError(
                str(folder),
                f"holds trials of another run, {trial} for one",
                "name another folder with --out, or delete that one",
            )


def _refuse_another_measurement(path: Path) -> None:
    if any(other.name != path.name for other in path.parent.glob(f"{FILE_PREFIX}.*")):
        raise InputError(
            str(path.parent),
            "holds another measurement of this trial",
            "delete that folder, or name another one with --out",
        )


def _records(started_at_seconds: float, events: Sequence[Any] | Iterator[Any]) -> bytes:
    """The content of one event file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    output = io.BytesIO()
    writer = RecordWriter(output)
    opening = Event(wall_time=started_at_seconds, file_version="brain.Event:2")
    for event in (opening, *events):
        writer.write(event.SerializeToString())
    return output.getvalue()


def _trial_events(source: Source, trial: TrialResult) -> Iterator[Any]:
    """Settings, series, final metrics under `metrics/`, and how it ended."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2 as hparams

    start, end = trial.started_at_seconds, ended_at_seconds(trial)
    name = f"{source.label}/{trial.id}"
    settings = hparams.hparams_pb(_settings(trial), trial_id=name, start_time_secs=start)
    yield Event(wall_time=start, step=0, summary=settings)

    def scalar(tag: str, value: float, step: int, at_seconds: float) -> Any:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        return Event(wall_time=at_seconds, step=step, summary=summary)

    for point in history(source, trial):
        yield scalar(point.name, point.value, point.index, point.at_seconds)
    for metric, value in values_of(trial).items():
        yield scalar(f"metrics/{metric}", value, 0, end)
    yield Event(wall_time=end, step=0, summary=_text_summary(tags_of(source, trial)))
    yield Event(wall_time=end, step=0, summary=_end_summary(trial, end))


def _settings(trial: TrialResult) -> dict[str, bool | float | str]:
    settings = {**settings_of(trial), "outcome": str(trial.outcome)}
    return {name: _hparam(value) for name, value in settings.items()}


def _hparam(value: object) -> bool | float | str:
    """What the HPARAMS page can hold."""
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, int | float) else plain(value)


def _columns_event(trials: Sequence[TrialResult], at_seconds: float) -> Any:
    """The settings that differ between the trials, and every metric that some trial has."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams import summary_v2 as hparams

    settings = [_settings(trial) for trial in trials]
    columns = []
    for name in dict.fromkeys(name for values in settings for name in values):
        values = [each.get(name) for each in settings]
        if name in ("strategy", "world_size", "outcome") or any(v != values[0] for v in values):
            known = {value for value in values if value is not None}
            one_type = len({type(value) for value in known}) == 1
            domain = hparams.Discrete(sorted(known)) if one_type else None
            columns.append(hparams.HParam(name, domain))
    names = dict.fromkeys(name for trial in trials for name in values_of(trial))
    metrics = [hparams.Metric(f"metrics/{name}", display_name=name) for name in names]
    summary = hparams.hparams_config_pb(columns, metrics, time_created_secs=at_seconds)
    return Event(wall_time=at_seconds, step=0, summary=summary)


def _text_summary(tags: dict[str, str]) -> Any:
    """What it was and how it ended, for the TEXT page, which shows it as plain text."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text import metadata
    from tensorboard.util import tensor_util

    lines = "\n".join(f"    {name}: {' '.join(value.split())}" for name, value in tags.items())
    value = Summary.Value(
        tag="trial",
        metadata=metadata.create_summary_metadata(display_name="trial", description=""),
        tensor=tensor_util.make_tensor_proto(lines.encode()),
    )
    return Summary(value=[value])


def _end_summary(trial: TrialResult, ended_at_seconds: float) -> Any:
    """SUCCESS of a trial that ended ok, FAILURE of any other."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    ok = trial.outcome is Outcome.OK
    status = api_pb2.STATUS_SUCCESS if ok else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended_at_seconds)
    value = Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(
            plugin_data_pb2.HParamsPluginData(session_end_info=end)
        ),
        tensor=metadata.NULL_TENSOR,
    )
    return Summary(value=[value])
