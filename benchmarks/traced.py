"""Profiles of published models, traced once and stored in `data/profiles.json.gz`.

    python benchmarks/traced.py

traces them again, which takes minutes, needs torchvision and timm, and is due when the tracer or
the list changes.  A test traces one of them.  Transformers of timm store the scores of attention,
as they did when the published runs were made.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args

from shardmark.config.load import from_mapping
from shardmark.core.traffic import ModelSize
from shardmark.predict.models import Models
from shardmark.predict.profile import Amount, Kind, Operation, Profile, Unit

FILE = Path(__file__).with_name("data") / "profiles.json.gz"
KINDS = get_args(Kind)
GROUPS = 8
"""Units of a stored profile: consecutive units with about equal work are one."""
DIGITS = 3


@cache
def _stored() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return content


def key_of(model: str, size: int, precision: str) -> str:
    """Name of a profile; all 16-bit types have the same."""
    return f"{model} {size} {'fp32' if precision == 'fp32' else '16'}"


@cache
def load(key: str) -> Profile | None:
    """The stored profile of a model; None if it was not traced."""
    if key not in _stored():
        return None
    tensors, units = _stored()[key]
    made = tuple(
        Unit(
            name=str(number),
            parameters=parameters,
            trained_parameters=parameters,
            forward=tuple(map(_operation, forward)),
            backward=tuple(map(_operation, backward)),
        )
        for number, (parameters, forward, backward) in enumerate(units)
    )
    total = sum(unit.parameters for unit in made)
    size = ModelSize(
        parameters=total,
        trained_parameters=total,
        trained_matrices=((1, total // tensors, tensors),),
    )
    return Profile(units=made, size=size)


def _operation(numbers: list[float]) -> Operation:
    kind, calls, flops, fixed_flops, moved, fixed_moved = numbers
    return Operation(
        kind=KINDS[int(kind)],
        calls=calls,
        flops=Amount(per_sample=flops, fixed=fixed_flops).times(calls),
        bytes=Amount(per_sample=moved, fixed=fixed_moved).times(calls),
    )


def condensed(profile: Profile) -> list[Any]:
    """The numbers of a profile that its step time depends on."""
    work = [sum(o.flops.per_sample for o in (*u.forward, *u.backward)) for u in profile.units]
    groups: list[tuple[int, list[Operation], list[Operation]]] = [
        (0, [], []) for _ in range(GROUPS)
    ]
    done = 0.0
    for unit, flops in zip(profile.units, work, strict=True):
        at = min(GROUPS - 1, int(GROUPS * (done + flops / 2) / sum(work)))
        parameters, forward, backward = groups[at]
        groups[at] = (
            parameters + unit.parameters,
            [*forward, *unit.forward],
            [*backward, *unit.backward],
        )
        done += flops
    units = [
        [parameters, _merged(forward), _merged(backward)]
        for parameters, forward, backward in groups
        if forward or backward
    ]
    return [profile.size.trained_tensors, units]


def _merged(operations: Iterable[Operation]) -> list[list[float]]:
    """Numbers of the operations, of which those with the same work are one."""
    calls: Counter[tuple[float, ...]] = Counter()
    for each in operations:
        amounts = (
            *(each.flops.per_sample, each.flops.fixed),
            *(each.bytes.per_sample, each.bytes.fixed),
        )
        work = (float(f"{amount / each.calls:.{DIGITS}g}") for amount in amounts)
        calls[KINDS.index(each.kind), *work] += round(each.calls)
    return [[kind, count, *work] for (kind, *work), count in calls.items()]


def traced(model: str, size: int, precision: str) -> Profile:
    """Trace a picture model of torchvision or timm."""
    workload = {"name": "classification", "dataset": "random", "training_samples": 8}
    experiment = from_mapping(
        {
            "name": "traced",
            "workload": workload | {"model": model, "image_size": size},
            "recipe": {
                **{"per_rank_batch": 8, "steps": 1, "optimizer": {"name": "sgd", "momentum": 0.9}},
                "precision": precision,
            },
            "matrix": {"strategy": ["single"], "world_size": [1]},
        }
    )
    return Models().profile(experiment.workload, experiment.recipe)


def main() -> None:
    os.environ["TIMM_FUSED_ATTN"] = "0"
    profiles = {}
    for key in _stored():
        model, size, precision = key.split()
        profile = traced(model, int(size), precision if precision == "fp32" else "fp16")
        profiles[key] = condensed(profile)
        print(key, flush=True)
    write(profiles)


def write(profiles: dict[str, Any]) -> None:
    content = json.dumps(profiles, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    main()
