"""Average precision: COCO's own code on the same detections says the same."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pycocotools import mask as run_lengths
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from shardmark.extras.detection.data import Detections, EvaluatedPicture, Objects, RunLengths
from shardmark.extras.detection.task import average_precision

if TYPE_CHECKING:
    from numpy.typing import NDArray

# pycocotools unpacks masks in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

HEIGHT, WIDTH = 48, 64
LABELS = np.array([1, 3, 17, 44, 90])
NAMES = ("map", "map_50", "map_75")
ALL_NAMES = (*NAMES, *(f"mask_{name}" for name in NAMES))
BOX = np.array([[0, 0, 10, 10]], np.float32)
NO_BOX = BOX[:0]


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


def evaluated(image_id: int, truth: Objects, found: Detections) -> EvaluatedPicture:
    return EvaluatedPicture(image_id=image_id, truth=truth, detections=found)


HIT = evaluated(1, objects(BOX, [1], [False]), detections(BOX, [0.5], [1]))
MISS = evaluated(2, objects(NO_BOX, [], []), detections(BOX, [0.5], [1]))


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
    return evaluated(image_id, truth, detections(boxes, scores, labels))


def drawn_pictures(seed: int) -> list[EvaluatedPicture]:
    """30 pictures, some without objects, some without detections; one has 300 of them."""
    random = np.random.default_rng(seed)
    image_ids = random.permutation(100_000)[:30].tolist()
    pictures = [
        drawn_picture(random, image_id, int(random.choice([0, 1, 4, 8])), found)
        for image_id, found in zip(image_ids[:-1], random.choice([0, 3, 20], 29), strict=True)
    ]
    crowded = drawn_picture(random, image_ids[-1], 8, 300)
    one_label = np.full(300, crowded.truth.labels[0])
    return [*pictures, replace(crowded, detections=replace(crowded.detections, labels=one_label))]


def indexed(pictures: Sequence[EvaluatedPicture], which: str) -> COCO:
    """Annotations or detections as COCO's own code reads them from files."""
    entries: list[dict[str, Any]] = []
    for picture in pictures:
        marks: Any = getattr(picture, which)
        sizes = marks.boxes[:, 2:].astype(np.float64) - marks.boxes[:, :2]
        for index in range(len(marks.boxes)):
            entry = {
                "id": len(entries) + 1,
                "image_id": picture.image_id,
                "category_id": int(marks.labels[index]),
                "bbox": [*marks.boxes[index, :2].astype(np.float64), *sizes[index]],
                "segmentation": marks.masks[index],
                "area": sizes[index].prod(),
            }
            if which == "truth":
                entry |= {"area": marks.areas[index], "iscrowd": int(marks.crowds[index])}
            else:
                entry["score"] = marks.scores[index]
            entries.append(entry)
    coco = COCO()
    coco.dataset = {
        "images": [{"id": p.image_id, "height": HEIGHT, "width": WIDTH} for p in pictures],
        "categories": [{"id": int(label)} for label in LABELS],
        "annotations": entries,
    }
    coco.createIndex()
    return coco


def expected(pictures: Sequence[EvaluatedPicture]) -> dict[str, float]:
    """The result of pycocotools; -1 where it has nothing to average."""
    results: dict[str, float] = {}
    with redirect_stdout(StringIO()):
        for prefix, kind in (("", "bbox"), ("mask_", "segm")):
            evaluation = COCOeval(indexed(pictures, "truth"), indexed(pictures, "detections"), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            averages = evaluation.stats[:3].tolist()
            results |= {f"{prefix}{n}": v for n, v in zip(NAMES, averages, strict=True)}
    return results


def test_average_precision_equals_pycocotools(capsys: pytest.CaptureFixture[str]) -> None:
    """However ranks share the pictures, although many scores are equal."""
    pictures = drawn_pictures(0)
    averages = average_precision(pictures, masks=True)
    assert averages == pytest.approx(expected(pictures), abs=1e-6, rel=0)
    assert tuple(averages) == ALL_NAMES
    assert all(value is not None and 0 < value < 1 for value in averages.values())
    assert average_precision(pictures, masks=False) == {name: averages[name] for name in NAMES}
    parts = [pickle.loads(pickle.dumps(pictures[rank::3])) for rank in (2, 0, 1)]
    assert average_precision([p for part in parts for p in part], masks=True) == averages
    assert capsys.readouterr() == ("", "")


def test_an_overlap_that_is_just_enough_counts() -> None:
    """11 of 20 pixels: float32 would ask for 0.55000001."""
    marked = objects(np.array([[0, 0, 20, 4]], np.float32), [1], [False])
    picture = evaluated(1, marked, detections(np.array([[0, 0, 11, 4]], np.float32), [0.5], [1]))
    assert average_precision([picture], masks=False)["map"] == pytest.approx(0.2)
    assert expected([picture])["map"] == pytest.approx(0.2)


@pytest.mark.parametrize("masks", [False, True])
def test_no_objects_give_none_and_no_detections_give_zero(masks: bool) -> None:
    """No object, crowds aside, has no average; no detection is zero."""
    pictures = drawn_pictures(0)
    names = ALL_NAMES if masks else NAMES
    unmarked = [replace(picture, truth=MISS.truth) for picture in pictures]
    crowds = [
        replace(p, truth=replace(p.truth, crowds=np.ones(len(p.truth), bool))) for p in pictures
    ]
    for emptied in ([], unmarked, crowds):
        assert average_precision(emptied, masks=masks) == dict.fromkeys(names)
    blind = [replace(picture, detections=detections(NO_BOX, [], [])) for picture in pictures]
    assert average_precision(blind, masks=masks) == dict.fromkeys(names, 0.0)


def test_repeated_picture_is_refused() -> None:
    with pytest.raises(AssertionError, match="came twice"):
        average_precision([HIT, HIT], masks=False)
