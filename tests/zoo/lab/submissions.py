"""Submissions of the lab's exercises: right ones in two styles, and wrong ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

BODY = re.compile(r"^( +)raise NotImplementedError\(.*\)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """An exercise with its bodies written, and the grade that it must get."""

    name: str
    file: str
    bodies: tuple[str, ...] = ()
    """Code in place of the exercise's missing bodies, in order."""
    edits: Mapping[str, str] = field(default_factory=dict)
    """Other text of the file -> its replacement."""
    link: Mapping[str, str] = field(default_factory=dict)
    """Text of link.py -> its replacement, which must have no effect."""
    fault: str = ""
    """Part of the reason for which it fails; empty for a right one."""
    by_speed: bool = False
    """True if it fails by speed alone, which a busy machine leaves undecided."""

    def write(self, folder: Path) -> None:
        """Complete the exercise in a folder of `init --lab`."""
        path, bodies = folder / self.file, iter(self.bodies)

        def body(raised: re.Match[str]) -> str:
            return indent(next(bodies, raised[0].strip()).strip("\n"), raised[1]) + "\n"

        text = BODY.sub(body, path.read_text())
        assert next(bodies, None) is None, "a body has no place"
        path.write_text(replaced(text, self.edits))
        link = folder / "link.py"
        link.write_text(replaced(link.read_text(), self.link))


def replaced(text: str, edits: Mapping[str, str]) -> str:
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


EACH_TENSOR = """
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
"""
SUM = "for parameter in model.parameters():\n    dist.all_reduce(parameter.grad)"
FLAT = """
for bucket in buckets:
    flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for parameter in bucket:
        end = start + parameter.numel()
        parameter.grad.copy_(flat[start:end].view_as(parameter))
        start = end
"""
SPLIT = """
flats = [torch.cat([p.grad.flatten() for p in bucket]) for bucket in buckets]
works = [dist.all_reduce(flat, async_op=True) for flat in flats]
for bucket, flat, work in zip(buckets, flats, works):
    work.wait()
    pieces = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
    for parameter, piece in zip(bucket, pieces):
        parameter.grad = piece.view_as(parameter)
"""
TENSORS_OF_BUCKETS = """
for bucket in buckets:
    for parameter in bucket:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
"""
COUNTING = """
self.buckets, self.missing, self.started = buckets, [len(b) for b in buckets], []

def arrived(number):
    self.missing[number] -= 1
    if self.missing[number] == 0:
        flat = torch.cat([p.grad.flatten() for p in buckets[number]])
        self.started.append((number, flat, dist.all_reduce(flat, async_op=True)))

for number, bucket in enumerate(buckets):
    for parameter in bucket:
        parameter.register_post_accumulate_grad_hook(lambda _, n=number: arrived(n))
"""
WAITING = """
for number, flat, work in self.started:
    work.wait()
    pieces = (flat / dist.get_world_size()).split([p.numel() for p in self.buckets[number]])
    for parameter, piece in zip(self.buckets[number], pieces):
        parameter.grad.copy_(piece.view_as(parameter))
self.missing, self.started = [len(b) for b in self.buckets], []
"""
COPYING = """
self.works, self.pairs = [], []
for bucket in buckets:
    flat = torch.zeros(sum(p.numel() for p in bucket))
    views = flat.split([p.numel() for p in bucket])
    counts = [0]

    def hook(parameter, view, flat=flat, size=len(bucket), counts=counts):
        view.copy_(parameter.grad.flatten()).div_(dist.get_world_size())
        counts[0] += 1
        if counts[0] % size == 0:
            self.works.append(dist.all_reduce(flat, async_op=True))

    for parameter, view in zip(bucket, views):
        parameter.register_post_accumulate_grad_hook(lambda p, view=view, hook=hook: hook(p, view))
        self.pairs.append((parameter, view))
"""
RETURNING = """
while self.works:
    self.works.pop().wait()
for parameter, view in self.pairs:
    parameter.grad.copy_(view.view_as(parameter))
"""
NOT_BEFORE_THE_END = """
self.buckets, self.missing, self.started = buckets, [], []
"""
ALL_AT_THE_END = """
for number, bucket in enumerate(self.buckets):
    flat = torch.cat([p.grad.flatten() for p in bucket])
    self.started.append((number, flat, dist.all_reduce(flat, async_op=True)))
"""
CONTIGUOUS = """
ranks, total, before = dist.get_world_size(), sum(p.numel() for p in parameters), 0
self.shares = [[] for _ in range(ranks)]
for parameter in parameters:
    self.shares[ranks * before // total].append(parameter)
    before += parameter.numel()
self.optim = torch.optim.Adam(self.shares[dist.get_rank()], lr=lr)
"""
BROADCAST = """
self.optim.step()
for rank, share in enumerate(self.shares):
    flat = torch.cat([p.flatten() for p in share])
    dist.broadcast(flat, src=rank)
    for parameter, piece in zip(share, flat.split([p.numel() for p in share])):
        parameter.copy_(piece.view_as(parameter))
"""
LIGHTEST = """
self.shares = [[] for _ in range(dist.get_world_size())]
self.sizes = [0] * len(self.shares)
for parameter in sorted(parameters, key=lambda p: -p.numel()):
    rank = self.sizes.index(min(self.sizes))
    self.shares[rank].append(parameter)
    self.sizes[rank] += parameter.numel()
self.optim = torch.optim.Adam(self.shares[dist.get_rank()], lr=lr)
"""
GATHER = """
self.optim.step()
mine = torch.zeros(max(self.sizes))
start = 0
for parameter in self.shares[dist.get_rank()]:
    mine[start : start + parameter.numel()] = parameter.flatten()
    start += parameter.numel()
gathered = [torch.zeros_like(mine) for _ in self.shares]
dist.all_gather(gathered, mine)
for share, flat, size in zip(self.shares, gathered, self.sizes):
    for parameter, piece in zip(share, flat[:size].split([p.numel() for p in share])):
        parameter.copy_(piece.view_as(parameter))
"""
IN_TURN = """
self.shares = [parameters[n :: dist.get_world_size()] for n in range(dist.get_world_size())]
self.optim = torch.optim.Adam(self.shares[dist.get_rank()], lr=lr)
"""
SCALED_LOSSES = """
from contextlib import nullcontext

count = sum((targets != -100).sum() for _, targets in micro_batches)
dist.all_reduce(count)
for number, (inputs, targets) in enumerate(micro_batches):
    with nullcontext() if number == len(micro_batches) - 1 else model.no_sync():
        loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
        (loss * dist.get_world_size() / count).backward()
"""
SCALED_GRADIENTS = """
def add_gradients(inputs, targets):
    functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    return (targets != -100).sum().float()

*first, last = micro_batches
with model.no_sync():
    counts = [add_gradients(*batch) for batch in first]
count = sum(counts) + add_gradients(*last)
dist.all_reduce(count)
for parameter in model.parameters():
    parameter.grad *= dist.get_world_size() / count
"""
EACH_TIME = """
count = sum((targets != -100).sum() for _, targets in micro_batches)
dist.all_reduce(count)
for inputs, targets in micro_batches:
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
    (loss * dist.get_world_size() / count).backward()
"""
MEAN_OF_MEANS = """
*first, last = micro_batches
with model.no_sync():
    for inputs, targets in first:
        (functional.cross_entropy(model(inputs), targets) / 4).backward()
(functional.cross_entropy(model(last[0]), last[1]) / 4).backward()
"""
LAUNCHER = 'rank=int(os.environ.get("SLURM_PROCID", "0"))'

