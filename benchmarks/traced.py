"""Profiles of published models, traced once and stored in `data`: `profiles.json.gz` for their
times, `memory.json.gz` for their memory.

    python benchmarks/traced.py [--again]

traces what the questions of the rows lack, or all of it, which takes half an hour, needs
torchvision and timm, and is due when the tracer changes.  A test traces one of them.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.layout import REPLICATED_ACTIVATIONS, ActivationSharding
from shardmark.base.recipe import Recipe
from shardmark.experiment.load import from_mapping
from shardmark.predict.models import Models, Steps
from shardmark.predict.profile import Amount, Kind, Operation, Profile, Unit
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads.options import WorkloadOptions

DATA = Path(__file__).with_name("data")
FILE, MEMORY = DATA / "profiles.json.gz", DATA / "memory.json.gz"
QUESTIONS = tuple(DATA / f"{name}.csv" for name in ("published", "recent", "unseen"))
PROFILE, UNIT = TypeAdapter(Profile), TypeAdapter(Unit)
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
PARTS = ("fixed", "per_sample", "replicated_fraction")
DIGITS = 3


class StoredModels(Models):
    """Models whose profiles are stored; with `traces`, a missing one is traced and stored."""

    def __init__(self, stored: dict[str, Any], *, traces: bool = False) -> None:
        super().__init__()
        self.stored = stored
        self._traces = traces
        self._loaded: dict[str, Profile] = {}

    def profile(
        self,
        options: WorkloadOptions,
        recipe: Recipe,
        *,
        device_type: str = "cuda",
        activations: ActivationSharding = REPLICATED_ACTIVATIONS,
        steps: Steps = "both",
    ) -> Profile:
        key = key_of(options, recipe)
        if key not in self.stored:
            if not self._traces:
                raise InputError(key, "it is not traced", "run benchmarks/traced.py")
            found = Models().profile(
                options, recipe, device_type=device_type, activations=activations
            )
            self.stored[key] = condensed(found)
        if key not in self._loaded:
            self._loaded[key] = expanded(self.stored[key])
        loaded = self._loaded[key]
        return (loaded.native if steps == "cast" else None) or loaded

    def check(self, cell: Trial, world_size: int, nodes: int) -> None:
        """Build no model."""

    def state_exceeds(self, cell: Trial, room_bytes: float) -> bool:  # noqa: ARG002
        """Take the stored profile: what is published fitted."""
        return False


def key_of(options: WorkloadOptions, recipe: Recipe) -> str:
    """Text of all that a profile depends on; 16-bit types are one, and so is full recomputation."""
    repeats = recipe.activation_checkpointing
    settings = {
        "precision": "fp32" if recipe.precision == "fp32" else "16",
        "repeats": None if isinstance(repeats, bool) else repeats,
        "compile": recipe.compile,
        "weights": recipe.weights,
        "optimizer": recipe.optimizer.model_dump(exclude_defaults=True, exclude={"lr"}),
    }
    task = options.without_weights().model_dump(exclude_defaults=True)
    return json.dumps(task | settings, sort_keys=True, separators=(",", ":"))


def condensed(profile: Profile) -> dict[str, Any]:
    """The numbers of a profile that its step time depends on; alike units are stored once."""
    units = [
        _rounded(UNIT.dump_python(_merged(u), mode="json", exclude_defaults=True))
        for u in profile.units
    ]
    distinct = [unit for at, unit in enumerate(units) if unit not in units[:at]]
    rest = replace(profile, units=(), native=None, trained_shapes=())
    content = _rounded(PROFILE.dump_python(rest, mode="json", exclude_defaults=True))
    native = {} if profile.native is None else {"native": condensed(profile.native)}
    return {**content, **native, "units": distinct, "order": [*map(distinct.index, units)]}


def expanded(content: dict[str, Any]) -> Profile:
    """The profile of its condensed numbers."""
    distinct = [UNIT.validate_python(unit) for unit in content["units"]]
    units = tuple(distinct[at] for at in content["order"])
    left_out = {"units", "order", "native"}
    rest = {key: value for key, value in content.items() if key not in left_out}
    native = expanded(content["native"]) if "native" in content else None
    return replace(PROFILE.validate_python({**rest, "units": []}), units=units, native=native)


def _merged(unit: Unit) -> Unit:
    """The unit without its memory; operations with the same work are one."""
    numbers: dict[str, Any] = {
        name: getattr(unit, name)
        for name in ("parameters", "trained_parameters", "sizes", "block", "frozen_element_bytes")
    }
    for name in ("forward", "backward", "repeated"):
        numbers[name] = tuple(_of_equal_work(getattr(unit, name)))
    return Unit(name="", **numbers)


def _of_equal_work(operations: Iterable[Operation]) -> Iterable[Operation]:
    calls: dict[tuple[Kind, Amount, Amount], float] = defaultdict(float)
    for each in operations:
        flops, moved = (
            Amount(**_rounded({name: getattr(amount, name) / each.calls for name in PARTS}))
            for amount in (each.flops, each.bytes)
        )
        calls[each.kind, flops, moved] += each.calls
    for (kind, flops, moved), count in calls.items():
        yield Operation(kind=kind, flops=flops.times(count), bytes=moved.times(count), calls=count)


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
    from benchmarks.published import case_of, rows_of

    os.environ["TIMM_FUSED_ATTN"] = "0"
    again = "--again" in sys.argv[1:]
    if again:
        memory = {}
        for key in json.loads(gzip.decompress(MEMORY.read_bytes())):
            model, size, precision = key.rsplit(" ", 2)
            memory[key] = _dumped(traced(model, int(size), precision.replace("16", "fp16")))
        write(memory, MEMORY)
    models = StoredModels({} if again else stored(), traces=True)
    rows = [row for file in QUESTIONS for row in rows_of(file)]
    for row in rows:
        known = len(models.stored)
        with suppress(ValueError, ShardmarkError):
            case_of(row, models)
        if len(models.stored) > known:
            print(row["id"], row["model"], flush=True)
            write(models.stored, FILE)


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


@cache
def stored() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return content


MODELS = StoredModels(stored())


if __name__ == "__main__":
    main()
