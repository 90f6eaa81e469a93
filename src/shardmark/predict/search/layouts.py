"""Finds the layouts that a model allows, and turns the best one into an experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.layout import Mesh
from shardmark.base.machine import Machine
from shardmark.base.recipe import Recipe
from shardmark.base.traffic import ModelSize
from shardmark.experiment.experiment import Experiment
from shardmark.predict.hardware.catalogue import NodeType
from shardmark.predict.models import Models, without_flash
from shardmark.predict.search.search import LAYERED, Division, Search, Searcher
from shardmark.predict.step import Factors
from shardmark.predict.timing import Constants
from shardmark.ranks.trial import StrategySpec, Trial

MOST_STAGES = 64
CHECKPOINTING = (False, True)


def searcher_of(
    cell: Trial,
    node: NodeType,
    nodes: int,
    models: Models,
    *,
    constants: Constants,
    factors: Factors,
) -> Searcher:
    """Return a search over layouts of the cell's model and recipe; its strategy is ignored."""
    recipe = cell.recipe.model_copy(update={"gradient_accumulation": 1, "cpu_offload": False})
    recipes = {
        checkpointed: recipe.model_copy(update={"activation_checkpointing": checkpointed})
        for checkpointed in CHECKPOINTING
    }
    profiles = {
        checkpointed: models.profile(cell.workload, changed, device_type=node.card.device_type)
        for checkpointed, changed in recipes.items()
    }

    @cache
    def inside(again: bool, tensor: int) -> Mapping[str, Any]:
        return models.activation_traffic(_divided(cell, recipes[again], tensor, 1), tensor, 1)

    @cache
    def between(pipeline: int) -> Mapping[str, Any]:
        return models.activation_traffic(_divided(cell, recipe, 1, pipeline), pipeline, 1)

    sizes: dict[Division, ModelSize] = {}
    divisions = [*_divisions(cell, recipe, node, nodes, models)]
    least = min((tensor for tensor, _ in divisions if tensor > 1), default=1)
    for (tensor, pipeline), again in product(divisions, recipes):
        # What passes inside of layers is the same for any number of ranks.
        traffic = {
            **(inside(again, least) if tensor > 1 else {}),
            **(between(pipeline) if pipeline > 1 else {}),
        }
        sizes[again, tensor, pipeline] = replace(profiles[again].size, **traffic)
    return Searcher(
        profiles=profiles,
        sizes=sizes,
        recipe=recipe,
        node=node,
        ranks=node.node.devices * nodes,
        nodes=nodes,
        constants=constants,
        factors=factors,
    )


def _divisions(
    cell: Trial, recipe: Recipe, node: NodeType, nodes: int, models: Models
) -> Iterator[tuple[int, int]]:
    """Yield the numbers of tensor ranks (within a node) and of stages that the model allows."""
    devices = node.node.devices
    ranks = devices * nodes
    machine = Machine(device_type="cuda", device_count=ranks, cores=ranks, is_predicted=True)
    for tensor in (size for size in range(1, devices + 1) if devices % size == 0):
        for pipeline in (size for size in range(1, MOST_STAGES + 1) if ranks % size == 0):
            parts = tensor * pipeline
            if ranks % parts:
                continue
            with suppress(StrategyUnavailable):
                if parts > 1:
                    divided = _divided(cell, recipe, tensor, pipeline)
                    strategy = divided.built_strategy
                    strategy.check(parts, machine, divided.recipe)
                    models.check(divided, parts, 1)
                yield tensor, pipeline


def _divided(cell: Trial, recipe: Recipe, tensor: int, pipeline: int) -> Trial:
    """Return the cell with its layers divided, and with samples for each stage."""
    mesh = {"tensor": tensor, "pipeline": pipeline}
    batch = {"global_batch": None, "per_rank_batch": 2 * pipeline}
    return cell.changed(
        strategy=StrategySpec(name=LAYERED, options={"mesh": mesh}),
        recipe=recipe.model_copy(update=batch),
    )


def winner_of(search: Search, experiment: Experiment, cell: Trial) -> Experiment | None:
    """Return the fastest layout as the experiment's only cell; None if nothing fits."""
    if not search.front:
        return None
    best = search.front[0]
    options = {
        name: value.model_dump(exclude_defaults=True) if isinstance(value, Mesh) else value
        for name, value in best.options.items()
    }
    content = experiment.model_dump(mode="json")
    recipe = {
        **cell.recipe.model_dump(mode="json"),
        "activation_checkpointing": best.activation_checkpointing,
        "cpu_offload": best.cpu_offload,
        "gradient_accumulation": best.gradient_accumulation,
    }
    return Experiment.model_validate(
        {
            **content,
            "name": f"{experiment.name}-best",
            "workload": without_flash(cell.workload).model_dump(mode="json"),
            "recipe": recipe,
            "matrix": {
                "strategy": [{"name": best.strategy, **options}],
                "world_size": [search.ranks],
            },
            "placement": {"nodes": search.nodes},
        }
    )
