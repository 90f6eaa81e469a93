"""Settings of trainers in a script, and what it does that an experiment file cannot express."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from shardmark.experiment.script_reading import Reading, Setting

OPTIMIZERS_OF_TRAINER = ("adamw", "adafactor", "sgd")
"""First parts of `optim`, such as `adamw_torch_fused`, that Shardmark has."""
SCHEDULES_OF_TRAINER = ("linear", "cosine", "constant")
TRAINERS = re.compile(r"HfArgumentParser|\w*Trainer")
"""Classes that start the process group themselves."""
AUGMENTATIONS = re.compile(
    r"Random(?!State|Sampler)[A-Z]\w+|ColorJitter|(Auto|Rand)Augment|TrivialAugment\w*|(?i:mixup|cutmix)"
)
"""Classes that change images at random."""
NOT_EXPRESSED = ("label_smoothing", "label_smoothing_factor")
"""Arguments of losses and trainers without a key in an experiment file."""


def add_remarks(reading: Reading, source: str) -> dict[str, str]:
    """Correct the settings by those of transformers' classes; return what is left out, by line."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    for call in calls:
        name = _last(call.func)
        reading.distributed |= bool(TRAINERS.fullmatch(name))
        if name == "TrainingArguments":
            _read_arguments(reading, call)
        elif name == "from_pretrained" and isinstance(call.func, ast.Attribute) and call.args:
            owner, model = _last(call.func.value), call.args[0]
            if "Model" in owner or "For" in owner:
                value = _literal(model)
                _put(reading, "model", model, f"hf:{value}" if isinstance(value, str) else None)
    return dict(item for call in calls for item in _left_out(call))


def _read_arguments(reading: Reading, call: ast.Call) -> None:
    """Read optimizer and schedule, whose defaults are AdamW and a linear decay."""
    words = {word.arg: word.value for word in call.keywords}
    optimizer, schedule = words.get("optim"), words.get("lr_scheduler_type")
    kind = "adamw" if optimizer is None else str(_literal(optimizer)).partition("_")[0]
    _put(reading, "optimizer.name", optimizer or call, _one_of(kind, OPTIMIZERS_OF_TRAINER))
    kind = "linear" if schedule is None else _literal(schedule)
    _put(reading, "schedule.name", schedule or call, _one_of(kind, SCHEDULES_OF_TRAINER))


def _left_out(call: ast.Call) -> Iterator[tuple[str, str]]:
    words = {word.arg: word.value for word in call.keywords}
    for name in NOT_EXPRESSED:
        if name in words and _literal(words[name]) != 0:
            yield name, f"line {call.lineno}: {name}={ast.unparse(words[name])}"
    name = _last(call.func)
    if AUGMENTATIONS.fullmatch(name):
        yield f"augmentation by {name}", f"line {call.lineno}: {ast.unparse(call)[:60]}"
    trains = "sampler" in words or ("shuffle" in words and _literal(words["shuffle"]) is not False)
    if name == "DataLoader" and trains and _literal(words.get("drop_last", call)) is not True:
        yield "incomplete last batch of an epoch", f"line {call.lineno}: without drop_last=True"
    if name == "WeightedRandomSampler":
        yield "weighted sampling", f"line {call.lineno}"


def _put(reading: Reading, name: str, node: ast.expr, value: Any) -> None:
    """Replace a setting; without a value it is not known."""
    source = " ".join(ast.unparse(node).split())[:60]
    reading.settings.pop(name, None)
    if value is None:
        reading.unclear[name] = f"line {node.lineno}: `{source}` is not translated"
    else:
        reading.settings[name] = Setting(value=value, line=node.lineno, source=source)


def _one_of(value: Any, names: tuple[str, ...]) -> str | None:
    return value if value in names else None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None


def _last(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return ast.unparse(node).rpartition(".")[2]
