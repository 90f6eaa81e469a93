"""Messages about a wrong experiment say where, what was found, and what is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Message = Callable[..., str]

IN_THE_BASE = [
    ("recipe.optimizer={name: adam, momentum: 0.9}", "adam has no momentum; leave it out"),
    ("recipe.optimizer={betas: [0.9, 0.999]}", "sgd has no betas; leave it out"),
    ("recipe.optimizer={name: adam, betas: [0.9, 2]}", "found 2; allowed is less than 1"),
    ("recipe.optimizer={name: own}", "own without path; give path"),
    (
        "recipe.optimizer={name: own, path: 'torch.optim:SGD', implementation: fused}",
        "own has no implementation; leave it out",
    ),
    ("recipe.optimizer.nesterov=true", "nesterov needs a momentum above 0"),
    ("recipe.schedule.name=step", "--set recipe.schedule.name: step without every_steps"),
    ("recipe.schedule.gamma=0.5", "constant has no gamma; leave it out"),
    ("recipe.per_rank_batch=0", "found 0; allowed is greater than 0"),
    ("recipe={global_batch: 1}", "give exactly one of epochs and steps"),
    ("recipe={epochs: 1}", "exactly one of global_batch and per_rank_batch"),
    ("recipe.epochs=true", "--set recipe.epochs: found true; this key is not a yes or no"),
    ("recipe.optimizer.lr=.inf", "found inf; allowed is a finite number"),
    ("recipe.cpu_offload=maybe", "found 'maybe'; allowed is true or false"),
    ("recipe=null", "--set recipe: found null; allowed is a mapping"),
    ("recipe.precision=[fp32, bf16]", "make it an axis: matrix: {recipe.precision: ['fp32'"),
    ("recipe.precision=fp8", "found 'fp8'; allowed are fp32, bf16, fp16 (nearest: 'fp32')"),
    ("device=gpu", "--set device: found 'gpu'; allowed are auto, cuda, cpu (nearest: 'cuda')"),
    ("name=../up", "found '../up'; allowed are letters, digits"),
    ("workload=3", "--set workload: found 3; allowed is a mapping"),
    ("workload={}", "missing; allowed are classification, detection"),
    ("workload.name=detect", "--set workload.name: found 'detect'; allowed are classification"),
    ("workload.modle=x", "(nearest: 'model')"),
    ("slow_ranks={1: 0.5}", "slow_ranks at 1: found 0.5; allowed is greater than or equal to 1"),
    ("slow_ranks={-1: 2}", "found '-1'; allowed is greater than or equal to 0"),
    ("placement.nodes=99999999", "found 99999999; allowed is less than or equal to 65536"),
    (
        "engine=slrum",
        "--set engine at name: found 'slrum'; allowed are local, torchrun, ray",
    ),
    ("engine={name: torchrun, node_seconds: 1}", "--set engine at node_seconds: found 1"),
    ("recipe.optimizer={name: AdamW}", "(nearest: 'adamw')"),
    ("recipe.optimizer={name: torch.optim.AdamW}", "(nearest: 'adamw')"),
    ("recipe.optimizer.learning_rate=1", "(nearest: 'lr')"),
    ("recipe.optimizer=adamw", "allowed is a mapping (key: value), e.g. {name: adamw}"),
    ("recipe.gradient_checkpointing=true", "(nearest: 'activation_checkpointing')"),
    ("recipe.gradient_accumulation_steps=2", "(nearest: 'gradient_accumulation')"),
    ("recipe.batch_size=8", "(nearest: 'global_batch')"),
    ("recipe.max_grad_norm=1", "(nearest: 'gradient_clipping')"),
    ("recipe.optimizer={name: adamw, state_bits: 4}", "found 4; allowed are 32, 8"),
    ("workload.loss_chunks=8", "no such key here; another kind of workload has it; leave it out"),
    (
        "recipe.activation_checkpointing=selektive",
        "--set recipe.activation_checkpointing: found 'selektive'; allowed is true or false or "
        "selective (nearest: 'selective') or a whole number",
    ),
    ("recipe.lr=0.1", "no such key here; nearest: 'recipe.optimizer.lr'"),
    ("recipe.optimizer.name=Adam", "(nearest: 'adam')"),
    (
        "recipe.optimizer.name=RMSProp",
        "write {name: own, path: torch.optim:RMSprop}, its options beside the name",
    ),
    ("recipe.compile=true", "found true; allowed are none, blocks, model"),
    (
        "recipe=[{steps: 1}]",
        "allowed is a mapping (key: value): write its keys without brackets and dashes",
    ),
    (
        "limits.max_restarts=2",
        "--set limits.max_restarts: found 2, and restarts inside a trial were removed; remove this "
        "key; after a failure, run the same command with the same --out again",
    ),
    (
        "limits.checkpoint_dir=/fast",
        "limits.checkpoint_dir: found '/fast', and restarts inside a trial were removed",
    ),
    ("num_epochs=3", "no such key here; nearest: 'recipe.epochs'"),
    ("strategies=[ddp]", "no such key here; nearest: 'matrix.strategy'"),
    ("world_sizes=[2]", "no such key here; nearest: 'matrix.world_size'"),
    ("repeat=3", "no such key here; nearest: 'measure.repeats'"),
    ("name=my run", "a letter or digit first, e.g. my-run"),
    ("recipe.steps", "--set recipe.steps: not key=value"),
    ("recipe.steps=[1", "--set recipe.steps, line 1: "),
]
IN_THE_MATRIX = [
    ("=5", "--set matrix: found 5; allowed is a mapping"),
    ("={}", "strategy: missing"),
    (".strategy=ddp", "found 'ddp'; allowed is a list in brackets: [ddp]"),
    (".strategy=[DDP]", "[0].name: found 'DDP'; nearest: 'ddp'"),
    (".strategy=[deepspeed]", "found 'deepspeed'; nearest: 'zero-1', 'zero-2', 'zero-3'"),
    (".strategy=[{ddp: {bucket_mb: 1}}]", "missing; write {name: ddp, ...}"),
    (".xyzzy=[1]", "no such axis; `shardmark schema` lists"),
    (".strategy=[]", "--set matrix.strategy: found []; allowed is at least one value"),
    (".strategy=[{nmae: ddp}]", "[0].name: missing; allowed are single, dp, ddp"),
    (".strategy=[ddpp]", "[0].name: found 'ddpp'; nearest: 'ddp-pp', 'ddp'"),
    (".strategy=[{name: ddp, bucket: 1}]", "[0].bucket: no such key; allowed are name, bucket_mb"),
    (".strategy=[{name: ddp, bucket_mb: x}]", "[0].bucket_mb: found 'x'; allowed is a number"),
    (".strategy=[{name: ddp, precision: fp8}]", "[0].precision: found 'fp8'; allowed are fp32"),
    (".world_size=[0]", "at [0]: found 0; allowed is greater than or equal to 1"),
    (".world_size=[9999999999]", "allowed is less than or equal to 65536"),
    (".world_size=[true]", "found true; allowed is a whole number"),
    (".lr=[0.1, -1]", "matrix.recipe.optimizer.lr at [1]: found -1; allowed is greater"),
    (".strategy.bucket_mb=[x]", "matrix.strategy.bucket_mb at [0]: found 'x'"),
    (".precison=[bf16]", "--set matrix.precison: no such axis; nearest: "),
    (".warmup_steps=[1]", "'recipe.schedule.warmup_steps', 'measure.warmup_steps'"),
    (".measure.repeats=[1]", "--set matrix.measure.repeats: no such axis"),
    (".slow_ranks=[{1: 0.5}]", "slow_ranks at [0].1: found 0.5; allowed is greater"),
    (".ranks_per_node=[2, 65537]", "placement.ranks_per_node at [1]: found 65537"),
    ("={strategy: [ddp], seed: [1], recipe.seed: [2]}", "the same axis as recipe.seed"),
]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [*IN_THE_BASE, *((f"matrix{setting}", text) for setting, text in IN_THE_MATRIX)],
)
def test_message_describes_the_mistake(message: Message, setting: str, expected: str) -> None:
    assert expected in message("recipe.seed=0", setting)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("matrix.optimizer=[{lr: 1}]", "matrix.lr=[1]"), "recipe.optimizer is an axis, too"),
        (
            ("matrix.precision=[bf16]", "matrix.strategy=[{name: ddp, precision: fp32}]"),
            "'fp32', but recipe.precision is an axis of the matrix; keep one of the two",
        ),
        (
            ("matrix.strategy.bucket_mb=[5]", "matrix.strategy=[{name: ddp, bucket_mb: 1}]"),
            "1, but strategy.bucket_mb is an axis of the matrix",
        ),
        (("matrix.precision=[bf16]", "precision=fp32"), "set matrix.recipe.precision to a list"),
        (("recipe.steps=10", "recipe.epochs=3"), "both are given"),
        (
            (f"matrix.seed={[*range(400)]}", f"matrix.steps={[*range(1, 401)]}"),
            "experiment: matrix: 320,000 cells; allowed are at most 4,000",
        ),
    ],
)
def test_message_names_conflicting_keys(
    message: Message, settings: tuple[str, ...], expected: str
) -> None:
    assert expected in message(*settings)
