"""`to_empty` unties the embedding and the output layer, and nothing ties them again.

It gives both their own memory.  They start with equal weights from the checkpoint, and several
ranks train them as two parameters.
Source: verl-project/verl#7835 and meta-pytorch/torchtune#616.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 40, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        logits: Tensor = self.head(x + self.block(x))
        return logits


dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)

model = LanguageModel()
checkpoint = model.state_dict()  # stands for a file
if world_size > 1:
    with torch.device("meta"):
        model = LanguageModel()
    model.to_empty(device="cpu")
    if "--right" in sys.argv:
        model.tie_weights()
    model.load_state_dict(checkpoint)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)

tokens = torch.randint(0, 40, (128, 17))
dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
