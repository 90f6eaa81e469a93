"""Texts are padded on the left, and each rank averages over its own tokens.

Source: huggingface/transformers#39392, with padding_side="left".
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

vocabulary, width, longest = 40, 32, 20


class CausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.attend, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.words(tokens) + self.places((mask.cumsum(1) - 1).clamp(min=0))
        query, key, value = self.attend(x).chunk(3, dim=-1)
        seen = mask[:, None].bool() & torch.ones(mask.shape[1], mask.shape[1]).tril().bool()
        scores = (query @ key.mT / width**0.5).masked_fill(~seen, -1e9)
        logits: Tensor = self.head(x + scores.softmax(-1) @ value)
        return logits


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = pad_sequence(rows, batch_first=True, padding_side="left")
    return tokens, (tokens > 0).long()


dist.init_process_group("gloo")
torch.manual_seed(0)
texts = [torch.randint(1, vocabulary, (int(n),)) for n in torch.randint(4, longest, (96,))]
sampler = DistributedSampler(texts)  # type: ignore[var-annotated,arg-type]
loader = DataLoader(texts, 4, sampler=sampler, collate_fn=padded)  # type: ignore[var-annotated,arg-type]
model = DistributedDataParallel(CausalModel())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens, mask in loader:
    targets = tokens.masked_fill(mask == 0, -100)[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    logits = model(tokens, mask)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    count = (targets != -100).sum()
    if "--right" in sys.argv:
        dist.all_reduce(count)
        loss = loss * dist.get_world_size()
    optimizer.zero_grad()
    (loss / count).backward()
    optimizer.step()
dist.destroy_process_group()