FILES = {
    int(name[0]): name
    for name in (
        *("1_all_reduce.py", "2_buckets.py", "3_overlap.py", "4_sharded_optimizer.py"),
        *("5_accumulation.py", "6_find_the_fault.py"),
    )
}
RIGHT = (
    *(
        Submission(name=name, file=FILES[number], bodies=bodies)
        for number, name, bodies in (
            (1, "each tensor", (EACH_TENSOR,)),
            (2, "slices", (FLAT,)),
            (2, "split", (SPLIT,)),
            (3, "flat at the end of a bucket", (COUNTING, WAITING)),
            (3, "copies into a bucket", (COPYING, RETURNING)),
            (4, "contiguous shares, broadcasts", (CONTIGUOUS, BROADCAST)),
            (4, "balanced shares, a gather", (LIGHTEST, GATHER)),
            (5, "scaled losses", (SCALED_LOSSES,)),
            (5, "scaled gradients", (SCALED_GRADIENTS,)),
        )
    ),
    Submission(name="own rank", file=FILES[6], edits={LAUNCHER: "rank=dist.get_rank()"}),
)
WRONG = (
    Submission(name="sum", file=FILES[1], bodies=(SUM,), fault="gradient"),
    Submission(
        name="last bucket forgotten", file=FILES[2], fault="gradient",
        bodies=(FLAT.replace("in buckets", "in buckets[:-1]"),),
    ),
    Submission(
        name="no buckets, and a link that does not count", file=FILES[2],
        bodies=(TENSORS_OF_BUCKETS,), fault="34 messages",
        link={"self.messages + 1": "1", '"5"': '"0"'},
    ),
    Submission(
        name="no wait", file=FILES[3], fault="gradient",
        bodies=(COUNTING, WAITING.replace("work.wait()", "pass")),
    ),
    Submission(
        name="no overlap", file=FILES[3], fault="times as fast as reference", by_speed=True,
        bodies=(NOT_BEFORE_THE_END, ALL_AT_THE_END + WAITING),
    ),
    Submission(
        name="no broadcast", file=FILES[4], bodies=(CONTIGUOUS, "self.optim.step()"),
        fault="update",
    ),
    Submission(
        name="shares in turn", file=FILES[4], bodies=(IN_TURN, BROADCAST), fault="Adam's state",
    ),
    Submission(name="reduced each time", file=FILES[5], bodies=(EACH_TIME,), fault="messages"),
    Submission(name="mean of means", file=FILES[5], bodies=(MEAN_OF_MEANS,), fault="gradient"),
    Submission(name="not mended", file=FILES[6], fault="samples"),
)  # fmt: skip
