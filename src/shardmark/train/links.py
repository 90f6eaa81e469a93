"""What a rank does that measures links: no model, no data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.core.run_files import JOINED_FILE
from shardmark.measure.network.network_probe import DEFAULT_SECONDS, RECORD_FILE
from shardmark.measure.network.network_ranks import measure_links
from shardmark.train.record import RankReport
from shardmark.trials.trial import Trial

if TYPE_CHECKING:
    from shardmark.train.rank import Settled


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
