"""Writes right training scripts from a seed, to count the false alarms of an audit."""

from __future__ import annotations

import random
from pathlib import Path

OPTIMIZERS = {
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "Adam": "torch.optim.Adam(model.parameters(), lr=2e-3)",
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)",
}
SCHEDULERS = (
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)",
    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))",
    "torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)",
)


def write_right_scripts(directory: Path, seed: int, count: int = 100) -> list[Path]:
    """Write `count` scripts to `directory`; the same seed gives the same scripts."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(count):
        path = directory / f"right_{index:03d}.py"
        path.write_text(right_script(random.Random(f"{seed}-{index}")))
        paths.append(path)
    return paths


def right_script(choice: random.Random) -> str:
    """A script that trains on n ranks what one process trains on the batches of all ranks.

    Its loss is the sum over the labelled tokens of all ranks and micro-batches, divided by their
    number, so batches with uneven numbers of labels are weighted right.
    """
    sharded = choice.random() < 0.4
    tied = choice.random() < 0.4
    clips = choice.random() < 0.5
    from_loader = choice.random() < 0.7
    scheduler = choice.choice((None, None, *SCHEDULERS))
    parts = [
        _imports(sharded, from_loader),
        _model(choice, tied),
        _data(choice, from_loader),
        _wrapper(choice, sharded),
        f"optimizer = {OPTIMIZERS[choice.choice(tuple(OPTIMIZERS))]}\n"
        + (f"scheduler = {scheduler}\n" if scheduler else ""),
        _loop(
            accumulation=choice.choice((1, 1, 2, 3, 4)),
            max_norm=choice.choice((0.05, 0.5, 5.0)) if clips else None,
            sharded=sharded,
            scheduled=scheduler is not None,
        ),
    ]
    return "\n".join(parts)


def _imports(sharded: bool, from_loader: bool) -> str:
    lines = [
        "import torch",
        "import torch.distributed as dist",
        "import torch.nn.functional as F",
        "from torch import nn",
    ]
    if sharded:
        lines += [
            "from torch.distributed.device_mesh import init_device_mesh",
            "from torch.distributed.fsdp import fully_shard",
        ]
    else:
        lines += [
            "from contextlib import nullcontext",
            "from torch.nn.parallel import DistributedDataParallel as DDP",
        ]
    if from_loader:
        lines += ["from torch.utils.data import DataLoader, DistributedSampler, TensorDataset"]
    return "\n".join(lines) + "\n"


def _model(choice: random.Random, tied: bool) -> str:
    dropout = choice.choice((0.0, 0.0, 0.0, 0.1))
    activation = choice.choice(("nn.ReLU()", "nn.GELU()", "nn.Tanh()"))
    norm = choice.choice(("nn.LayerNorm(width)", "nn.Identity()"))
    width = choice.choice((16, 24, 32))
    tie = "        self.head.weight = self.embedding.weight\n" if tied else ""
    return f"""
vocabulary, width, length = {choice.choice((20, 33, 48))}, {width}, {choice.choice((5, 8, 12))}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = {norm}
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activation, self.dropout = {activation}, nn.Dropout({dropout})

    def forward(self, x):
        return x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range({choice.choice((1, 2, 3))}))
        self.head = nn.Linear(width, vocabulary, bias=False)
{tie}
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed({choice.randrange(1000)})
"""


def _data(choice: random.Random, from_loader: bool) -> str:
    batch_size = choice.choice((2, 3, 4, 6))
    uneven = choice.random() < 0.6
    if not from_loader:
        masking = (
            "    y[torch.arange(length) >= torch.randint(1, length + 1, (batch_size, 1), "
            "generator=generator)] = -100\n"
            if uneven
            else ""
        )
        return f"""
batch_size = {batch_size}
text = torch.randint(0, vocabulary, (4000,))
generator = torch.Generator().manual_seed({choice.randrange(1000)} + rank)


def get_batch():
    starts = torch.randint(len(text) - length, (batch_size,), generator=generator).tolist()
    x = torch.stack([text[i : i + length] for i in starts])
    y = torch.stack([text[i + 1 : i + 1 + length] for i in starts])
{masking}    return x, y
"""
    masking = (
        "labels[torch.arange(length) >= torch.randint(1, length + 1, (384, 1))] = -100\n"
        if uneven
        else ""
    )
    return f"""
tokens = torch.randint(0, vocabulary, (384, length + 1))
labels = tokens[:, 1:].clone()
{masking}dataset = TensorDataset(tokens[:, :-1], labels)
sampler = DistributedSampler(dataset, shuffle={choice.random() < 0.7})
loader = DataLoader(dataset, batch_size={batch_size}, sampler=sampler, drop_last=True)


def all_batches():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


batches = all_batches()


def get_batch():
    return next(batches)
"""


def _wrapper(choice: random.Random, sharded: bool) -> str:
    if not sharded:
        view = choice.random() < 0.5
        return f"model = DDP(Model(), gradient_as_bucket_view={view})"
    reshard = choice.random() < 0.5
    return f"""
model = Model()
mesh = init_device_mesh("cpu", (world_size,))
for block in model.blocks:
    fully_shard(block, mesh=mesh, reshard_after_forward={reshard})
fully_shard(model, mesh=mesh)
"""


def _loop(*, accumulation: int, max_norm: float | None, sharded: bool, scheduled: bool) -> str:
    clip = (
        f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm})\n" if max_norm else ""
    )
    schedule = "    scheduler.step()\n" if scheduled else ""
    backward = """            logits = model(x).flatten(0, 1)
            loss = F.cross_entropy(logits, y.flatten(), ignore_index=-100, reduction="sum")
            (loss * world_size / count).backward()
"""
    if sharded:
        synchronise = "        model.set_requires_gradient_sync(index == len(micro_batches) - 1)\n"
        backward = backward.replace(" " * 12, " " * 8)
    else:
        synchronise = (
            "        last = index == len(micro_batches) - 1\n"
            "        with nullcontext() if last else model.no_sync():\n"
        )
    return f"""
for step in range(6):
    micro_batches = [get_batch() for _ in range({accumulation})]
    count = sum((y != -100).sum() for _, y in micro_batches)
    dist.all_reduce(count)
    for index, (x, y) in enumerate(micro_batches):
{synchronise}{backward}{clip}    optimizer.step()
{schedule}    optimizer.zero_grad()
    if rank == 0:
        print(f"step {{step}}: loss {{loss.item():.4f}}")

dist.destroy_process_group()
"""
