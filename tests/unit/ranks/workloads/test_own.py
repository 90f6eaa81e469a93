"""A task of the user's own: the examples keep to the protocol, and mistakes are named."""

from __future__ import annotations

import re
import textwrap
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from shardmark.base.errors import DataError, InputError
from shardmark.base.layout import Shard
from shardmark.ranks.workloads import build_workload, check_data, data_paths, options
from shardmark.ranks.workloads.base import BatchPlan, Workload
from shardmark.ranks.workloads.own.task import OwnBatch

TEMPLATES = Path(str(files("shardmark.experiment"))) / "templates"
PLAN = BatchPlan(global_batch=8, seed=3)
WHOLE = Shard(index=0, count=1)
CPU = torch.device("cpu")

TASK = """
import random

import numpy as np
import torch
from torch import nn


class Task:
    def model(self):
        return nn.Linear(2, 1)

    def train_data(self):
        return [torch.full((2,), float(i)) for i in range(16)]

    validation_data = train_data

    def loss(self, model, rows):
        return model(rows).square().mean()
"""


def written(folder: Path, extra: str, **changes: Any) -> Workload:
    """The small task above, with more in its class; each in a file of its own."""
    path = folder / "task.py"
    path.write_text(TASK + textwrap.indent(textwrap.dedent(extra), "    "))
    return build_workload(options({"name": "own", "task": f"{path}:Task"} | changes), 0)


def taken(workload: Workload, shard: Shard = WHOLE, steps: int = 3) -> list[OwnBatch]:
    batches = list(islice(workload.batches(PLAN, shard), steps))
    assert all(isinstance(batch, OwnBatch) for batch in batches)
    return batches  # type: ignore[return-value]  # just asserted


def test_model_whose_train_method_returns_none_is_accepted(tmp_path: Path) -> None:
    """Backbones of detectors have such a method, which keeps norms in evaluation."""
    extra = """
    class Quiet(nn.Linear):
        def train(self, mode=True):
            super().train(mode)

    def model(self):
        return self.Quiet(2, 1)
    """
    assert written(tmp_path, extra).build_model().training


@pytest.mark.parametrize("draw", ["torch.rand(())", "random.random()", "np.random.random()"])
@pytest.mark.parametrize("workers", [0, 1])
def test_validation_draws_the_same_whatever_the_number_of_ranks(
    tmp_path: Path, draw: str, workers: int
) -> None:
    """A VAE's or a diffusion model's loss draws, and depends on which samples are together."""
    workload = written(
        tmp_path,
        f"""
        evaluate = lambda s, m, rows: {{"value": rows.std() + {draw}, "batches": 1}}
        metrics = dict
        """,
        evaluation_batch=3,
        loader_workers=workers,
    )
    model = workload.build_model().eval()
    found = []
    for count in (1, 2, 3, 8):
        torch.manual_seed(count)
        shards = [Shard(index=index, count=count) for index in range(count)]
        parts = [workload.evaluate(model, shard, CPU) for shard in shards]
        found.append(dict(workload.quality(parts)))
    assert found[0]["batches"] == workload.validation_batches == 6
    assert all(quality == pytest.approx(found[0]) for quality in found)


def test_random_draws_of_a_sample_depend_on_epoch_and_sample_alone(tmp_path: Path) -> None:
    workload = written(
        tmp_path,
        """
        class Noisy(list):
            def __getitem__(self, index):
                return super().__getitem__(index) + torch.rand(2)

        train_data = lambda self: self.Noisy(torch.zeros(8, 2))
        """,
    )
    torch.manual_seed(1)
    state = torch.get_rng_state()
    (first, second), (again, _) = taken(workload, steps=2), taken(workload, steps=2)
    half = taken(workload, Shard(index=1, count=2), steps=1)[0]
    assert torch.equal(torch.get_rng_state(), state), "dropout's generator is left alone"
    assert torch.equal(first.content, again.content)
    assert torch.equal(half.content, first.content[4:])
    order = [second.sample_ids.index(i) for i in first.sample_ids]
    assert not torch.equal(second.content[order], first.content)


