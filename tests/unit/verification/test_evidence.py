"""What the ranks leave behind: stored without loss, put together in rank order."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmark.equivalence.evidence import RankEvidence, put_together, seen_by_one_process
from tests.unit.verification.evidence import array, handmade


def rank_evidence(rank: int) -> RankEvidence:
    made = handmade()
    return RankEvidence(
        initial_sha256=made.initial_sha256[rank],
        sample_ids=list(made.sample_ids[rank]),
        losses=list(made.losses[rank]),
        draws=list(made.draws[rank]),
        learning_rates=list(made.learning_rates),
        optimizer_steps=2,
        buffers=made.buffers[rank],
        quality=made.quality,
        samples_evaluated=100,
        tensors=made.tensors if rank == 0 else {},
    )


def same(found: RankEvidence, expected: RankEvidence) -> None:
    """Equal in every field; arrays to the last bit and of the same type."""
    equal = ("initial_sha256", "sample_ids", "losses", "draws", "learning_rates", "optimizer_steps")
    for name in equal:
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.quality, found.samples_evaluated) == (expected.quality, 100)
    mine = {**found.tensors, "buffers": found.buffers}
    wanted = {**expected.tensors, "buffers": expected.buffers}
    assert list(mine) == list(wanted)
    for part, named in wanted.items():
        assert list(mine[part]) == list(named)
        for name, tensor in named.items():
            np.testing.assert_array_equal(mine[part][name], tensor, strict=True)


def test_rank_evidence_survives_the_file(tmp_path: Path) -> None:
    for rank in range(2):
        path = tmp_path / f"{rank}.npz"
        rank_evidence(rank).save(path)
        same(RankEvidence.load(path), rank_evidence(rank))


def test_odd_names_and_numbers_survive_the_file(tmp_path: Path) -> None:
    """Names from models and from `parameter/key`; values that no comparison likes."""
    odd = replace(
        rank_evidence(0),
        tensors={"optimizer state": {"a.0 b/exp_avg": array(math.inf, -0.0), "file": array()}},
        buffers={"norm.count": np.array(3.0, dtype=np.float32)},
        quality={"accuracy_top1": None},
        losses=[math.nan, 1e-300],
    )
    odd.save(tmp_path / "odd.npz")
    found = RankEvidence.load(tmp_path / "odd.npz")
    assert math.isnan(found.losses[0])
    same(replace(found, losses=[]), replace(odd, losses=[]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.floats(width=32), max_size=5), st.lists(st.floats(), max_size=3))
def test_any_number_survives_the_file(
    tmp_path: Path, values: list[float], losses: list[float]
) -> None:
    made = replace(rank_evidence(0), losses=losses, buffers={"values": array(*values)})
    made.save(tmp_path / "any.npz")
    found = RankEvidence.load(tmp_path / "any.npz")
    np.testing.assert_array_equal(found.losses, losses)
    np.testing.assert_array_equal(found.buffers["values"], array(*values))


def test_ranks_are_put_together_in_order() -> None:
    found = put_together([rank_evidence(0), rank_evidence(1)])
    expected = handmade()
    for name in ("initial_sha256", "sample_ids", "losses", "learning_rates", "optimizer_steps"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.tensors.keys() == expected.tensors.keys()
    for mine, wanted in zip(found.buffers, expected.buffers, strict=True):
        np.testing.assert_array_equal(mine["mean"], wanted["mean"])


def test_the_rank_with_the_fewest_steps_counts() -> None:
    ranks = [rank_evidence(0), replace(rank_evidence(1), optimizer_steps=1)]
    assert put_together(ranks).optimizer_steps == 1


def test_one_process_sees_all_shares_as_one() -> None:
    made = handmade()
    found = seen_by_one_process(made)
    assert found.sample_ids == (((0, 1, 2, 3), (4, 5, 6, 7)),)
    assert found.losses == ((3.0, 2.0),)
    assert found.initial_sha256 == ("a" * 64,)
    assert len(found.buffers) == 1
    assert found.buffers[0] is made.buffers[0]
    assert found.tensors is made.tensors
    assert seen_by_one_process(found).losses == found.losses
