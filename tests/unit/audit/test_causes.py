"""Causes of a deviation on made-up records: present, absent, and at the border."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from shardmark.audit import causes
from shardmark.audit.comparison import (
    Records,
    Vectors,
    agreement_check,
    gradient_check,
    reproduces,
    tensors_differ,
)
from shardmark.scripts.record import (
    GRAPH,
    Clip,
    Draw,
    Forward,
    Loader,
    LossCall,
    Micro,
    Record,
    Step,
)
from tests import present

GENERATOR = torch.Generator().manual_seed(1)
OWN = [torch.randn(40, generator=GENERATOR) for _ in range(2)]
"""Gradients of each rank's samples."""
MEAN = (OWN[0] + OWN[1]) / 2


def micro(
    gradient: Tensor | None = None,
    *,
    factor: float = 1.0,
    count: float = 4.0,
    reduction: str = "mean",
    couples: bool = False,
    counted: Sequence[bool] | None = None,
    gathers: tuple[str, ...] = (),
) -> Micro:
    """A micro-batch whose loss is `factor` times the mean 0.5 of its targets."""
    value = 0.5 * (1.0 if reduction == "mean" else count)
    call = LossCall(
        function="mse_loss", reduction=reduction, weight=count, value=value, couples=couples,
        counted=None if counted is None else torch.tensor(counted),
    )  # fmt: skip
    gradients = {} if gradient is None else {0: gradient}
    return Micro(loss=factor * 0.5, losses=[call], gradients=gradients, gathers=list(gathers))


def record(
    rank: int,
    used: Tensor,
    *micros: Micro,
    first_row: float = 0.0,
    **facts: Any,
) -> Record:
    rows = torch.arange(4.0) + first_row
    forward = Forward(module="Linear", inputs=[rows], outputs=[rows], rows=4, step=0)
    step = Step(gradients=[used], after=[used], micros=list(micros), settings=[{"lr": 0.1}])
    step.local_norms = [float(used.norm())]
    return Record(
        rank=rank, ranks=2, names=["weight"], steps=[step], forwards=[forward], before=[used],
        **facts,
    )  # fmt: skip


def unmatched(
    used: Tensor,
    micros: list[Micro],
    single: Micro | None,
    *,
    of_replay: Tensor = MEAN,
    first_row: float = 100.0,
) -> Records:
    """Records of two ranks and of one process that got other samples."""
    ranks = [record(n, used, m, first_row=10.0 * n) for n, m in enumerate(micros)]
    replay = None if single is None else record(0, of_replay, single, first_row=first_row)
    return Records(ranks=ranks, replay=replay, disturbed=None)


def own_finding(records: Records) -> str | None:
    finding = causes.of_own_gradients(records, causes.estimate(records).gradient)
    return None if finding is None else finding.name


def deviation(records: Records) -> float:
    estimate = causes.estimate(records).gradient["weight"]
    used = records.gradients()["weight"]
    return float(abs(used - estimate).max())


@pytest.mark.parametrize(
    ("factor", "reduction", "sum_of_gradients", "cause"),
    [
        (1.0, "mean", 1.0, None),
        (0.5, "mean", 1.0, "averaged_twice"),
        (0.5, "sum", 1.0, "averaged_twice"),
        (0.5, "mean", 2.0, None),  # divided by the ranks, and summed over them
        (2.0, "mean", 1.0, "multiplied_by_ranks"),
        (1.0, "mean", 2.0, "summed"),
    ],
)
def test_the_size_of_the_loss_is_that_of_one_process(
    factor: float, reduction: str, sum_of_gradients: float, cause: str | None
) -> None:
    micros = [micro(factor * own, factor=factor, reduction=reduction) for own in OWN]
    used = sum_of_gradients * factor * MEAN
    records = unmatched(used, micros, micro(reduction=reduction))
    assert causes.estimate(records).sized
    assert own_finding(records) == cause if cause else deviation(records) < 1e-6


def test_a_plain_sum_is_n_times_too_small_where_it_is_averaged() -> None:
    micros = [micro(4 * own, factor=4.0, reduction="sum") for own in OWN]
    records = unmatched(4 * MEAN, micros, micro(factor=4.0, reduction="sum"))
    assert own_finding(records) == "averaged_sum"


@pytest.mark.parametrize("divided_by_all", [True, False])
def test_uneven_targets_weigh_as_many_as_they_are(divided_by_all: bool) -> None:
    counts = [2.0, 6.0]
    factors = [2 * count / 8 for count in counts] if divided_by_all else [1.0, 1.0]
    micros = [
        micro(factor * own, factor=factor, count=count, reduction="sum")
        for own, factor, count in zip(OWN, factors, counts, strict=True)
    ]
    used = (factors[0] * OWN[0] + factors[1] * OWN[1]) / 2
    records = unmatched(used, micros, micro(reduction="sum"))
    if divided_by_all:
        assert deviation(records) < 1e-6
    else:
        assert own_finding(records) == "uneven_weights"


def test_an_unknown_loss_of_one_process_leaves_the_size_unknown() -> None:
    micros = [micro(own) for own in OWN]
    assert not causes.estimate(unmatched(MEAN, micros, None)).sized
    unknown = replace(micro(), losses=[])
    assert not causes.estimate(unmatched(MEAN, micros, unknown)).sized


def test_one_process_on_the_samples_of_rank_0_shows_the_size() -> None:
    micros = [replace(micro(0.5 * own), losses=[]) for own in OWN]
    single = replace(micro(), losses=[])
    records = unmatched(0.5 * MEAN, micros, single, of_replay=OWN[0], first_row=0.0)
    assert causes.estimate(records).sized
    assert own_finding(records) == "averaged_twice"
    other = unmatched(0.5 * MEAN, micros, single, of_replay=OWN[1], first_row=0.0)
    assert not causes.estimate(other).sized


def test_uneven_weights_hide_no_factor_of_a_loss_that_nobody_knows() -> None:
    records = matched(2 * MEAN, 0.4 * OWN[0] + 0.6 * OWN[1])
    for rank, own in zip(records.ranks, OWN, strict=True):
        rank.steps[0].micros = [Micro(loss=0.5, gradients={0: 2 * own})]
    records.ranks[1].forwards[0].inputs = [torch.arange(4.0) + 4]
    records.one_process.forwards[0].inputs = [torch.arange(8.0)]
    expected = causes.estimate(records, plain_mean=True)
    assert expected.sized
    assert expected.gradient["weight"] == pytest.approx(MEAN.numpy())
    assert (
        present(causes.of_own_gradients(records, expected.gradient)).name == "multiplied_by_ranks"
    )


