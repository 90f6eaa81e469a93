"""Metrics of what was learned, and of what went wrong on the way."""

from __future__ import annotations

from functools import partial

from shardmark.core.metrics.catalogue import Metric

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

_server_metric = partial(Metric, group="servers", over="trial", better="lower")
SERVERS = (
    _server_metric(
        name="staleness_mean",
        unit="updates",
        definition="Updates that a server took between handing out parameters and using the"
        " gradient that was computed from them; mean over all gradients.",
        source="parameter servers (Ho et al., NIPS 2013)",
    ),
    _server_metric(
        name="staleness_max",
        unit="updates",
        definition="The stalest gradient that a server used, as staleness_mean.",
        source="parameter servers",
    ),
    _server_metric(
        name="push_count",
        unit="pushes",
        better="higher",
        definition="Gradients that workers sent in the whole training, one for each worker's step.",
        source="parameter servers",
    ),
    _server_metric(
        name="pull_count",
        unit="pulls",
        better="higher",
        definition="Times that workers got parameters in the whole training.",
        source="parameter servers",
    ),
    _server_metric(
        name="push_bytes",
        unit="bytes",
        definition="Gradients that a worker sends in one step, to all servers.",
        source="parameter servers",
    ),
    _server_metric(
        name="pull_bytes",
        unit="bytes",
        definition="Parameters that a worker gets in one step, from all servers.",
        source="parameter servers",
    ),
    _server_metric(
        name="updates_per_second",
        unit="updates/s",
        better="higher",
        definition="Optimizer steps of a server per second of the measured windows.",
        source="parameter servers",
    ),
    _server_metric(
        name="server_wait_seconds",
        unit="seconds",
        definition="Time for which a worker's step waits at the barrier or the bound; mean.",
        source="parameter servers",
    ),
    _server_metric(
        name="lost_samples",
        unit="samples",
        definition="Samples handed to workers which died before they sent a gradient.",
        source="parameter servers",
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
    _errors_metric(
        name="lost_seconds",
        unit="seconds",
        definition="Wall time that did not bring the training on: over all restarts, from when"
        " training last stood at the step that was gone back to, until it went on from there.",
        source="wall clock of the ranks",
    ),
    _errors_metric(
        name="checkpoint_seconds",
        unit="seconds",
        definition="Time of one checkpoint, in which nobody trains, mean of those kept.",
        source="wall clock, outside the windows",
    ),
    _errors_metric(
        name="checkpoint_bytes",
        unit="bytes",
        definition="Bytes that a rank writes for one checkpoint, mean of those kept; what all ranks"
        " hold alike, the first rank of each node writes.",
        source="size of the files",
    ),
)
