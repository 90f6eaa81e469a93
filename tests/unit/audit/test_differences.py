"""Differences between two scripts on made-up records, each of which is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardmark.audit.comparison import Records
from shardmark.audit.differences import Scripts, baseline, differences, pairs_of, same_rows
from shardmark.audit.guided import divided, fitted
from shardmark.audit.pairing import paired_names
from shardmark.scripts.record import (
    Clip,
    Forward,
    LossCall,
    Micro,
    OptimizerFacts,
    Record,
    Step,
)

NAMES = ["up.weight", "up.bias"]
SHAPES = [(4, 3), (4,)]


def recorded() -> Record:
    """A rank of a script that takes two steps with AdamW."""
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(shape, generator=generator) for shape in SHAPES]
    steps, forwards, weights = [], [], before
    for number in range(2):
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        weights = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        call = LossCall(function="cross_entropy", reduction="mean", weight=8.0, value=1.5)
        steps.append(
            Step(
                gradients=list(gradients),
                after=weights,
                micros=[Micro(loss=1.5, losses=[call], gradients=dict(enumerate(gradients)))],
                settings=[
                    {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-8},
                    {"lr": 0.1, "weight_decay": 0.0, "eps": 1e-8},
                ],
                buffers={"norm.running_mean": torch.ones(3)},
            )
        )
        rows = torch.arange(8.0, dtype=torch.float64) + 10 * number
        forwards.append(
            Forward(module="M", inputs=[rows], outputs=[rows.cos()], rows=8, step=number)
        )
    facts = OptimizerFacts(
        path="torch.optim.adamw:AdamW", types=["float32"], switches=["decoupled_weight_decay"],
        initial_lr=0.1, state_types={"exp_avg": "float32"},
    )  # fmt: skip
    return Record(
        rank=0, ranks=1, names=list(NAMES), shapes=list(SHAPES), groups=[0, 1], before=before,
        start=[1.0, 2.0], steps=steps, forwards=forwards, optimizer_facts=[facts], epsilon=1.2e-7,
        schedule_settings={"StepLR.step_size": 30.0}, dropout={"drop": 0.1},
        forward_draws={0: [torch.ones(2)], 1: [torch.ones(2)]},
        calls={"up": [4.0, 5.0]},
    )  # fmt: skip


def scripts(change: Callable[[Record], Any], *, again: bool = False) -> Scripts:
    a, b = recorded(), recorded()
    change(b)
    pairs = pairs_of(a, b)
    records = Records(ranks=[b], replay=baseline([a], b.names, pairs), disturbed=None)
    second = copy.deepcopy(b) if again else None
    return Scripts(
        a=[a], alone=[b], b=[b], again=None if second is None else [second], pairs=pairs,
        records=records,
    )  # fmt: skip


def set_setting(
    key: str, value: float, *, step: int = 0, group: int = 0
) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.steps[step].settings[group][key] = value

    return change


def set_loss(**values: Any) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        for key, value in values.items():
            setattr(record.steps[0].micros[0].losses[0], key, value)

    return change


def scale(factor: float) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        step = record.steps[0]
        step.gradients = [None if g is None else factor * g for g in step.gradients]

    return change


def of_record(**values: Any) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        for key, value in values.items():
            setattr(record, key, value)

    return change


def untie(record: Record) -> None:
    record.names.append("head.weight")
    record.shapes.append((4, 3))
    record.start.append(1.0)
    record.groups.append(0)
    record.before.append(record.before[0])


def other_rows(record: Record) -> None:
    record.forwards[1].inputs[0] = record.forwards[1].inputs[0] + 0.5


def more_rows(record: Record, steps: int) -> None:
    for forward in record.forwards[:steps]:
        forward.inputs[0] = torch.arange(16.0, dtype=torch.float64)


def keep_gradient(record: Record) -> None:
    first, second = (step.gradients for step in record.steps)
    record.steps[1].gradients = [a + b for a, b in zip(first, second, strict=True)]  # type: ignore[operator]


def lose_gradient(record: Record) -> None:
    record.steps[0].gradients[0] = None


def other_outputs(record: Record) -> None:
    record.calls["up"] = [8.0, 5.0]
    record.steps[0].gradients = [torch.ones(shape) for shape in SHAPES]


def other_loss(record: Record) -> None:
    record.steps[0].micros[0].losses.clear()
    record.steps[0].micros[0].loss = 1.7
    gradient = record.steps[0].gradients[0]
    assert gradient is not None
    record.steps[0].gradients[0] = gradient + torch.eye(*gradient.shape, dtype=gradient.dtype)


def drop_bias(record: Record) -> None:
    for values in (record.names, record.shapes, record.start, record.groups, record.before):
        values.pop()
    for step in record.steps:
        del step.micros[0].gradients[1], step.gradients[1], step.after[1]
    record.frozen.append("up.bias")


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (set_setting("weight_decay", 0.01, group=1), "weight_decay", "up.bias is 0.01 (A: 0)"),
        (set_setting("eps", 1e-6), "optimizer_setting", "eps of up.weight is 1e-06 (A: 1e-08)"),
        (set_setting("lr", 0.2), "learning_rate", "of step 1 is 0.2 (A: 0.1)"),
        (set_setting("lr", 0.05, step=1), "schedule", "of step 2 is 0.05 (A: 0.1)"),
        (set_loss(options={"label_smoothing": 0.1}), "loss_options", "is 0.1 (A: 0.0)"),
        (
            lambda r: (set_loss(function="mse_loss")(r), scale(2.0)(r)),
            "loss_function",
            "mse_loss (A: cross_entropy)",
        ),
        (set_loss(weight=10.0), "targets", "counts 10 targets of a step (A: 8)"),
        (lambda r: setattr(r.steps[0].micros[0], "loss", 1.7), "loss_term", "terms beside it"),
        (of_record(dropout={"drop": 0.0}), "dropout", "none (A: 0.1 in 1 module)"),
        (of_record(epsilon=2.0**-7), "precision", "rounds to 7 bits (A: 23)"),
        (of_record(batch_norm={("", True, 0, 0): [(4, 0.0)]}), "batch_norm", "8 rows"),
        (of_record(resumed_at=5), "resumed", "5 steps"),
        (lambda r: r.optimizer_facts[0].types.append("bfloat16"), "weights_type", "bfloat16"),
        (
            lambda r: r.optimizer_facts[0].state_types.update(exp_avg="bfloat16"),
            "state_type",
            "keeps exp_avg in bfloat16 (A: float32)",
        ),
        (lambda r: r.optimizer_facts[0].switches.clear(), "optimizer", "AdamW"),
        (
            lambda r: r.steps[0].clips.append(
                Clip(norm=2.0, limit=5.0, scaled=False, scale=1.0, micros=1)
            ),
            "clipping",
            "clip_grad_norm_ to 5 (A: none)",
        ),
        (scale(2.0), "gradient_factor", "is 2 times A's"),
        (untie, "tied_weights", "head.weight"),
        (drop_bias, "frozen", "B does not train up.bias"),
        (lambda r: r.before[0].add_(1), "start", "other weights (up.weight)"),
        (other_rows, "samples", "other samples"),
        (keep_gradient, "gradient_kept", "its gradient of step 2 has that of step 1 added"),
        (lose_gradient, "no_gradient", "no gradient to its up.weight"),
        (other_outputs, "outputs", "its up gets other inputs than A's"),
        (other_loss, "loss", "its loss of the same outputs of the model is 1.7 (A: 1.5)"),
        (
            lambda r: setattr(r.steps[1], "state_is_new", True),
            "state_lost",
            "the state of its optimizer is new in step 2 (A: that of the steps before)",
        ),
        (
            of_record(forward_draws={0: [torch.ones(2)]}),
            "dropout",
            "in the model in step 2 is none (A: some)",
        ),
        (lambda r: more_rows(r, 1), "accumulation", "B takes 16 samples in step 1, A 8"),
        (lambda r: more_rows(r, 2), "batch", "B takes 16 samples a step, A 8"),
        (lambda r: r.steps[1].moved.update({0: 1.0}), "weights_changed", "outside"),
        (
            of_record(schedule_settings={"StepLR.step_size": 10.0}),
            "schedule",
            "its StepLR.step_size is 10 (A: 30)",
        ),
        (of_record(average=[torch.ones(4, 3), torch.ones(4)]), "average", "B keeps an average"),
        (lambda r: r.steps[1].buffers.clear() or r.steps[1].buffers.update(
            {"norm.running_mean": 2 * torch.ones(3)}), "buffers", "norm.running_mean"),
    ],
)  # fmt: skip
def test_a_difference_is_named(change: Callable[[Record], Any], name: str, words: str) -> None:
    found = {difference.name: difference for difference in differences(scripts(change))}
    assert name in found, list(found)
    assert words in found[name].reason


def test_other_passes_through_a_module_are_no_other_inputs() -> None:
    """Two micro-batches call a module of positions twice, and one joined batch calls it once."""

    def twice(record: Record) -> None:
        other_outputs(record)
        rows = record.forwards[0].inputs[0]
        halves = [replace(record.forwards[0], inputs=[part]) for part in rows.chunk(2)]
        record.forwards[:1] = halves

    assert "outputs" not in {difference.name for difference in differences(scripts(twice))}


def test_another_function_of_the_same_loss_is_no_difference() -> None:
    """Such as nll_loss after log_softmax: the gradients are equal."""
    assert differences(scripts(set_loss(function="nll_loss"))) == []


def test_losses_in_another_order_are_compared_by_function() -> None:
    both = scripts(lambda _: None)
    for records, place in ((both.a, 1), (both.b, 0)):
        for record in records:
            losses = record.steps[0].micros[0].losses
            losses[0].options["label_smoothing"] = 0.1
            losses.insert(place, replace(losses[0], function="mse_loss", options={}))
    assert "loss_options" not in {difference.name for difference in differences(both)}


def test_a_factor_of_the_loss_that_the_gradient_has_not_is_no_difference() -> None:
    """The script may add up the loss of all targets, and divide the gradients."""

    def of_sum(record: Record) -> None:
        set_loss(reduction="sum")(record)
        record.steps[0].micros[0].loss = 800.0

    assert differences(scripts(of_sum)) == []


def test_equal_scripts_have_no_difference() -> None:
    assert differences(scripts(lambda _: None)) == []


@pytest.mark.parametrize("change", [other_rows, lambda r: r.before[0].add_(1)])
def test_what_a_does_not_repeat_is_no_difference(change: Callable[[Record], Any]) -> None:
    """A's second start is as far from its first one as B is."""
    assert differences(scripts(change, again=True)) == []


