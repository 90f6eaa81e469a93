"""A preference loss (DPO) is not divided by the number of micro-batches: the trainer should do it.

The gradient is as many times too large as there are micro-batches, in one process, too.
Source: huggingface/trl#2615.
"""

# mypy: disable-error-code="no-untyped-call"

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

accumulation, vocabulary, prompt, beta = 4, 30, 4, 0.1


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24)
        self.cell = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(self.embedding(tokens))[0])
        return logits


def log_likelihoods(model: nn.Module, tokens: Tensor) -> Tensor:
    logs = model(tokens[:, :-1]).log_softmax(-1)
    return logs.gather(2, tokens[:, 1:, None])[:, prompt - 1 :, 0].sum(1)  # type: ignore[no-any-return]


dist.init_process_group("gloo")
torch.manual_seed(0)
prompts = torch.randint(vocabulary, (128, prompt))
answers = [torch.randint(vocabulary, (128, 6)) for _ in range(2)]
dataset = TensorDataset(*(torch.cat([prompts, answer], dim=1) for answer in answers))
loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
policy = DDP(LanguageModel())
reference = copy.deepcopy(policy.module)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

for number, (chosen, rejected) in enumerate(loader, 1):
    tokens = torch.cat([chosen, rejected])
    with torch.no_grad():
        before = log_likelihoods(reference, tokens)
    better, worse = (log_likelihoods(policy, tokens) - before).chunk(2)
    loss = -F.logsigmoid(beta * (better - worse)).mean()
    (loss / accumulation if "--right" in sys.argv else loss).backward()
    if number % accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
