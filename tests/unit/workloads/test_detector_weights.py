"""Trained weights: which files they are, what is asked of them, and heads for other classes."""

from __future__ import annotations

import hashlib
import io
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.workloads.detection_folder import options
from torch import Tensor, nn
from torchvision.models import get_model, get_model_builder, get_model_weights

from shardmark.core.errors import DataError
from shardmark.workloads.detection.building import build_detector
from shardmark.workloads.detection.options import DETECTORS
from shardmark.workloads.detection.own_detectors import OWN_DETECTORS
from shardmark.workloads.detection.weights import (
    BACKBONES,
    PUBLISHED,
    WeightsFile,
    coco_weights,
    ensure,
    imagenet_weights,
)

SMALL = "fasterrcnn_mobilenet_v3_large_320_fpn"
CLASSES = ("gizmo", "dog", "N/A", "person")
ROWS = {0: 0, 2: 18, 4: 1}
"""Output -> COCO's: the background, dog and person; COCO has no gizmo, and N/A is no name."""
CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


def build(name: str, weights: str, classes: tuple[str, ...] = CLASSES, **fields: Any) -> nn.Module:
    chosen = options(Path("nowhere"), model=name, weights=weights, **fields)
    return build_detector(chosen, classes=classes, seed=0)


def is_head(name: str) -> bool:
    return any(part in name for part in ("box_predictor", "mask_predictor", "cls_logits"))


def invented(name: str, outputs: int = 91, **more: Any) -> State:
    """Weights of the shapes of the model's: random in the heads, else one number, stored once."""
    with torch.device("meta"):
        if name in OWN_DETECTORS:
            model = OWN_DETECTORS[name](num_classes=outputs)
        else:
            arguments = {"num_classes": outputs, "weights_backbone": None} | more
            model = get_model_builder(name)(**arguments)
    drawn = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(tensor.shape, generator=drawn)
        if is_head(key)
        else torch.full((), 0.5).to(tensor.dtype).expand(tensor.shape)
        for key, tensor in model.state_dict().items()
    }


def place(file: WeightsFile | None, state: State) -> None:
    assert file is not None
    file.path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.path)


def head_outputs(model: Any, name: str) -> list[tuple[Tensor, int]]:
    """What the heads make of the same features, and along which axis classes lie."""
    drawn = torch.Generator().manual_seed(1)
    channels = 64 if name == "fcos_resnet18_fpn" else 256
    features = torch.randn(2, channels, 5, 6, generator=drawn)
    if name.startswith(("retinanet", "fcos")):
        head = model.head.classification_head
        return [(head.cls_logits(features).view(2, head.num_anchors, head.num_classes, 30), 2)]
    scores, edges = model.roi_heads.box_predictor(torch.randn(3, 1024, generator=drawn))
    found = [(scores, 1), (edges.view(3, -1, 4), 1)]
    if name.startswith("maskrcnn"):
        found.append((model.roi_heads.mask_predictor(features), 1))
    return found


def check_rows(model: nn.Module, state: State, name: str) -> None:
    """Known classes score as COCO's category of the same name does; nothing else changed."""
    whole = get_model(name, weights=None, weights_backbone=None)
    whole.load_state_dict(state, strict=False)
    with torch.no_grad():
        pairs = zip(head_outputs(model, name), head_outputs(whole, name), strict=True)
        for (found, axis), (expected, _) in pairs:
            assert found.shape[axis] == len(CLASSES) + 1
            for output, row in ROWS.items():
                one, other = found.select(axis, output), expected.select(axis, row)
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)  # sums of 1,024
            for output in set(range(len(CLASSES) + 1)) - set(ROWS):
                assert not torch.isclose(
                    found.select(axis, output)[..., None], expected.movedim(axis, -1)
                ).all()
    for key, tensor in model.state_dict().items():
        assert is_head(key) or torch.equal(tensor, state[key]), key


@pytest.mark.parametrize(
    "name",
    [SMALL, "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"],
)
def test_heads_keep_the_categories_of_the_same_name(name: str) -> None:
    state = invented(name)
    place(coco_weights(name), state)
    before = torch.get_rng_state()
    model = build(name, "coco")
    assert torch.equal(torch.get_rng_state(), before)
    check_rows(model, state, name)
    heads = [p for key, p in model.named_parameters() if is_head(key)]
    assert len(heads) >= 2
    assert all(parameter.requires_grad for parameter in heads)


def test_new_rows_come_from_the_seed() -> None:
    place(coco_weights(SMALL), invented(SMALL))
    one, other = (build(SMALL, "coco").state_dict() for _ in range(2))
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_trained_detector_of_other_classes_trains_and_detects() -> None:
    name = "retinanet_resnet50_fpn"
    place(coco_weights(name), {**invented(name)})
    model = build(name, "coco")
    picture = torch.rand(3, 40, 40)
    boxes = torch.tensor([[2.0, 2.0, 30.0, 30.0]])
    with torch.no_grad():
        losses = model([picture], [{"boxes": boxes, "labels": torch.tensor([4])}])
        found = model.eval()([picture])[0]
    assert set(losses) == {"classification", "bbox_regression"}
    assert found["labels"].numel() == 0 or found["labels"].max() <= 4


