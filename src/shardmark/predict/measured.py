"""Speeds that a user has measured: a number with its machine, a stored run, a script's run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from pydantic import ValidationError

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.metrics import FEW_STEPS
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.experiment.matrix import cells_of_any_size
from shardmark.predict.hardware.catalogue import (
    NodeType,
    joined_node,
    load_card,
    load_node,
    names,
    nodes_of,
)
from shardmark.predict.memory import fit_of
from shardmark.predict.model_name import as_usual
from shardmark.predict.models import Models
from shardmark.predict.request import PlanRequest
from shardmark.ranks.costs import costs_of
from shardmark.ranks.strategies.base import samples_of_share
from shardmark.ranks.trial import StrategySpec, Trial

SPEED = re.compile(
    r"(?P<value>(?:[1-9]\d*(?:,\d{3})+|\d+)(?:\.\d+)?)\s*(?P<times>[km](?=\s)|)\s*"
    r"(?P<unit>[a-z]+)\s*(?:/|per)\s*(?P<per>[a-z]+)"
    r"(?:\s+on\s+(?P<machine>.+?))?(?:\s+with\s+(?P<strategy>\S+))?",
    re.IGNORECASE,
)
"""A comma stands between thousands: `0,42 s/step` is refused, and not read as 42."""
PER_GPU = re.compile(r"\s*(?:/|per)\s*(?:gpu|device|card|rank)\b", re.IGNORECASE)
STEPS = {"step", "steps", "it", "iter", "iteration", "iterations"}
SAMPLES = {"sample", "samples", "example", "examples", "sequences", "seq", "image", "images", "img"}
TOKENS = {"token", "tokens", "tok"}
SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **{"ms": 1e-3, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0},
}
ALLOWED = (
    "allowed is a speed and its machine, such as '3,100 tokens/s on 1xa100-80', '12 samples/s',"
    " '0.42 s/step' or '2.1 it/s on 8xh100 with fsdp'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured speed, and the trial whose step is predicted to compare it."""

    trial: Trial
    node: NodeType
    samples_per_second: float
    source: str
    """Origin of the speed, as `ddp on 8 ranks of runs/one`."""
    measured_steps: float = FEW_STEPS
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

    @property
    def description(self) -> str:
        return f"{self.source}, {self.step_seconds:.3g} s a step"


def measured_number(request: PlanRequest, models: Models) -> Measured:
    """Return the speed that the request states as a number.

    Raises `InputError` for text that is no speed, and without a machine or a batch that fits.
    """
    text = request.measured or ""
    speed, per_gpu = PER_GPU.subn("", text.strip())
    match = SPEED.fullmatch(speed)
    value = float(match["value"].replace(",", "")) if match else 0.0
    if match is None or not value:
        raise InputError("--measured", f"found {text!r}", ALLOWED)
    value *= {"": 1.0, "k": 1e3, "m": 1e6}[match["times"].lower()]
    if match["machine"]:
        request = replace(request, machines=(match["machine"],), nodes=(1,))
    if (count := len(request.machines) * len(request.nodes)) > 1:
        message = f"{text!r} does not say on which of {count} machines"
        raise InputError("--measured", message, f"add one, as in '{text} on {request.machines[0]}'")
    trial, node = _measured_trial(request, models, match["strategy"] or "")
    unit, divisor = match["unit"].lower(), match["per"].lower()
    tokens: float | None = trial.workload.tokens_per_sample
    size = (trial.world_size, trial.nodes)
    if unit in TOKENS and tokens is None:  # the data of a task say how many
        profile = models.profile_of(trial, *size, device_type=node.card.device_type)
        tokens = profile.tokens_per_sample
    samples = {
        **dict.fromkeys(STEPS, float(trial.batch_per_step)),
        **dict.fromkeys(SAMPLES, 1.0),
        **dict.fromkeys(TOKENS, 1 / (tokens or inf)),
    }
    # Each GPU takes part in every step, and in a part of the samples.
    of_all = trial.layout.devices if per_gpu and unit not in STEPS else 1
    if unit in SECONDS and divisor in STEPS:
        rate = samples[divisor] / (value * SECONDS[unit])
    elif divisor in SECONDS and samples.get(unit):
        rate = of_all * samples[unit] * value / SECONDS[divisor]
    else:
        message = f"{unit}/{divisor} is not a speed of this model"
        raise InputError("--measured", message, ALLOWED)
    return Measured(trial=trial, node=node, samples_per_second=rate, source=f"measured {text}")