def test_a_scalar_loss_is_a_mean_and_the_default_metric(tmp_path: Path) -> None:
    workload = written(tmp_path, "weights = lambda self, data: [float(r[0]) for r in data]")
    model, batch = workload.build_model(), taken(workload)[0]
    rows = batch.content
    loss = workload.loss(model, batch)
    torch.testing.assert_close(loss.total, model(rows).square().mean() * batch.weight)
    assert batch.weight == float(rows[:, 0].sum())
    assert workload.not_additive is None
    assert set(workload.quality([workload.evaluate(model, WHOLE, CPU)])) == {"validation_loss"}
    assert workload.quality([{}]) == {}


@pytest.mark.parametrize("weights", ["", "weights = lambda self, data: [2.0] * len(data)"])
def test_method_weights_makes_weights_known_before_the_loss(tmp_path: Path, weights: str) -> None:
    loss = "def loss(self, model, rows):\n    t = model(rows).sum()\n    return t, t.exp() * 0 + 3"
    workload = written(tmp_path, f"{weights}\n{loss}")
    assert workload.weights_known is bool(weights)
    found = workload.loss(workload.build_model(), taken(workload)[0])
    assert (found.known_before, float(found.weight)) == (bool(weights), 3)
    assert isinstance(found.weight, torch.Tensor)
    assert not found.weight.requires_grad, "nobody trains the weight"
    with pytest.raises(InputError, match="weights of the validation samples sum to 0"):
        workload.quality([{"loss": torch.zeros(()), "weight": torch.zeros(())}])


def test_the_mean_over_nothing_is_refused(tmp_path: Path) -> None:
    """Unless it is a number all the same."""
    workload = written(
        tmp_path,
        """
        weights = lambda self, data: [float(row[0] % 2) for row in data]

        def loss(self, model, rows):
            kept = rows[:, 0] % 2 == 1
            return model(rows[kept]).square().mean()
        """,
    )
    model, (batch, *_) = workload.build_model(), taken(workload)
    parts = sorted(batch.split(8), key=lambda part: part.weight)
    assert workload.loss(model, parts[-1]).weight == 1
    with pytest.raises(InputError, match=r"has weight 0.*return \(sum, weight\)"):
        workload.loss(model, parts[0])


def test_a_mean_in_half_precision_is_weighed_in_full(tmp_path: Path) -> None:
    workload = written(
        tmp_path,
        """
        weights = lambda self, data: [2e4] * len(data)
        loss = lambda self, model, rows: model(rows).square().mean().half()
        """,
    )
    loss = workload.loss(workload.build_model(), taken(workload)[0])
    assert loss.total.isfinite(), "16 bits end at 65,504"


def test_operations_are_counted_all_over_the_data_set(tmp_path: Path) -> None:
    """Sample i has i + 1 rows, 8.5 on average; each pass takes 4 operations a row."""
    workload = written(
        tmp_path,
        """
        train_data = lambda self: [torch.ones(i + 1, 2) for i in range(16)]
        collate = lambda self, samples: torch.cat(samples)
        """,
    )
    assert workload.sample_input_flops(workload.build_model()) == 68


def test_declarations_of_the_task_class_are_read(tmp_path: Path) -> None:
    workload = written(
        tmp_path,
        """
        loss_adds_up = False
        synthetic = True
        model_calls = 2

        def loss(self, model, rows):
            return model(rows).square().sum() + model(-rows).square().sum(), len(rows)

        def blocks(self, model):
            return [model]
        """,
    )
    model = workload.build_model()
    assert workload.not_additive is not None
    assert workload.synthetic
    assert workload.blocks(model) == [model]
    assert workload.loss(model, taken(workload)[0]).weight == 8


def test_method_tokens_counts_tokens(tmp_path: Path) -> None:
    told = "tokens = lambda self, data: [3 * int(row[0]) for row in data]"
    silent = tmp_path / "silent"
    silent.mkdir()
    assert written(tmp_path, told).tokens_in([(1, 2), (5,), ()]) == 24
    assert written(silent, "").tokens_in([(1, 2)]) is None


