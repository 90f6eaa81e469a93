"""What a rank does that measures links: no model, no data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.experiment.schema import Trial
from shardmark.measure.network_probe import DEFAULT_SECONDS, RECORD_FILE
from shardmark.measure.network_ranks import measure_links
from shardmark.measure.rank_files import JOINED_FILE
from shardmark.training.report import RankReport

if TYPE_CHECKING:
    from shardmark.training.rank import Settled


def measure_trial_links(trial: Trial, directory: Path, place: Settled, report: RankReport) -> None:
    """Exchange messages with all other ranks; rank 0 leaves the timings.  Collective."""
    report.write()
    process = place.process
    (directory / JOINED_FILE.format(process.rank)).touch()
    record = measure_links(
        process.device, seconds=trial.measure.link_seconds or DEFAULT_SECONDS, node=process.node
    )
    if record is not None:
        (directory / RECORD_FILE).write_text(record.model_dump_json())