@pytest.mark.parametrize(("counts", "known"), [((4.0, 4.0), True), ((4.0, 6.0), False)])
def test_a_sum_of_losses_weighs_ranks_alike_for_equally_many_targets(
    counts: tuple[float, float], known: bool
) -> None:
    micros = [micro(own, count=count) for own, count in zip(OWN, counts, strict=True)]
    records = unmatched(MEAN, micros, micro())
    assert causes.weights_are_known(records)  # one loss for each batch: its targets weigh alike
    for one in micros:
        one.losses = [*one.losses, *one.losses]
    assert causes.weights_are_known(records) is known


def test_a_loss_over_several_samples_is_named() -> None:
    for changed, text in (
        (micro(OWN[0], couples=True), "other samples of the batch"),
        (micro(OWN[0], gathers=("all_gather at train.py:7",)), "train.py:7"),
    ):
        records = unmatched(MEAN, [changed, micro(OWN[1])], micro())
        assert text in causes.unseen_dependence(records)
    records.ranks[0].steps[0].micros[0].gathers = []
    records.ranks[0].steps[0].micros[0].exchanges = ["all_to_all_single at train.py:9"]
    assert "train.py:9" in causes.unseen_dependence(records)
    assert not causes.unseen_dependence(unmatched(MEAN, [micro(o) for o in OWN], micro()))


def matched(used: Tensor, single: Tensor, **facts: Any) -> Records:
    ranks = [record(n, used, micro(own), **facts) for n, own in enumerate(OWN)]
    return Records(ranks=ranks, replay=record(0, single, micro()), disturbed=None)


def named(records: Records, *, shares: Record | None = None, alone: Sequence[Record] = ()) -> str:
    """Name of the cause, with a replay of shares, and one of each rank's samples alone."""
    by_ranks = {(rank,): record for rank, record in enumerate(alone)}
    replays: dict[str, Any] = {"with_shares": lambda: shares, "alone": lambda *r: by_ranks.get(r)}
    finding = causes.of_gradient(replace(records, **replays))
    return "" if finding is None else finding.name


def test_batch_norm_is_named_if_its_shares_give_the_gradient() -> None:
    other = torch.randn(40, generator=GENERATOR)
    records = matched(MEAN, other, batch_norm={("", True, 0, 0): [(4, 0.0)]})
    assert named(records, shares=record(0, MEAN * (1 + 1e-6))) == "batch_norm_of_share"
    assert named(records, shares=record(0, other)) == ""
    assert named(matched(MEAN, other), shares=record(0, MEAN)) == ""
    rounded = matched(MEAN, MEAN + 2e-6 * OWN[0], batch_norm={("", True, 0, 0): [(4, 0.0)]})
    assert named(rounded, shares=record(0, MEAN + 1e-6 * OWN[1])) == ""


def test_models_that_are_clipped_one_by_one_have_gradients_before_that() -> None:
    first, second, third = OWN[0], OWN[1], MEAN
    facts: dict[str, Any] = {"norm": 1.0, "limit": 0.1, "scaled": False, "scale": 1.0, "micros": 0}
    clips = [
        Clip(gradients=[first, None, None], **facts),
        Clip(gradients=[0.1 * first, second, None], **facts),
    ]
    used: list[Tensor | None] = [0.1 * first, 0.1 * second, third]
    before = Step(gradients=used, clips=clips).unclipped
    assert all(map(torch.equal, map(present, before), (first, second, third)))
    assert Step(gradients=used).unclipped == []


def test_what_batch_norm_leaves_of_a_deviation_is_named_beside_it() -> None:
    """Statistics of a rank's rows make a loss look like one of the full batch."""
    single, other = (torch.randn(40, generator=GENERATOR) for _ in range(2))
    alone = {(rank,): record(rank, own) for rank, own in enumerate(OWN)}

    def beside(of_shares: Tensor | None, *, unclear: bool = False) -> list[str]:
        """Names for ranks that use the mean, and a gradient of one process with their rows."""
        records = matched(MEAN, single, batch_norm={("", True, 0, 0): [(4, 0.0)]})
        shares = None if of_shares is None else record(0, of_shares)
        records = replace(records, with_shares=lambda: shares, alone=lambda *r: alone.get(r))
        found = present(causes.of_gradient(records))
        assert found.name == "whole_batch_loss"
        cause, rest = causes.beside_batch_norm(records, found, unclear=unclear)
        return [finding.name for finding in (cause, *rest) if finding is not None]

    uneven = 0.3 * OWN[0] + 0.7 * OWN[1]
    assert beside(uneven) == ["batch_norm_of_share", "uneven_weights"]
    assert beside(uneven, unclear=True) == ["batch_norm_of_share"]
    near = MEAN + 0.1 * other
    assert beside(near) == ["batch_norm_of_share", "whole_batch_loss"], "contrastive, too"
    assert beside(-MEAN) == ["whole_batch_loss"], "it takes the rows of all ranks"
    assert beside(None) == ["whole_batch_loss"]


def test_a_loss_of_the_full_batch_is_named_if_ranks_alone_have_their_gradients() -> None:
    other = torch.randn(40, generator=GENERATOR)
    both = [record(0, OWN[0]), record(1, OWN[1])]
    records = matched(MEAN, other)
    assert named(records, alone=both) == "whole_batch_loss"
    assert named(records, alone=[record(0, OWN[0]), record(1, other)]) == "", "another frozen part"
    assert named(records, alone=[record(0, 1.1 * OWN[0]), both[1]]) == ""
    assert named(records) == ""
    records.one_process.padded_left = True
    assert named(records, alone=both) == "", "the model may depend on the padding"
    records.one_process.padded_left = False
    records.ranks[0].steps[0].micros[0].gathers = ["all_gather at train.py:7"]
    assert named(records, alone=[record(0, other)]) == "gathered_without_gradients"
    assert named(records, alone=both) == "whole_batch_loss"


