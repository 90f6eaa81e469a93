"""Which detection models there are.  Imports no torch: `_detector_building` builds them."""

from __future__ import annotations

from difflib import get_close_matches

from shardmark.workloads.models import check_function_spelling, check_model_name, is_user_function

DETECTORS: dict[str, str] = {
    "fasterrcnn_resnet50_fpn": "detector: Faster R-CNN with feature pyramid, 41.8 M parameters"
    " (Ren et al., 2015; Lin et al., 2017)",
    "fasterrcnn_resnet50_fpn_v2": "detector: Faster R-CNN with batch norms, 43.7 M parameters"
    " (Li et al., 2021)",
    "fasterrcnn_mobilenet_v3_large_fpn": "detector: Faster R-CNN on MobileNetV3, 19.4 M parameters",
    "fasterrcnn_mobilenet_v3_large_320_fpn": "detector: the same for pictures of 320 pixels",
    "fasterrcnn_swin_t_fpn": "detector: Faster R-CNN on a Swin-T transformer with feature pyramid,"
    " 45.2 M parameters (Liu et al., 2021)",
    "maskrcnn_resnet50_fpn": "detector: Mask R-CNN, boxes and masks, 44.5 M parameters"
    " (He et al., 2017)",
    "maskrcnn_resnet50_fpn_v2": "detector: Mask R-CNN after Li et al. (2021), 46.4 M parameters",
    "retinanet_resnet50_fpn": "detector: RetinaNet, one stage, 34.1 M parameters"
    " (Lin et al., 2017)",
    "retinanet_resnet50_fpn_v2": "detector: RetinaNet after Zhang et al. (2020), 38.2 M parameters",
    "fcos_resnet50_fpn": "detector: FCOS, one stage, no anchors, 32.3 M parameters"
    " (Tian et al., 2019)",
    "fcos_resnet18_fpn": "detector: FCOS on a small backbone, for pictures of 128 pixels,"
    " 11.5 M parameters",
}
"""Name -> one line (parameters with COCO's 91 outputs)."""


def check_detector_name(name: str) -> None:
    """Raise `ValueError` that says what is wrong with the name and which are nearest."""
    if is_user_function(name):
        check_model_name(name)
        return
    if name not in DETECTORS:
        check_function_spelling(name)
        nearest = get_close_matches(name.lower(), DETECTORS, n=3) or list(DETECTORS)
        raise ValueError(
            f"unknown detector {name!r}; nearest: {', '.join(nearest)}; "
            "or package.module:function of your own"
        )


def has_masks(name: str) -> bool:
    """Whether the detector learns masks; a user's function may, so it is given them."""
    return name.startswith("maskrcnn") or is_user_function(name)