def _measured_trial(request: PlanRequest, models: Models, strategy: str) -> tuple[Trial, NodeType]:
    """Return the training that was measured on the machine of a request, and that machine.

    Without a strategy it is on several devices the first usual one whose memory suffices.
    """
    name, count = nodes_of(request.machines[0])
    nodes = count or request.nodes[0]
    node, _ = joined_node(name, nodes)
    ranks = nodes * node.node.devices
    asked = replace(
        request,
        subject=request.measured_model or request.subject,
        batch=request.measured_batch or request.batch,
        measured=None,
    ).resolved()
    cells, _ = cells_of_any_size(asked.experiment)
    if request.measured_batch:
        batch = {"global_batch": None, "per_rank_batch": request.measured_batch}
        cells = [cell.changed(recipe=cell.recipe.model_copy(update=batch)) for cell in cells]
    if strategy or ranks == 1:
        spec = StrategySpec(name=(strategy or "single").lower())
        cells = [cells[0].changed(strategy=spec)]
    cells = [*map(as_usual, cells)] if asked.assumed else cells
    sized = [cell.changed(world_size=ranks, nodes=nodes) for cell in cells]
    return next((cell for cell in sized if _fits(cell, node, models)), sized[-1]), node


def _fits(cell: Trial, node: NodeType, models: Models) -> bool:
    size, device_type = (cell.world_size, cell.nodes), node.card.device_type
    with suppress(ShardmarkError):
        memory = models.memory_of(cell, *size, device_type=device_type)
        return fit_of(memory.peak_bytes, node.card) == "yes"
    return False


def measured_trials(run: StoredRun, on: NodeType, cells: Sequence[Trial]) -> list[Measured]:
    """Return each cell of a run once, with the median speed of its repeats.

    Runs of a script, whose model only the user knows, are those of the first of `cells` with the
    script's batch.  Raises `InputError` for a card that is neither the planned one nor known.
    """
    repeats: dict[str, list[tuple[Trial, str, float, float]]] = {}
    for result in run.trials:
        rate = result.metrics.get("samples_per_second")
        if result.outcome is not Outcome.OK or rate is None or not result.ranks:
            continue
        if result.disturbed is not None or (trial := _trial_of(result, cells[0])) is None:
            continue
        key = trial.model_copy(update={"repeat": 0, "id": ""}).model_dump_json()
        steps = result.metrics.get("measured_steps")
        counted = FEW_STEPS if steps is None else steps.value
        repeats.setdefault(key, []).append((trial, result.ranks[0].device, rate.value, counted))
    return [
        Measured(
            trial=trial,
            node=_node_of(trial, device, on, run),
            samples_per_second=median(speed for _, _, speed, _ in same),
            measured_steps=min(counted for *_, counted in same),
            source=f"{trial.title} of {run.path}",
        )
        for same in repeats.values()
        for trial, device, *_ in same[:1]
    ]


def _trial_of(result: TrialResult, cell: Trial) -> Trial | None:
    """Return the trial of a result, or the cell with a script's batch; None if neither is known."""
    try:
        trial = Trial.model_validate(result.trial)
    except ValidationError:  # another version wrote it
        return None
    if trial.script is None:
        return None if costs_of(trial.built_strategy) is None else trial
    steps, samples = result.metrics.get("measured_steps"), sum(r.samples for r in result.ranks)
    if steps is None or samples < steps.value:
        return None
    batch = round(samples / steps.value / trial.world_size)
    sizes = {"global_batch": None, "per_rank_batch": batch, "gradient_accumulation": 1}
    strategy = cell.strategy if trial.world_size > 1 else StrategySpec(name="single")
    return cell.changed(
        recipe=cell.recipe.model_copy(update=sizes),
        strategy=strategy,
        world_size=trial.world_size,
        nodes=trial.nodes,
    )


def _node_of(trial: Trial, device: str, on: NodeType, run: StoredRun) -> NodeType:
    if on.card.device in (None, device):
        return on
    if (card := known_card(device)) is not None:
        return load_node(f"{card}x{max(1, trial.world_size // trial.nodes)}")
    message = f"it ran on {device!r}, for which no card ships"
    allowed = "start from a card that ships; or plan on it, with its YAML file as --on"
    raise InputError(f"--from {run.path}", message, allowed)


def known_card(device: str) -> str | None:
    """Name of the card that ships for a device, by the name that the driver reports."""
    return next((name for name in names("cards") if load_card(name).device == device), None)