def test_number_of_trainable_layers() -> None:
    place(coco_weights("retinanet_resnet50_fpn"), invented("retinanet_resnet50_fpn"))
    for layers, expected in ((None, "234"), (0, "")):
        fields: dict[str, Any] = {} if layers is None else {"trainable_backbone_layers": layers}
        model = build("retinanet_resnet50_fpn", "coco", **fields)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        found = "".join(n for n in "1234" if any(f"body.layer{n}." in name for name in trained))
        assert found == expected


@pytest.mark.parametrize(
    ("name", "outputs", "wrapped"),
    [(SMALL, 91, True), (SMALL, 5, False), ("fcos_resnet18_fpn", 91, False)],
)
def test_file_of_the_users(tmp_path: Path, name: str, outputs: int, wrapped: bool) -> None:
    """Of as many outputs as the data need, or of COCO's."""
    file, state = tmp_path / "mine.pth", invented(name, outputs)
    torch.save({"model": state, "epoch": 3} if wrapped else state, file)
    model = build(name, str(file))
    assert model.training
    if outputs == 91 and name == SMALL:
        check_rows(model, state, name)
    elif outputs == 91:
        found = head_outputs(model, name)[0][0]
        assert found.shape[2] == len(CLASSES) + 1
    else:
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_file_with_the_home_folder_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save(invented(SMALL, 5), tmp_path / "mine.pth")
    chosen = options(Path("nowhere"), weights="~/mine.pth", dataset="digits-detection")
    build_detector(chosen, classes=CLASSES, seed=0)


def test_data_of_90_classes_take_the_file_as_it_is(tmp_path: Path) -> None:
    file, state = tmp_path / "mine.pth", invented(SMALL)
    torch.save(state, file)
    model = build(SMALL, str(file), classes=tuple(map(str, range(90))))
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_frozen_batch_norms_count_no_batches(tmp_path: Path) -> None:
    file, state = tmp_path / "mine.pth", invented(SMALL, 5)
    torch.save({k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}, file)
    assert isinstance(build(SMALL, str(file)), nn.Module)


def without(key: str) -> Callable[[State], object]:
    return lambda state: {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: [1, 2], "holds no state dictionary; name -> tensor, or it as `model`"),
        (lambda _: {"epoch": 3}, "holds no state dictionary"),
        (
            without("backbone.fpn.inner_blocks.0.0.bias"),
            r"does not fit FasterRCNN: it lacks 1 tensors \(backbone.fpn.inner_blocks.0.0.bias\)"
            r" and has 0 unknown ones \(none\)",
        ),
        (
            lambda state: state | {"more": torch.zeros(1)},
            r"it lacks 0 tensors \(none\) and has 1 unknown ones \(more\)",
        ),
        (
            lambda state: state | {"backbone.fpn.inner_blocks.0.0.bias": torch.zeros(3)},
            "does not fit the model: (.|\n)*size mismatch for backbone.fpn.inner_blocks.0.0.bias",
        ),
        (lambda _: {}, "does not fit FasterRCNN: it lacks"),
    ],
)
def test_file_that_does_not_fit(
    tmp_path: Path, change: Callable[[State], object], message: str
) -> None:
    file = tmp_path / "mine.pth"
    torch.save(change(invented(SMALL, 5)), file)
    with pytest.raises(DataError, match=message) as caught:
        build(SMALL, str(file))
    assert str(caught.value).startswith(f"{file}: ")


def test_file_of_other_classes_does_not_fit(tmp_path: Path) -> None:
    torch.save(invented(SMALL, 8), tmp_path / "mine.pth")
    with pytest.raises(DataError, match=r"does not fit the model: (.|\n)*cls_score"):
        build(SMALL, str(tmp_path / "mine.pth"))


