"""What would have been predicted for measured rows, to stand beside them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from shardmark.analysis.compare.rows import Row
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.predict.anchor import Anchors, known_card, step_of
from shardmark.predict.hardware.catalogue import NodeType, load_node
from shardmark.predict.hardware.written import node_of
from shardmark.predict.memory import rank_memory
from shardmark.predict.models import Models
from shardmark.predict.timing import Constants
from shardmark.results.network import read_network
from shardmark.results.store import StoredRun
from shardmark.trials.trial import Trial


class Predictions:
    """Of rows whose models come from the package: a run's own code is not started for a table."""

    def __init__(self, rows: Sequence[Row], models: Models | None = None) -> None:
        self._rows = rows
        self._models = models or Models()

    def peak_memory_bytes(self, row: Row) -> float:
        """Raises `ShardmarkError` where it cannot be told."""
        trial = _trial_of(row)
        profile = self._models.profile_of(
            trial, trial.world_size, trial.nodes, device_type=trial.device_type
        )
        memory = rank_memory(
            profile,
            trial.built_strategy,
            trial.recipe,
            trial.world_size,
            nodes=trial.nodes,
            device_type=trial.device_type,
        )
        return memory.peak_bytes

    def tokens_per_second(self, row: Row) -> float:
        """As `samples_per_second`, of a task with tokens."""
        return self.samples_per_second(row) * (_trial_of(row).workload.tokens_per_sample or 0)

    def samples_per_second(self, row: Row) -> float:
        """From the trial on the fewest devices of the same run and model.

        Raises `ShardmarkError` where there is none but itself, or its card is not known.
        """
        trial = _trial_of(row)
        alike = [
            other
            for other in self._rows
            if other.folder == row.folder
            and other.ok_trials
            and other.ok_trials[0].layout.devices < row.devices
            and any(each.disturbed is None for each in other.ok_trials)
        ]
        if not alike:
            raise _untold("no undisturbed trial on fewer devices is there to predict it from")
        first = min(alike, key=lambda other: other.ok_trials[0].layout.devices)
        assert first.folder is not None, "rows come from runs"
        node = _node_of(first, max(1, trial.world_size // trial.nodes))
        run = StoredRun(path=first.folder, trials=tuple(first.ok_trials))
        constants = Constants()
        anchor = Anchors(run, node, [trial], self._models, constants).of(trial)
        assert anchor is not None, "a run without such a trial is refused"
        step = step_of(trial, self._models, node, constants)
        return trial.batch_per_step / step.time(constants, anchor.factors).seconds


def _node_of(row: Row, ranks: int) -> NodeType:
    """So many of its card, if that ships; else what the run measured of its links and cores."""
    device = row.ok_trials[0].ranks[0].device
    if (card := known_card(device)) is not None:
        return load_node(f"{card}x{ranks}")
    assert row.folder is not None, "rows come from runs"
    record = read_network(row.folder)
    if record is None or record.speed is None:
        raise _untold("nothing is known of its card; measure.link_seconds=8 measures it")
    return node_of(record, device=device)


def _trial_of(row: Row) -> Trial:
    if not row.ok_trials:
        raise _untold("no trial ended ok")
    try:
        trial = Trial.model_validate(row.ok_trials[0].trial)
    except ValidationError:
        raise _untold("its trial is of another version") from None
    if trial.workload.user_modules():
        raise _untold("its own code is not started for a table")
    return trial


def _untold(reason: str) -> ShardmarkError:
    return InputError("predicted", reason, "`shardmark plan` predicts any machine")
