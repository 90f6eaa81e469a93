"""The names of the data sets.  Imports no torch."""

from __future__ import annotations

DATASETS: dict[str, str] = {
    "digits": "handwritten digits of scikit-learn, 1,437 + 360 of 8 x 8, no download (the default)",
    "mnist": "handwritten digits, 60,000 + 10,000 of 28 x 28, in torchvision's layout",
    "cifar10": "photographs in 10 classes, 50,000 + 10,000 of 32 x 32, in torchvision's layout",
    "imagefolder": "your own pictures: train/CLASS/*.jpg and test/CLASS/*.jpg",
    "random": "made up from the seed, of any size and number: for speed only",
    "digits-detection": "detection: handwritten digits on canvases, made once, no download",
    "coco": "detection: COCO 2017, or your own pictures in its layout",
    "stdlib": "language: the source of Python's standard library, 10 MB, no download",
    "torch-source": "language: torch's own Python source, 50 MB, no download",
    "text": "language: every file below a folder is a document",
    "jsonl": "language: a document in each line of *.jsonl",
    "parquet": "language: a document in each row of *.parquet",
    "arrow": "language: what `save_to_disk` of the library datasets wrote",
    "tokens": "language: nanoGPT's .bin, or Megatron's .bin and .idx",
}
"""Name -> one line."""