def groups(parameters: str, more: str = "") -> str:
    return f"parameter_groups = lambda self, model: [{{'params': {parameters}, {more}}}]"


def test_parameter_groups_are_known_by_name(tmp_path: Path) -> None:
    """Whatever tensors a strategy holds the parameters in."""
    workload = written(
        tmp_path,
        """
        better = {"accuracy": "higher"}

        def parameter_groups(self, model):
            import numpy
            none = numpy.float32(0)
            return [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": none}]
        """,
    )
    assert len(workload.parameter_groups) == 0
    workload.build_model()
    told = [(set(group.names), group.options) for group in workload.parameter_groups]
    assert told == [({"weight"}, {}), ({"bias"}, {"weight_decay": 0.0})]
    assert type(told[1][1]["weight_decay"]) is float
    assert workload.better == {"accuracy": "higher"}


def by_itself(line: str) -> str:
    """A loss that does what strategies do."""
    return f"""
def loss(self, model, rows):
    loss = model(rows).square().mean()
    {line}
    return loss
"""


def beside(part: str, sign: str = "") -> str:
    """A task with a part that its loss uses, beside the model."""
    call = f"self.head {sign} model(rows)" if sign else "self.head(model(rows))"
    return f"head = {part}\nloss = lambda self, model, rows: {call}.square().mean()"


FORWARD = "def loss(self, model, rows):\n    out = model(rows)\n"
TEACHER = f"""
def model(self):
    student = nn.Linear(2, 1)
    student.teacher = nn.Linear(2, 1).requires_grad_(False)
    return student

{FORWARD}
    with torch.no_grad():
        model.teacher.weight.lerp_(model.weight, 0.1)
    return out.mean()
"""


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ("model = lambda self: 3", "model() returns a int"),
        ("train_data = lambda self: iter([1])", "train_data() returns a list_iterator without"),
        ("train_data = lambda self: torch.utils.data.DataLoader([1])", "return its data set"),
        ("train_data = lambda self: {'x': [1], 'y': [2]}", "returns a dict with the keys x, y"),
        ("train_data = lambda self: (torch.ones(16, 2), torch.ones(16))", "TensorDataset(X, y)"),
        (
            "train_data = lambda self: [(torch.ones(2 + i % 2), i) for i in range(16)]",
            "of a batch differ in shape ((",
        ),
        ("train_data = lambda self: [nn.Module()] * 16", "default collate cannot join the samples"),
        (
            f"{FORWARD}    return out.mean(), out",
            "the second, a Tensor of shape (8, 1), is no weight",
        ),
        (f"{FORWARD}    return out.mean(), {{'logits': out}}", "the second, a dict, is no weight"),
        (TEACHER, "loss changes teacher.weight, a frozen parameter of the model (a teacher"),
        ("def __init__(self, *, kind):\n    pass", "its arguments are (*, kind)"),
        ("loss = 1", "has no method loss"),
        ("configure_optimizers = lambda self: []", "exactly one optimizer"),
        ("parameter_groups = lambda self, model: []", "has weight 0 times"),
        ("parameter_groups = lambda self, m: [m.weight]", "returns a group without params"),
        (groups("[model.weight, torch.ones(2)]"), "not a parameter of the model"),
        (groups("model.parameters()", "'momentum': 0.5"), "sets momentum"),
        (groups("[*model.parameters()]") + " * 2", "has weight 2 times"),
        ("better = {'rmse': 'low'}", "better is {'rmse': 'low'}"),
        ("better = {'rmse': ['low']}", "better is {'rmse': ['low']}"),
        (groups("model.parameters()", "'lr': -1.0"), "sets lr to -1.0"),
        (groups("model.parameters()", "'betas': 0.9"), "sets betas to 0.9"),
        ("backward = lambda self, loss: None", "the strategy runs the backward pass"),
        ("evaluate = lambda self, model, rows: {}", "no metrics(sums)"),
        ("loss = lambda self, m, rows: m(rows)", "loss returns a Tensor of shape (8, 1)"),
        ("loss = lambda self, m, rows: 0.0 * rows.sum()", "calls the model 0 times"),
        ("loss = lambda self, m, rows: m(m(rows).expand(8, 2)).sum()", "calls the model 2 times"),
        ("loss = lambda self, m, rows: m(rows).sum().detach()", "without a gradient"),
        ("weights = lambda self, data: [1.0]", "shape (1,) for 16 samples"),
        ("weights = lambda self, data: [-1.0] * 16", "one of its weights is negative"),
        ("tokens = lambda self, data: [float('nan')] * 16", "one of its tokens is negative or not"),
        ("weights = lambda self, data: [0.0] * 16", "step 1 sum to 0"),
        ("def __init__(self, size):\n    pass", "missing 1 required positional argument"),
        ("net = nn.Linear(2, 1)\nmodel = lambda self: self.net", "or a part of it, a second time"),
        (
            "net = nn.Linear(2, 1)\nmodel = lambda self: nn.Sequential(nn.Linear(2, 2), self.net)",
            "or a part of it, a second time",
        ),
        (by_itself("loss.backward()"), "(by a backward pass, an optimizer,"),
        (by_itself("loss.backward()\n    loss = loss.detach()"), "which no strategy supports"),
        (
            by_itself(
                "loss.backward(); torch.optim.SGD(model.parameters()).step(); model.zero_grad()"
            ),
            "a backward pass, an optimizer,",
        ),
        (
            beside("nn.Linear(1, 1)"),
            "loss depends on self.head, which is not part of the model",
        ),
        (beside("nn.Parameter(torch.ones(1))", "*"), "self.head.requires_grad_(False)"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, extra: str, found: str) -> None:
    def first_loss() -> None:
        workload = written(tmp_path, extra)
        workload.build_model()
        workload.loss(workload.build_model(), taken(workload)[0])

    with pytest.raises((InputError, DataError)) as caught:
        first_loss()
    assert found in str(caught.value)


