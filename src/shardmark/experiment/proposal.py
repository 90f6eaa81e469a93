"""Proposes an experiment for a training script, from the record of its first step."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from shardmark.base.errors import InputError
from shardmark.base.files.scratch import scratch_folder
from shardmark.base.recipe import Optimizer
from shardmark.base.text import counted
from shardmark.scripts.command import ScriptCommand
from shardmark.scripts.launch import launch, read_records, starter
from shardmark.scripts.recording import Plan
from shardmark.scripts.start import described_writes

if TYPE_CHECKING:
    from shardmark.scripts.record import OptimizerFacts, Record

SEEN = "seen in the first step"
OPTIMIZERS = {name: name.lower() for name in ("SGD", "Adam", "AdamW", "Adafactor", "Muon")}
"""Classes of torch and transformers -> names of the recipe."""
SCHEDULES = {("CosineAnnealingLR",): "cosine"}
PRECISIONS = {2.0**-7: "bf16", 2.0**-10: "fp16", 2.0**-11: "fp32", 2.0**-23: "fp32"}
"""Rounding error of the least precise results in a forward pass -> precision; 2**-11 is TF32."""
USUAL_SAMPLERS = re.compile("((Random|Sequential|Distributed|SeedableRandom)Sampler)?")
SAME_TRAINING = {"foreach", "fused", "capturable", "differentiable"}
"""Options of optimizers that leave the training as it is."""


@dataclass(slots=True, kw_only=True)
class Proposal:
    """An experiment file for a script."""

    text: str = ""
    recipe: list[str] = field(default_factory=list)
    """Lines of the recipe for a task of the user's own."""
    seen: list[str] = field(default_factory=list)
    """A line for each setting that the first step showed."""
    left_out: list[str] = field(default_factory=list)
    """A line for what the script does and an experiment cannot express."""
    missing: list[str] = field(default_factory=list)
    """A line for each setting that was not seen, with the value that is used in its place."""

    def see(self, key: str, value: Any, source: str = "") -> None:
        note = f"{source}, {SEEN}" if source else SEEN
        self.seen.append(f"{key}: {_yaml(value)} ({note})")
        self.recipe.append(f"{key}: {_yaml(value)}  # {note}")

    def miss(self, key: str, default: Any, reason: str) -> None:
        self.missing.append(f"{key}: {reason}; {_yaml(default)} is used")
        self.recipe.append(f"{key}: {_yaml(default)}  # not found: {reason}")


def record_first_step(
    command: ScriptCommand, seconds: float, *, writes_are_fine: bool = False
) -> tuple[Record, str]:
    """Let one process take a script's first step; return its record, and where the script wrote.

    Raises `InputError` if it takes none that can be recorded.
    """
    with scratch_folder() as folder, starter(folder, writes_are_fine=writes_are_fine) as start:
        plan = Plan(directory=str(folder / "record"), steps=1)
        started = launch(start, command, 1, plan)
        try:
            (record, *_), _ = read_records(started, plan, ranks=1, seconds=seconds)
        finally:
            started.end()
        if not record.steps:
            remedy = "`shardmark init --task script` writes an experiment to change"
            raise InputError("command", f"its first step is not seen: {record.refusal}", remedy)
        return record, described_writes(Path(plan.directory))


def propose(record: Record, command: ScriptCommand, ranks: int) -> Proposal:
    """Propose an experiment from the record of the first step that one process took.

    The script is measured as it is; the recipe is a comment for a task of the user's own.
    """
    proposal = Proposal()
    _read_batch(proposal, record, ranks)
    proposal.miss("epochs", 1, "the first step does not show how long the script trains")
    _read_optimizer(proposal, record, command)
    schedules = tuple(dict.fromkeys(record.schedules))
    if schedules in SCHEDULES:
        proposal.see("schedule", {"name": SCHEDULES[schedules]}, *schedules)
    elif schedules:
        reason = f"{', '.join(schedules)} is not translated"
        proposal.miss("schedule", {"name": "constant"}, reason)
    _read_precision(proposal, record)
    if record.seed is not None and record.seed < 2**32:
        proposal.see("seed", record.seed)
    else:
        proposal.miss("seed", 0, "the script does not seed torch")
    for clip in record.steps[0].last_clips[:1]:
        if clip.function == "clip_grad_value_":
            proposal.left_out.append(f"clipping of each value of a gradient at {clip.limit:g}")
        elif 0 < clip.limit < math.inf:
            proposal.see("gradient_clipping", clip.limit)
    first, *others = command.script
    name = others[0].rpartition(".")[2] if first == "-m" else Path(first).stem
    sizes = f"{[*dict.fromkeys((1, ranks))]}"
    if not (record.joined or record.frameworks):
        sizes = "[1]  # one process joined no process group: add ranks if it trains on several"
    template = files("shardmark.experiment") / "templates" / "proposal.yaml"
    proposal.text = Template(template.read_text(encoding="utf-8")).substitute(
        command=json.dumps(command.text),
        left_out="".join(f"# Left out: {line}\n" for line in proposal.left_out),
        name=re.sub(r"[^A-Za-z0-9]", "-", name).strip("-") or "script",
        world_size=sizes,
        recipe="".join(f"#   {line}\n" for line in proposal.recipe),
        ranks=ranks,
    )
    return proposal


