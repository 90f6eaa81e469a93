"""Builds and traces the models of a plan.  Imports torch when the first model is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from shardmark.base.errors import DataError, InputError, ShardmarkError
from shardmark.base.layout import REPLICATED_ACTIVATIONS, ActivationSharding
from shardmark.base.recipe import Recipe
from shardmark.base.traffic import stored_element_bytes
from shardmark.predict.memory import RankMemory, computes_natively, rank_memory
from shardmark.predict.profile import Profile
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import check_data
from shardmark.ranks.workloads.language.options import ATTENTION, LanguageOptions
from shardmark.ranks.workloads.language.tokenizers import rows_without_text
from shardmark.ranks.workloads.options import WorkloadOptions
from shardmark.ranks.workloads.vision.options import ClassificationOptions

if TYPE_CHECKING:
    from torch import nn

    from shardmark.ranks.workloads.base import Workload

FEW_SAMPLES = 8
"""Random samples of tokens for a trace: those of its larger step."""
STAND_INS = {"cifar10": 50_000, "mnist": 60_000}
"""Training samples of data sets that random images of the same shape can replace."""

Steps = Literal["autocast", "cast", "both"]


class Models:
    """A cache of models and of their profiles."""

    def __init__(self) -> None:
        self.notify: Callable[[str], None] = lambda _: None
        """Called with a description of each phase that takes time, as it begins."""
        self.reference_model = False
        """Count a frozen copy of a model in 16 bits beside it; an adapter needs none."""
        self.routed_experts = False
        """Let the experts of Llama 4 compute the tokens sent to them in all precisions."""
        self.notes: dict[str, None] = {}
        # By the text of the options, which cannot be hashed.
        self._built: dict[str, tuple[Workload, nn.Module]] = {}
        self._profiles: dict[tuple[object, ...], dict[str, Profile | None]] = {}
        self._bare: dict[str, Profile] = {}
        self._samples: dict[str, int | None] = {}
        self._checked: set[tuple[int, str, int, int]] = set()

    def profile(
        self,
        options: WorkloadOptions,
        recipe: Recipe,
        *,
        device_type: str = "cuda",
        activations: ActivationSharding = REPLICATED_ACTIVATIONS,
        steps: Steps = "both",
    ) -> Profile:
        """Profile a step with the kernels of a device type and the given activation sharding.

        `steps` are those that are traced: under autocast, with parameters cast to 16 bits, or both.
        Raises `ShardmarkError` for a model that cannot be built or traced.
        """
        traced = partial(self._traced, options, recipe, device_type, activations)
        in_16_bits = recipe.precision != "fp32" and steps != "autocast"
        cast = traced(casts=True) if in_16_bits else None
        if steps == "cast" and cast is not None:
            return cast
        profile = traced(casts=False)
        assert profile is not None, "an error was raised"
        return replace(profile, native=cast)

    def _traced(
        self,
        options: WorkloadOptions,
        recipe: Recipe,
        device_type: str,
        activations: ActivationSharding,
        *,
        casts: bool,
    ) -> Profile | None:
        """Profile a step under autocast, or with parameters cast to 16 bits.

        None for a model that does not compute with such parameters.
        """
        from shardmark.predict.trace.optimizers import with_optimizer
        from shardmark.predict.trace.trace import traced
        from shardmark.ranks.strategies.parameters import check_parameters

        settings = (recipe.precision, recipe.activation_checkpointing, recipe.compile, casts)
        key = (repr(options), *settings, device_type, activations, self.routed_experts)
        by_update = self._profiles.setdefault(key, {})
        update = f"{recipe.optimizer!r}, {recipe.weights}"
        for other in [*by_update.values()][:1]:
            if update not in by_update and other is not None:
                changed = with_optimizer(other, recipe.optimizer, device_type, recipe.weights)
                by_update[update] = changed
            return by_update.get(update)
        workload, model = self._model(options, recipe)
        check_parameters("plan", model, "a prediction", "sparse", instead="measure it with run")
        recomputes = ", activation checkpointing" * bool(recipe.activation_checkpointing)
        cast = ", cast parameters" * casts
        self.notify(f"tracing a step in {recipe.precision}{cast}{recomputes}")
        with _named_failures(options):
            profile = traced(
                *(workload, recipe),
                casts=casts,
                model=model,
                device_type=device_type,
                activations=activations,
                flash=without_flash(options) is not options and recipe.precision != "fp32",
                routed=self.routed_experts,
            )
        if profile is None:
            by_update[update] = None
            return None
        stacks = (p for p in model.parameters() if p.dim() == 3 and stored_element_bytes(p) < 1)
        if saved_bytes := sum((2 - stored_element_bytes(p)) * p.numel() for p in stacks):
            self.notes[
                "Experts are in 4 bits, as Unsloth and axolotl (quantize_moe_experts) store them;"
                " transformers 5 with bitsandbytes alone leaves them in 16 bits:"
                f" {saved_bytes / 2**30:,.3g} GiB more for each copy of the model."
            ] = None
        if profile.unused:
            names = ", ".join(profile.unused)
            self.notes[f"The traced step skips {names}: steps that use them take longer."] = None
        for name in profile.limited:
            note = f"{name} is traced with as many positive proposals as it samples at most."
            self.notes[note] = None
        profile = replace(
            profile,
            data_bytes=self._data_bytes(options, recipe) if device_type == "cpu" else 0.0,
            active_parameters=workload.active_parameters(model),
            tokens_per_sample=_tokens_per_sample(workload, options),
            host_prepares_samples=not options.loader_workers,
        )
        by_update[update] = profile
        return profile

    def profile_of(
        self,
        cell: Trial,
        world_size: int,
        nodes: int,
        *,
        device_type: str,
        runs: bool = True,
    ) -> Profile:
        """Profile a cell, with the activation traffic of a strategy that shards or cuts layers.

        Unless it `runs`, no step is traced: the profile has the parameters of each block.
        Raises `StrategyUnavailable` for a model that the strategy cannot train.
        """
        strategy = cell.built_strategy
        costs = cost_model(strategy)
        self.check(cell, world_size, nodes)
        casts = computes_natively(strategy, cell.recipe)
        traced = partial(
            self.profile,
            cell.workload,
            cell.recipe,
            device_type=device_type,
            activations=costs.activation_sharding(),
            steps="cast" if casts else "autocast",
        )
        profile = traced() if runs else self.untraced(cell)
        if self.reference_model and getattr(cell.workload, "adapter", None) is None:
            profile = replace(profile, reference_bytes=2.0 * profile.size.parameters)
        layout = strategy.layout(world_size, nodes)
        if not runs or layout.tensor * layout.pipeline * layout.sequence == 1:
            return profile
        traffic = self.activation_traffic(cell, world_size, nodes)
        return replace(profile, size=replace(profile.size, **traffic))

    def memory_of(self, cell: Trial, world_size: int, nodes: int, **options: Any) -> RankMemory:
        """Predict the memory of the rank that holds most; `options` are those of `profile_of`.

        Raises `ShardmarkError`.
        """
        profile = self.profile_of(cell, world_size, nodes, **options)
        strategy, recipe = cell.built_strategy, cell.recipe
        return rank_memory(
            profile, strategy, recipe, world_size, nodes=nodes, device_type=options["device_type"]
        )

    def state_exceeds(self, cell: Trial, room_bytes: float) -> bool:
        """True if the model's state is larger than the room of all devices, which hold it."""
        if cell.recipe.cpu_offload:
            return False
        with suppress(ShardmarkError):  # which the trace reports
            of_one = rank_memory(self.untraced(cell), build_strategy("single", {}), cell.recipe, 1)
            return of_one.parameters + of_one.gradients + of_one.optimizer_state > room_bytes
        return False

    def untraced(self, cell: Trial) -> Profile:
        """Return a profile with the parameters of each block and no operations."""
        from shardmark.predict.trace.trace import untraced

        key = f"{cell.workload!r}, {cell.recipe.optimizer!r}, {cell.recipe.weights}"
        if key not in self._bare:
            with _named_failures(cell.workload):
                workload, model = self._model(cell.workload, cell.recipe)
                bare = untraced(workload, cell.recipe, model)
            tokens = _tokens_per_sample(workload, cell.workload)
            self._bare[key] = replace(bare, tokens_per_sample=tokens)
        return self._bare[key]

    def check(self, cell: Trial, world_size: int, nodes: int) -> None:
        """Raise `StrategyUnavailable` for a model that the cell's strategy cannot train."""
        workload, model = self._model(cell.workload, cell.recipe)
        layout = cell.built_strategy.layout(world_size, nodes)
        divides = layout.tensor * layout.pipeline * layout.sequence > 1
        key = (id(model), str(cell.strategy), *((world_size, nodes) if divides else (1, 1)))
        if key in self._checked:
            return
        with _named_failures(cell.workload):
            cell.built_strategy.check_model(workload, model, world_size, nodes)
        self._checked.add(key)

    def activation_traffic(self, cell: Trial, world_size: int, nodes: int) -> Mapping[str, Any]:
        """Return the fields of `ModelSize` about traffic between ranks inside the model."""
        from shardmark.ranks.workloads.model_building import build_on_meta

        workload, _ = self._model(cell.workload, cell.recipe)
        with _named_failures(cell.workload):
            # A new model: counting changes it.
            counted = build_on_meta(workload) or workload.build_model()
            return cost_model(cell.built_strategy).activation_traffic(
                workload, counted, Cell(recipe=cell.recipe, world_size=world_size, nodes=nodes)
            )

    def training_samples(self, options: WorkloadOptions) -> int | None:
        """Return the number of training samples; None if only a run finds it out."""
        options = options.without_weights()
        if (key := repr(options)) not in self._samples:
            try:
                count = None if options.fetches_data else check_data(options)
            except DataError:
                count = options.training_samples or STAND_INS.get(getattr(options, "dataset", ""))
            self._samples[key] = count
        return self._samples[key]

    def _model(self, options: WorkloadOptions, recipe: Recipe) -> tuple[Workload, nn.Module]:
        """Return the task, and its model, without weights if possible."""
        from shardmark.ranks.workloads import build_workload
        from shardmark.ranks.workloads.model_building import build_on_meta

        options = options.without_weights()
        if (key := repr(options)) not in self._built:
            self.notify("building the model")
            with _named_failures(options, "building its model"):
                workload = build_workload(self._with_data(options), recipe.seed)
                self._built[key] = workload, build_on_meta(workload) or workload.build_model()
        return self._built[key]

    def _data_bytes(self, options: WorkloadOptions, recipe: Recipe) -> int:
        """Return the bytes of the tensors of a task's data, which it reads again."""
        from shardmark.ranks.measure.memory.tensors import live_tensors, storage_bytes
        from shardmark.ranks.workloads import build_workload

        before = live_tensors("cpu")  # held, so that the collector frees none meanwhile
        seen: set[int] = set()
        storage_bytes(before, seen=seen)
        workload = build_workload(self._with_data(options.without_weights()), recipe.seed)
        held_bytes = storage_bytes(live_tensors("cpu"), seen=seen)
        del workload, before
        return held_bytes

    def _with_data(self, options: WorkloadOptions) -> WorkloadOptions:
        """Return the options, or those of random tokens or images where these cost the same.

        Packed samples of tokens differ in content alone.  Missing images are replaced by random
        ones of the same size.
        """
        options = without_flash(options)
        rows = rows_without_text(options) if isinstance(options, LanguageOptions) else None
        if rows is not None:
            text = {"dataset": "random", "data_dir": None, "tokenizer": "bytes"}
            few = {"training_samples": FEW_SAMPLES, "validation_samples": FEW_SAMPLES}
            return options.model_copy(
                update={**text, **few, "vocabulary": rows, "loader_workers": 0}
            )
        replaceable = isinstance(options, ClassificationOptions) and options.dataset in STAND_INS
        try:
            if not (replaceable and options.fetches_data):
                check_data(options)
                return options
        except DataError:
            if not replaceable:
                raise
        changes: dict[str, Any] = dict.fromkeys(
            ("data_dir", "training_samples", "validation_samples")
        )
        name = getattr(options, "dataset", "")
        note = f"{name} is not on this machine: random images of its size were traced."
        self.notes[note] = None
        return options.model_copy(
            update={**changes, "dataset": "random", "download": False, "loader_workers": 0}
        )


def _tokens_per_sample(workload: Workload, options: WorkloadOptions) -> float | None:
    count = workload.training_samples
    tokens = None if options.tokens_per_sample else workload.tokens_in([range(count)])
    return options.tokens_per_sample if tokens is None else tokens / count


def without_flash(options: WorkloadOptions) -> WorkloadOptions:
    """Return the options without the library FlashAttention, which a plan does not need."""
    chosen: Mapping[str, Any] = getattr(options, "model_options", {})
    if not str(chosen.get(ATTENTION)).startswith("flash_attention"):
        return options
    others = {key: value for key, value in chosen.items() if key != ATTENTION}
    return options.model_copy(update={"model_options": others})


@contextmanager
def _named_failures(options: WorkloadOptions, part: str = "a step of its model") -> Iterator[None]:
    """Turn errors of the user's model into an `InputError` that names the workload."""
    try:
        yield
    except ShardmarkError:
        raise
    except Exception as error:
        message = f"{part} fails: {type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(f"workload {options.name}", message, "make `run` work first") from error
