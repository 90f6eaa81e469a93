"""Detectors: built by name, with the data's classes, from the seed or from trained weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetClassificationHead

from shardmark.base.errors import DataError, InputError
from shardmark.extras.detection import own_detectors
from shardmark.extras.detection.building import (
    COCO_OUTPUTS,
    HEADS,
    build_detector,
    coco_rows,
    fit_heads,
)
from shardmark.extras.detection.options import DETECTORS, PUBLISHED
from shardmark.extras.detection.own_detectors import (
    OWN_DETECTORS,
    fcos_resnet18_fpn,
)
from shardmark.ranks.workloads import check_data, trained_weights
from tests.unit.extras.detection.detection_data import options

MOBILE = "fasterrcnn_mobilenet_v3_large_320_fpn"
SMALL = "fcos_resnet18_fpn"
NARROW: dict[str, Any] = {"backbone_width": 8}
CLASSES = ("gizmo", "dog", "N/A", "person")
COCO_ROWS = [0, None, 18, None, 1]
"""Rows of the background and the classes: COCO has no gizmo, and N/A is no name."""
CONTENT = b"weights"
FILE = f"net-{hashlib.sha256(CONTENT).hexdigest()[:8]}"

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _torch_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


def build(name: str, classes: tuple[str, ...] = CLASSES, seed: int = 0, **fields: Any) -> nn.Module:
    return build_detector(
        options(Path("nowhere"), model=name, **fields), classes=classes, seed=seed
    )


def outlined(name: str, **fields: Any) -> Any:
    """Without any memory."""
    with torch.device("meta"):
        return build(name, **fields)


def constants(model: nn.Module) -> State:
    """A state dictionary of one number, which is stored once for each tensor."""
    return {
        key: torch.full((), 0.5).to(tensor.dtype).expand(tensor.shape)
        for key, tensor in model.state_dict().items()
    }


@cache
def own_state(outputs: int) -> State:
    """State of the small detector."""
    with torch.device("meta"):
        model = fcos_resnet18_fpn(num_classes=outputs, **NARROW)
    return constants(model)


def place(name: str, state: State) -> Path:
    file = trained_weights.path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file)
    return file


# Models.


@pytest.mark.parametrize("name", DETECTORS)
def test_listed_facts_of_every_detector_are_true(name: str) -> None:
    """The size with COCO's outputs is right; options reach it; all layers train."""
    key = "detections_per_img" if name.startswith(("retina", "fcos")) else "box_detections_per_img"
    model = outlined(name, classes=tuple(map(str, range(90))), model_options={key: 7})
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    listed = re.search(r"([\d.]+) M parameters", DETECTORS[name])
    assert name == MOBILE or (listed and f"{millions:.1f}" == listed[1])
    assert getattr(model, "roi_heads", model).detections_per_img == 7
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("Frozen" in type(module).__name__ for module in model.modules())
    assert any(f"{head}.bias" in model.state_dict() for head, _ in HEADS)