def _read_batch(proposal: Proposal, record: Record, ranks: int) -> None:
    """Read the global batch: rows of a micro-batch, times micro-batches, times ranks."""
    forwards = [forward for forward in record.forwards if not forward.step]
    fed = [micro for micro in record.steps[0].micros if micro.loaders]
    numbers = {number for micro in fed for number in micro.loaders}
    loader = next((one for one in record.loaders if one.number in numbers), None)
    accumulation = len(fed) or len({forward.micro for forward in forwards}) or 1
    rows = next((forward.rows for forward in forwards), 0)
    source = f"{rows} rows of the model's first input"
    if loader is not None and loader.batch_size:
        rows = loader.batch_size
        samples = "" if loader.samples is None else f" of {counted(loader.samples, 'sample')}"
        source = f"DataLoader{samples} with batches of {rows}"
    if loader is not None and not USUAL_SAMPLERS.fullmatch(loader.sampler):
        proposal.left_out.append(f"the order of samples by {loader.sampler}")
    if not rows:
        proposal.miss("global_batch", 32 * ranks, "the model's first input is no batch of tensors")
        return
    factors = {"micro-batches": accumulation, "ranks": ranks}
    source += "".join(f" x {n} {name}" for name, n in factors.items() if n != 1)
    proposal.see("global_batch", rows * accumulation * ranks, source)
    if accumulation > 1:
        proposal.see("gradient_accumulation", accumulation)


def _read_optimizer(proposal: Proposal, record: Record, command: ScriptCommand) -> None:
    """Read the first optimizer, with the settings of its first group of parameters."""
    first, *others = record.optimizer_facts
    groups = record.steps[0].settings
    settings = {**groups[0], "lr": first.initial_lr or Optimizer().lr}
    proposal.see("optimizer", _optimizer(first, settings, command), first.path)
    if not first.initial_lr:
        default = settings["lr"]
        proposal.missing.append(f"optimizer.lr: no rate above 0 was seen; {default} is used")
    for number, group in enumerate(groups[1:], 2):
        if different := {key: n for key, n in group.items() if n != groups[0].get(key)}:
            values = ", ".join(f"{key} {n:g}" for key, n in different.items())
            proposal.left_out.append(f"settings of parameter group {number} ({values})")
    proposal.left_out += [f"the optimizer {other.path}" for other in others]


def _optimizer(
    facts: OptimizerFacts, settings: Mapping[str, float], command: ScriptCommand
) -> dict[str, Any]:
    """Return the optimizer of the recipe; one without a name there has its class and options."""
    module, _, kind = facts.path.partition(":")
    values: dict[str, Any] = {key: n for key, n in settings.items() if n and "[" not in key}
    for key in (key.removesuffix("[0]") for key in settings if key.endswith("[0]")):
        values[key] = [n for name, n in settings.items() if name.startswith(f"{key}[")]
    switches = {*facts.switches} - SAME_TRAINING
    if "decoupled_weight_decay" in switches:  # AdamW is an Adam with this option
        switches.remove("decoupled_weight_decay")
        kind = "AdamW" if kind == "Adam" else kind
    values |= dict.fromkeys(sorted(switches), True)
    name = OPTIMIZERS.get(kind, "own") if module.startswith(("torch.", "transformers.")) else "own"
    keys = {"lr", *Optimizer.KEYS[name]}
    if name != "own" and switches <= keys:
        return {"name": name} | {key: value for key, value in values.items() if key in keys}
    module = command.script[0] if module == "__main__" else module
    rate = values.pop("lr")
    return {"name": "own", "path": f"{module}:{kind}", "lr": rate, "options": values}


def _read_precision(proposal: Proposal, record: Record) -> None:
    precision = PRECISIONS.get(record.epsilon)
    if precision is None:
        proposal.miss("precision", "fp32", "the model returned no number of 16 or 32 bits")
        return
    proposal.see("precision", precision)
    if record.epsilon == 2.0**-11:
        proposal.see("tf32", value=True)
    if record.optimizer_facts[0].types == ["bfloat16"]:
        proposal.see("weights", "bf16")


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_yaml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, float):  # YAML 1.1 takes 1e-05 for text; a tensor's number has 7 digits
        text = repr(float(f"{value:.7g}"))
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
