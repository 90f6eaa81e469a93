"""Builds and traces the models that a plan asks about.  Imports torch when first asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardmark.core.errors import DataError, InputError, ShardmarkError
from shardmark.core.layout import REPLICATED_ACTIVATIONS, ActivationSharding
from shardmark.core.recipe import Recipe
from shardmark.costs import cost_model
from shardmark.costs.base import Cell
from shardmark.predict.profile import Profile
from shardmark.trials.trial import Trial
from shardmark.workloads import check_data
from shardmark.workloads.options import WorkloadOptions
from shardmark.workloads.vision.options import ClassificationOptions

if TYPE_CHECKING:
    from torch import nn

    from shardmark.workloads.base import Workload

STAND_INS = {"cifar10": 50_000, "mnist": 60_000}
"""Training samples of data sets whose pictures `random` has in shape and classes."""


class Models:
    """Each model once, and each of its profiles."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self._built: list[tuple[WorkloadOptions, tuple[Workload, nn.Module, int]]] = []
        self._traced: list[tuple[tuple[object, ...], Profile]] = []
        self._samples: list[tuple[WorkloadOptions, int | None]] = []

    def profile(
        self,
        options: WorkloadOptions,
        recipe: Recipe,
        *,
        device_type: str = "cuda",
        division: ActivationSharding = REPLICATED_ACTIVATIONS,
    ) -> Profile:
        """Of its steps, with the kernels of such devices, and as its layers would be divided.

        Raises `ShardmarkError` for one that cannot be built or traced.
        """
        from shardmark.predict.trace import trace
        from shardmark.strategies.parameters import check_parameters

        chosen = (recipe.precision, recipe.activation_checkpointing, recipe.optimizer)
        key = (options, *chosen, device_type, division)
        for known, profile in self._traced:
            if known == key:
                return profile
        workload, model, data_bytes = self._model(options, recipe)
        check_parameters("plan", model, "a prediction", "sparse", instead="measure it with run")
        with _failures_told(options):
            profile = trace(workload, recipe, device_type=device_type, division=division)
        if device_type == "cpu":
            native = profile.native and replace(profile.native, data_bytes=data_bytes)
            profile = replace(profile, data_bytes=data_bytes, native=native)
        if profile.unused:
            names = ", ".join(profile.unused)
            self.notes[f"The traced step skips {names}: steps that use them take longer."] = None
        self._traced.append((key, profile))
        return profile

    def profile_of(self, cell: Trial, world_size: int, nodes: int, *, device_type: str) -> Profile:
        """With what passes between ranks inside of the model, where the cell's strategy divides it.

        Raises `StrategyUnavailable` for a model that it cannot train.
        """
        strategy = cell.built_strategy
        costs = cost_model(strategy)
        self.check(cell, world_size, nodes)
        profile = self.profile(
            cell.workload,
            cell.recipe,
            device_type=device_type,
            division=costs.activation_sharding(),
        )
        layout = strategy.layout(world_size, nodes)
        if layout.tensor * layout.pipeline * layout.sequence == 1:
            return profile
        traffic = self.activation_traffic(cell, world_size, nodes)
        return replace(profile, size=replace(profile.size, **traffic))

    def check(self, cell: Trial, world_size: int, nodes: int) -> None:
        """Raise `StrategyUnavailable` for a model that the cell's strategy cannot train."""
        workload, model, _ = self._model(cell.workload, cell.recipe)
        with _failures_told(cell.workload):
            cell.built_strategy.check_model(workload, model, world_size, nodes)

    def activation_traffic(self, cell: Trial, world_size: int, nodes: int) -> Mapping[str, Any]:
        """Fields of `ModelSize` about what passes between ranks inside of the model."""
        from shardmark.strategies.initial_weights import hollow_model

        workload, *_ = self._model(cell.workload, cell.recipe)
        with _failures_told(cell.workload):
            # Counting leaves its marks on a model.
            counted = hollow_model(workload) or workload.build_model()
            return cost_model(cell.built_strategy).activation_traffic(
                workload,
                counted,
                Cell(recipe=cell.recipe, world_size=world_size, nodes=nodes),
            )

    def training_samples(self, options: WorkloadOptions) -> int | None:
        """None where the ranks alone could tell."""
        for known, count in self._samples:
            if known == options:
                return count
        try:
            count = None if options.fetches_data else check_data(options)
        except DataError:
            count = options.training_samples or STAND_INS.get(getattr(options, "dataset", ""))
        self._samples.append((options, count))
        return count

    def _model(self, options: WorkloadOptions, recipe: Recipe) -> tuple[Workload, nn.Module, int]:
        """The task, its model, without weights where it can be built so, and bytes of its data."""
        from shardmark.measure.memory.tensors import live_tensor_bytes
        from shardmark.strategies.initial_weights import hollow_model
        from shardmark.workloads import build_workload

        for known, built in self._built:
            if known == options:
                return built
        before = live_tensor_bytes("cpu")
        workload = build_workload(self._here(options), recipe.seed)
        data_bytes = max(0, live_tensor_bytes("cpu") - before)
        model = hollow_model(workload) or workload.build_model()
        self._built.append((options, (workload, model, data_bytes)))
        return workload, model, data_bytes

    def _here(self, options: WorkloadOptions) -> WorkloadOptions:
        """Itself, or made-up pictures of the same size where its data are elsewhere."""
        stands = isinstance(options, ClassificationOptions) and options.dataset in STAND_INS
        try:
            if not (stands and options.fetches_data):
                check_data(options)
                return options
        except DataError:
            if not stands:
                raise
        changes: dict[str, Any] = dict.fromkeys(
            ("data_dir", "training_samples", "validation_samples")
        )
        name = getattr(options, "dataset", "")
        self.notes[f"{name} is not here: made-up pictures of its size were traced."] = None
        return options.model_copy(
            update={**changes, "dataset": "random", "download": False, "loader_workers": 0}
        )


@contextmanager
def _failures_told(options: WorkloadOptions) -> Iterator[None]:
    """Whatever a model of the user's raises in a step."""
    try:
        yield
    except ShardmarkError:
        raise
    except Exception as error:
        found = f"a step of its model fails: {type(error).__name__}: {error}"
        raise InputError(f"workload {options.name}", found, "make `run` work first") from error