@pytest.mark.parametrize(("layers", "frozen"), [(None, 0), (2, 4)])
def test_swin_freezes_all_but_its_trainable_layers(layers: int | None, frozen: int) -> None:
    """The embedding, then stages 1, 3, 5, 7; the merging before a stage is part of it."""
    with torch.device("meta"):
        detector = OWN_DETECTORS["fasterrcnn_swin_t_fpn"]
        model: Any = detector(num_classes=3, trainable_backbone_layers=layers)
    body: Any = model.backbone.body
    levels = model.backbone(torch.zeros(1, 3, 64, 96, device="meta"))
    sizes = [tuple(level.shape[1:]) for level in levels.values()]
    assert sizes[:4] == [(256, 64 // stride, 96 // stride) for stride in (4, 8, 16, 32)]
    trains = [all(p.requires_grad for p in part.parameters()) for part in body]
    assert trains == [False] * frozen + [True] * (8 - frozen)
    rest = [p for name, p in model.named_parameters() if not name.startswith("backbone.body")]
    assert all(parameter.requires_grad for parameter in rest)


def test_frozen_layers_are_counted_as_torchvision_does() -> None:
    model = fcos_resnet18_fpn(num_classes=3, trainable_backbone_layers=2, **NARROW)
    trained = {name for name, p in model.backbone.body.named_parameters() if p.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"layer3", "layer4"}
    for build_own in OWN_DETECTORS.values():
        with torch.device("meta"), pytest.raises(ValueError, match="is 6; 5 at most"):
            build_own(num_classes=3, trainable_backbone_layers=6)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (SMALL, {"nms_tresh": 1}, r"options\.nms_tresh: .* no such argument.*nms_thresh"),
        ("retinanet_resnet50_fpn", {"detection_per_img": 1}, "nearest: detections_per_img"),
        (MOBILE, {"wholly_unlike": 1}, "nearest: .*box_batch_size_per_image"),
        ("fasterrcnn_swin_t_fpn", {"box_predictor": nn.Identity()}, "num_classes should be None"),
    ],
)
def test_wrong_model_options_are_refused(name: str, given: dict[str, Any], message: str) -> None:
    """Also those that torchvision's classes swallow."""
    with pytest.raises(InputError, match=message) as caught:
        outlined(name, model_options=given)
    assert str(caught.value).startswith("workload.model_options")


# Heads for other classes than COCO's.


PREDICTORS: dict[str, Callable[[int], nn.Module]] = {
    "roi_heads.box_predictor": lambda outputs: FastRCNNPredictor(6, outputs),
    "roi_heads.mask_predictor": lambda outputs: MaskRCNNPredictor(6, 5, outputs),
    "head.classification_head": lambda outputs: RetinaNetClassificationHead(6, 3, outputs),
}


def by_class(head: nn.Module, path: str, outputs: int) -> Tensor:
    """Apply the head to the same features; the result is (classes, ...)."""
    features = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(1))
    if path.startswith("head"):  # (pictures, places and anchors, classes)
        return head([features]).movedim(-1, 0)  # type: ignore[no-any-return]
    if path.endswith("mask_predictor"):
        return head(features).movedim(1, 0)  # type: ignore[no-any-return]
    scores, edges = head(features[0, :, 0].T)
    return torch.cat([scores[..., None], edges.view(len(edges), outputs, 4)], dim=-1).movedim(1, 0)


@torch.no_grad()
@pytest.mark.parametrize("path", PREDICTORS)
def test_heads_keep_the_categories_of_the_same_name(path: str) -> None:
    model, head = nn.Module(), PREDICTORS[path](COCO_OUTPUTS)
    parent, _, name = path.partition(".")
    model.add_module(parent, nn.ModuleDict({name: head}))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = by_class(head, path, COCO_OUTPUTS)
    assert coco_rows(CLASSES) == COCO_ROWS
    fit_heads(model, COCO_ROWS)
    after = by_class(head, path, len(COCO_ROWS))
    assert len(after) == len(COCO_ROWS)
    for row, outputs in zip(COCO_ROWS, after, strict=True):
        if row is None:
            assert not any(torch.allclose(outputs, old) for old in before)
        else:
            torch.testing.assert_close(outputs, before[row])
    assert all(parameter.requires_grad for parameter in model.parameters())


# Files of weights.


def test_published_detector_gets_new_outputs_for_other_classes() -> None:
    """The body is as in the file, new outputs come from the seed, and only some layers train."""
    with torch.device("meta"):
        whole = get_model(MOBILE, weights=None, weights_backbone=None)
    state = constants(whole)
    place(PUBLISHED["coco"][MOBILE], state)
    before = torch.get_rng_state()
    frozen = build(MOBILE, weights="coco", trainable_backbone_layers=0)
    assert torch.equal(torch.get_rng_state(), before)
    again = frozen.state_dict()
    changed = {key for key, value in again.items() if not torch.equal(value, state[key])}
    assert changed == {key for key in state if "box_predictor" in key}
    trains = {name for name, parameter in frozen.named_parameters() if parameter.requires_grad}
    assert trains
    assert not any("backbone.body" in name for name in trains)