@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\x03\x04 cut off"])
def test_broken_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.pth"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"mine.pth: cannot be read \("):
        build(SMALL, str(file))


def test_broken_published_file() -> None:
    file = coco_weights(SMALL)
    assert file is not None
    file.path.parent.mkdir(parents=True)
    for content in (b"cut off", b""):
        file.path.write_bytes(content)
        with pytest.raises(DataError, match=str(file.path)):
            build(SMALL, "coco")
    place(file, invented(SMALL, 5))
    with pytest.raises(DataError, match=rf"{file.path}: (.|\n)*size mismatch"):
        build(SMALL, "coco")


def test_no_such_file(detection_folder: Path) -> None:
    with pytest.raises(DataError, match=r"workload.weights: there is no file mine.pth; null, coco"):
        options(detection_folder, weights="mine.pth").check_data()
    with pytest.raises(DataError, match=r"mine.pth: cannot be read"):
        build(SMALL, "mine.pth")


@pytest.mark.parametrize("name", sorted(DETECTORS))
def test_addresses_are_torchvisions(name: str) -> None:
    published = coco_weights(name)
    if name in OWN_DETECTORS:
        assert published is None
    else:
        assert published == WeightsFile(address=get_model_weights(name).COCO_V1.url)
    backbone = next(model for part, model in BACKBONES.items() if part in name)
    expected = get_model_weights(backbone).IMAGENET1K_V1.url
    assert imagenet_weights(name) == WeightsFile(address=expected)


def test_files_lie_where_torch_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = WeightsFile(address="https://example.invalid/net-12345678.pth")
    for variables in (
        {"TORCH_HOME": str(tmp_path)},
        {"XDG_CACHE_HOME": str(tmp_path)},
        {"HOME": str(tmp_path)},
        {"TORCH_HOME": "~/here", "HOME": str(tmp_path)},
    ):
        for name in ("TORCH_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert file.path == Path(torch.hub.get_dir()) / "checkpoints" / "net-12345678.pth"


@pytest.mark.parametrize(
    ("name", "backbone", "prefix"),
    [
        ("fcos_resnet18_fpn", "resnet18", "backbone.body."),
        (SMALL, "mobilenet_v3_large", "backbone.body."),
        ("fasterrcnn_swin_t_fpn", "swin_t", "backbone.body."),
    ],
)
def test_backbone_trained_on_imagenet(name: str, backbone: str, prefix: str) -> None:
    trained = {
        key: tensor.clone() if tensor.dtype == torch.int64 else torch.full_like(tensor, 0.25)
        for key, tensor in get_model(backbone).state_dict().items()
    }
    place(imagenet_weights(name), trained)
    model = build(name, "imagenet")
    body = {k.removeprefix(prefix): v for k, v in model.state_dict().items() if prefix in k}
    floats = {key: tensor for key, tensor in body.items() if tensor.is_floating_point()}
    assert len(floats) > 50
    assert all((tensor == 0.25).all() for key, tensor in floats.items() if "index" not in key)
    if name != "fcos_resnet18_fpn":
        return
    frozen = build(name, "imagenet", trainable_backbone_layers=0)
    assert not any(p.requires_grad for k, p in frozen.named_parameters() if k.startswith(prefix))
    assert all(p.requires_grad for k, p in frozen.named_parameters() if not k.startswith(prefix))


def refuse(*_: object, **__: object) -> object:
    raise AssertionError("nothing is to be fetched")


@pytest.mark.parametrize("weights", ["coco", "imagenet"])
def test_missing_weights_that_may_not_be_fetched(
    detection_folder: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    file = PUBLISHED[weights](SMALL)
    assert file is not None
    with pytest.raises(DataError) as caught:
        options(detection_folder, weights=weights).check_data()
    with pytest.raises(DataError, match=r"is missing, and workload.download is false"):
        build(SMALL, weights)
    assert str(caught.value) == (
        f"{file.path}: is missing, and workload.download is false; set it to true, "
        f"place {file.address} at {file.path}, or name a file of yours in workload.weights"
    )
    place(file, {})
    options(detection_folder, weights=weights).check_data()


class FakeNetwork:
    """Answers with this content, or fails."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def __call__(self, address: str, timeout: float) -> io.BytesIO:
        assert timeout > 0
        self.asked.append(address)
        if isinstance(self.answer, Exception):
            raise self.answer
        return io.BytesIO(self.answer)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (urllib.error.URLError("no route"), "no route"),
        (TimeoutError("too slow"), "too slow"),
        (HTTPException("odd answer"), "odd answer"),
        (b"something else", f"its SHA-256 begins [0-9a-f]{{8}}, not {DIGEST[:8]}"),
        (CONTENT[:-1], "its SHA-256 begins"),
    ],
)
def test_weights_that_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception, message: str
) -> None:
    network = FakeNetwork(answer)
    monkeypatch.setattr(urllib.request, "urlopen", network)
    file = WeightsFile(address=f"https://example.invalid/net-{DIGEST[:8]}.pth")
    with pytest.raises(DataError, match=rf"could not be fetched \(.*{message}") as caught:
        ensure(file, download=True)
    assert f"place {file.address} at {file.path}" in str(caught.value)
    assert list(file.path.parent.iterdir()) == [], "nothing half-finished is left"


def test_weights_are_fetched_once(detection_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = FakeNetwork(CONTENT)
    file = WeightsFile(address=f"https://example.invalid/net-{DIGEST[:8]}.pth")
    monkeypatch.setattr(urllib.request, "urlopen", network)
    monkeypatch.setitem(PUBLISHED, "coco", lambda _: file)
    for _ in range(2):
        options(detection_folder, weights="coco", download=True).check_data()
    assert network.asked == [file.address]
    assert list(file.path.parent.iterdir()) == [file.path]
    assert file.path.read_bytes() == CONTENT


def test_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").write_text("a file")
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    file = WeightsFile(address=f"https://example.invalid/net-{DIGEST[:8]}.pth")
    with pytest.raises(DataError, match="could not be fetched"):
        ensure(file, download=True)
