"""A stored run of the user's as what predictions start from: its factors, its speed, its kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pydantic import ValidationError

from shardmark.core.errors import InputError
from shardmark.core.metrics import FEW_STEPS
from shardmark.costs import costs_of
from shardmark.predict.calibrate import calibrate_communication, calibrate_compute
from shardmark.predict.hardware.catalogue import NodeType, load_card, load_node, names
from shardmark.predict.intervals import Kind
from shardmark.predict.step import Factors, Step, plan_step
from shardmark.predict.timing import Constants
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import StoredRun
from shardmark.strategies.base import samples_of_share
from shardmark.trials.trial import Trial

if TYPE_CHECKING:
    from shardmark.predict.models import Models

ELSEWHERE = frozenset(
    {
        *("training_samples", "validation_samples", "loader_workers", "data_dir", "download"),
        *("on_broken", "augment"),
    }
)
"""Options of a task that leave a step's computing as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """What measured trials say about one cell."""

    factors: Factors
    samples_per_second_per_device: float
    """Measured; on another card, times what its peak is to the measured one's."""
    nodes: int
    """Of the largest trial that was used."""
    same_card: bool

    def kind(self, nodes: int) -> Kind:
        """What lies between what was measured and a prediction on so many nodes."""
        if not self.same_card:
            return "another card"
        return "more nodes" if nodes > self.nodes else "more ranks"


@dataclass(frozen=True, slots=True)
class _Measured:
    """All repeats of one cell."""

    trial: Trial
    device: str
    samples_per_second: float
    measured_steps: float
    """Of the repeat with fewest."""

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
    """A run's trials, found for each cell of an experiment."""

    def __init__(
        self,
        run: StoredRun,
        on: NodeType,
        cells: Sequence[Trial],
        models: Models,
        constants: Constants,
    ) -> None:
        """Raises `InputError` where no trial tells of any cell."""
        self._on = on
        self._models = models
        self._constants = constants
        self._path = str(run.path)
        disturbed = [found for result in run.trials if (found := result.disturbed) is not None]
        self._measured = list(_measured(run.trials))
        self._used: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.doubts: dict[str, None] = {}
        """Why predictions from it may be far off."""
        if not any(self._like(cell) for cell in cells):
            found = "it has no measured trial of this model in this precision"
            if disturbed:
                found += f" that was not disturbed: {disturbed[0]}"
            raise InputError(f"--from {run.path}", found, "measure one, or leave --from out")

    @property
    def told(self) -> str:
        return "; ".join(self._used)

    def of(self, cell: Trial) -> Anchor | None:
        """None where no trial is of its model in its precision.

        The trial on the fewest devices gives the compute factor; of the same strategy, the one on
        most gives the communication factor, or all other strategies' middle one.
        """
        alike = self._like(cell)
        recipe = cell.recipe
        if not alike:
            self.notes[f"No trial of {self._path} is in {recipe.precision}: no interval."] = None
            return None
        first = min(alike, key=lambda each: (each.devices, -each.micro_batch))
        node, same = self._node_of(first)
        factors = calibrate_compute(
            step_of(first.trial, self._models, node, self._constants),
            first.step_seconds,
            first.micro_batch,
            self._constants,
            Factors(),
        )
        self._tell(first)
        several = [each for each in alike if same and each.devices > first.devices]
        own = [each for each in several if each.trial.strategy == cell.strategy]
        largest = [max(own, key=lambda each: each.devices)] if own else several
        found = [*self._communication(largest, node, factors)]
        if found:
            factors = Factors(
                compute=factors.compute, communication=median(each for _, each in found)
            )
        fewest = min(own or [first], key=lambda each: each.devices)
        measured, planned = (
            each.card.peak(recipe.precision, tf32=recipe.tf32) for each in (node, self._on)
        )
        return Anchor(
            factors=factors,
            samples_per_second_per_device=fewest.samples_per_second
            / fewest.devices
            * (1.0 if same else planned / measured),
            nodes=max(each.trial.nodes for each in (first, *(each for each, _ in found))),
            same_card=same,
        )

    def _communication(
        self, several: Iterable[_Measured], node: NodeType, factors: Factors
    ) -> Iterable[tuple[_Measured, float]]:
        for each in several:
            try:
                step = step_of(each.trial, self._models, node, self._constants)
                if not each.devices > 1 or not step.traffic:
                    continue
                found = calibrate_communication(step, each.step_seconds, self._constants, factors)
            except InputError as error:
                told = f"Times on several ranks are doubtful: {each.trial.title}: {error}."
                self.doubts[told] = None
                continue
            self._tell(each)
            yield each, found.communication

    def _tell(self, measured: _Measured) -> None:
        seconds, steps = measured.step_seconds, measured.measured_steps
        if steps < FEW_STEPS:
            told = f"fewer than {FEW_STEPS} steps were measured of {measured.trial.title}"
            self.doubts[f"Times are doubtful: {told} in {self._path}."] = None
        self._used[f"{measured.trial.title} of {self._path}, {seconds:.4g} s a step"] = None

    def _like(self, cell: Trial) -> list[_Measured]:
        """Trials of the same model in the same precision."""
        model = cell.workload.model_dump(exclude=set(ELSEWHERE))
        return [
            each
            for each in self._measured
            if each.trial.recipe.precision == cell.recipe.precision
            and each.trial.workload.model_dump(exclude=set(ELSEWHERE)) == model
        ]

    def _node_of(self, measured: _Measured) -> tuple[NodeType, bool]:
        """The machine of a trial, and whether its card is the planned one."""
        device = measured.device
        if self._on.card.device in (None, device):
            return self._on, True
        each = max(1, measured.trial.world_size // measured.trial.nodes)
        if (card := known_card(device)) is not None:
            return load_node(f"{card}x{each}"), False
        found = f"it ran on {device!r}, of which no card is known"
        allowed = "start from a card that ships; or plan on it, with its YAML file as --on"
        raise InputError(f"--from {self._path}", found, allowed)


def step_of(trial: Trial, models: Models, node: NodeType, constants: Constants) -> Step:
    """Raises `ShardmarkError` for a model that cannot be traced or divided."""
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
    """Of those that ship, by the name that a driver reports."""
    return next((name for name in names("cards") if load_card(name).device == device), None)


def _measured(results: Iterable[TrialResult]) -> Iterable[_Measured]:
    """Each cell once, with the median speed of its repeats, disturbed ones left out."""
    cells: dict[str, list[tuple[Trial, str, float, float]]] = {}
    for result in results:
        rate = result.metrics.get("samples_per_second")
        if result.outcome is not Outcome.OK or rate is None or not result.ranks:
            continue
        if result.disturbed is not None:
            continue
        try:
            trial = Trial.model_validate(result.trial)
        except ValidationError:  # of another version
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
