"""Names of torchvision's files of trained weights of detectors."""

from __future__ import annotations

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
    "resnet101": "resnet101-63fe2227",
    "resnet50": "resnet50-0676ba61",
    "resnet18": "resnet18-f37072fd",
    "mobilenet_v3_large": "mobilenet_v3_large-8738ca79",
    "swin_t": "swin_t-704ceda3",
}
_WITHOUT_COCO = (
    *("fasterrcnn_resnet101_fpn", "fasterrcnn_swin_t_fpn"),
    *("maskrcnn_swin_t_fpn", "fcos_resnet18_fpn"),
)
"""Detectors that torchvision has not trained on COCO, and whose backbone it has trained."""

PUBLISHED: dict[str, dict[str, str]] = {
    "coco": _COCO,
    "imagenet": {
        detector: file
        for detector in (*_COCO, *_WITHOUT_COCO)
        for backbone, file in _BACKBONES.items()
        if backbone in detector
    },
}
"""Value of `workload.weights` -> detector -> NAME-HASH, with the first digits of the SHA-256."""
