"""Proposes an experiment for a training script, from what can be read in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmark.experiment.script_reading import Reading, read_script
from shardmark.experiment.script_remarks import add_remarks
from shardmark.ranks.workloads.models import MODELS, registered_names

STRATEGIES = "[single, ddp, fsdp, zero-1]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An experiment file for a script."""

    text: str
    lines: tuple[str, ...]
    """A line for each setting that was read, with its place in the script."""
    left_out: tuple[str, ...]
    """A line for what the script does and the experiment does not, such as label smoothing."""
    missing: tuple[str, ...]
    """A line for each setting that was not found, with the value that is used in its place."""


def propose(script: Path, ranks: int) -> Proposal:
    """Read the script and propose an experiment, without running the script.

    A known model and data set make the workload `classification`, with every strategy.  Other
    scripts are measured as they are, and the recipe is a comment for a task of the user's own.
    Raises `InputError` for a script that cannot be read.
    """
    reading = read_script(script)
    left_out = add_remarks(reading, script.read_text(encoding="utf-8"))
    model = reading.settings.get("model")
    if model is not None and not (_is_known(str(model.value)) or model.value.startswith("hf:")):
        del reading.settings["model"]
        reason = f"line {model.line}: `{model.source}` is no model of torchvision or timm"
        reading.unclear["model"] = reason
    recipe = [*_recipe(reading, ranks)]
    model, dataset = reading.settings.get("model"), reading.settings.get("dataset")
    is_vision = model is not None and dataset is not None and _is_known(str(model.value))
    head = [
        f"# Proposed from {script.name}, which was read and not run.  Check every line.",
        *(f"# Left out: {name} ({place})" for name, place in left_out.items()),
        f"name: {_experiment_name(script)}",
    ]
    if is_vision:
        assert model is not None
        assert dataset is not None
        body = [
            "workload:",
            "  name: classification",
            f"  model: {model.value}  # {model.place}",
            f"  dataset: {dataset.value}  # {dataset.place}",
            *_data_folder(reading),
            "recipe:",
            *(f"  {line}" for line in recipe),
            "matrix:",
            f"  strategy: {STRATEGIES}",
            f"  world_size: [{ranks}]",
        ]
    else:
        alone = "  # the script starts no process group, so that more ranks would train alike"
        sizes = [*dict.fromkeys((1, ranks))] if reading.distributed else [1]
        variants = {name: f"--strategy {name}" for name in reading.strategies}
        body = [
            "# The script as it is: Shardmark starts its ranks and measures its steps.",
            f"workload: {{name: script, command: {json.dumps(str(script))}}}",
            "recipe: {steps: 35}  # measured steps and warm-up",
            "matrix:",
            f"  variant: {json.dumps(variants or {'script': ''})}",
            f"  world_size: {json.dumps(sizes)}" + ("" if reading.distributed else alone),
            "",
            "# To compare strategies that the script does not have, write a task of your own",
            "# (`shardmark init --task tokens` writes one to change), with these settings:",
            "# workload: {name: own, task: my_task:Task}",
            "# recipe:",
            *(f"#   {line}" for line in recipe),
            f"# matrix: {{strategy: {STRATEGIES}, world_size: [{ranks}]}}",
        ]
    return Proposal(
        text="\n".join([*head, *body, ""]),
        lines=tuple(
            f"{name}: {_yaml(setting.value)} ({setting.place})"
            for name, setting in reading.settings.items()
        ),
        left_out=tuple(f"{name} ({place})" for name, place in left_out.items()),
        missing=tuple(f"{name}: {reason}" for name, reason in reading.missing.items()),
    )


def _is_known(model: str) -> bool:
    return model in MODELS or model.startswith("timm:") or model in registered_names("torchvision")


def _experiment_name(script: Path) -> str:
    letters = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in script.stem
    )
    return letters.strip("-") or "script"


def _yaml(value: Any) -> str:
    if isinstance(value, float):  # YAML 1.1 takes 1e-05 for text
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return json.dumps(value)


def _data_folder(reading: Reading) -> Iterator[str]:
    folder = reading.settings.get("data_dir")
    if folder is not None:
        yield f"  data_dir: {json.dumps(str(folder.value))}  # {folder.place}"
    elif "data_dir" in reading.unclear:
        yield "  data_dir: data  # not found in the script; the folder of the data set"


def _recipe(reading: Reading, ranks: int) -> Iterator[str]:
    """Yield the lines of the recipe, with the lines of the script, or that nothing was found."""
    settings = reading.settings

    def line(key: str, setting: str, default: Any) -> str:
        if setting in settings:
            return f"{key}: {_yaml(settings[setting].value)}  # {settings[setting].place}"
        return f"{key}: {_yaml(default)}  # not found in the script"

    batch, accumulation = settings.get("batch"), settings.get("gradient_accumulation")
    if batch is None:
        yield f"global_batch: {32 * ranks}  # not found in the script; samples of a step, all ranks"
    else:
        factors = {"ranks": ranks if reading.distributed else 1}
        factors["micro-batches"] = 1 if accumulation is None else accumulation.value
        used = {name: factor for name, factor in factors.items() if factor != 1}
        total = batch.value
        for factor in used.values():
            total *= factor
        times = "".join(f" x {factor} {name}" for name, factor in used.items())
        yield f"global_batch: {total}  # {batch.place}{times}"
    yield line("steps", "steps", 200) if "steps" in settings else line("epochs", "epochs", 1)
    optimizer = {
        name.partition(".")[2]: setting
        for name, setting in settings.items()
        if name.startswith("optimizer.")
    }
    if "name" in optimizer:
        values = ", ".join(f"{key}: {_yaml(s.value)}" for key, s in optimizer.items())
        yield f"optimizer: {{{values}}}  # {optimizer['name'].place}"
    else:
        yield "optimizer: {name: sgd, lr: 0.01}  # not found in the script"
    schedule = {name: s for name, s in settings.items() if name.startswith("schedule.")}
    if schedule:
        values = ", ".join(f"{n.partition('.')[2]}: {_yaml(s.value)}" for n, s in schedule.items())
        yield f"schedule: {{{values}}}  # {next(iter(schedule.values())).place}"
    yield line("precision", "precision", "fp32")
    yield line("seed", "seed", 0)
    for name in ("gradient_accumulation", "gradient_clipping", "compile"):
        if name in settings:
            yield line(name, name, None)
    if "activation_checkpointing" in settings:
        yield line("activation_checkpointing", "activation_checkpointing", default=False)