HELD = """
class Holder:
    pass

holder = Holder()
holder.parts = [nn.Linear(1, 1)]
losses = {"id": nn.ModuleList([nn.Linear(1, 1)])}
scales = [torch.ones(1, requires_grad=True)]
given = [torch.arange(32.0).view(16, 2).requires_grad_(), 0]
hidden = (lambda part: lambda outputs: part * outputs)(nn.Parameter(torch.ones(3)[:1]))

def train_data(self):
    return torch.utils.data.TensorDataset(self.given[0])

def loss(self, model, rows):
    return (EXPRESSION).square().mean()
"""


@pytest.mark.parametrize(
    ("expression", "part", "batches"),
    [
        ("self.holder.parts[0](model(*rows))", "self.holder.parts[0]", 1),
        ("self.losses['id'][0](model(*rows))", "self.losses['id']", 1),
        ("self.__class__.hidden(model(*rows))", "a tensor of shape (1,)", 1),
        ("self.scales[0] * model(*rows)", "self.scales[0]", 2),
    ],
)
def test_parameters_outside_of_the_model_are_found_wherever_they_are(
    tmp_path: Path, expression: str, part: str, batches: int
) -> None:
    """A tensor that is no `nn.Parameter` shows in the second batch that the task stores it."""
    workload = written(tmp_path, HELD.replace("EXPRESSION", expression))
    model, (first, second, _) = workload.build_model(), taken(workload)
    if batches == 2:
        workload.loss(model, first)
    with pytest.raises(InputError, match=re.escape(f"the loss depends on {part}, which")):
        workload.loss(model, second)


@pytest.mark.parametrize(
    "expression",
    [
        "torch.autograd.grad(model(x := rows[0].detach().requires_grad_()).sum(), x,"
        " create_graph=True)[0] + model.weight",
        "model(self.given.__setitem__(1, rows[0].detach().requires_grad_()) or self.given[1])",
    ],
    ids=["derivatives", "a batch that the task stores"],
)
def test_leaves_of_a_batch_are_no_parameters(tmp_path: Path, expression: str) -> None:
    workload = written(tmp_path, HELD.replace("EXPRESSION", expression))
    model = workload.build_model()
    for batch in taken(workload):
        assert workload.loss(model, batch).total.requires_grad


