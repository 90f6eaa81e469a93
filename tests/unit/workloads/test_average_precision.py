"""Average precision: COCO's own code on the same detections says the same."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pycocotools import mask as run_lengths
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchmetrics.detection import MeanAveragePrecision

from shardmark.workloads.detection.annotated import Objects, RunLengths
from shardmark.workloads.detection.average_precision import (
    OVERLAPS,
    RECALLS,
    Detections,
    EvaluatedPicture,
    average_precision,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

# pycocotools unpacks masks in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

MINI = Path(__file__).parents[4] / "shared" / "data" / "coco-mini" / "annotations"
HEIGHT, WIDTH = 48, 64
LABELS = np.array([1, 3, 17, 44, 90])
UNMARKED = 7
NAMES = ("map", "map_50", "map_75")
ALL_NAMES = (*NAMES, *(f"mask_{name}" for name in NAMES))


def drawn_boxes(random: np.random.Generator, count: int) -> NDArray[np.float32]:
    corners = random.integers(0, (40, 30), (count, 2))
    sizes = random.integers(4, (24, 18), (count, 2))
    return np.concatenate((corners, corners + sizes), axis=1).astype(np.float32)


def mask_of(box: NDArray[np.float32]) -> RunLengths:
    """The box's pixels without a corner, so that masks overlap otherwise than boxes."""
    left, top, right, bottom = np.clip(box.round().astype(int), 0, (WIDTH, HEIGHT) * 2)
    pixels = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
    pixels[top:bottom, left:right] = 1
    pixels[top : top + (bottom - top) // 3, left : left + (right - left) // 2] = 0
    encoded: RunLengths = run_lengths.encode(pixels)
    return encoded


def objects(boxes: NDArray[np.float32], labels: Any, crowds: Any) -> Objects:
    masks = tuple(mask_of(box) for box in boxes)
    return Objects(
        boxes=boxes,
        labels=np.asarray(labels, np.int64),
        areas=np.array([run_lengths.area(mask) for mask in masks], np.float64),
        crowds=np.asarray(crowds, bool),
        masks=masks,
    )


def detections(boxes: NDArray[np.float32], scores: Any, labels: Any) -> Detections:
    return Detections(
        boxes=boxes,
        scores=np.asarray(scores, np.float32),
        labels=np.asarray(labels, np.int64),
        masks=tuple(mask_of(box) for box in boxes),
    )


def drawn_picture(
    random: np.random.Generator, image_id: int, marked: int, found: int
) -> EvaluatedPicture:
    """Half of what is found lies near what is marked; few different scores make many ties."""
    truth = objects(
        drawn_boxes(random, marked), random.choice(LABELS, marked), random.random(marked) < 0.15
    )
    boxes, labels = drawn_boxes(random, found), random.choice(LABELS, found)
    for index in range(found if marked else 0):
        if random.random() < 0.5:
            near = random.integers(marked)
            boxes[index] = truth.boxes[near] + random.integers(-2, 3, 4)
            labels[index] = truth.labels[near]
    scores = random.integers(1, 20, found) / 20
    return EvaluatedPicture(image_id=image_id, truth=truth, found=detections(boxes, scores, labels))


def drawn_pictures(seed: int) -> list[EvaluatedPicture]:
    """30 pictures, some without objects, some without detections; one has 300 of them."""
    random = np.random.default_rng(seed)
    image_ids = random.permutation(100_000)[:30].tolist()
    pictures = [
        drawn_picture(
            random, image_id, int(random.choice([0, 1, 4, 8])), int(random.choice([0, 3, 20]))
        )
        for image_id in image_ids[:-1]
    ]
    crowded = drawn_picture(random, image_ids[-1], 8, 300)
    one_label = np.full(300, crowded.truth.labels[0])
    return [*pictures, replace(crowded, found=replace(crowded.found, labels=one_label))]


def as_in_a_file(image_id: int, marks: Objects | Detections, first_id: int) -> list[dict[str, Any]]:
    boxes = marks.boxes.astype(np.float64)
    sizes = boxes[:, 2:] - boxes[:, :2]
    if isinstance(marks, Objects):
        more = {"area": marks.areas, "iscrowd": marks.crowds.astype(int)}
    else:
        more = {"area": sizes.prod(axis=1), "score": marks.scores}
    if marks.masks is not None:
        more["segmentation"] = np.array(marks.masks, dtype=object)
    return [
        {
            "id": first_id + index,
            "image_id": image_id,
            "category_id": int(marks.labels[index]),
            "bbox": [*boxes[index, :2], *sizes[index]],
            **{name: values[index] for name, values in more.items()},
        }
        for index in range(len(boxes))
    ]


def indexed(pictures: Sequence[EvaluatedPicture], which: str) -> COCO:
    made: list[dict[str, Any]] = []
    for picture in pictures:
        made += as_in_a_file(picture.image_id, getattr(picture, which), len(made) + 1)
    labels = np.unique([*LABELS, UNMARKED, *(mark["category_id"] for mark in made)])
    coco = COCO()
    coco.dataset = {
        "images": [
            {"id": picture.image_id, "height": HEIGHT, "width": WIDTH} for picture in pictures
        ],
        "categories": [{"id": int(label)} for label in labels],
        "annotations": made,
    }
    coco.createIndex()
    return coco


def expected(pictures: Sequence[EvaluatedPicture], *, masks: bool = True) -> dict[str, float]:
    """What pycocotools says; -1 where it has nothing to average."""
    results: dict[str, float] = {}
    with redirect_stdout(StringIO()):
        for prefix, kind in (("", "bbox"), ("mask_", "segm"))[: 1 + masks]:
            evaluation = COCOeval(indexed(pictures, "truth"), indexed(pictures, "found"), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            averages = evaluation.stats[:3].tolist()
            results |= {f"{prefix}{n}": v for n, v in zip(NAMES, averages, strict=True)}
    return results


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_pycocotools(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = drawn_pictures(seed)
    found = average_precision(pictures, masks=True)
    assert found == pytest.approx(expected(pictures), abs=1e-6, rel=0)
    assert tuple(found) == ALL_NAMES
    assert all(value is not None and 0 < value < 1 for value in found.values())
    assert average_precision(pictures, masks=False) == {name: found[name] for name in NAMES}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("seed", range(3))
def test_order_and_sharing_change_nothing(seed: int) -> None:
    """Not even a digit, although many scores are equal."""
    pictures = drawn_pictures(seed)
    found = average_precision(pictures, masks=True)
    assert average_precision(pictures[::-1], masks=True) == found
    parts = [pickle.loads(pickle.dumps(pictures[rank::3])) for rank in range(3)]
    assert average_precision([p for part in parts for p in part], masks=True) == found


def test_equal_scores_are_ranked_by_picture() -> None:
    """A hit in the picture of the lower id comes before the miss that scores the same."""
    box = np.array([[0, 0, 10, 10]], np.float32)
    nothing = objects(box[:0], [], [])
    hit = EvaluatedPicture(
        image_id=1, truth=objects(box, [1], [False]), found=detections(box, [0.5], [1])
    )
    miss = EvaluatedPicture(image_id=2, truth=nothing, found=detections(box, [0.5], [1]))
    for pictures in ([hit, miss], [miss, hit]):
        assert average_precision(pictures, masks=False)["map"] == pytest.approx(1.0)
    for pictures in ([replace(hit, image_id=3), miss], [miss, replace(hit, image_id=3)]):
        assert average_precision(pictures, masks=False)["map"] == pytest.approx(0.5)


def test_an_overlap_that_is_just_enough_counts() -> None:
    """11 of 20 pixels: float32 would ask for 0.55000001."""
    marked = objects(np.array([[0, 0, 20, 4]], np.float32), [1], [False])
    found = detections(np.array([[0, 0, 11, 4]], np.float32), [0.5], [1])
    pictures = [EvaluatedPicture(image_id=1, truth=marked, found=found)]
    assert average_precision(pictures, masks=False)["map"] == pytest.approx(0.2)
    assert expected(pictures)["map"] == pytest.approx(0.2)


def test_agrees_with_torchmetrics_on_pixels() -> None:
    """Masks are handed on as run lengths; the library's own way says the same."""

    def pixels(masks: tuple[RunLengths, ...] | None) -> torch.Tensor:
        assert masks is not None
        shapes = [run_lengths.decode(mask) for mask in masks]
        return torch.from_numpy(np.reshape(shapes, (-1, HEIGHT, WIDTH))).bool()

    def as_tensors(marks: Objects | Detections) -> dict[str, torch.Tensor]:
        tensors = {
            "boxes": torch.from_numpy(marks.boxes),
            "labels": torch.from_numpy(marks.labels),
            "masks": pixels(marks.masks),
        }
        if isinstance(marks, Detections):
            return tensors | {"scores": torch.from_numpy(marks.scores)}
        return tensors | {
            "area": torch.from_numpy(marks.areas),
            "iscrowd": torch.from_numpy(marks.crowds).long(),
        }

    pictures = sorted(drawn_pictures(0), key=lambda picture: picture.image_id)
    metric = MeanAveragePrecision(
        iou_type=("bbox", "segm"),
        iou_thresholds=OVERLAPS,
        rec_thresholds=RECALLS,
        backend="faster_coco_eval",
    )
    metric.warn_on_many_detections = False
    metric.update(
        [as_tensors(picture.found) for picture in pictures],
        [as_tensors(picture.truth) for picture in pictures],
    )
    theirs = metric.compute()
    for name, value in average_precision(pictures, masks=True).items():
        key = f"segm_{name[5:]}" if name.startswith("mask_") else f"bbox_{name}"
        assert value == float(theirs[key]), name


def without(picture: EvaluatedPicture, *, truth: bool, found: bool) -> EvaluatedPicture:
    empty = np.zeros((0, 4), np.float32)
    return replace(
        picture,
        truth=objects(empty, [], []) if truth else picture.truth,
        found=detections(empty, [], []) if found else picture.found,
    )


def only_crowds(picture: EvaluatedPicture) -> EvaluatedPicture:
    crowds = np.ones(len(picture.truth), bool)
    return replace(picture, truth=replace(picture.truth, crowds=crowds))


@pytest.mark.parametrize("masks", [False, True])
def test_no_object_has_no_average(masks: bool) -> None:
    pictures = drawn_pictures(0)
    nothing = dict.fromkeys(ALL_NAMES if masks else NAMES)
    for emptied in (
        [],
        [without(picture, truth=True, found=False) for picture in pictures],
        [without(picture, truth=True, found=True) for picture in pictures],
        [only_crowds(picture) for picture in pictures],
    ):
        assert average_precision(emptied, masks=masks) == nothing
        assert not emptied or set(expected(emptied, masks=masks).values()) == {-1.0}


@pytest.mark.parametrize("masks", [False, True])
def test_no_detection_is_zero(masks: bool) -> None:
    pictures = [without(picture, truth=False, found=True) for picture in drawn_pictures(0)]
    zeros = dict.fromkeys(ALL_NAMES if masks else NAMES, 0.0)
    assert average_precision(pictures, masks=masks) == zeros
    assert average_precision(pictures[-1:], masks=masks) == zeros


def test_detections_in_a_picture_without_objects_count_against_it() -> None:
    """Those of a category that no picture marks do not, as in COCO's own code."""
    box = np.array([[0, 0, 10, 10]], np.float32)
    hit = EvaluatedPicture(
        image_id=1, truth=objects(box, [3], [False]), found=detections(box, [0.5], [3])
    )
    empty = without(replace(hit, image_id=2), truth=True, found=False)
    better = replace(empty, found=detections(box, [0.9], [3]))
    other = replace(empty, found=detections(box, [0.9], [UNMARKED]))
    assert average_precision([hit, better], masks=True)["mask_map"] == pytest.approx(0.5)
    assert average_precision([hit, other], masks=True)["mask_map"] == pytest.approx(1.0)


def test_a_detection_on_a_crowd_is_ignored() -> None:
    boxes = np.array([[0, 0, 10, 10], [20, 20, 60, 40]], np.float32)
    inside = np.array([[0, 0, 10, 10], [25, 25, 35, 35]], np.float32)
    truth = objects(boxes, [1, 1], [False, True])
    picture = EvaluatedPicture(
        image_id=1, truth=truth, found=detections(inside, [0.5, 0.9], [1, 1])
    )
    assert average_precision([picture], masks=False)["map"] == pytest.approx(1.0)
    counted = replace(picture, truth=objects(boxes[:1], [1], [False]))
    assert average_precision([counted], masks=False)["map"] == pytest.approx(0.5)


def test_read_only_arrays() -> None:
    """As they come out of a cache; a picture may be evaluated by a model without masks."""
    picture = drawn_picture(np.random.default_rng(1), 1, 4, 20)
    found = average_precision([picture], masks=False)
    for marks in (picture.truth, picture.found):
        for name in ("boxes", "labels"):
            getattr(marks, name).flags.writeable = False
    picture.truth.areas.flags.writeable = False
    picture.found.scores.flags.writeable = False
    bare = replace(
        picture,
        truth=replace(picture.truth, masks=None),
        found=replace(picture.found, masks=None),
    )
    assert average_precision([bare], masks=False) == found


def test_no_picture_twice() -> None:
    pictures = drawn_pictures(0)
    with pytest.raises(AssertionError, match="evaluated twice"):
        average_precision([*pictures, pictures[0]], masks=False)


def test_asks_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a collective was called")

    pictures = drawn_pictures(0)
    found = average_precision(pictures, masks=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name in ("barrier", "all_gather", "all_gather_object", "get_world_size"):
        monkeypatch.setattr(torch.distributed, name, fail)
    assert average_precision(pictures, masks=True) == found


def mini_pictures(random: np.random.Generator) -> list[EvaluatedPicture]:
    """COCO's own marks; found are most of them, shifted, some with another label, and some twice.

    Masks are shifted by whole pixels.
    """
    with redirect_stdout(StringIO()):
        coco = COCO(str(MINI / "instances_val2017.json"))
    pictures = []
    for image_id in sorted(coco.imgs):
        marks = coco.loadAnns(coco.getAnnIds(imgIds=[image_id]))
        masks = tuple(coco.annToRLE(mark) for mark in marks)
        corners = np.array([mark["bbox"] for mark in marks], np.float64).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        truth = Objects(
            boxes=corners.astype(np.float32),
            labels=np.array([mark["category_id"] for mark in marks], np.int64),
            areas=np.array([mark["area"] for mark in marks], np.float64),
            crowds=np.array([mark["iscrowd"] for mark in marks], bool),
            masks=masks,
        )
        pictures.append(
            EvaluatedPicture(image_id=image_id, truth=truth, found=perturbed(truth, random))
        )
    return pictures


def perturbed(truth: Objects, random: np.random.Generator) -> Detections:
    assert truth.masks is not None
    chosen = np.flatnonzero(random.random(len(truth)) < 0.8)
    chosen = np.sort(np.concatenate((chosen, chosen[::5])))
    shifts = random.integers(-6, 7, (len(chosen), 2))
    labels = truth.labels[chosen]
    wrong = random.random(len(chosen)) < 0.1
    labels[wrong] = random.choice(truth.labels, wrong.sum())
    return Detections(
        boxes=truth.boxes[chosen] + np.tile(shifts, 2).astype(np.float32),
        scores=random.random(len(chosen)).astype(np.float32).round(2),
        labels=labels,
        masks=tuple(
            run_lengths.encode(
                np.asfortranarray(np.roll(run_lengths.decode(truth.masks[index]), shift, (1, 0)))
            )
            for index, shift in zip(chosen, shifts, strict=True)
        ),
    )


@pytest.mark.skipif(not MINI.is_dir(), reason="the shared COCO pictures are not on this machine")
def test_agrees_with_pycocotools_on_coco() -> None:
    pictures = mini_pictures(np.random.default_rng(0))
    marked = json.loads((MINI / "instances_val2017.json").read_bytes())["annotations"]
    assert sum(len(picture.truth) for picture in pictures) == len(marked)
    assert sum(picture.truth.crowds.sum() for picture in pictures) == 5
    found = average_precision(pictures, masks=True)
    assert found == pytest.approx(expected(pictures), abs=1e-6, rel=0)
    assert all(value is not None and 0.1 < value < 0.9 for value in found.values())
    exact = [
        replace(
            picture,
            found=Detections(
                boxes=picture.truth.boxes,
                scores=np.ones(len(picture.truth), np.float32),
                labels=picture.truth.labels,
                masks=picture.truth.masks,
            ),
        )
        for picture in pictures
    ]
    assert average_precision(exact, masks=True) == dict.fromkeys(ALL_NAMES, pytest.approx(1.0))
