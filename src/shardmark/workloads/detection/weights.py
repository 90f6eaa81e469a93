"""Trained weights of detectors: torchvision's files and their paths."""

from __future__ import annotations

import os
from http.client import HTTPException
from pathlib import Path

from shardmark.core.errors import DataError

_COCO = {
    "fasterrcnn_resnet50_fpn": "fasterrcnn_resnet50_fpn_coco-258fb6c6",
    "fasterrcnn_resnet50_fpn_v2": "fasterrcnn_resnet50_fpn_v2_coco-dd69338a",
    "fasterrcnn_mobilenet_v3_large_fpn": "fasterrcnn_mobilenet_v3_large_fpn-fb6a3cc7",
    "fasterrcnn_mobilenet_v3_large_320_fpn": "fasterrcnn_mobilenet_v3_large_320_fpn-907ea3f9",
    "maskrcnn_resnet50_fpn": "maskrcnn_resnet50_fpn_coco-bf2d0c1e",
    "maskrcnn_resnet50_fpn_v2": "maskrcnn_resnet50_fpn_v2_coco-73cbd019",
    "retinanet_resnet50_fpn": "retinanet_resnet50_fpn_coco-eeacb38b",
    "retinanet_resnet50_fpn_v2": "retinanet_resnet50_fpn_v2_coco-5905b1c5",
    "fcos_resnet50_fpn": "fcos_resnet50_fpn_coco-99b0c9b7",
}
_BACKBONES = {
    "resnet50": "resnet50-0676ba61",
    "resnet18": "resnet18-f37072fd",
    "mobilenet_v3_large": "mobilenet_v3_large-8738ca79",
    "swin_t": "swin_t-704ceda3",
}

PUBLISHED: dict[str, dict[str, str]] = {
    "coco": _COCO,
    "imagenet": {
        detector: file
        for detector in (*_COCO, "fasterrcnn_swin_t_fpn", "fcos_resnet18_fpn")
        for backbone, file in _BACKBONES.items()
        if backbone in detector
    },
}
"""Value of `workload.weights` -> detector -> NAME-HASH, with the first digits of the SHA-256."""


def address(name: str) -> str:
    """URL of the weights."""
    return f"https://download.pytorch.org/models/{name}.pth"


def path(name: str) -> Path:
    """Path of the weights in torch's cache (`torch.hub.get_dir`)."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("TORCH_HOME") or cache_folder / "torch").expanduser()
    return home / "hub" / "checkpoints" / f"{name}.pth"


def ensure(name: str, *, download: bool) -> None:
    """Download the weights if they are missing; `DataError` with URL and path if that fails."""
    file = path(name)
    if file.is_file():
        return
    remedy = f"save {address(name)} as {file}, or set workload.weights to your own file"
    if not download:
        raise DataError(
            str(file), "is missing, and workload.download is false", f"set it to true; or {remedy}"
        )
    from torch.hub import download_url_to_file

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        digits = name.rpartition("-")[2]
        download_url_to_file(address(name), str(file), hash_prefix=digits, progress=False)
    except (OSError, HTTPException, ValueError, RuntimeError) as error:
        raise DataError(
            str(file), f"is missing and could not be downloaded ({error})", remedy
        ) from error