def test_a_loss_may_take_the_number_of_the_step(tmp_path: Path) -> None:
    """Two steps an epoch; micro-batches and all ranks have that of their step."""
    extra = "def loss(self, model, rows, step):\n    return model(rows).sum() * 0 + step"
    workload = written(tmp_path, extra)
    model = workload.build_model()
    for shard in (WHOLE, Shard(index=1, count=2)):
        batches = taken(workload, shard, steps=5)
        losses = [workload.loss(model, batch) for batch in batches]
        means = [float(loss.total.detach() / loss.weight) for loss in losses]
        assert means == [0, 1, 2, 3, 4]
    (part, _) = batches[4].split(2)
    assert float(workload.loss(model, part).total.detach()) == 4 * len(part)
    workload.loss(model, batches[1])
    model.eval()
    with torch.no_grad():
        metrics = workload.quality([workload.evaluate(model, WHOLE, CPU)])
    assert metrics == {"validation_loss": 1.0}, "the step that was trained last"


STUDENT = """
def model(self):
    student = nn.Linear(2, 1)
    student.teacher = nn.Linear(2, 1).requires_grad_(False)
    return student

def after_step(self, model, step):
    model.{changed}.weight.lerp_(model.weight, 1 / step)
"""


def test_after_step_changes_frozen_parameters_alone(tmp_path: Path) -> None:
    workload = written(tmp_path, STUDENT.format(changed="teacher"))
    model: Any = workload.build_model()
    assert workload.has_after_step
    workload.after_step(model, 1)
    assert torch.equal(model.teacher.weight, model.weight)
    folder = tmp_path / "wrong"
    folder.mkdir()
    wrong = written(folder, STUDENT.format(changed="teacher") + "    model.bias.zero_()\n")
    with pytest.raises(InputError, match="after_step changes bias, a trained parameter; change"):
        wrong.after_step(wrong.build_model(), 1)


def test_after_step_draws_by_the_number_of_the_step(tmp_path: Path) -> None:
    workload = written(tmp_path, "def after_step(self, model, step):\n    self.x = torch.rand(())")
    task: Any = workload
    drawn = []
    for step in (1, 2, 1):
        workload.after_step(torch.nn.Linear(1, 1), step)
        drawn.append(float(task._task.x))
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_frozen_teacher_is_no_part_of_the_model(tmp_path: Path) -> None:
    frozen = beside("nn.Linear(1, 1).requires_grad_(False)")
    workload = written(tmp_path, f"spare = nn.Linear(1, 1)\n{frozen}")
    model, (batch, *_) = workload.build_model(), taken(workload)
    workload.loss(model, batch).total.backward()  # type: ignore[no-untyped-call]  # torch's
    assert workload.loss(model, batch).total.requires_grad, "gradients are not its own later on"


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ("evaluate = lambda s, m, rows: 3\nmetrics = dict", "evaluate returns a int"),
        ("metrics = lambda self, sums: 3", "metrics returns a int"),
        ("metrics = lambda self, sums: {'mfu': 1}", "metrics returns the name 'mfu'"),
        ("metrics = lambda self, sums: {'a b': 1}", "metrics returns the name 'a b'"),
    ],
)
def test_mistakes_of_the_evaluation_are_named(tmp_path: Path, extra: str, found: str) -> None:
    workload = written(tmp_path, extra)
    with pytest.raises(InputError) as caught:
        workload.quality([workload.evaluate(workload.build_model().eval(), WHOLE, CPU)])
    assert found in str(caught.value)


@pytest.mark.parametrize("draw", ["torch.rand(1)", "random.random()", "numpy.random.rand()"])
def test_collate_with_random_draws_is_not_additive(tmp_path: Path, draw: str) -> None:
    collate = "import numpy, random\ncollate = lambda self, rows: torch.stack(rows)"
    assert written(tmp_path, collate).not_additive is None
    (tmp_path / "drawn").mkdir()
    body = "import numpy, random\ndef collate(self, rows, n=numpy, r=random):\n"
    drawn = draw.replace("numpy", "n").replace("random.random()", "r.random()")
    reason = written(
        tmp_path / "drawn", f"{body}    return torch.stack(rows) * {drawn}"
    ).not_additive
    assert reason is not None
    assert "collate draws" in reason


