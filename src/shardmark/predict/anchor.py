"""Fits predictions to speeds that the user has measured: factors, speed, and distance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from shardmark.base.errors import InputError
from shardmark.base.metrics import FEW_STEPS
from shardmark.predict.hardware.catalogue import NodeType
from shardmark.predict.intervals import Basis
from shardmark.predict.measured import Measured
from shardmark.predict.step import Factors, Step, plan_step
from shardmark.predict.timing import Constants
from shardmark.ranks.trial import Trial

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.predict.models import Models


LEAST, MOST = 1e-3, 1e3
"""Bounds of a factor that can be right."""
GRIDS, POINTS = 2, 128
"""The bounds of a factor are divided by so many points, and the interval found by as many again:
the factor is then known to 0.1 %."""


def calibrate_compute(
    step: Step, measured_seconds: float, micro_batch: float, constants: Constants, factors: Factors
) -> Factors:
    """Return the factors with which the step's computation agrees with the measured time.

    `micro_batch` counts samples, or the tokens of samples that have any.  Raises `InputError` for
    one alone, whose time is that of starting its operations, and for a step shorter than its
    communication and its library's code alone.
    """
    if micro_batch < 2:
        allowed = "measure 2 or more: the time of one is that of starting its operations"
        raise InputError("the measured run", "its ranks take 1 sample at a time", allowed)
    seconds = partial(step.seconds, constants, communication=factors.communication)
    return replace(factors, compute=_fitted(seconds, measured_seconds))


def calibrate_communication(
    step: Step, measured_seconds: float, constants: Constants, factors: Factors
) -> Factors:
    """Return the factors with which a step on several ranks agrees with the measured time."""
    seconds = partial(step.seconds, constants, factors.compute)
    return replace(factors, communication=_fitted(seconds, measured_seconds))


def _fitted(
    seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]], measured_seconds: float
) -> float:
    """Return the factor at which a step's time, which grows with it, is the measured time."""
    low, high = LEAST, MOST
    for grid in range(GRIDS):
        factors = np.geomspace(low, high, POINTS + 1)
        predicted = seconds(factors)
        if grid == 0 and not predicted[0] <= measured_seconds <= predicted[-1]:
            message = (
                f"it took {measured_seconds:.3g} s a step, expected {predicted[0]:.3g} to"
                f" {predicted[-1]:.3g}"
            )
            allowed = "check the card, the network and the batch of that run"
            raise InputError("the measured run", message, allowed)
        at = max(1, int(np.searchsorted(predicted, measured_seconds)))
        low, high = factors[at - 1], factors[at]
    return float((low * high) ** 0.5)


