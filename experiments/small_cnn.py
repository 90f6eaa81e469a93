"""A small convolutional network without batch norm, so that shares of ranks do not matter."""

from torch import nn


def small_cnn(num_classes: int, width: int = 16) -> nn.Module:
    """Three convolutions at 32, 16 and 8 pixels, and a linear head."""
    layers: list[nn.Module] = []
    channels = 3
    for outputs in (width, 2 * width, 4 * width):
        block = nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()
        layers += [nn.Sequential(*block, nn.MaxPool2d(2))]
        channels = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, num_classes))