def test_weights_are_solved_for_where_they_give_the_gradient() -> None:
    assert named(matched(MEAN, 0.3 * OWN[0] + 0.7 * OWN[1])) == "uneven_weights"
    doubled = causes.of_weighting(matched(MEAN, 0.15 * OWN[0] + 0.35 * OWN[1]))
    assert doubled is not None
    assert "2 times as large" in doubled.evidence
    assert named(matched(MEAN, 1.3 * OWN[0] - 0.3 * OWN[1])) == ""


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        ((0.25, 0.75, 0.4, 0.6), "uneven_micro_batches"),  # the ranks weigh alike
        ((0.2, 0.5, 0.4, 0.9), "uneven_weights"),
    ],
)
def test_weights_of_micro_batches_are_told_from_those_of_ranks(
    weights: Sequence[float], cause: str
) -> None:
    own = [torch.randn(40, generator=GENERATOR) for _ in weights]
    records = matched(
        sum(own, 0 * MEAN) / 2, sum((w * g for w, g in zip(weights, own, strict=True)), 0 * MEAN)
    )
    for rank, gradients in zip(records.ranks, (own[:2], own[2:]), strict=True):
        rank.steps[0].micros = [micro(gradient) for gradient in gradients]
    assert named(records) == cause


@pytest.mark.parametrize("factor", [0.98, 2.1, 3.0])
def test_a_factor_that_is_not_the_number_of_ranks_is_no_sum(factor: float) -> None:
    assert named(matched(factor * MEAN, MEAN)) == ""


def test_a_factor_is_named_without_a_call_of_backward() -> None:
    ranks = [record(n, MEAN / 2) for n in range(2)]
    assert named(Records(ranks=ranks, replay=record(0, MEAN))) == "averaged_twice"


@pytest.mark.parametrize(("hooks", "cause"), [(False, "multiplied_by_ranks"), (True, "summed")])
def test_a_hook_may_sum_a_gradient_before_it_is_seen(hooks: bool, cause: str) -> None:
    facts = {"gradient_hooks": hooks}
    ranks = [record(n, 2 * MEAN, micro(2 * own), **facts) for n, own in enumerate(OWN)]
    assert named(Records(ranks=ranks, replay=record(0, MEAN, micro()))) == cause


@pytest.mark.parametrize(("limit", "named_so"), [(1.0, True), (100.0, False)])
def test_clipping_is_named_if_the_clipped_gradients_give_the_result(
    limit: float, named_so: bool
) -> None:
    norms = [float(own.norm()) for own in OWN]
    clipped = [own * min(1.0, limit / norm) for own, norm in zip(OWN, norms, strict=True)]
    single = MEAN * min(1.0, limit / float(MEAN.norm())) + (0 if named_so else 0.1 * OWN[0])
    records = matched((clipped[0] + clipped[1]) / 2, single)
    for rank, own, norm in zip(records.ranks, OWN, norms, strict=True):
        rank.steps[0].clips = [
            Clip(norm=norm, limit=limit, scaled=False, scale=1.0, micros=1, gradients=[own])
        ]
    assert (named(records) == "clipped_locally") == named_so


@pytest.mark.parametrize(
    ("factors", "cause"),
    [((1.0, 1.5), "shards_scaled"), ((1.0, 1.0), ""), (None, "clipped_locally")],
)
def test_shards_are_clipped_if_their_norms_are_the_limit(
    factors: tuple[float, float] | None, cause: str
) -> None:
    full = MEAN * 0.1 / MEAN.norm()
    shards = list(full.chunk(2))
    scales = factors or [0.1 / float(shard.norm()) for shard in shards]
    assert named(sharded(full, scales)) == cause


def sharded(single: Tensor, scales: Sequence[float], *, steps: int = 1) -> Records:
    """Records of ranks that each multiply their shard of one process's gradient by a number."""
    shards = [s * shard for s, shard in zip(scales, single.chunk(len(scales)), strict=True)]
    ranks = [
        record(n, torch.cat(shards), micro(OWN[n % 2]), frameworks=["FSDP2"])
        for n in range(len(scales))
    ]
    for rank, shard in zip(ranks, shards, strict=True):
        rank.steps[0].local_norms = [float(shard.norm())]
    replay = record(0, single, micro())
    replay.steps *= steps
    return Records(ranks=ranks, replay=replay)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_norm_that_is_averaged_is_the_limit(steps: int) -> None:
    single = MEAN * 0.1 / MEAN.norm()
    factor = 0.1 / (sum(float(shard.norm()) for shard in single.chunk(2)) / 2)
    records = sharded(single, [factor] * 2, steps=steps)
    finding = causes.of_gradient(records)
    if steps == 1:  # one step does not show that one process clips
        assert finding is None
        return
    assert present(finding).name == "clip_norm_averaged"
    right, evidence = float(MEAN.norm()), present(finding).evidence
    assert f"used is {right / factor:.4g}, and that of the full gradient is {right:.4g}" in evidence


@pytest.mark.parametrize(
    ("times", "cause"),
    [(2.0, "clip_norm_counted_again"), (4.0, "clip_norm_counted_again"), (1.9, "")],
)
def test_a_norm_that_counts_gradients_again_is_the_limit(times: float, cause: str) -> None:
    records = matched(MEAN / times**0.5, MEAN)
    present(records.replay).steps *= 2
    assert named(records) == cause


