"""A single rank in torch's fake process group, whose collectives need no other rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardmark.base.layout import Shard
from shardmark.ranks.strategies.base import RankContext, TrainingGroup
from shardmark.ranks.strategies.layers.sequences import SequenceWorker
from shardmark.ranks.strategies.replicas import DistributedReplicas
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads.base import Batch, BatchPlan, Workload


def reduce_bucket(group: Any, bucket: Any) -> Any:
    """Reduce a bucket as DDP does: it cannot read the result of a fake collective's future."""
    dist.all_reduce(bucket.buffer(), group=group)
    reduced: Any = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


@contextmanager
def one_of_many(rank: int, world_size: int) -> Iterator[RankContext]:
    """Yield the place of a rank.  Collectives return at once, and leave their buffers unchanged.

    The group stays: DTensor keeps meshes, and with them their groups, until the process ends.  So
    a process is always the same rank.
    """
    if not dist.is_initialized() or dist.get_backend() != "fake":
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    create = DistributedReplicas.__init__

    def create_with_hook(module: DistributedReplicas, *args: Any, **kwargs: Any) -> None:
        create(module, *args, **kwargs)
        # A lambda: torch checks the annotations of a function.
        module.register_comm_hook(
            module.process_group,
            lambda group, bucket: reduce_bucket(group, bucket),  # noqa: PLW0108
        )

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LOCAL_RANK", 0), ("RANK", rank), ("WORLD_SIZE", world_size)):
            patch.setitem(os.environ, name, str(value))
        patch.setattr(DistributedReplicas, "__init__", create_with_hook)
        patch.setattr(TrainingGroup, "gather", lambda _, value: [value] * world_size)
        patch.setattr(SequenceWorker, "_check_weight", lambda *_: None)  # ranks would sum it up
        yield RankContext(
            rank=rank,
            world_size=world_size,
            local_rank=0,
            local_world_size=1,
            device=torch.device("cpu"),
        )


def batches_of(of: Trial, workload: Workload) -> Iterator[Batch]:
    """Batches of a rank's size: the data set needs no samples for the other ranks."""
    plan = BatchPlan(global_batch=of.batch_per_step // of.layout.shares, seed=of.recipe.seed)
    return workload.batches(plan, Shard(index=0, count=1))