ELSEWHERE = {
    *("training_samples", "validation_samples", "loader_workers", "data_dir", "download"),
    *("on_broken", "augment", "loss_chunks"),
}
"""Options of a task that hardly change the computation of a step."""
PLAUSIBLE = 4
"""Largest factor between a measured and a planned step that is no reason to doubt the former."""
SHARED = 0.375
"""Power of a model's factor that another model has: most of its error is of the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """Measurements that predictions of one cell start from."""

    factors: Factors
    samples_per_second_per_device: float | None
    """Measured speed; for another card, multiplied by the ratio of the peaks.  None for that of
    another model."""
    nodes: int
    """Nodes of the largest trial that was used."""
    same_card: bool

    def basis(self, nodes: int, alone: Basis) -> Basis:
        """Difference between the measurements and a prediction on so many nodes.

        `alone` is that of a prediction without one: a run of another model makes the interval
        narrower only for `fused`.
        """
        if not self.same_card:
            return "another card"
        if self.samples_per_second_per_device is None:
            return "another model" if alone == "fused" else alone
        return "more nodes" if nodes > self.nodes else "more ranks"


class Anchors:
    """Selects the measurements that predictions of a cell start from."""

    def __init__(
        self, measured: Sequence[Measured], on: NodeType, models: Models, constants: Constants
    ) -> None:
        self._measured = measured
        self._on = on
        self._models = models
        self._constants = constants
        self._used: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.doubts: dict[str, None] = {}
        """Reasons why predictions from the measurements may be far off."""

    @property
    def description(self) -> str:
        """Measurements that were used, with their times."""
        return "; ".join(self._used)

    def anchor(self, cell: Trial) -> Anchor | None:
        """Fit the factors of a cell; None if nothing was measured in its precision.

        The same model counts before others.  The trial on the fewest devices gives the compute
        factor.  The trial of the same strategy on most devices gives the communication factor;
        without one it is the median of all trials.
        """
        recipe = cell.recipe
        comparable = self.matching(cell)
        if not comparable:
            note = f"Nothing was measured in {recipe.precision}: its speed is not calibrated."
            self.notes[note] = None
            return None
        same_model = [m for m in comparable if _task(m.trial) == _task(cell)]
        comparable = same_model or comparable
        first = min(comparable, key=lambda trial: (trial.devices, -trial.micro_batch))
        node, same_card = first.node, first.node.card == self._on.card
        step = step_of(first.trial, self._models, node, self._constants)
        factors = calibrate_compute(
            step,
            first.step_seconds,
            first.micro_batch * (first.trial.workload.tokens_per_sample or 1),
            self._constants,
            Factors(),
        )
        ratio = float(step.seconds(self._constants, 1.0, 1.0)[0]) / first.step_seconds
        if node.card.device_type != "cpu" and not 1 / PLAUSIBLE < ratio < PLAUSIBLE:
            doubt = (
                f"{first.source} is {ratio:.2g} times the planned speed of {first.trial.strategy}"
                f" with {first.trial.batch_per_step} samples a step; check --measured-batch"
            )
            self.doubts[f"Times are doubtful: {doubt}."] = None
        if not same_model:
            factors = Factors(compute=factors.compute**SHARED)
        self._note_use(first)
        larger = [m for m in comparable if same_card and m.devices > first.devices]
        same_strategy = [m for m in larger if m.trial.strategy == cell.strategy]
        most = [max(same_strategy, key=lambda m: m.devices)] if same_strategy else larger
        fits = [*self._communication(most, node, factors)]
        if fits:
            communication = median(factor for _, factor in fits)
            factors = Factors(compute=factors.compute, communication=communication)
        fewest = min(same_strategy or [first], key=lambda m: m.devices)
        measured, planned = (
            machine.card.peak(trained.precision, tf32=trained.tf32)
            for machine, trained in ((node, first.trial.recipe), (self._on, recipe))
        )
        per_device = fewest.samples_per_second / fewest.devices
        return Anchor(
            factors=factors,
            samples_per_second_per_device=(
                per_device * (1.0 if same_card else planned / measured) if same_model else None
            ),
            nodes=max(m.trial.nodes for m in (first, *(m for m, _ in fits))),
            same_card=same_card,
        )

    def matching(self, cell: Trial) -> list[Measured]:
        """Return what was measured in the cell's precision, of which 16-bit ones are one."""
        is_fp32 = cell.recipe.precision == "fp32"
        return [m for m in self._measured if (m.trial.recipe.precision == "fp32") == is_fp32]

    def _communication(
        self, measurements: Iterable[Measured], node: NodeType, factors: Factors
    ) -> Iterable[tuple[Measured, float]]:
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

    def _note_use(self, measured: Measured) -> None:
        if measured.measured_steps < FEW_STEPS:
            doubt = f"fewer than {FEW_STEPS} steps were measured of {measured.source}"
            self.doubts[f"Times are doubtful: {doubt}."] = None
        self._used[measured.description] = None


def _task(trial: Trial) -> dict[str, object]:
    """Options that decide the computation of a sample."""
    return trial.workload.model_dump(exclude=ELSEWHERE)


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
