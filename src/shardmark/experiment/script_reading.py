"""Reads batch, optimizer, precision and more from a training script, without running it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import add, floordiv, mul, truediv
from pathlib import Path
from typing import Any

from shardmark.base.errors import InputError

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"name": "sgd", "lr": 1e-3},
    "Adam": {"name": "adam", "lr": 1e-3},
    "AdamW": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
}
"""Optimizers of torch, with its defaults where Shardmark has others."""
OPTIMIZER_KEYS = ("lr", "momentum", "dampening", "nesterov", "betas", "eps", "weight_decay")
DATASETS = {"CIFAR10": "cifar10", "MNIST": "mnist", "ImageFolder": "imagefolder"}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "fp16": "fp16"}
ARGUMENTS_OF_TRAINER = {
    "per_device_train_batch_size": "batch",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_grad_norm": "gradient_clipping",
    "seed": "seed",
    "gradient_checkpointing": "activation_checkpointing",
}
"""Arguments of transformers' `TrainingArguments`."""
DISTRIBUTED = ("init_process_group", "DistributedSampler", "Accelerator", "TrainingArguments")
"""Names in scripts whose batch is that of one rank."""
ARITHMETIC = {ast.Mult: mul, ast.Div: truediv, ast.FloorDiv: floordiv, ast.Add: add}
DEEPEST = 8
"""Most names and options that are followed to a value."""
EXPECTED = ("batch", "optimizer.name", "optimizer.lr", "precision", "epochs", "seed", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of the script, and the line that has it."""

    value: Any
    line: int
    source: str
    """The expression in the script, shortened."""

    @property
    def place(self) -> str:
        """The line, and the expression unless it is the value itself."""
        literal = self.source in (repr(self.value), repr(self.value).strip("[]"))
        return f"line {self.line}" if literal else f"line {self.line}: {self.source}"


@dataclass(slots=True, kw_only=True)
class Reading:
    """Settings of a script by name; `batch` is that of a `DataLoader`."""

    settings: dict[str, Setting] = field(default_factory=dict)
    unclear: dict[str, str] = field(default_factory=dict)
    """Setting -> the reason why its value is not known."""
    strategies: tuple[str, ...] = ()
    """Choices of the script's option `--strategy`."""
    distributed: bool = False

    @property
    def missing(self) -> dict[str, str]:
        """Settings without a value, with the reason."""
        absent = dict.fromkeys(EXPECTED, "nothing in the script sets it")
        return {
            name: reason
            for name, reason in {**absent, **self.unclear}.items()
            if name not in self.settings
        }


def read_script(path: Path) -> Reading:
    """Read a script.  Raises `InputError` for a file that is missing or not Python."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "name a script") from None
    except (SyntaxError, ValueError) as error:
        raise InputError(str(path), f"is not Python: {error}", "name a script") from None
    return _Reader(tree).read()


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._calls = sorted(
            (node for node in self._nodes if isinstance(node, ast.Call)),
            key=lambda call: (call.lineno, call.col_offset),
        )
        self._values = dict(self._assigned())
        self._options = {name: call for call in self._calls for name in _option_names(call)}
        self._reading = Reading()

    def read(self) -> Reading:
        names = {_name(call) for call in self._calls}
        self._reading.distributed = not names.isdisjoint(DISTRIBUTED)
        for call in self._calls:
            _READERS.get(_name(call), _Reader._read_vision_model)(self, call)
        self._read_batch()
        self._read_epochs()
        if (option := self._options.get("strategy")) is not None:
            choices = self._value(_keyword(option, "choices"))
            if isinstance(choices, list) and all(isinstance(name, str) for name in choices):
                self._reading.strategies = tuple(choices)
        return self._reading

    def _assigned(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield names that are assigned once, with their values."""
        values: dict[str, list[ast.expr | None]] = {}
        for node in self._nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                if isinstance(node.targets[0], ast.Name):
                    values.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                values.setdefault(node.target.id, []).append(node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                values.setdefault(node.target.id, []).append(None)
        for name, (first, *others) in values.items():
            if first is not None and not others:
                yield name, first

    def _value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """Return the value of an expression; None if it is not known without running it."""
        if node is None or depth > DEEPEST:
            return None
        if isinstance(node, ast.Name):
            return self._value(self._values.get(node.id), depth + 1)
        if isinstance(node, ast.Attribute):
            if (option := self._options.get(node.attr)) is None:
                return node.attr if node.attr in PRECISIONS else None
            return self._value(_keyword(option, "default"), depth + 1)
        if isinstance(node, (ast.Tuple, ast.List)):
            items = [self._value(item, depth + 1) for item in node.elts]
            return None if None in items else items
        return self._constant(node, depth)

    def _constant(self, node: ast.expr, depth: int) -> Any:
        """Return the value of a literal, or of a product or sum."""
        if isinstance(node, ast.BinOp):
            sides = [self._value(side, depth + 1) for side in (node.left, node.right)]
            return _result(node.op, *sides)
        with suppress(ValueError, TypeError, SyntaxError, RecursionError):
            return ast.literal_eval(node)
        return None

    def _take(self, name: str, node: ast.expr | None, value: Any = None) -> None:
        """Store the first value of a setting, or why it is not known."""
        if node is None or name in self._reading.settings:
            return
        source = " ".join(ast.unparse(node).split())[:60]
        value = self._value(node) if value is None else value
        if value is None:
            reason = f"line {node.lineno}: the value of `{source}` is not known without running it"
            self._reading.unclear.setdefault(name, reason)
        else:
            self._reading.settings[name] = Setting(value=value, line=node.lineno, source=source)

    def _read_batch(self) -> None:
        loaders = [call for call in self._calls if _name(call) == "DataLoader"]
        training = [
            call
            for call in loaders
            if self._value(_keyword(call, "shuffle")) is True or _keyword(call, "sampler")
        ]
        for call in (training or loaders)[:1]:
            self._take("batch", _keyword(call, "batch_size", position=1))

    def _read_epochs(self) -> None:
        for node in self._nodes:
            if (
                isinstance(node, ast.For)
                and isinstance(node.target, ast.Name)
                and "epoch" in node.target.id.lower()
                and isinstance(node.iter, ast.Call)
                and _name(node.iter) in ("range", "trange")
                and len(node.iter.args) == 1
            ):
                self._take("epochs", node.iter.args[0])

    def _read_optimizer(self, call: ast.Call) -> None:
        kind = _name(call)
        self._take("optimizer.name", call, OPTIMIZERS[kind]["name"])
        for key in OPTIMIZER_KEYS:
            node = _keyword(call, key, position=1 if key == "lr" else None)
            if node is not None:
                self._take(f"optimizer.{key}", node)
            elif key in OPTIMIZERS[kind]:
                self._take(f"optimizer.{key}", call, OPTIMIZERS[kind][key])

    def _read_autocast(self, call: ast.Call) -> None:
        dtype = _keyword(call, "dtype", position=1)
        if dtype is None:  # torch's default on CUDA
            self._take("precision", call, "fp16")
        else:
            self._take("precision", dtype, PRECISIONS.get(str(self._value(dtype))))

    def _read_accelerator(self, call: ast.Call) -> None:
        node = _keyword(call, "mixed_precision")
        if node is not None:
            value = self._value(node)
            self._take("precision", node, "fp32" if value == "no" else PRECISIONS.get(str(value)))
        self._take("gradient_accumulation", _keyword(call, "gradient_accumulation_steps"))

    def _read_trainer(self, call: ast.Call) -> None:
        self._take("optimizer.name", call, "adamw")
        for argument, name in ARGUMENTS_OF_TRAINER.items():
            self._take(name, _keyword(call, argument))
        for precision in ("bf16", "fp16"):
            if self._value(node := _keyword(call, precision)) is True:
                self._take("precision", node, precision)

    def _read_cosine(self, call: ast.Call) -> None:
        self._take("schedule.name", call, "cosine")
        self._take("schedule.warmup_steps", _keyword(call, "num_warmup_steps", position=1))

    def _read_schedule(self, call: ast.Call) -> None:
        self._take("schedule.name", call, "cosine")

    def _read_other_schedule(self, call: ast.Call) -> None:
        reason = f"line {call.lineno}: {_name(call)} is not translated"
        self._reading.unclear.setdefault("schedule", reason)

    def _read_clipping(self, call: ast.Call) -> None:
        self._take("gradient_clipping", _keyword(call, "max_norm", position=1))

    def _read_seed(self, call: ast.Call) -> None:
        self._take("seed", _keyword(call, "seed", position=0))

    def _read_compile(self, call: ast.Call) -> None:
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch":
            self._take("compile", call, "model")

    def _read_checkpointing(self, call: ast.Call) -> None:
        self._take("activation_checkpointing", call, value=True)

    def _read_dataset(self, call: ast.Call) -> None:
        self._take("dataset", call, DATASETS[_name(call)])
        self._take("data_dir", _keyword(call, "root", position=0))

    def _read_named_model(self, call: ast.Call) -> None:
        node = _keyword(call, "model_name", position=0)
        name = self._value(node)
        if isinstance(name, str) and node is not None:
            self._take("model", node, f"timm:{name}")

    def _read_vision_model(self, call: ast.Call) -> None:
        """Take a function of `torchvision.models`, called by its module."""
        function = call.func
        if isinstance(function, ast.Attribute) and _last(function.value) == "models":
            self._take("model", call, function.attr)


_READERS: dict[str, Callable[[_Reader, ast.Call], None]] = {
    **dict.fromkeys(OPTIMIZERS, _Reader._read_optimizer),
    **dict.fromkeys(DATASETS, _Reader._read_dataset),
    "autocast": _Reader._read_autocast,
    "Accelerator": _Reader._read_accelerator,
    "TrainingArguments": _Reader._read_trainer,
    "get_cosine_schedule_with_warmup": _Reader._read_cosine,
    "CosineAnnealingLR": _Reader._read_schedule,
    **dict.fromkeys(
        ("StepLR", "MultiStepLR", "OneCycleLR", "LambdaLR", "ExponentialLR", "SequentialLR"),
        _Reader._read_other_schedule,
    ),
    "clip_grad_norm_": _Reader._read_clipping,
    "manual_seed": _Reader._read_seed,
    "set_seed": _Reader._read_seed,
    "compile": _Reader._read_compile,
    "gradient_checkpointing_enable": _Reader._read_checkpointing,
    "create_model": _Reader._read_named_model,
}
"""Name of a called function -> the method that reads the call."""


def _result(operator: ast.operator, left: Any, right: Any) -> Any:
    """Return a product, quotient or sum of two numbers; None for anything else."""
    compute = ARITHMETIC.get(type(operator))
    if compute is None or not all(isinstance(side, (int, float)) for side in (left, right)):
        return None
    with suppress(ArithmeticError):
        return compute(left, right)
    return None


def _name(call: ast.Call) -> str:
    return _last(call.func)


def _last(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _keyword(call: ast.Call, name: str, *, position: int | None = None) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def _option_names(call: ast.Call) -> Iterator[str]:
    """Yield the attributes that an option of argparse sets."""
    if _name(call) == "add_argument":
        for argument in call.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value.lstrip("-").replace("-", "_")
