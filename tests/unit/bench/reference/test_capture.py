"""Captures are stored without loss, and joined in the order of the ranks' shares."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardmark.base.evidence.captures import BY_SHARE, Capture
from shardmark.base.layout import Layout, RankLayout, Shard
from shardmark.bench.reference.capture import CAPTURE_FILE, capture_steps, read_capture
from shardmark.ranks.strategies.step import EagerWorker
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads.base import BatchPlan
from tests.unit.bench.reference.verification_cases import array, handmade, verification_case
from tests.unit.ranks.train.toy import CPU, ToyWorkload, recipe


def rank_capture(rank: int) -> Capture:
    made = handmade()
    own: dict[str, Any] = {name: (getattr(made, name)[rank],) for name in BY_SHARE}
    return replace(made, tensors=made.tensors if rank == 0 else {}, **own)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # Names from models and from `parameter/key`; values that no comparison likes.
        {
            "tensors": {
                "optimizer state": {"a.0 b/exp_avg": array(math.inf, -0.0), "file": array()}
            },
            "buffers": ({"norm.count": np.array(3.0, dtype=np.float32), "nan": array(math.nan)},),
            "quality": {"accuracy_top1": None},
            "losses": ((1e-300, -0.0),),
        },
    ],
)
def test_a_rank_s_capture_survives_the_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Equal in every field; arrays to the last bit, in their order and of the same type."""
    expected = replace(rank_capture(0), **changes)
    expected.save(tmp_path / "rank.npz")
    stored = Capture.load(tmp_path / "rank.npz")
    mine, wanted = (replace(c, tensors={}, buffers=()) for c in (stored, expected))
    assert mine == wanted
    parts = zip(stored.tensors.values(), expected.tensors.values(), strict=True)
    for tensors, wanted_tensors in ((stored.buffers[0], expected.buffers[0]), *parts):
        assert list(tensors) == list(wanted_tensors)
        for name, tensor in wanted_tensors.items():
            np.testing.assert_array_equal(tensors[name], tensor, strict=True)
    assert list(stored.tensors) == list(expected.tensors)


def test_the_counting_rank_of_each_share_is_read_in_the_order_of_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallel ranks see the same samples: each share is read once."""
    shares = [Shard(index=index, count=2) for index in (1, 0)]
    ranks = [RankLayout(share=s, counts_loss=c) for s in shares for c in (False, True)]
    layout = Layout(ranks=(*ranks, RankLayout(share=None)), data=2, tensor=2)
    monkeypatch.setattr(Trial, "layout", layout)
    rank_capture(0).save(tmp_path / CAPTURE_FILE.format(3))
    replace(rank_capture(1), skipped=((1,),)).save(tmp_path / CAPTURE_FILE.format(1))
    capture, expected = read_capture(verification_case().trial, tmp_path), handmade()
    for name in ("initial_sha256", "sample_ids", "losses", "draws", "learning_rates"):
        assert getattr(capture, name) == getattr(expected, name), name
    assert capture.skipped == ((), (1,))
    assert capture.tensors.keys() == expected.tensors.keys()
    for mine, wanted in zip(capture.buffers, expected.buffers, strict=True):
        np.testing.assert_array_equal(mine["mean"], wanted["mean"])


def test_shares_are_merged_into_one_capture() -> None:
    made = handmade()
    found = made.seen_by_one_process()
    assert found.sample_ids == (((0, 1, 2, 3), (4, 5, 6, 7)),)
    assert found.losses == ((3.0, 2.0),)
    assert found.initial_sha256 == ("a" * 64,)
    assert len(found.buffers) == 1
    assert found.buffers[0] is made.buffers[0]
    assert found.tensors is made.tensors
    assert found.seen_by_one_process().losses == found.losses


def test_a_step_that_the_scaler_leaves_out_is_captured_as_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of the second of three steps is infinite."""
    workload = ToyWorkload(factor_of_step=lambda step: math.inf if step == 1 else 1.0)
    evaluation = SimpleNamespace(quality={})
    monkeypatch.setattr("shardmark.bench.reference.capture.evaluate", lambda *_: evaluation)
    alone = SimpleNamespace(barrier=lambda: None, gather=lambda value: [value])
    monkeypatch.setattr(EagerWorker, "group", alone)
    asked = recipe(precision="fp16", steps=3)
    capture = capture_steps(
        EagerWorker(workload.build_model(), workload=workload, recipe=asked, device=CPU, shares=1),
        workload,
        asked,
        plan=BatchPlan(global_batch=8, seed=5),
        shard=Shard(index=0, count=1),
        steps=3,
        devices=[torch.device("cpu")],
    )
    assert capture.skipped == ((1,),)