@pytest.mark.parametrize(
    ("outputs", "classes", "wrapped"),
    [(91, CLASSES, True), (5, CLASSES, False), (91, tuple(map(str, range(90))), False)],
)
def test_weights_are_loaded_from_a_file_of_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outputs: int,
    classes: tuple[str, ...],
    wrapped: bool,
) -> None:
    """The file has as many outputs as the data need, or COCO's; frozen norms count no batches."""
    monkeypatch.setenv("HOME", str(tmp_path))
    state = {k: v for k, v in own_state(outputs).items() if "num_batches_tracked" not in k}
    torch.save({"model": state, "epoch": 3} if wrapped else state, tmp_path / "mine.pth")
    loaded = build(SMALL, classes, weights="~/mine.pth", model_options=NARROW).state_dict()
    assert len(loaded["head.classification_head.cls_logits.bias"]) == len(classes) + 1
    same = {key for key, value in state.items() if torch.equal(loaded[key], value)}
    heads = set() if outputs == len(classes) + 1 else {k for k in state if "cls_logits" in k}
    assert set(state) - same == heads


def without(key: str) -> Callable[[State], object]:
    return lambda state: {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: [1, 2], "has no state dictionary"),
        (lambda _: {"epoch": 3}, "has no state dictionary"),
        (without("backbone.body.conv1.weight"), r"it lacks 1 tensors \(backbone.body.conv1.weight"),
        (lambda state: state | {"more": torch.zeros(1)}, r"1 unknown ones \(more\)"),
        (lambda _: own_state(8), "size mismatch"),
        (b"PK\x03\x04 cut off", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_weights_file_that_does_not_fit_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    file = tmp_path / "mine.pth"
    if isinstance(change, bytes):
        file.write_bytes(change)
    elif change is not None:
        torch.save(change(own_state(5)), file)
    with pytest.raises(DataError, match=rf"(?s)mine\.pth: .*{message}"):
        build(SMALL, weights=str(file), model_options=NARROW)


@pytest.mark.filterwarnings("ignore:for .*no-op:UserWarning")  # nothing is copied to meta tensors
def test_broken_published_file_is_refused() -> None:
    with torch.device("meta"):
        other = get_model(MOBILE, weights=None, weights_backbone=None, num_classes=5)
    file = place(PUBLISHED["coco"][MOBILE], constants(other))
    with pytest.raises(DataError, match=rf"(?s){file}: .*size mismatch"):
        outlined(MOBILE, weights="coco")
    file.write_bytes(b"cut off")
    with pytest.raises(DataError, match=str(file)):
        outlined(MOBILE, weights="coco")


def test_addresses_of_weights_are_those_of_torchvision() -> None:
    """A newer torchvision may have other files."""
    for name in DETECTORS:
        if name not in OWN_DETECTORS:
            expected = get_model_weights(name).COCO_V1.url
            assert trained_weights.address(PUBLISHED["coco"][name]) == expected
        backbones = ("resnet101", "resnet50", "resnet18", "mobilenet_v3_large", "swin_t")
        (backbone,) = (each for each in backbones if each in name)
        expected = get_model_weights(backbone).IMAGENET1K_V1.url
        assert trained_weights.address(PUBLISHED["imagenet"][name]) == expected


@pytest.mark.parametrize(
    "variables",
    [{"TORCH_HOME": "/here"}, {"XDG_CACHE_HOME": "/here"}, {"TORCH_HOME": "~/here", "HOME": "/me"}],
)
def test_weights_are_stored_where_torch_looks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("TORCH_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert trained_weights.path(FILE) == Path(torch.hub.get_dir()) / "checkpoints" / f"{FILE}.pth"


@pytest.mark.parametrize("weights", ["coco", "imagenet"])
def test_a_plan_needs_no_file_of_weights_for_the_same_frozen_layers(weights: str) -> None:
    place(PUBLISHED["imagenet"][MOBILE], constants(get_model("mobilenet_v3_large")))
    chosen = options(Path("nowhere"), model=MOBILE, weights=weights, trainable_backbone_layers=1)
    model = build_detector(chosen.without_weights(), classes=CLASSES, seed=0)
    expected = build(MOBILE, weights="imagenet", trainable_backbone_layers=1)
    assert str(model) == str(expected)
    trains = [{n: p.requires_grad for n, p in m.named_parameters()} for m in (model, expected)]
    assert trains[0] == trains[1]
    assert set(trains[0].values()) == {False, True}
    assert chosen.model_copy(update={"weights": "mine.pth"}).without_weights().weights is None
    with pytest.raises(ValueError, match="null initialises from the seed"):
        options(Path("nowhere"), model=MOBILE, weights="random")


def test_backbone_is_loaded_with_imagenet_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        trained = get_model("resnet18")
    place(PUBLISHED["imagenet"][SMALL], constants(trained))
    model = build(SMALL, weights="imagenet", trainable_backbone_layers=0)
    body = {k: v for k, v in model.state_dict().items() if "body" in k and v.is_floating_point()}
    assert len(body) > 50
    assert all((value == 0.5).all() for value in body.values())
    trains = {"body" in key: p.requires_grad for key, p in model.named_parameters()}
    assert trains == {True: False, False: True}
    asked = []

    def noted(name: str, *, weights: str | None, **options: Any) -> nn.Module:
        asked.append((name, weights))
        return get_model(name, **options)  # type: ignore[no-any-return]

    def noted_pyramid(*, backbone_name: str, weights: str | None, **options: Any) -> nn.Module:
        asked.append((backbone_name, weights))
        return resnet_fpn_backbone(  # type: ignore[no-any-return]
            backbone_name=backbone_name, weights=None, **options
        )

    monkeypatch.setattr(own_detectors, "get_model", noted)
    monkeypatch.setattr(own_detectors, "resnet_fpn_backbone", noted_pyramid)
    with torch.device("meta"):
        for build_own in OWN_DETECTORS.values():
            build_own(num_classes=3, weights_backbone="IMAGENET1K_V1")
    names = ("resnet101", "swin_t", "swin_t", "resnet18")
    assert asked == [(name, "IMAGENET1K_V1") for name in names]


def refuse(*_: object, **__: object) -> object:
    raise AssertionError("nothing is to be fetched")


@pytest.mark.parametrize("given", PUBLISHED)
def test_missing_weights_are_refused_without_download(
    detection_folder: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    chosen, name = options(detection_folder, model=MOBILE, weights=given), PUBLISHED[given][MOBILE]
    for call in (lambda: check_data(chosen), lambda: build(MOBILE, weights=given)):
        with pytest.raises(DataError) as caught:
            call()
        told = str(caught.value)
        assert (
            f"workload.download is false; set it to true; or save {trained_weights.address(name)}"
            in told
        )
        assert str(trained_weights.path(name)) in told
    place(name, {})
    check_data(chosen)
    with pytest.raises(
        DataError, match=r"workload.weights: no such file: mine.pth; use null, coco"
    ):
        check_data(options(detection_folder, weights="mine.pth"))


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that files are fetched from."""
    folder = tmp_path / "remote"
    folder.mkdir()
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a thread of tqdm's stays
    monkeypatch.setattr(trained_weights, "address", lambda name: (folder / f"{name}.pth").as_uri())
    return folder


def test_weights_are_fetched_once(remote: Path) -> None:
    (remote / f"{FILE}.pth").write_bytes(CONTENT)
    for _ in range(2):
        trained_weights.ensure(FILE, download=True)
        (remote / f"{FILE}.pth").unlink(missing_ok=True)
    assert trained_weights.path(FILE).read_bytes() == CONTENT
    assert list(trained_weights.path(FILE).parent.iterdir()) == [trained_weights.path(FILE)]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), (CONTENT[:-1], "invalid hash value")]
)
def test_failed_download_of_weights_leaves_no_file(
    remote: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (remote / f"{FILE}.pth").write_bytes(content)
    with pytest.raises(DataError, match=rf"could not be downloaded \(.*{message}") as caught:
        trained_weights.ensure(FILE, download=True)
    assert f"save {trained_weights.address(FILE)} as {trained_weights.path(FILE)}" in str(
        caught.value
    )
    assert list(trained_weights.path(FILE).parent.iterdir()) == [], "nothing half-finished is left"