@pytest.mark.parametrize("switch", ["fused", "foreach", "capturable"])
def test_another_implementation_is_no_difference(switch: str) -> None:
    assert differences(scripts(lambda r: r.optimizer_facts[0].switches.append(switch))) == []


def test_a_clip_written_by_hand_is_seen_by_its_gradient() -> None:
    """B clips by a function of torch above its limit, and the gradients are equal."""
    clip = Clip(norm=2.0, limit=1.0, scaled=False, scale=1.0, micros=1)
    assert differences(scripts(lambda r: r.steps[0].clips.append(clip))) == []


ROWS = torch.arange(8.0, dtype=torch.float64)
MASK = torch.ones(8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([ROWS], [ROWS.flip(0)], True),
        ([ROWS], [ROWS, MASK], True),
        ([ROWS, MASK], [ROWS + 0.5, MASK], False),
        ([ROWS], [1.1 * ROWS], False),
        ([ROWS[3:4]], [ROWS[3:4]], True),
        ([ROWS[3:4]], [ROWS[4:5]], False),
        ([MASK], [MASK], True),
        ([], [], False),
    ],
)
def test_rows_are_equal_in_all_tensors_that_vary(
    a: list[torch.Tensor], b: list[torch.Tensor], same: bool
) -> None:
    ranks = [
        [replace(recorded(), forwards=[Forward(module="M", inputs=i, outputs=[], rows=8, step=0)])]
        for i in (a, b)
    ]
    assert same_rows(*ranks, steps=1) is same


