from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("matrix=5", "--set matrix: found 5; allowed is a mapping"),
        ("matrix={}", "missing; give a list of some of alone, both, both-1, served"),
        ("matrix.strategy=both", "found 'both'; allowed is a list in brackets"),
        ("matrix.strategy=[]", "--set matrix.strategy: an empty list; give at least one value"),
        ("matrix.strategy=[3]", "found 3; allowed is a strategy's name or a mapping"),
        ("matrix.strategy=[{nmae: both}]", "found {'nmae': 'both'} without a name; allowed are"),
        ("matrix.strategy=[bothh]", "found 'bothh'; allowed are alone, both, both-1, served"),
        ("matrix.strategy=[both, {name: both}]", "{'name': 'both'} is given twice, first as [0]"),
        ("matrix.strategy=[{name: both, bucket: 1}]", "it has no option 'bucket'"),
        (
            "matrix.strategy=[{name: both, bucket_mb: x}]",
            "strategy both, option bucket_mb: found 'x'",
        ),
        ("matrix.strategy=[{name: both-1, stage: 2}]", "it has no option 'stage'"),
        (
            "matrix.strategy=[{name: both, precision: fp8}]",
            "[0].precision: found 'fp8'; allowed are fp32, bf16, fp16",
        ),
        ("matrix.strategy=[{name: both, gradient_accumulation: 0}]", "found 0; allowed is greater"),
        ("matrix.world_size=[0]", "found 0; allowed is a whole number from 1 to 65536"),
        ("matrix.world_size=[9999999999]", "found 9999999999; allowed is a whole number from 1 to"),
        ("matrix.world_size=[true]", "found true; allowed is a whole number from 1 to 65536"),
        ("matrix.world_size=[2.0]", "found 2.0; allowed is a whole number from 1 to 65536"),
        ("matrix.world_size=[2, 2]", "2 is given twice, first as [0]; give it once"),
        ("matrix.recipe.optimizer.lr=[1, 1.0]", "1.0 is given twice"),
        ("matrix.lr=[0.1, -1]", "matrix.recipe.optimizer.lr at [1]: found -1; allowed is greater"),
        ("matrix.optimizer=[{nmae: sgd}]", "[0].nmae: no such key; allowed are name, lr"),
        ("matrix.workload.model=[small, smal]", "at [1]: found 'smal'; allowed are small, large"),
        (
            "matrix.workload.modle=[small]",
            "at [0]: no such key; allowed are name, model, data_dir (nearest: 'model')",
        ),
        ("matrix.strategy.bucket_mb=[x]", "strategy both, option bucket_mb: found 'x'"),
        ("matrix.strategy.bucket=[1]", "no such axis; nearest: 'strategy.bucket_mb'"),
        ("matrix.strategy.staleness=[1]", "no such axis"),
        (
            "matrix.warmup_steps=[1]",
            "several meanings; allowed is one of recipe.schedule.warmup_steps",
        ),
        ("matrix.measure.repeats=[1]", "--set matrix.measure.repeats: no such axis"),
        ("matrix.limits.trial_seconds=[1]", "no such axis"),
        ("matrix.slow_ranks=[{1: 0.5}]", "slow_ranks at [0].1: found 0.5; allowed is greater"),
        ("matrix.slow_ranks=[2.0]", "matrix.slow_ranks at [0]: found 2.0; allowed is a mapping"),
        ("matrix.slow_ranks=[{}, {}]", "{} is given twice, first as [0]"),
    ],
)
def test_says_what_is_wrong(message: Callable[..., str], setting: str, expected: str) -> None:
    assert expected in message(setting)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ("matrix={strategy: [both], seed: [1], recipe.seed: [2]}",),
            "the same axis as recipe.seed",
        ),
        (("matrix.optimizer=[{lr: 1}]", "matrix.lr=[1]"), "recipe.optimizer is an axis, too"),
        (
            ("matrix.precision=[bf16]", "matrix.strategy=[{name: both, precision: fp32}]"),
            "'fp32', but recipe.precision is an axis of the matrix; keep one of the two",
        ),
        (
            ("matrix.strategy.bucket_mb=[5]", "matrix.strategy=[{name: both, bucket_mb: 1}]"),
            "1, but strategy.bucket_mb is an axis of the matrix",
        ),
    ],
)
def test_says_what_does_not_go_together(
    message: Callable[..., str], settings: tuple[str, ...], expected: str
) -> None:
    assert expected in message(*settings)
