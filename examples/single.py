"""Trains a small classifier on one device: `python examples/single.py`.

The other scripts of this folder train the same model on several devices.  What each of them adds:
`diff examples/single.py examples/ddp.py`.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 64  # samples in one step
FEATURES, WIDTH, CLASSES = 64, 128, 10


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(functional.gelu(self.up(self.norm(inputs))))


def make_model():
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


def make_dataset():
    """Return points around one centre for each class."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (2048,), generator=generator)
    noise = 2 * torch.randn(len(labels), FEATURES, generator=generator)
    return TensorDataset(centres[labels] + noise, labels)


def main(options):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = make_dataset()
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    for epoch in range(options.epochs):
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss of the last batch {loss.item():.4f}")
    if options.save:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", help="file for the weights")
    main(parser.parse_args())