SHAPE = (4, 3)


@pytest.mark.parametrize(
    ("b", "a", "expected"),
    [
        ({"x": SHAPE, "y": (4,)}, {"x": SHAPE, "y": (4,)}, {"x": "x", "y": "y"}),
        ({"net.x": SHAPE, "net.y": (4,)}, {"x": SHAPE, "y": (4,)}, {"net.x": "x", "net.y": "y"}),
        (
            {"model.net.x": SHAPE, "model.net.y": (4,)},
            {"module.x": SHAPE, "module.y": (4,)},
            {"model.net.x": "module.x", "model.net.y": "module.y"},
        ),
        (
            {"e.w": SHAPE, "x.a": (4,), "x.b": (4,)},
            {"embed.w": SHAPE, "x.a": (4,), "x.b": (4,)},
            {"e.w": "embed.w", "x.a": "x.a", "x.b": "x.b"},
        ),
        (
            {"blocks.0.w": SHAPE, "blocks.1.w": (4,), "blocks.2.w": (4,)},
            {"0.w": SHAPE, "2.w": (4,), "4.w": (4,)},
            {"blocks.0.w": "0.w", "blocks.1.w": "2.w", "blocks.2.w": "4.w"},
        ),
        ({"p": SHAPE, "q": (4,)}, {"x": SHAPE, "y": (4,)}, {"p": "x", "q": "y"}),
        ({"x": SHAPE, "z": (7,)}, {"x": SHAPE, "y": (4,)}, {"x": "x"}),
        ({"x": (9,), "y": (4,)}, {"x": SHAPE, "y": (4,)}, {"y": "y"}),
    ],
)
def test_parameters_are_paired(
    b: dict[str, tuple[int, ...]], a: dict[str, tuple[int, ...]], expected: dict[str, str]
) -> None:
    assert paired_names(b, a) == expected


