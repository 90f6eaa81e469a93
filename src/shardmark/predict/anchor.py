"""Fits predictions to a stored run of the user: its factors, its speed, and its distance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pydantic import ValidationError

from shardmark.base.errors import InputError
from shardmark.base.metrics import FEW_STEPS
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.predict.calibrate import calibrate_communication, calibrate_compute
from shardmark.predict.hardware.catalogue import NodeType, load_card, load_node, names
from shardmark.predict.intervals import Kind
from shardmark.predict.step import Factors, Step, plan_step
from shardmark.predict.timing import Constants
from shardmark.ranks.costs import costs_of
from shardmark.ranks.strategies.base import samples_of_share
from shardmark.ranks.trial import Trial

if TYPE_CHECKING:
    from shardmark.predict.models import Models

ELSEWHERE = frozenset(
    {
        *("training_samples", "validation_samples", "loader_workers", "data_dir", "download"),
        *("on_broken", "augment"),
    }
)
"""Options of a task that do not change the computation of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """Measurements that predictions of one cell start from."""

    factors: Factors
    samples_per_second_per_device: float
    """Measured speed; for another card, multiplied by the ratio of the peaks."""
    nodes: int
    """Nodes of the largest trial that was used."""
    same_card: bool

    def kind(self, nodes: int) -> Kind:
        """Difference between the measurements and a prediction on so many nodes."""
        if not self.same_card:
            return "another card"
        return "more nodes" if nodes > self.nodes else "more ranks"


@dataclass(frozen=True, slots=True)
class _Measured:
    """The repeats of one cell, as one measurement."""

    trial: Trial
    device: str
    samples_per_second: float
    measured_steps: float
    """Measured steps of the repeat with the fewest."""

    @property
    def step_seconds(self) -> float:
        return self.trial.batch_per_step / self.samples_per_second

    @property
    def micro_batch(self) -> float:
        recipe = self.trial.recipe
        return samples_of_share(recipe, self.trial.layout.shares) / recipe.gradient_accumulation

    @property
    def devices(self) -> int:
        return self.trial.layout.devices


