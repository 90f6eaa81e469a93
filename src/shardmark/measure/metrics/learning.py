"""Metrics of what was learned, and of what went wrong on the way."""

from __future__ import annotations

from functools import partial

from shardmark.measure.catalogue import Metric

_OVERLAPS = {
    "": "over IoU 0.5, 0.55, ..., 0.95",
    "_50": "at IoU 0.5",
    "_75": "at IoU 0.75",
}
_quality_metric = partial(Metric, group="quality", over="trial", better="lower")
QUALITY = (
    _quality_metric(
        name="train_loss",
        unit="loss",
        definition="Mean loss of the last epoch's training steps over all ranks.",
        source="training",
    ),
    _quality_metric(
        name="validation_loss",
        unit="loss",
        definition="Mean loss over the whole validation set, each sample once, after the last"
        " epoch.",
        source="evaluation of the assembled model",
    ),
    _quality_metric(
        name="accuracy_top1",
        unit="fraction",
        better="higher",
        definition="Share of the validation set whose class is the model's first guess, 0 to 1.",
        source="evaluation of the assembled model",
    ),
    _quality_metric(
        name="accuracy_top5",
        unit="fraction",
        better="higher",
        definition="Share of the validation set whose class is among the model's first five"
        " guesses, 0 to 1.",
        source="evaluation of the assembled model",
    ),
    *(
        _quality_metric(
            name=f"{prefix}map{suffix}",
            unit="fraction",
            better="higher",
            definition=f"Average precision of {kind} {overlap}, mean over the categories, 0 to 1;"
            " interpolated at 101 recalls, from the best 100 detections of a category in a"
            " picture, as COCO defines it.",
            source="evaluation of the assembled model (Lin et al., arXiv 1405.0312)",
        )
        for prefix, kind in (("", "boxes"), ("mask_", "masks"))
        for suffix, overlap in _OVERLAPS.items()
    ),
)

_errors_metric = partial(Metric, group="errors", over="maximum", better="lower")
ERRORS = (
    _errors_metric(
        name="nonfinite_steps",
        unit="steps",
        definition="Steps of the whole training whose loss was not a finite number.",
        source="training",
    ),
    _errors_metric(
        name="skipped_steps",
        unit="steps",
        definition="Optimizer steps left out because a loss-scaled gradient was not finite.",
        source="strategy",
    ),
    _errors_metric(
        name="data_errors",
        unit="samples",
        over="sum",
        definition="Unreadable samples that were left out, all ranks.",
        source="workload",
    ),
    _errors_metric(
        name="restarts",
        unit="restarts",
        over="trial",
        definition="Times that the launcher started the ranks anew within the trial.",
        source="launcher",
    ),
)
