"""Files that a rank leaves are intact at any time, and have everything known so far."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmark.base.files.run_files import rank_file, rank_steps_file
from shardmark.base.results.schema import ProbeRecord, RankError, RankRecord
from shardmark.ranks.measure.step.recorder import Recorder
from shardmark.ranks.train.record import Evaluation, RankReport, sample_order_sha256, weights_sha256
from tests.unit.ranks.train.toy import CountingClock, FakeWorker, ToyWorkload

RANK = 3


def report_of(directory: Path, losses: list[float], warmup_steps: int = 1) -> RankReport:
    """Steps of two samples each; a window from the warm-up's end to the end."""
    report = RankReport(directory, RANK)
    report.recorder = recorder = Recorder(CountingClock())
    recorder.start_training()
    for step, loss in enumerate(losses):
        if step == warmup_steps:
            recorder.start_window()
        recorder.start_step()
        with recorder.span("data"):
            pass
        recorder.end_step(torch.tensor(loss), (2 * step, 2 * step + 1), 0.5**step)
    if len(losses) > warmup_steps:
        recorder.stop_window()
    report.workload = ToyWorkload()
    report.worker = FakeWorker()
    report.steps_per_epoch = 12
    report.settings = {"gradient_clipping": None}
    return report


def read(directory: Path) -> tuple[RankRecord, list[dict[str, Any]]]:
    record = RankRecord.model_validate_json((directory / rank_file(RANK)).read_text())
    steps = directory / rank_steps_file(RANK)
    lines = steps.read_text().splitlines() if steps.exists() else []
    return record, [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_record_and_step_lines_of_a_training(tmp_path: Path) -> None:
    report = report_of(tmp_path, [4.0, 2.0, 1.0])
    report.initial_sha256 = weights_sha256([("w", torch.ones(2))])
    report.final_sha256 = weights_sha256([("w", torch.zeros(2))])
    report.end_epoch(2, Evaluation(seconds=0.5, quality={"validation_loss": 1.5}))
    report.end_epoch(3, None)
    report.probe = ProbeRecord(parameter_bytes=8)
    report.write()
    record, lines = read(tmp_path)
    (window,) = record.windows
    assert (window.first_step, window.end_step, window.window_seconds) == (1, 3, 2 * 4 + 10)
    assert (record.samples, record.samples_total) == (4, 6)
    assert [(e.first_step, e.end_step, e.train_loss, e.quality) for e in record.epochs] == [
        (0, 2, 3.0, {"validation_loss": 1.5}),
        (2, 3, 1.0, None),
    ]
    assert record.evaluation_seconds == (0.5,)
    weights = (record.initial_weights_sha256, record.final_weights_sha256)
    assert weights == (report.initial_sha256, report.final_sha256)
    assert record.sample_order_sha256 == sample_order_sha256([(0, 1), (2, 3), (4, 5)])
    assert (record.synthetic, record.data_errors) == (True, ("a broken sample",))
    assert (record.settings, record.probe) == ({"gradient_clipping": None}, report.probe)
    assert record.first_step_at_seconds is not None
    told = ("step", "epoch", "measured", "loss", "learning_rate")
    assert [tuple(line[key] for key in told) for line in lines] == [
        (0, 0, False, 4.0, 1.0),
        (1, 0, True, 2.0, 0.5),
        (2, 1, True, 1.0, 0.25),
    ]
    first = lines[0]
    assert (first["rank"], first["samples"]) == (RANK, 2)
    assert (first["step_seconds"], first["data_seconds"]) == (3.0, 1.0)
    assert {first[f"{name}_seconds"] for name in ("forward", "backward", "optimizer")} == {None}
    assert first["started_at_seconds"] > 1e9


ERROR = RankError(kind="exception", message="ValueError: x", at_seconds=1.0)


def test_nonfinite_losses_are_counted_and_stored_as_null(tmp_path: Path) -> None:
    """And an error keeps what was measured before."""
    report = report_of(tmp_path, [4.0, float("nan"), float("inf"), 1.0])
    report.end_epoch(1, None)
    report.end_epoch(4, None)
    report.error = ERROR
    report.write()
    record, lines = read(tmp_path)
    assert (record.nonfinite_steps, record.error) == (2, ERROR)
    assert record.first_nonfinite is not None
    assert [line["loss"] for line in lines] == [4.0, None, None, 1.0]
    assert [epoch.train_loss for epoch in record.epochs] == [4.0, None]


def test_error_is_stored_if_losses_cannot_be_read(tmp_path: Path) -> None:
    """The case of a CUDA error, after which every later use of the device fails."""
    report = report_of(tmp_path, [4.0])
    assert report.recorder is not None
    report.recorder.flush()
    report.recorder.losses += [torch.zeros(()), torch.zeros(3)]  # cannot be stacked: RuntimeError
    report.error = ERROR
    report.write()
    record, lines = read(tmp_path)
    assert (record.error, len(lines)) == (ERROR, 1)  # what was in numbers by then is kept


def test_weights_hash_depends_on_names_shapes_types_and_values() -> None:
    weight, half = torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.bfloat16)
    tensors = {"weight": weight, "half": half, "none": torch.empty(0)}
    original = weights_sha256(tensors.items())
    changed = [
        {**tensors, "weight": weight + 1e-6},
        {**tensors, "weight": weight.view(3, 2)},
        {**tensors, "half": half.half()},
        {"weights": weight, "half": half, "none": torch.empty(0)},
        {"weight": weight, "half": half},
    ]
    hashes = {weights_sha256(named.items()) for named in changed}
    assert len({original, *hashes}) == len(changed) + 1
    transposed = torch.nn.Parameter(weight.t().contiguous().t())
    assert weights_sha256({**tensors, "weight": transposed}.items()) == original


def test_sample_order_hash_depends_on_samples_order_and_steps() -> None:
    orders = [((1, 2), (3,)), ((1,), (2, 3)), ((2, 1), (3,)), ((1, 2, 3),), ((1, 2), (3,), ()), ()]
    assert len({sample_order_sha256(order) for order in orders}) == len(orders)
    assert sample_order_sha256(((1, 2), (3,))) == sample_order_sha256([(1, 2), (3,)])


def test_added_steps_are_in_no_epoch_and_no_hash(tmp_path: Path) -> None:
    """They are measured, and a trial with more of them trained the same."""
    report = report_of(tmp_path, [4.0, 2.0, 1.0, 0.5])
    report.end_epoch(2, None)
    report.end_training(2, "hash")
    report.counts_samples = False
    report.write()
    another_counts = read(tmp_path)[0]
    assert (another_counts.samples, another_counts.samples_total) == (0, 0)
    report.counts_samples = True
    report.write()
    record, lines = read(tmp_path)
    assert another_counts.sample_order_sha256 == record.sample_order_sha256
    assert record.sample_order_sha256 == sample_order_sha256([(0, 1), (2, 3)])
    assert (record.final_weights_sha256, record.samples_total, record.samples) == ("hash", 4, 6)
    assert [epoch.train_loss for epoch in record.epochs] == [3.0]
    assert [(line["epoch"], line["measured"]) for line in lines] == [
        *((0, False), (0, True)),
        *((None, True), (None, True)),
    ]


def test_record_names_every_device_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The UUIDs find power, memory and the peak."""
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name="NVIDIA H200", uuid=f"uuid-{device.index}"),
    )
    report = RankReport(tmp_path, RANK)
    report.describe([torch.device("cuda", index) for index in range(2)], threads=1)
    record, _ = read(tmp_path)
    assert (record.device, record.device_uuids) == ("NVIDIA H200", ("uuid-0", "uuid-1"))
