"""Experiments proposed from records of a first step, which the tests make up."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.base.files.strict_yaml import parse_yaml
from shardmark.base.recipe import Recipe
from shardmark.experiment.load import from_mapping
from shardmark.experiment.proposal import Proposal, propose
from shardmark.scripts.command import parse_command
from shardmark.scripts.record import Clip, Forward, Loader, Micro, OptimizerFacts, Record, Step

SGD = "torch.optim.sgd:SGD"
ADAMW = {"lr": 3e-5, "betas[0]": 0.9, "betas[1]": 0.95, "eps": 1e-8, "weight_decay": 0.01}


def facts(path: str = SGD, **values: Any) -> OptimizerFacts:
    return OptimizerFacts(
        **{"path": path, "types": ["float32"], "switches": [], "initial_lr": 0.1, **values}
    )


def recorded(*, path: str = SGD, step: Step | None = None, **values: Any) -> Record:
    """A record of one process that took a step with a batch of 16 rows."""
    forward = Forward(module="Linear", inputs=[], outputs=[], rows=16, step=0)
    return Record(
        **{
            "rank": 0,
            "ranks": 1,
            "steps": [step or Step(settings=[{"lr": 0.1}], micros=[Micro()])],
            "forwards": [forward],
            "optimizer_facts": [facts(path)],
            "epsilon": 2.0**-23,
            **values,
        }
    )


def proposed(record: Record, command: str = "train.py", ranks: int = 2) -> Proposal:
    proposal = propose(record, parse_command(command.split()), ranks)
    from_mapping(parse_yaml(proposal.text, "proposal"), place="proposal")
    return proposal


def recipe_of(proposal: Proposal) -> Recipe:
    """The recipe that the comments of the file propose."""
    lines = proposal.text.splitlines()
    inner = [line.removeprefix("# ") for line in lines[lines.index("# recipe:") : -1]]
    mapping: Any = parse_yaml("\n".join(inner), "proposal")
    return Recipe(**mapping["recipe"])


def test_a_script_is_measured_as_it_is() -> None:
    command = "train.py --lr 0.1"
    mapping: Any = parse_yaml(proposed(recorded(joined=True), command, 4).text, "proposal")
    assert mapping["workload"] == {"name": "script", "command": command}
    assert mapping["recipe"] == {"steps": 35}
    assert mapping["matrix"] == {"variant": {"script": ""}, "world_size": [1, 4]}
    assert "world_size: [1]" in proposed(recorded(), ranks=4).text


def test_the_global_batch_counts_micro_batches_and_ranks() -> None:
    assert recipe_of(proposed(recorded(), ranks=4)).global_batch == 64
    step = Step(settings=[{"lr": 0.1}], micros=[Micro(loaders=[0]), Micro(loaders=[0])])
    loaders = [Loader(batch_size=5, number=1), Loader(batch_size=8, number=0, samples=80)]
    recipe = recipe_of(proposed(recorded(step=step, loaders=loaders)))
    assert (recipe.global_batch, recipe.gradient_accumulation) == (8 * 2 * 2, 2)


def test_two_losses_of_one_forward_pass_are_one_micro_batch() -> None:
    step = Step(settings=[{"lr": 0.1}], micros=[Micro(), Micro()])
    assert recipe_of(proposed(recorded(step=step))).gradient_accumulation == 1


@pytest.mark.parametrize(
    ("path", "group", "switches", "expected"),
    [
        (SGD, {"lr": 0.1, "momentum": 0.9}, ["nesterov", "fused"], {
            "name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("torch.optim.adamw:AdamW", ADAMW, [], {
            "name": "adamw", "lr": 3e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}),
        ("torch.optim.adam:Adam", {"lr": 0.1}, ["decoupled_weight_decay"], {"name": "adamw"}),
        ("torch.optim.rmsprop:RMSprop", {"lr": 0.1, "alpha": 0.9}, ["centered", "foreach"], {
            "name": "own", "path": "torch.optim.rmsprop:RMSprop",
            "options": {"alpha": 0.9, "centered": True}}),
        (SGD, {"lr": 0.1}, ["maximize"], {"name": "own", "options": {"maximize": True}}),
        ("__main__:SGD", {"lr": 0.1}, [], {"name": "own", "path": "train.py:SGD"}),
    ],
)  # fmt: skip
def test_the_optimizer_has_the_settings_of_the_first_step(
    path: str, group: dict[str, float], switches: list[str], expected: dict[str, Any]
) -> None:
    step = Step(settings=[group], micros=[Micro()])
    record = recorded(
        step=step, optimizer_facts=[facts(path, switches=switches, initial_lr=group["lr"])]
    )
    optimizer = recipe_of(proposed(record)).optimizer
    assert {key: getattr(optimizer, key) for key in expected} == expected


def test_a_warm_up_does_not_hide_the_learning_rate() -> None:
    step = Step(settings=[{"lr": 0.0}], micros=[Micro()])
    warmed = recorded(step=step, optimizer_facts=[facts(initial_lr=0.3)], schedules=["LambdaLR"])
    proposal = proposed(warmed)
    assert recipe_of(proposal).optimizer.lr == 0.3
    assert any(line.startswith("schedule: LambdaLR") for line in proposal.missing)
    unknown = proposed(recorded(step=step, optimizer_facts=[facts(initial_lr=0.0)]))
    assert any(line.startswith("optimizer.lr: ") for line in unknown.missing)
    cosine = recorded(schedules=["CosineAnnealingLR"])
    assert recipe_of(proposed(cosine)).schedule.name == "cosine"


@pytest.mark.parametrize(
    ("epsilon", "types", "precision", "weights"),
    [
        (2.0**-7, ["float32"], "bf16", "fp32"),
        (2.0**-7, ["bfloat16"], "bf16", "bf16"),
        (2.0**-10, ["float32"], "fp16", "fp32"),
        (2.0**-23, ["float32"], "fp32", "fp32"),
    ],
)
def test_the_precision_is_that_of_the_results(
    epsilon: float, types: list[str], precision: str, weights: str
) -> None:
    record = recorded(epsilon=epsilon, optimizer_facts=[facts(types=types)])
    recipe = recipe_of(proposed(record))
    assert (recipe.precision, recipe.weights) == (precision, weights)


@pytest.mark.parametrize(("norm", "limit", "expected"), [(3.0, 1.5, 1.5), (3.0, float("inf"), None),
                                                         (None, 0.5, None)])  # fmt: skip
def test_clipping_by_the_norm_has_a_key(
    norm: float | None, limit: float, expected: float | None
) -> None:
    function = "clip_grad_value_" if norm is None else "clip_grad_norm_"
    clip = Clip(norm=norm, limit=limit, function=function, scaled=False, scale=1.0, micros=1)
    step = Step(settings=[{"lr": 0.1}], micros=[Micro()], clips=[clip])
    proposal = proposed(recorded(step=step))
    assert recipe_of(proposal).gradient_clipping == expected
    assert any("each value" in line for line in proposal.left_out) == (norm is None)


def test_what_is_not_seen_is_listed_with_the_default() -> None:
    missing = proposed(recorded(forwards=[], epsilon=0.0)).missing
    assert [line.partition(":")[0] for line in missing] == [
        *("global_batch", "epochs", "precision", "seed"),
    ]
    assert missing[0].endswith("64 is used")
    assert recipe_of(proposed(recorded(seed=7))).seed == 7
    assert recipe_of(proposed(recorded(seed=2**40))).seed == 0, "drawn, and no key"


def test_what_an_experiment_cannot_say_is_listed() -> None:
    groups = [{"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}]
    step = Step(settings=groups, micros=[Micro(loaders=[0])])
    loader = Loader(batch_size=4, number=0, sampler="WeightedRandomSampler")
    optimizers = [facts(), facts("muon:Muon")]
    record = recorded(step=step, loaders=[loader], optimizer_facts=optimizers)
    proposal = proposed(record)
    for text in ("WeightedRandomSampler", "group 2 (weight_decay 0)", "muon:Muon"):
        assert any(text in line for line in proposal.left_out), text
        assert text in proposal.text