def test_renamed_parameters_in_another_order_are_paired_by_value() -> None:
    b, a = {"p": SHAPE, "q": SHAPE, "r": (4,)}, {"x": SHAPE, "y": SHAPE, "z": (4,)}
    values = {"p": 2.0, "q": 1.0, "r": 0.0}, {"x": 1.0, "y": 2.0, "z": 0.0}
    assert paired_names(b, a, values) == {"p": "y", "q": "x", "r": "z"}


def test_parameters_with_equal_values_are_paired_in_the_order_of_their_calls() -> None:
    """The optimizer has the modules in another order than the forward pass."""
    a, b = recorded(), recorded()
    b.names, b.shapes, b.start = ["first.bias", "last.bias"], [(4,), (4,)], [0.0, 0.0]
    a.names, a.shapes, a.start = ["tail.bias", "head.bias"], [(4,), (4,)], [0.0, 0.0]
    b.calls = {"first": [1.0, 1.0], "last": [1.0, 1.0]}
    a.calls = {"head": [1.0, 1.0], "tail": [1.0, 1.0]}
    assert pairs_of(a, b) == {"first.bias": "head.bias", "last.bias": "tail.bias"}


def test_a_batch_is_divided_by_rows() -> None:
    batch = {"x": torch.arange(8).view(4, 2), "name": "text"}
    first, second = divided(batch, 2)
    assert first["x"].tolist() == [[0, 1], [2, 3]]
    assert second["x"].tolist() == [[4, 5], [6, 7]]
    assert second["name"] == "text"


def test_a_batch_takes_the_structure_of_the_other_script() -> None:
    own = {"x": torch.zeros(4, 2), "y": torch.zeros(4, dtype=torch.int64)}
    other = (torch.ones(4, 2), torch.ones(4, dtype=torch.int64))
    batch = fitted(own, other)
    assert batch is not None
    assert batch["x"].sum() == 8
    assert batch["y"].dtype == torch.int64
    assert fitted(own, (torch.ones(4, 2),)) is None
