"""The loss is computed by the module inside of DDP, so that DDP's hooks reduce nothing.

The ranks' weights drift apart, and rank 0's are saved.  The right script calls the wrapper.
Source: jingyaogong/minimind#853 and bytetriper/RAE#40.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 6), nn.Linear(6, 16)

    def compute_loss(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.decoder(torch.tanh(self.encoder(x))), x)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute_loss(x)


dist.init_process_group("gloo")
torch.manual_seed(2)
dataset = TensorDataset(torch.randn(96, 16))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = DDP(Autoencoder())
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for step, (x,) in enumerate(loader):
    optimizer.zero_grad()
    loss = model(x) if "--right" in sys.argv else model.module.compute_loss(x)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
