"""Profiles of published models, traced once and stored in `data`: `profiles.json.gz` for their
times, `memory.json.gz` for their memory.

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
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from shardmark.base.traffic import ModelSize
from shardmark.experiment.load import from_mapping
from shardmark.predict.models import Models
from shardmark.predict.profile import Amount, Kind, Operation, Profile, Unit

FILE = Path(__file__).with_name("data") / "profiles.json.gz"
MEMORY = FILE.with_name("memory.json.gz")
PROFILE = TypeAdapter(Profile)
BERT = {"model": "hf:bert", "objective": "masked", "vocabulary": 30522, "sequence_length": 512}
BERT_LARGE = {
    **{"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    **{"intermediate_size": 4096, "attn_implementation": "eager"},
}
GPT2_XL = {"n_layer": 48, "n_embd": 1600, "n_head": 25, "attn_implementation": "eager"}
TEXTS: dict[str, dict[str, Any]] = {
    "bert-base": BERT,
    "bert-large eager": BERT | {"model_options": BERT_LARGE},
    "gpt2-xl eager": {"model": "hf:gpt2", "sequence_length": 128, "model_options": GPT2_XL},
}
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
    """Trace a language model of `TEXTS`, or a picture model of torchvision or timm."""
    name, checkpointed, _ = model.partition(" checkpointed")
    workload: dict[str, Any] = {"name": "classification", "dataset": "random", "model": model}
    workload |= {"training_samples": 8, "image_size": size}
    if name in TEXTS:
        workload = {"name": "language", "dataset": "stdlib", "tokenizer": "bytes", **TEXTS[name]}
    optimizer = {"name": "adamw"} if name in TEXTS else {"name": "sgd", "momentum": 0.9}
    experiment = from_mapping(
        {
            "name": "traced",
            "workload": workload,
            "recipe": {
                **{"per_rank_batch": 8, "steps": 1, "optimizer": optimizer},
                **{"precision": precision, "activation_checkpointing": bool(checkpointed)},
            },
            "matrix": {"strategy": ["single"], "world_size": [1]},
        }
    )
    return Models().profile(experiment.workload, experiment.recipe)


@cache
def memory_profile(key: str) -> Profile:
    """The stored profile of a model with the moments of its memory, without its operations."""
    return PROFILE.validate_python(json.loads(gzip.decompress(MEMORY.read_bytes()))[key])


def without_operations(profile: Profile) -> Profile:
    units = tuple(replace(unit, forward=(), backward=()) for unit in profile.units)
    native = profile.native and without_operations(profile.native)
    return replace(profile, units=units, native=native)


def main() -> None:
    os.environ["TIMM_FUSED_ATTN"] = "0"
    for file, stored in ((FILE, condensed), (MEMORY, _dumped)):
        profiles = {}
        for key in json.loads(gzip.decompress(file.read_bytes())):
            model, size, precision = key.rsplit(" ", 2)
            found = traced(model, int(size), "fp32" if precision == "fp32" else "fp16")
            profiles[key] = stored(found)
            print(key, flush=True)
        write(profiles, file)


def _dumped(profile: Profile) -> Any:
    content = PROFILE.dump_python(without_operations(profile), mode="json", exclude_defaults=True)
    return _rounded(content)


def _rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_rounded(value) for value in content]
    return float(f"{content:.{DIGITS + 2}g}") if isinstance(content, float) else content


def write(profiles: dict[str, Any], file: Path = FILE) -> None:
    content = json.dumps(profiles, separators=(",", ":")).encode()
    file.write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    main()
