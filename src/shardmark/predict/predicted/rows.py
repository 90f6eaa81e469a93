"""Predictions for measured rows, for comparison with the measurements."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.results.network import read_network
from shardmark.base.results.store import StoredRun
from shardmark.bench.analysis.compare.rows import Row
from shardmark.predict.anchor import Anchors, step_of
from shardmark.predict.hardware.catalogue import NodeType, load_node
from shardmark.predict.hardware.written import node_of
from shardmark.predict.measured import known_card, measured_trials
from shardmark.predict.models import Models
from shardmark.predict.timing import Constants
from shardmark.ranks.trial import Trial


class Predictions:
    """Predictions for rows whose models are part of the package; a run's code is not executed."""

    def __init__(self, rows: Sequence[Row], models: Models | None = None) -> None:
        self._rows = rows
        self._models = models or Models()

    def peak_memory_bytes(self, row: Row) -> float:
        """Predict the peak memory of a rank.  Raises `ShardmarkError` if it is not possible."""
        trial = _trial_of(row)
        size = (trial.world_size, trial.nodes)
        return self._models.memory_of(trial, *size, device_type=trial.device_type).peak_bytes

    def tokens_per_second(self, row: Row) -> float:
        """Predict the throughput of a task with tokens, as `samples_per_second` does."""
        return self.samples_per_second(row) * (_trial_of(row).workload.tokens_per_sample or 0)

    def samples_per_second(self, row: Row) -> float:
        """Predict the throughput from the trial of the same run on the fewest devices.

        Raises `ShardmarkError` if there is no such trial, or the GPU is not in the catalogue.
        """
        trial = _trial_of(row)
        smaller = [
            other
            for other in self._rows
            if other.folder == row.folder
            and other.ok_trials
            and other.ok_trials[0].layout.devices < row.devices
            and any(result.disturbed is None for result in other.ok_trials)
        ]
        if not smaller:
            raise _unpredictable("no undisturbed trial on fewer devices to predict it from")
        first = min(smaller, key=lambda other: other.ok_trials[0].layout.devices)
        assert first.folder is not None, "rows come from runs"
        node = _node_of(first, max(1, trial.world_size // trial.nodes))
        run = StoredRun(path=first.folder, trials=tuple(first.ok_trials))
        constants = Constants()
        measured = measured_trials(run, node, [trial])
        anchor = Anchors(measured, node, self._models, constants).anchor(trial)
        if anchor is None:
            raise _unpredictable(f"no trial on fewer devices is in {trial.recipe.precision}")
        step = step_of(trial, self._models, node, constants)
        return trial.batch_per_step / step.time(constants, anchor.factors).seconds


def _node_of(row: Row, ranks: int) -> NodeType:
    """Return a node with the row's GPU model, or one from the run's measured links and cores."""
    device = row.ok_trials[0].ranks[0].device
    if (card := known_card(device)) is not None:
        return load_node(f"{card}x{ranks}")
    assert row.folder is not None, "rows come from runs"
    record = read_network(row.folder)
    if record is None or record.speed is None:
        raise _unpredictable(
            "the speed of its machine is not known; measure.link_seconds: 8 measures it"
        )
    return node_of(record, device=device)


def _trial_of(row: Row) -> Trial:
    if not row.ok_trials:
        raise _unpredictable("no trial ended ok")
    try:
        trial = Trial.model_validate(row.ok_trials[0].trial)
    except ValidationError:
        raise _unpredictable("its trial is of another version") from None
    if trial.user_modules():
        raise _unpredictable("its own code is not started for a table")
    return trial


def _unpredictable(reason: str) -> ShardmarkError:
    return InputError("predicted", reason, "`shardmark plan` predicts any machine")
