from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardmark.config.json_schema import experiment_schema


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for inner in schema.values():
            yield from _references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _references(inner)


def test_every_reference_leads_somewhere() -> None:
    schema = experiment_schema()
    references = set(_references(schema))
    assert references
    assert references <= {f"#/$defs/{name}" for name in schema["$defs"]}


def test_strategy_entries_are_a_name_or_a_mapping_with_options() -> None:
    matrix = experiment_schema()["properties"]["matrix"]
    names, *entries = matrix["properties"]["strategy"]["items"]["oneOf"]
    assert names == {"enum": ["alone", "both", "both-1", "served"]}
    by_name = {entry["properties"]["name"]["const"]: entry for entry in entries}
    assert set(by_name) == set(names["enum"])
    shared = {"precision", "activation_checkpointing", "gradient_accumulation", "cpu_offload"}
    assert set(by_name["both"]["properties"]) == {"name", "bucket_mb", "stage"} | shared
    assert set(by_name["both-1"]["properties"]) == {"name", "bucket_mb"} | shared
    assert not by_name["both"]["additionalProperties"]


def test_axes_have_full_and_short_keys() -> None:
    axes = experiment_schema()["properties"]["matrix"]["properties"]
    assert {"recipe.precision", "precision", "recipe.optimizer.lr", "lr", "world_size"} <= set(axes)
    assert {"workload.model", "strategy.bucket_mb", "strategy.staleness"} <= set(axes)
    assert not {"warmup_steps", "measure.repeats", "strategy.precision"} & set(axes)
    assert axes["precision"]["items"]["enum"] == ["fp32", "bf16", "fp16"]
    assert axes["precision"]["type"] == "array"


def test_slow_ranks_are_a_key_and_an_axis() -> None:
    properties = experiment_schema()["properties"]
    slow = properties["slow_ranks"]
    assert slow["description"].startswith("Rank -> factor, at least 1")
    assert slow["propertyNames"] == {"pattern": "^[0-9]+$"}
    assert slow["additionalProperties"] == {"maximum": 1000, "minimum": 1, "type": "number"}
    axis = properties["matrix"]["properties"]["slow_ranks"]
    assert axis["items"]["additionalProperties"] == slow["additionalProperties"]


def test_keys_have_their_meanings() -> None:
    schema = experiment_schema()
    assert schema["properties"]["matrix"]["description"].startswith("Dotted key -> the values")
    recipe = schema["$defs"]["Recipe"]["properties"]
    assert recipe["global_batch"]["description"].startswith("Samples per optimizer step")


def test_workloads_are_told_apart_by_name() -> None:
    toy, needy = experiment_schema()["properties"]["workload"]["oneOf"]
    assert (toy["properties"]["name"], toy["required"]) == ({"const": "toy"}, ["name"])
    assert needy["required"] == ["name", "vocabulary"]


def test_placement_is_a_key_and_an_axis_and_engines_are_told_apart_by_name() -> None:
    properties = experiment_schema()["properties"]
    axes = properties["matrix"]["properties"]
    assert {"placement.nodes", "nodes", "placement.ranks_per_node", "ranks_per_node"} <= set(axes)
    names, *engines = properties["engine"]["oneOf"]
    assert [engine["properties"]["name"]["const"] for engine in engines] == names["enum"]
    assert "rendezvous" in engines[names["enum"].index("torchrun")]["properties"]
