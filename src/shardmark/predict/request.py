"""Makes the experiment of a question about a model on machines that are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.base.errors import InputError
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import Override, load_experiment
from shardmark.predict.hardware.catalogue import Card, load_node, nodes_of
from shardmark.predict.model_name import adapter_of, experiment_of, is_experiment

PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An experiment to predict, and what was assumed."""

    experiment: Experiment
    assumed: str | None = None
    """None for an experiment that the user wrote."""
    fp8: bool = False
    """True if products inside blocks are in 8 bits, and everything else in bf16."""


def question_about(
    name: str,
    machines: Sequence[str],
    nodes: Sequence[int],
    *,
    batch: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    adapter: str | None = None,
    overrides: Sequence[str | Override] = (),
) -> Question:
    """Return the experiment of a file, a preset or a model.

    The machines choose the strategies of a model and, unless it is given, its precision.  Raises
    `InputError` for an unknown name.
    """
    fp8 = precision == "fp8"
    precision = "bf16" if fp8 else precision
    chosen = {
        "recipe.per_rank_batch": batch,
        "workload.sequence_length": sequence_length,
        "recipe.precision": precision,
    }
    if is_experiment(name):
        options = [f"{key}={value}" for key, value in chosen.items() if value is not None]
        experiment = load_experiment(name, [*options, *overrides])
        if adapter is not None:
            added = adapter_of(adapter, experiment.recipe.precision).model_dump_json()
            options.append(f"workload.adapter={added}")
            experiment = load_experiment(name, [*options, *overrides])
        return Question(experiment=experiment, fp8=fp8)
    loaded = [(load_node(node), count or nodes[-1]) for node, count in map(nodes_of, machines)]
    experiment, assumed = experiment_of(
        name,
        devices=max(node.node.devices * count for node, count in loaded),
        nodes=max(count for _, count in loaded),
        least_devices=min(node.node.devices * count for node, count in loaded),
        precision=precision or _precision([node.card for node, _ in loaded]),
        batch=batch,
        sequence_length=sequence_length,
        adapter=adapter,
        overrides=overrides,
    )
    return Question(experiment=experiment, assumed=assumed, fp8=fp8)


def _precision(cards: Sequence[Card]) -> str:
    """Return the first precision that all cards have in hardware."""
    for precision in PRECISIONS:
        try:
            for card in cards:
                card.peak(precision)
        except InputError:
            continue
        return precision
    return PRECISIONS[-1]