class Anchors:
    """Selects the trials of a run that predictions of a cell start from."""

    def __init__(
        self,
        run: StoredRun,
        on: NodeType,
        cells: Sequence[Trial],
        models: Models,
        constants: Constants,
    ) -> None:
        """Read the run's trials.  Raises `InputError` if none has the model of any cell."""
        self._on = on
        self._models = models
        self._constants = constants
        self._path = str(run.path)
        disturbed = [reason for result in run.trials if (reason := result.disturbed) is not None]
        self._measured = list(_measured(run.trials))
        self._used: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.doubts: dict[str, None] = {}
        """Reasons why predictions from the run may be far off."""
        if not any(self._like(cell) for cell in cells):
            message = "it has no measured trial of this model in this precision"
            if disturbed:
                message += f" that was not disturbed: {disturbed[0]}"
            raise InputError(f"--from {run.path}", message, "measure one, or leave --from out")

    @property
    def description(self) -> str:
        """Trials that were used, with their times."""
        return "; ".join(self._used)

    def anchor(self, cell: Trial) -> Anchor | None:
        """Fit the factors of a cell; None if no trial has its model and precision.

        The trial on the fewest devices gives the compute factor.  The trial of the same strategy on
        most devices gives the communication factor; without one it is the median of all trials.
        """
        same_model = self._like(cell)
        recipe = cell.recipe
        if not same_model:
            self.notes[f"No trial of {self._path} is in {recipe.precision}: no interval."] = None
            return None
        first = min(same_model, key=lambda trial: (trial.devices, -trial.micro_batch))
        node, same_card = self._node_of(first)
        factors = calibrate_compute(
            step_of(first.trial, self._models, node, self._constants),
            first.step_seconds,
            first.micro_batch,
            self._constants,
            Factors(),
        )
        self._note_use(first)
        larger = [m for m in same_model if same_card and m.devices > first.devices]
        same_strategy = [m for m in larger if m.trial.strategy == cell.strategy]
        most = [max(same_strategy, key=lambda m: m.devices)] if same_strategy else larger
        fits = [*self._communication(most, node, factors)]
        if fits:
            communication = median(factor for _, factor in fits)
            factors = Factors(compute=factors.compute, communication=communication)
        fewest = min(same_strategy or [first], key=lambda m: m.devices)
        measured, planned = (
            machine.card.peak(recipe.precision, tf32=recipe.tf32) for machine in (node, self._on)
        )
        return Anchor(
            factors=factors,
            samples_per_second_per_device=fewest.samples_per_second
            / fewest.devices
            * (1.0 if same_card else planned / measured),
            nodes=max(m.trial.nodes for m in (first, *(m for m, _ in fits))),
            same_card=same_card,
        )

    def _communication(
        self, measurements: Iterable[_Measured], node: NodeType, factors: Factors
    ) -> Iterable[tuple[_Measured, float]]:
        """Yield each measurement that fits, with its communication factor."""
        for measured in measurements:
            seconds = measured.step_seconds
            try:
                step = step_of(measured.trial, self._models, node, self._constants)
                if not measured.devices > 1 or not step.communicates:
                    continue
                fitted = calibrate_communication(step, seconds, self._constants, factors)
            except InputError as error:
                doubt = f"Times on several ranks are doubtful: {measured.trial.title}: {error}."
                self.doubts[doubt] = None
                continue
            self._note_use(measured)
            yield measured, fitted.communication

    def _note_use(self, measured: _Measured) -> None:
        seconds, steps = measured.step_seconds, measured.measured_steps
        if steps < FEW_STEPS:
            doubt = f"fewer than {FEW_STEPS} steps were measured of {measured.trial.title}"
            self.doubts[f"Times are doubtful: {doubt} in {self._path}."] = None
        self._used[f"{measured.trial.title} of {self._path}, {seconds:.4g} s a step"] = None

    def _like(self, cell: Trial) -> list[_Measured]:
        """Return the trials of the same model in the same precision."""
        model = cell.workload.model_dump(exclude=set(ELSEWHERE))
        return [
            measured
            for measured in self._measured
            if measured.trial.recipe.precision == cell.recipe.precision
            and measured.trial.workload.model_dump(exclude=set(ELSEWHERE)) == model
        ]

    def _node_of(self, measured: _Measured) -> tuple[NodeType, bool]:
        """Return the machine of a trial, and whether its card is the planned one."""
        device = measured.device
        if self._on.card.device in (None, device):
            return self._on, True
        per_node = max(1, measured.trial.world_size // measured.trial.nodes)
        if (card := known_card(device)) is not None:
            return load_node(f"{card}x{per_node}"), False
        message = f"it ran on {device!r}, for which no card ships"
        allowed = "start from a card that ships; or plan on it, with its YAML file as --on"
        raise InputError(f"--from {self._path}", message, allowed)


def step_of(trial: Trial, models: Models, node: NodeType, constants: Constants) -> Step:
    """Predict a trial's step.  Raises `ShardmarkError` if the model cannot be traced or divided."""
    return plan_step(
        models.profile_of(trial, trial.world_size, trial.nodes, device_type=node.card.device_type),
        trial.built_strategy,
        trial.recipe,
        trial.world_size,
        node,
        nodes=trial.nodes,
        constants=constants,
    )


def known_card(device: str) -> str | None:
    """Name of the card that ships for a device, by the name that the driver reports."""
    return next((name for name in names("cards") if load_card(name).device == device), None)


def _measured(results: Iterable[TrialResult]) -> Iterable[_Measured]:
    """Yield each cell once, with the median speed of its repeats that were not disturbed."""
    cells: dict[str, list[tuple[Trial, str, float, float]]] = {}
    for result in results:
        rate = result.metrics.get("samples_per_second")
        if result.outcome is not Outcome.OK or rate is None or not result.ranks:
            continue
        if result.disturbed is not None:
            continue
        try:
            trial = Trial.model_validate(result.trial)
        except ValidationError:  # another version wrote it
            continue
        if costs_of(trial.built_strategy) is None:
            continue
        key = trial.model_copy(update={"repeat": 0, "id": ""}).model_dump_json()
        steps = result.metrics.get("measured_steps")
        counted = FEW_STEPS if steps is None else steps.value
        cells.setdefault(key, []).append((trial, result.ranks[0].device, rate.value, counted))
    for repeats in cells.values():
        trial, device, *_ = repeats[0]
        middle = median(speed for _, _, speed, _ in repeats)
        yield _Measured(trial, device, middle, min(counted for *_, counted in repeats))