@dataclass(frozen=True)
class Rows:
    rows: Any
    scale: float = 1.0


class Encoding(UserDict[str, Any]):
    """An encoding like a Hugging Face tokenizer's."""


X, Y, PICTURES = torch.arange(8).view(4, 2), torch.arange(4.0), tuple(torch.ones(4, 3, 5, 5))
BOXES = [{"boxes": torch.ones(k, 4)} for k in range(3, 7)]


@pytest.mark.parametrize(
    ("content", "second"),
    [
        (Rows(X), lambda half: torch.equal(half.rows, X[2:]) and half.scale == 1.0),
        (Encoding(ids=X), lambda half: type(half) is Encoding and torch.equal(half["ids"], X[2:])),
        ([X, Y], lambda half: torch.equal(half[0], X[2:]) and torch.equal(half[1], Y[2:])),
        ([X, Y, X, Y], lambda half: len(half) == 4 and torch.equal(half[3], Y[2:])),
        ((PICTURES, BOXES), lambda half: len(half[0]) == 2 and half[1] == BOXES[2:]),
        ({"lengths": [1, 2, 3, 4], "names": None}, lambda half: half["lengths"] == [3, 4]),
        ([[1], [2, 3], [], [4]], lambda half: half == [[], [4]]),
        (BOXES, lambda half: half == BOXES[2:]),
        (X.numpy(), lambda half: half.tolist() == [[4, 5], [6, 7]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_micro_batches_are_parts_of_their_batch(
    content: Any, second: Callable[[Any], bool]
) -> None:
    batch = OwnBatch(content=content, sample_ids=(0, 1, 2, 3), step_weight=4.0)
    halves = batch.split(2)
    assert second(halves[1].content)
    assert type(batch.to(torch.device("meta")).content) is type(content)


@pytest.mark.parametrize(
    "content",
    [
        {"rows": X, "step": torch.tensor(1)},
        SimpleNamespace(rows=X),
        {"sizes": [224, 224]},
        [X, X, X, X],
        [[1, 2, 3, 4]] * 4,
    ],
    ids=["single tensor", "object", "two numbers", "either way", "numbers either way"],
)
def test_batch_that_cannot_be_split_is_refused(content: Any) -> None:
    batch = OwnBatch(content=content, sample_ids=(0, 1, 2, 3), step_weight=4.0)
    assert batch.split(1) == (batch,)
    with pytest.raises(InputError, match=r"cannot be split into micro-batches.*collate"):
        batch.split(2)


@pytest.mark.parametrize(
    ("bases", "body", "lacks"),
    [
        ("", "def train_data(self): ...", "has no model, validation_data, loss; required: model"),
        (
            "",
            "def __init__(self):\n        self.train_data, self.model = 1, 2",
            "no validation_data",
        ),
        ("(Base)", "pass", None),
        ("", "def __init__(self):\n        setattr(self, 'x', 1)", None),
    ],
    ids=["one of four", "set in __init__", "inherited", "set by name"],
)
def test_missing_methods_are_found_in_the_source(
    tmp_path: Path, bases: str, body: str, lacks: str | None
) -> None:
    """Before a rank imports it, as far as the source is sure."""
    (tmp_path / "bare.py").write_text(f"class Task{bases}:\n    {body}\n")
    asked = {"name": "own", "task": f"{tmp_path}/bare.py:Task"}
    if lacks is None:
        assert options(asked)
        return
    with pytest.raises(ValidationError, match=lacks):
        options(asked)


def test_files_among_the_options_are_part_of_what_was_trained(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a b")
    task = f"{TEMPLATES / 'tokens'}.py:Task"
    told = {"words": str(tmp_path / "words.txt"), "width": 8, "mode": "fast"}
    made = options({"name": "own", "task": task, "options": told})
    assert data_paths(made) == (tmp_path / "words.txt",)
    assert made.user_modules() == (f"{TEMPLATES / 'tokens'}.py",)
    assert check_data(made) is None
