"""The names of the data sets.  Imports no torch."""

from __future__ import annotations

DATASETS: dict[str, str] = {
    "digits": "handwritten digits, 1,437 + 360 of 8 x 8, no download (the default)",
    "mnist": "handwritten digits, 60,000 + 10,000 of 28 x 28, in torchvision's layout",
    "cifar10": "photographs in 10 classes, 50,000 + 10,000 of 32 x 32, in torchvision's layout",
    "imagefolder": "your own images: train/CLASS/*.jpg and test/CLASS/*.jpg",
    "random": "synthetic images or tokens of any size and number: for performance only",
    "digits-detection": "detection: handwritten digits on canvases, generated, no download",
    "coco": "detection: COCO 2017, or your own images in its layout",
    "stdlib": "language: the source of Python's standard library, 10 MB, no download",
    "torch-source": "language: torch's own Python source, 50 MB, no download",
    "text": "language: text files below a folder, one document per file",
    "jsonl": "language: *.jsonl files, one document per line",
    "parquet": "language: *.parquet files, one document per row",
    "arrow": "language: a folder written by `save_to_disk` of the library datasets",
    "tokens": "language: nanoGPT's .bin, or Megatron's .bin and .idx",
}
"""Description of each data set, in one line."""