@pytest.mark.parametrize(("size", "cause"), [(1, "clipped_locally"), (2, "clip_norm_of_group")])
def test_the_norm_of_each_group_of_ranks_is_the_limit(size: int, cause: str) -> None:
    single = MEAN * 0.1 / MEAN.norm()
    groups = single.chunk(4 // size)
    scales = [0.1 / float(group.norm()) for group in groups for _ in range(size)]
    assert named(sharded(single, scales)) == cause


@pytest.mark.parametrize(("scales", "cause"), [((1.4, 1.2), "clipped_locally"), ((1.0, 0.5), "")])
def test_ranks_that_clip_what_they_share_disagree_by_their_norms(
    scales: tuple[float, float], cause: str
) -> None:
    records = matched(MEAN, MEAN)
    size = float(MEAN.norm())
    for rank, scale in zip(records.ranks, scales, strict=True):
        rank.steps[0].gradients = [scale * MEAN]
        rank.steps[0].local_norms = [size if cause else scale * size]
    assert present(causes.of_disagreement(records)).name == (cause or "ranks_disagree")


@pytest.mark.parametrize(("size", "which"), [(1, "1 rank, which changes nothing"), (2, "")])
def test_a_group_that_lacks_ranks_is_named_where_all_gradients_differ(
    size: int, which: str
) -> None:
    records = matched(MEAN, MEAN, small_groups={"DDP": 1} if size == 1 else {})
    assert causes.of_disagreement(records) is None
    for rank, own in zip(records.ranks, OWN, strict=True):
        rank.steps[0].gradients = [own]
    finding = present(causes.of_disagreement(replace(records)))
    assert finding.name == ("group_too_small" if which else "not_reduced")
    assert which in finding.reason


@pytest.mark.parametrize(
    ("elements", "same"),
    [
        ((8.0, 8.0, 16.0), True),
        ((4.0, 4.0, 16.0), False),
        ((5.0, 5.0, 16.0), True),  # pooled in another way
        (None, False),
    ],
)
def test_parts_of_the_same_rows_are_not_the_same_data(
    elements: tuple[float, ...] | None, same: bool
) -> None:
    records = matched(MEAN, MEAN)
    both = [*records.ranks, present(records.replay)]
    rows = [torch.arange(4.0), torch.arange(4.0), torch.arange(4.0).repeat(2)]
    for one, inputs, count in zip(both, rows, elements or (0.0,) * 3, strict=True):
        one.forwards[0].inputs, one.forwards[0].rows = [inputs], len(inputs)
        one.calls = {"head": [1.0, 1.0, count]}
    if elements is None:  # the script fails in one process, and the ranks' outputs differ
        records = replace(records, replay=None)
        records.ranks[1].forwards[0].outputs = [torch.arange(4.0) + 1]
    finding = causes.of_data(records)
    assert (finding is not None and finding.name == "same_data") == same


def test_a_cause_gives_every_tensor() -> None:
    expected: Vectors = {"a": MEAN.double().numpy(), "b": OWN[0].double().numpy()}
    used: Vectors = {"a": 0.5 * expected["a"], "b": expected["b"]}
    halves: Vectors = {name: 0.5 * value for name, value in expected.items()}
    assert reproduces(used, used, expected, 5e-7)
    assert not reproduces(used, halves, expected, 5e-7)
    assert not reproduces(used, expected, expected, 5e-7)
    assert not reproduces(used, {"a": used["a"]}, expected, 5e-7)


def test_equal_infinities_are_no_difference() -> None:
    mask = torch.tensor([0.0, float("-inf"), float("nan")])
    assert not tensors_differ(mask, mask.clone(), 1e-5)
    assert tensors_differ(mask, torch.zeros(3), 1e-5)
    assert tensors_differ(mask, torch.tensor([1.0, float("-inf"), float("nan")]), 1e-5)
    assert tensors_differ(mask, mask[:2], 1e-5)
    assert not tensors_differ(torch.ones(4), torch.ones(4) + 5e-6, 1e-5)


def drawn(
    rows: int,
    *shares: Sequence[int],
    settings: Sequence[dict[str, int]] = (),
    subsets: Sequence[Sequence[int]] = (),
) -> Records:
    """Records of ranks whose samplers give these indices of a data set of so many rows."""
    ranks = [record(n, MEAN, micro(MEAN), first_row=10.0 * n) for n in range(len(shares))]
    for n, (rank, share) in enumerate(zip(ranks, shares, strict=True)):
        rank.loaders = [
            Loader(
                batch_size=4, samples=rows, available=subsets[n] if subsets else range(rows),
                sampler_settings=settings[n] if settings else {}, indices=[*share], largest_batch=4,
            )
        ]  # fmt: skip
    return Records(ranks=ranks, replay=record(0, MEAN, micro()))


def permuted(rows: int, seed: int = 0) -> list[int]:
    order: list[int] = torch.randperm(rows, generator=seeded(seed)).tolist()
    return order


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distributed(*seeds: int, replicas: int = 2, rows: int = 64) -> dict[str, Any]:
    """Shares and settings of torch's sampler, one for each seed."""
    samplers: list[DistributedSampler[int]] = [
        DistributedSampler(range(rows), replicas, rank, seed=seed)  # type: ignore[arg-type]
        for rank, seed in enumerate(seeds)
    ]
    settings = [
        {"seed": one.seed, "epoch": one.epoch, "num_replicas": replicas, "rank": one.rank}
        for one in samplers
    ]
    return {"shares": [[*one] for one in samplers], "settings": settings}


def test_unlike_settings_of_samplers_are_named() -> None:
    facts = distributed(3, 6)
    finding = present(causes.of_data(drawn(64, *facts["shares"], settings=facts["settings"])))
    assert finding.name == "data_dropped"
    assert "seed differs by rank (3, 6)" in finding.reason
    assert "same seed" in finding.remedy
    facts = distributed(3, 3, replicas=4)
    finding = present(causes.of_data(drawn(64, *facts["shares"], settings=facts["settings"])))
    assert "num_replicas=4" in finding.reason
    facts = distributed(3, 3)
    subsets = [permuted(64, seed) for seed in (1, 2)]
    shares = [[data[n] for n in of] for data, of in zip(subsets, facts["shares"], strict=True)]
    finding = present(
        causes.of_data(drawn(64, *shares, settings=facts["settings"], subsets=subsets))
    )
    assert finding.name == "data_dropped"
    assert "DistributedSampler" not in finding.remedy


def test_ranks_with_orders_of_their_own_miss_samples() -> None:
    finding = present(causes.of_data(drawn(48, *(permuted(48, r)[r::2] for r in range(2)))))
    assert finding.name == "data_dropped"
    assert "its own order" in finding.reason
    again = [permuted(50, r)[r::2] + permuted(50, r)[r:4:2] for r in range(2)]  # the last batch
    assert present(causes.of_data(drawn(50, *again))).name == "data_dropped"
    overlapping = [range(40), range(30, 64)]
    finding = present(causes.of_data(drawn(64, *overlapping, subsets=overlapping)))
    assert (finding.name, finding.deviation) == ("data_repeated", "10 samples are on several ranks")


@pytest.mark.parametrize(
    ("rows", "shares"),
    {
        "shares that the first samples fill up": (
            65, distributed(0, 0, 0, 0, replicas=4, rows=65)["shares"],
        ),
        "a last round of batches that begins again": (
            50, [[i for n in range(0, 56, 4) if n // 4 % 2 == r
                  for i in (permuted(50) + permuted(50))[n : n + 4]] for r in range(2)],
        ),
        "draws with replacement": (
            64, [torch.randint(64, (32,), generator=seeded(r)).tolist() for r in range(2)],
        ),
        "a few samples of each rank": (1000, [permuted(1000, r)[:100] for r in range(2)]),
        "all samples on each rank": (64, [permuted(64, r) for r in range(2)]),
        "repeated augmentation": (
            96, [[i for i in permuted(96) for _ in range(3)][r::8][:12] for r in range(8)],
        ),
        "two ranks for each share": (64, [permuted(64)[r // 2 :: 2] for r in range(4)]),
        "a part that is left for validation": (64, [permuted(64)[r:50:2] for r in range(2)]),
    }.values(),
)  # fmt: skip
def test_samples_that_ranks_repeat_or_leave_out_by_intent_are_no_fault(
    rows: int, shares: list[list[int]]
) -> None:
    assert causes.of_data(drawn(rows, *shares)) is None


def test_a_split_of_the_data_leaves_out_nothing() -> None:
    train = permuted(80)[:64]
    facts = distributed(0, 0)
    shares = [[train[n] for n in of_rank] for of_rank in facts["shares"]]
    records = drawn(80, *shares, settings=facts["settings"], subsets=[train] * 2)
    assert causes.of_data(records) is None


@pytest.mark.parametrize(
    ("facts", "second", "found"),
    [
        ({}, 0, True),
        ({}, 1, False),
        ({"shuffles": False}, 0, False),
        ({"trains": False}, 0, False),  # an evaluation, or a look at the first batch
    ],
)
def test_an_order_is_that_of_every_epoch_if_it_is_that_of_two(
    facts: dict[str, Any], second: int, found: bool
) -> None:
    records = matched(MEAN, MEAN)
    records.ranks[1].forwards[0].inputs = [torch.arange(4.0) + 10]
    records.ranks[0].loaders = [
        Loader(batch_size=2, number=0, indices=permuted(16, seed), sampler="OwnSampler",
               **{"shuffles": True, "trains": True, **facts})
        for seed in (0, second)
    ]  # fmt: skip
    finding = causes.of_data(records)
    assert (finding is not None) == found
    if finding is not None:
        assert finding.name == "same_order_every_epoch"
        assert "OwnSampler" in finding.reason


def scheduled(ranks: list[float], single: list[float], **facts: Any) -> Records:
    records = matched(MEAN, MEAN, **facts)
    for one, rates in ((records.ranks[0], ranks), (records.ranks[1], ranks),
                       (present(records.replay), single)):  # fmt: skip
        one.loaders = [Loader(batch_size=4, length=20, batches=3)]
        one.steps = [replace(one.steps[0], settings=[{"lr": rate}]) for rate in rates]
    return records


def test_a_total_of_optimizer_steps_is_told_from_epochs() -> None:
    ranks, single = [1.0, 0.8, 0.6], [1.0, 0.9, 0.8]
    for facts, cause in (
        ({"totals": [10]}, "schedule_differs"),
        ({"totals": [40]}, None),
        ({"totals": [10], "asked_lengths": True}, None),
        ({}, None),
    ):
        records = scheduled(ranks, single, **facts)
        assert causes.advances_by_ranks(records, present(records.replay))
        finding = causes.of_total(records)
        assert (finding and finding.name) == cause
    scaled = scheduled([2.0, 1.8, 1.6], single)
    replay = present(scaled.replay)
    assert not causes.advances_by_ranks(scaled, replay)
    assert causes.scales_rates(scaled, replay)


def test_ranks_that_change_gradients_after_reduction_disagree() -> None:
    records = matched(MEAN, MEAN)
    records.ranks[1].steps[0].gradients = [1.5 * MEAN]
    records.ranks[1].steps[0].local_norms = [1.5 * float(MEAN.norm())]
    finding = present(causes.of_disagreement(records))
    assert finding.name == "ranks_disagree"
    for scale in (1.0, 0.3):  # clipped, each by its own norm
        for rank, own in zip(records.ranks, OWN, strict=True):
            rank.steps[0].gradients = [scale * (1 + rank.rank) * own]
        finding = present(causes.of_disagreement(replace(records)))
        assert finding.name == "not_reduced"


@pytest.mark.parametrize(
    ("norm", "scaled", "found"), [(8.0, True, True), (8.0, False, False), (None, True, False)]
)
def test_clipping_is_blamed_for_a_scale_that_the_gradients_have(
    norm: float | None, scaled: bool, found: bool
) -> None:
    records = matched(MEAN, MEAN)
    clip = Clip(norm=norm, limit=1.0, scaled=scaled, scale=4.0, micros=1, gradients=[MEAN])
    records.ranks[0].steps[0].clips = [clip]
    finding = causes.of_scaler(records)
    assert (finding is not None) == found
    if finding is not None:
        assert finding.name == "clipped_before_unscaling"
        assert "clipped to 0.25 instead of 1" in finding.deviation
        assert "without the scale 2" in finding.evidence


@pytest.mark.parametrize(("of_rank", "scales"), [(4, True), (2, False), (8, False)])
def test_a_batch_is_scaled_if_a_rank_has_that_of_one_process(of_rank: int, scales: bool) -> None:
    records = matched(MEAN, MEAN)
    replay = present(records.replay)
    for one, size in (*((rank, of_rank) for rank in records.ranks), (replay, 4)):
        one.loaders = [Loader(batch_size=size, batches=1)]
    assert causes.scales_batch(records, replay) == scales


def test_gradients_are_those_of_the_first_step_unless_another_is_asked_for() -> None:
    records = matched(MEAN, MEAN)
    for rank in records.ranks:
        rank.steps.append(replace(rank.steps[0], gradients=[2 * MEAN]))
    first, second = records.gradients()["weight"], records.gradients(1)["weight"]
    assert list(second) == list(2 * first)


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (torch.ones(2, 3), "equal on all ranks"),
        (torch.full((2, 3), 2.0), "differ by 0.5"),
        (torch.ones(3, 2), "shape (3, 2)"),
    ],
)
def test_tensors_of_the_ranks_agree_in_shape_and_in_values(second: Tensor, found: str) -> None:
    check = agreement_check("weights", [[torch.ones(2, 3)], [second]], ["weight"])
    assert check.found == found
    assert check.holds == (found == "equal on all ranks")


def drawing(
    *,
    seeds: tuple[int, int] = (0, 0),
    sums: tuple[float, float] = (1.0, 2.0),
    first: int = 1,
    shape: tuple[int, ...] = (4, 3),
    dropout: bool = False,
    inside: bool = False,
    own_seed: bool = True,
) -> Records:
    """Records of two ranks that draw random numbers for their batches of four rows."""
    ranks = []
    for rank, (seed, checksum) in enumerate(zip(seeds, sums, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        values = [torch.rand(shape, generator=generator) for _ in range(3)]
        values = [(value < 0.5).float() for value in values] if dropout else values
        forward = Forward(
            module="Denoiser", inputs=[torch.rand(4)], outputs=[], rows=4, step=0, shapes=[(3,)]
        )
        draws = [
            Draw(place="train.py:7", value=value, forward=number if first else 0, own_seed=own_seed)
            for number, value in enumerate(values, first)
        ]
        ranks.append(
            Record(
                rank=rank, ranks=2, forwards=[forward] * 4, draws=[] if inside else draws,
                forward_draws={n: [v] for n, v in enumerate(values)} if inside else {},
                own_seed=own_seed,
                loaders=[Loader(batch_size=4, batches=3, sums=[checksum] * 3)],
            )
        )  # fmt: skip
    return Records(ranks=ranks)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, True),
        ({"inside": True}, True),
        ({"seeds": (0, 1)}, False),
        ({"sums": (1.0, 1.0)}, False),  # the ranks share their samples
        ({"first": 0}, False),  # before training, or in an evaluation
        ({"first": 3}, False),  # once
        ({"shape": (8, 3)}, False),  # rows of all ranks together
        ({"shape": (4, 5), "inside": True}, False),  # inside of the model
        ({"dropout": True}, False),
        ({"own_seed": False}, False),  # they go on after the initial weights
        ({"own_seed": False, "inside": True}, False),
    ],
)
def test_equal_draws_are_noise_for_different_samples(facts: dict[str, Any], named: bool) -> None:
    found = causes.of_draws(drawing(**facts))
    assert (found is not None and found.name == "equal_draws") is named
    if facts.get("own_seed") is False:
        assert causes.of_draws(drawing(**facts), any_seed=True) is not None, "for a note"


def test_a_line_may_draw_steps_and_noise() -> None:
    records = drawing()
    for rank in records.ranks:
        steps = [replace(draw, value=torch.ones(4, dtype=torch.int64)) for draw in rank.draws]
        rank.draws += steps
    assert present(causes.of_draws(records)).name == "equal_draws"


def windows(*steps: Sequence[tuple[float, float]], rows: Sequence[int], **options: Any) -> Records:
    """Records of one process whose micro-batches have a count of targets and a factor each."""
    options = {"counted": [True] * 5 + [False], **options}
    facts = {name: options.pop(name) for name in ("batch_norm",) if name in options}
    by_step = [
        [
            micro(factor * own, factor=factor, count=count, **options)
            for (count, factor), own in zip(step, OWN * 2, strict=False)
        ]
        for step in steps
    ]
    weighted = (factor * own for (_, factor), own in zip(steps[0], OWN * 2, strict=False))
    used = sum(weighted, 0 * MEAN)
    one = record(0, used, *by_step[0], **facts)
    one.steps += [Step(gradients=[used], micros=micros) for micros in by_step[1:]]
    one.forwards = [
        Forward(module="Linear", inputs=[10.0 * number + torch.arange(count)], outputs=[],
                rows=count, step=0, micro=number)
        for number, count in enumerate(rows)
    ]  # fmt: skip
    return Records(ranks=[one])


@pytest.mark.parametrize(
    ("window", "rows", "options", "uneven"),
    [
        (((4, 0.5), (12, 0.5)), (2, 2), {}, True),
        (((4, 0.5), (12, 0.5)), (2, 2), {"reduction": "none"}, True),
        (((4, 0.75), (12, 0.25)), (3, 1), {}, True),
        (((8, 0.5), (8, 0.5)), (2, 2), {}, False),
        (((8, 0.75), (8, 0.25)), (2, 2), {}, False),
        (((4, 0.25), (12, 0.75)), (2, 2), {"reduction": "sum"}, False),
        (((4, 0.5), (12, 0.6)), (2, 2), {}, False),
        (((4, 0.5), (12, 0.5)), (2, 2), {"couples": True}, False),
        (((4, 0.5), (12, 0.5)), (2, 2), {"batch_norm": True}, False),
        (((4, 0.5), (12, 0.5)), (2, 2), {"reduction": "batchmean"}, False),
        (((4, 0.5), (12, 0.5)), (2, 2), {"counted": [True] * 6}, False),
        (((4, 0.5), (12, 0.5)), (2, 2), {"counted": None}, False),
        (((4, 0.5), (12, 0.5)), (1, 3), {"counted": None}, True),
        (((4, 0.25), (12, 0.75)), (1, 3), {"counted": None}, False),
    ],
    ids=[
        "mean of means", "mean by hand", "weighted by samples", "equal counts", "weights by intent",
        "all targets divide", "another part of the loss", "contrastive", "batch norm",
        "mean of samples", "each sample a mean", "elements", "other samples", "samples",
    ],
)  # fmt: skip
def test_micro_batches_are_uneven_if_targets_and_weights_are_known(
    window: Sequence[tuple[float, float]], rows: Sequence[int], options: Any, uneven: bool
) -> None:
    finding = causes.of_micro_batches(windows(window, rows=rows, **options))
    assert (finding is not None) == uneven


@pytest.mark.parametrize(
    ("factors", "name", "times"),
    [
        ((1, 1, 1, 1), "accumulation_not_divided", "4 times"),
        ((0.4, 0.6, 0.3, 0.7), "accumulation_not_divided", "2 times"),  # means of two
        ((0.4, 0.6, 0.2, 0.7), None, ""),
        ((0.1, 0.2, 0.3, 0.4), None, ""),
        ((0.0625,) * 4, "accumulation_divided_twice", "1/4"),
    ],
)
def test_the_size_of_an_accumulated_gradient(
    factors: Sequence[float], name: str | None, times: str
) -> None:
    window = [(4.0, factor) for factor in factors]
    finding = causes.of_accumulation(windows(window, rows=(2, 2, 2, 2)))
    assert (finding and finding.name) == name
    assert finding is None or times in finding.deviation


@pytest.mark.parametrize(("of_full_windows", "short"), [(0.25, True), (0.125, False), (None, True)])
def test_a_short_window_is_divided_as_full_ones_are(
    of_full_windows: float | None, short: bool
) -> None:
    full = [] if of_full_windows is None else [[(4.0, of_full_windows)] * 4]
    records = windows([(4.0, 0.25)] * 2, *full, rows=(2, 2))
    records.ranks[0].window = 4
    finding = causes.of_accumulation(records)
    assert (finding is not None and finding.name == "short_window") == short


def own_means(
    *factors: float,
    divisor: float = 1.0,
    elements: tuple[float, float] = (2.0, 4.0),
    times: float = 1.0,
    sums: bool = False,
    **facts: Any,
) -> Records:
    """Records of two ranks and one process whose losses are means that their graphs show.

    `elements` are those of a mean on a rank and in one process, `times` multiplies the losses of
    the ranks alone, and `sums` tells that the graph has a sum.
    """

    def of(number: int, gradients: Sequence[Tensor], rows: Sequence[float]) -> Record:
        used = sum((f * g for f, g in zip(factors, gradients, strict=True)), 0 * MEAN) / divisor
        alone = len(rows) > 2
        micros = []
        for factor, gradient in zip(factors, gradients, strict=True):
            mean = LossCall(
                function="mean", reduction=GRAPH, weight=elements[alone], value=0.5,
                options={"sums": sums},
            )  # fmt: skip
            given: dict[str, Any] = {"loaders": [0], "gradients": {0: factor * gradient}, **facts}
            loss = factor * 0.5 * (1.0 if alone else times)
            micros.append(Micro(loss=loss, means=[mean], **given))
        one = record(number, used, *micros)
        one.forwards = [
            Forward(module="Linear", inputs=[100.0 * micro + torch.tensor(rows)], outputs=[],
                    rows=len(rows), step=0, micro=micro)
            for micro in range(len(factors))
        ]  # fmt: skip
        return one

    own = [[torch.randn(40, generator=GENERATOR) for _ in factors] for _ in range(2)]
    means = [(a + b) / 2 for a, b in zip(*own, strict=True)]
    ranks = [of(n, g, [2.0 * n, 2.0 * n + 1]) for n, g in enumerate(own)]
    return Records(ranks=ranks, replay=of(0, means, [0.0, 1.0, 2.0, 3.0]))


MEAN_OF_TORCH = LossCall(function="cross_entropy", reduction="mean", weight=2.0, value=0.5)


@pytest.mark.parametrize(
    ("factors", "facts", "name", "note"),
    [
        ((1, 1, 1, 1), {}, "accumulation_not_divided", False),
        ((0.25,) * 4, {}, None, False),
        ((1, 1, 1, 1), {"divisor": 4.0}, None, False),  # the gradients are divided
        ((0.1, 0.2, 0.3, 0.4), {}, None, False),
        ((0.5,) * 4, {}, None, True),  # a factor of its own, or two micro-batches together
        ((0.25, 0.25), {}, None, True),  # half of the squares, divided by two
        ((1, 1, 1, 1), {"elements": (1, 1)}, None, True),  # one number, whatever its samples
        ((1, 1, 1, 1), {"elements": (2, 8)}, None, True),  # other elements than those of the ranks
        ((1, 1), {"sums": True}, "accumulation_not_divided", False),
        ((1, 1), {"sums": True, "elements": (4, 8)}, None, True),  # two columns, divided by two
        ((1, 1), {"times": 0.5}, None, True),  # divided by a number that is no number of rows
        ((4, 4, 4, 4), {}, None, True),  # a sum
        ((1, 1), {"loaders": []}, None, True),  # two losses of one batch
        ((1.1, 1.3, 1.2, 1.5), {"losses": [MEAN_OF_TORCH]}, None, True),  # another term beside it
        ((0.1, 0.2, 0.3, 0.4), {"losses": [MEAN_OF_TORCH]}, None, False),
    ],
)
def test_means_that_torch_does_not_compute_are_added_if_nothing_else_explains_it(
    factors: Sequence[float], facts: dict[str, Any], name: str | None, note: bool
) -> None:
    records = own_means(*factors, **facts)
    finding = causes.of_accumulation(records)
    assert (finding and finding.name) == name
    assert (causes.of_unknown_division(records) is not None) == note


def test_means_of_two_lines_may_be_two_losses() -> None:
    records = own_means(1, 1)
    present(records.replay).steps[0].micros[0].place = "train.py:7"
    assert causes.of_accumulation(records) is None


def test_a_hook_on_gradients_may_divide_them() -> None:
    records = own_means(1, 1)
    present(records.replay).gradient_hooks = True
    assert causes.of_accumulation(records) is None


def test_the_amount_is_that_of_one_pass_over_all_micro_batches() -> None:
    few, many = OWN
    used, one_pass = (few + many) / 2, (few + 3 * many) / 4
    off = float((used - one_pass).norm() / max(used.norm(), one_pass.norm()))
    finding = present(causes.of_micro_batches(windows(((4, 0.5), (12, 0.5)), rows=(2, 2))))
    assert causes.percent(off) in finding.deviation
    assert "4 targets weighs 0.5 in place of 0.25" in finding.evidence


def test_a_gradient_that_is_no_sum_of_the_micro_batches_shows_no_weights() -> None:
    records = windows(((4, 0.5), (12, 0.5)), rows=(2, 2))
    records.ranks[0].steps[0].gradients = [OWN[0]]
    assert causes.of_micro_batches(records) is None


@pytest.mark.parametrize(
    ("divisor", "second", "named"),
    [(24, (6, 2), True), (16, (6, 2), False), (25, (6, 2), False), (32, (6, 2), False)],
)
def test_a_divisor_is_of_other_steps_if_it_is_their_number_of_targets(
    divisor: float, second: Sequence[float], named: bool
) -> None:
    steps = [[(count, count / divisor) for count in counts] for counts in ((4.0, 12.0), second)]
    finding = causes.of_other_steps(windows(*steps, rows=(2, 2), reduction="sum"))
    assert (finding is not None) == named
    assert finding is None or "0.667 times" in finding.deviation


def test_equal_counts_may_be_a_number_of_the_script() -> None:
    steps = [[(8.0, 8 / 32)] * 2] * 2
    assert causes.of_other_steps(windows(*steps, rows=(2, 2), reduction="sum")) is None


def test_a_fault_before_clipping_is_looked_for_before_clipping() -> None:
    half, clipped = MEAN / 2, MEAN / 100
    records = matched(clipped, clipped)
    for one, gradient in (*((rank, half) for rank in records.ranks), (records.replay, MEAN)):
        present(one).steps[0].clips = [Clip(norm=1.0, limit=0.1, scaled=False, scale=1.0, micros=1)]
        present(one).steps[0].clips[0].gradients = [gradient]
    assert records.off_before_clipping(present(records.replay)) == pytest.approx(0.5)
    finding = causes.of_gradient(replace(records, before_clipping=True))
    assert present(finding).name == "averaged_twice"


def rescaled(
    *factors: float,
    sizes: Sequence[float] = (1.0, 2.0, 4.0),
    loss: float = 1.0,
    scales: Sequence[float | None] = (None,),
    inside: tuple[float, int] | None = None,
) -> Records:
    """Records of a process whose optimizer gets multiples of gradients of several sizes.

    `loss` multiplies the loss, and `scales` are those of DeepSpeed's engine for each micro-batch.
    `inside` is the multiple that its optimizer gets, and the number of its elements.
    """
    one = record(0, MEAN)
    one.steps = []
    for factor, size in zip(factors, sizes, strict=False):
        parts = [size * MEAN, *[0 * MEAN for _ in scales[1:]]]
        micros = [micro(part, factor=loss) for part in parts]
        micros = [replace(m, scale=scale) for m, scale in zip(micros, scales, strict=True)]
        one.steps += record(0, factor * size * MEAN, *micros).steps
        if inside is not None:
            one.steps[-1].sizes = [(size, MEAN.numel()), (inside[0] * size, inside[1])]
    return Records(ranks=[one], replay=one)


@pytest.mark.parametrize(
    ("factors", "facts", "text"),
    [
        ((1 / 1024,) * 3, {}, "1/1024 of"),
        ((3, 3, 3), {}, "3 times"),
        ((1, 1, 1), {}, None),
        ((0.5, 0.25, 0.125), {}, None),
        ((0.5,) * 3, {"sizes": (1, 1, 1)}, None),
        ((0.5,) * 3, {"loss": 2.0}, None),
        ((0.5,), {}, None),
        ((-1,) * 3, {}, None),
    ],
    ids=[
        "scale", "multiple", "none", "clipped", "clipped, of one size", "scaled loss", "one step",
        "maximized",
    ],
)  # fmt: skip
def test_a_multiple_of_the_gradient_is_no_clipping(
    factors: Sequence[float], facts: dict[str, Any], text: str | None
) -> None:
    found = causes.of_rescaling(rescaled(*factors, **facts))
    assert (found is not None) == (text is not None)
    assert found is None or f"gets {text} the gradient" in found.deviation


@pytest.mark.parametrize(
    ("share", "named_so"),
    [(1.0, True), (0.0, False), (0.9, False), (0.99, False), (0.995, False), (-1.0, False)],
)
def test_a_gradient_is_kept_if_the_next_one_has_all_of_it(share: float, named_so: bool) -> None:
    """A part of it is momentum by hand."""
    one = record(0, OWN[0], micro(OWN[0]))
    one.steps += record(0, OWN[1] + share * OWN[0], micro(OWN[1])).steps
    one.before, one.steps[0].after = [torch.zeros(2)], [torch.ones(2)]
    found = causes.of_kept(Records(ranks=[one]))
    assert (found is not None) == named_so
    one.steps[0].after = one.before  # a step that only accumulates
    assert causes.of_kept(Records(ranks=[one])) is None


@pytest.mark.parametrize(
    ("scales", "inside", "text"),
    [
        ([1.0], (1 / 65536, 40), "1/65536 of"),
        ([65536.0], (1 / 65536, 40), None),
        ([1.0], (1.0, 40), None),
        ([65536.0], (1.0, 40), None),
        ([1.0], (0.1, 30), None),
        ([1.0], (2.0, 80), None),
        ([None], (0.1, 40), None),
        ([0.5, 0.5], (1.0, 41), None),
        ([0.5, 0.5], (1 / 1024, 41), "1/1024 of"),
        ([512.0, 512.0], (1 / 1024, 40), None),
        ([1024.0, 1024.0], (1 / 1024, 40), None),
    ],
    ids=[
        "scale that the loss lacks", "scale", "none", "unscaled before", "a part of the parameters",
        "parameters twice", "unknown loss", "micro-batches", "scale of micro-batches",
        "both divided", "divided by the script",
    ],
)  # fmt: skip
def test_deepspeed_divides_the_gradient_by_what_multiplies_the_loss(
    scales: Sequence[float], inside: tuple[float, int], text: str | None
) -> None:
    found = causes.of_rescaling(rescaled(1, 1, 1, scales=scales, inside=inside))
    assert (found is not None) == (text is not None)
    assert found is None or f"gets {text} the gradient" in found.deviation


@pytest.mark.parametrize(("factors", "shown"), [((0.3, 0.3), True), ((0.3, 0.4), False)])
def test_a_factor_that_all_tensors_share_is_shown(factors: Sequence[float], shown: bool) -> None:
    expected: Vectors = {name: own.double().numpy() for name, own in zip("ab", OWN, strict=True)}
    used = {n: f * g for f, (n, g) in zip(factors, expected.items(), strict=True)}
    check = gradient_check("gradient", used, expected, {}, 1e-6)
    assert not check.holds
    assert ("0.3 times as large in every parameter" in (check.where or "")) == shown


@pytest.mark.parametrize(("step", "reason"), [(0, "begins with its own"), (1, "updates its")])
def test_buffers_differ_from_the_start_or_by_training(step: int, reason: str) -> None:
    ranks = [record(rank, MEAN, micro(OWN[rank])) for rank in range(2)]
    for rank in ranks:
        rank.steps = [replace(rank.steps[0], buffers={"mean": torch.ones(3)}) for _ in range(2)]
    assert causes.of_buffers(Records(ranks=ranks, replay=None, disturbed=None)) is None
    ranks[1].steps[step].buffers["mean"] = torch.zeros(3)
    found = present(causes.of_buffers(Records(ranks=ranks, replay=None, disturbed=None)))
    assert reason in found.reason
    assert f"at the beginning of step {step + 1}" in found.evidence


@pytest.mark.parametrize(
    ("single", "module"),
    [((2.0, 4.0, 20.0), ""), ((2.0, 5.0, 20.0), "cell"), ((2.0, 0.0, 20.0), "")],
)
def test_a_result_that_was_too_large_to_be_summed_is_no_other_result(
    single: tuple[float, ...], module: str
) -> None:
    """Sums of squares of inputs and results, and the number of inputs; 0 was not summed."""
    ranks = [record(n, MEAN, micro(OWN[n]), calls={"cell": [1.0, 2.0, 10.0]}) for n in range(2)]
    replay = record(0, MEAN, micro(), calls={"cell": [*single]})
    assert Records(ranks=ranks, replay=replay, disturbed=None).unlike_module == module


@pytest.mark.parametrize(("reduction", "known"), [("mean", False), ("sum", True)])
def test_sums_of_several_losses_weigh_unlike_numbers_of_targets(
    reduction: str, known: bool
) -> None:
    micros = [micro(OWN[rank], reduction=reduction) for rank in range(2)]
    for rank, each in enumerate(micros):
        each.losses *= 2
        each.losses[1] = replace(each.losses[1], weight=4.0 + rank)
    records = unmatched(MEAN, micros, micro(reduction=reduction))
    assert causes.weights_are_known(records) is known
