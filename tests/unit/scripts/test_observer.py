"""The observer records the steps of the script's optimizers, whatever they are made of."""

from __future__ import annotations

import atexit
import itertools
import os
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardmark.scripts import full_tensors, hooks
from shardmark.scripts.draws import WatchDraws
from shardmark.scripts.observer import Observer
from shardmark.scripts.record import START, Loader, Record, part_of
from shardmark.scripts.recording import Plan, rank_file
from tests import present


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Observer]:
    observer = Observer(Plan(directory=str(tmp_path), steps=9))
    yield observer
    atexit.unregister(observer.write)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)


def test_an_optimizer_inside_of_another_one_takes_no_step_of_the_script(observer: Observer) -> None:
    outer, inner = optimizer(), optimizer()
    for _ in range(2):
        observer.before_step(outer)
        observer.before_step(inner)
        observer.after_step(inner)
        observer.after_step(outer)
    assert len(observer.record.steps) == 2
    assert observer.record.refusal == ""


def test_an_optimizer_may_have_no_learning_rate(observer: Observer) -> None:
    adafactor = optimizer()
    adafactor.param_groups[0]["lr"] = None
    observer.before_step(adafactor)
    observer.after_step(adafactor)
    assert observer.record.steps[0].rates == []


def test_a_step_with_zeros_before_any_backward_pass_only_makes_a_state(observer: Observer) -> None:
    """Torch's functions that load a checkpoint make the state of an optimizer so."""
    adam = torch.optim.Adam([weight := nn.Parameter(torch.ones(3))])
    for gradient in (torch.zeros(3), torch.ones(3)):
        weight.grad = gradient
        observer.before_step(adam)
        adam.step()
        observer.after_step(adam)
    assert len(observer.record.steps) == 1


def test_an_optimizer_that_is_made_anew_has_a_new_state(observer: Observer) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    for adam in (torch.optim.Adam([weight]),) * 2:
        observer.before_step(adam)
        adam.step()
        observer.after_step(adam)
    adam.state.clear()
    observer.before_step(adam)
    observer.after_step(adam)
    assert [step.state_is_new for step in observer.record.steps] == [False, False, True]


def test_inputs_and_outputs_of_modules_are_summed_in_the_first_step(observer: Observer) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU())
    model[0].weight = nn.Parameter(torch.ones(1, 2))
    inputs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    observer.before_module(model)
    observer.before_module(model[0])
    observer.after_module(model[0], ((inputs,), {}), model[0](inputs))
    observer.after_module(model, ((inputs,), {}), model(inputs))
    assert observer.record.calls == {"0": [30.0, 58.0, 4.0]}


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def test_a_look_at_a_data_set_changes_no_random_numbers(observer: Observer) -> None:
    data = Augmented()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=2, sampler=sampler)

    def first(iterate: Callable[[], Iterator[torch.Tensor]]) -> torch.Tensor:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return next(iterate())

    seen = first(lambda: observer.batches(loader, 0, lambda: iter(loader)))
    assert torch.equal(seen, first(lambda: iter(loader)))
    assert observer.record.draws == []


class Trainer:
    """Trains linear layers with the observer's calls that the hooks make."""

    def __init__(self, observer: Observer, *layers: nn.Linear) -> None:
        self.observer, self.layers = observer, layers
        self.optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
        observer.optimizers += map(weakref.ref, self.optimizers)

    def backward(self, layer: nn.Linear) -> None:
        self.observer.before_module(layer)
        loss = layer(torch.ones(2, layer.in_features)).sum()
        self.observer.after_module(layer, (torch.ones(2, layer.in_features),), loss)
        self.observer.before_backward(loss)
        loss.backward()
        self.observer.after_backward()

    def update(self, number: int) -> None:
        self.observer.before_step(self.optimizers[number])
        self.optimizers[number].step()
        self.observer.after_step(self.optimizers[number])


def test_optimizers_that_step_together_take_one_step(observer: Observer) -> None:
    trainer = Trainer(observer, nn.Linear(3, 2), nn.Linear(3, 1))
    for _ in range(2):
        for layer in trainer.layers:
            trainer.backward(layer)
        trainer.update(1)
        trainer.update(0)
    first, second = observer.record.steps
    assert [tensor.shape for tensor in first.after] == [(1, 3), (1,), (2, 3), (2,)]
    assert all(gradient is not None for gradient in (*first.gradients, *second.gradients))
    assert [len(step.settings) for step in (first, second)] == [2, 2]
    assert observer.record.optimizers == [1, 0]
    assert observer.record.refusal == ""


def test_optimizers_with_a_backward_pass_each_are_parts_of_their_own(observer: Observer) -> None:
    trainer = Trainer(observer, nn.Linear(3, 2), nn.Linear(3, 1))
    for number in (0, 1, 0, 0, 1):
        trainer.backward(trainer.layers[number])
        trainer.update(number)
    record = observer.record
    assert record.refusal == ""
    assert record.parts == [0, 0, 1, 1]
    assert record.names == ["weight", "bias", "model 2: weight", "model 2: bias"]
    assert [step.part for step in record.steps] == [0, 1, 0, 0, 1]
    first, second = (part_of(record, part) for part in range(2))
    assert [len(part.steps) for part in (first, second)] == [3, 2]
    assert [(f.step, f.micro) for f in first.forwards] == [(0, 0), (1, -1), (1, 0), (2, 0)]
    assert [(f.step, f.micro) for f in second.forwards] == [
        (0, -1),
        (0, 0),
        (1, -1),
        (1, -1),
        (1, 0),
    ]
    assert second.names == ["model 2: weight", "model 2: bias"]
    assert [t.shape for t in second.steps[0].after] == [(1, 3), (1,)]
    assert all(g is not None for step in second.steps for g in step.gradients)
    assert [sorted(micro.gradients) for step in second.steps for micro in step.micros] == [
        [0, 1]
    ] * 2
    assert not any(step.moved for part in (first, second) for step in part.steps)


def test_optimizers_that_stepped_together_and_step_apart_are_refused(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "finish", lambda: None)
    trainer = Trainer(observer, nn.Linear(3, 2), nn.Linear(3, 1))
    for numbers in ((0, 1), (0,), (0,)):
        for number in numbers:
            trainer.backward(trainer.layers[number])
        for number in numbers:
            trainer.update(number)
    assert "apart from each other" in observer.record.refusal


@pytest.mark.parametrize(("steps", "ends"), [((0,) * 9, False), ((0,) * 9 + (1,) * 9, True)])
def test_an_optimizer_that_has_not_stepped_yet_is_waited_for(
    observer: Observer, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], ends: bool
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(observer, "finish", lambda: ended.append(True))
    trainer = Trainer(observer, nn.Linear(3, 2), nn.Linear(3, 1))
    trainer.backward(trainer.layers[1])
    for number in steps:
        trainer.backward(trainer.layers[number])
        trainer.update(number)
    assert bool(ended) is ends


def test_weights_that_change_between_two_steps_are_recorded(observer: Observer) -> None:
    layer = nn.Linear(3, 2)
    trainer = Trainer(observer, layer)
    for changed in (False, False, True):
        if changed:
            with torch.no_grad():
                layer.bias.fill_(1.0)
        trainer.backward(layer)
        trainer.update(0)
    assert [list(step.moved) for step in observer.record.steps] == [[], [], [1]]


def test_the_flag_of_ddp_counts_in_its_forward_pass(observer: Observer) -> None:
    class DistributedDataParallel(nn.Linear):
        require_backward_grad_sync = False

    layer = DistributedDataParallel(3, 2)
    trainer = Trainer(observer, layer)
    observer.before_module(layer)
    observer.after_module(layer, (), layer(torch.ones(2, 3)))
    layer.require_backward_grad_sync = True
    observer.before_backward(torch.ones(1))
    observer.after_backward()
    trainer.update(0)
    assert [micro.synchronised for micro in observer.record.steps[0].micros] == [False]


class Normalizer(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.mean


def test_buffers_of_modules_without_parameters_are_recorded(observer: Observer) -> None:
    """They count if a loss depends on them, also without a gradient: those of a meter do not."""
    normalizer, layer = Normalizer(), nn.Linear(3, 3)
    trainer, data = Trainer(observer, layer), torch.ones(2, 3)

    def called() -> torch.Tensor:
        observer.before_module(normalizer)
        outputs: torch.Tensor = normalizer.forward(data)
        observer.after_module(normalizer, (), outputs)
        return outputs

    def buffers(loss: torch.Tensor) -> set[str]:
        observer.before_backward(loss)
        observer.after_backward()
        trainer.update(0)
        return set(observer.record.steps[-1].buffers)

    with WatchDraws(lambda *_: None, observer.flow):
        called()
        assert buffers(layer(data).sum()) == set()
        with torch.no_grad():
            inputs = torch.cat([called().clamp(-1, 1), data])
        assert buffers(layer(inputs).sum()) == {"Normalizer.mean"}
        assert set(observer.record.steps[0].buffers) == {"Normalizer.mean"}
        assert buffers((layer(data) - called()).sum()) == {"Normalizer.mean"}
        assert buffers(layer(data).sum()) == set()


def test_a_gather_inside_of_the_model_counts_if_it_takes_results(observer: Observer) -> None:
    layer = nn.Linear(3, 2)
    result = layer(torch.ones(2, 3))
    observer.before_module(layer)
    observer.collective("all_gather", ([torch.zeros(2, 2)], result.detach()))
    observer.collective("all_gather_into_tensor", (torch.zeros(4, 3), layer.weight))
    observer.collective("all_reduce", (result,))
    assert observer._micro.gathers == []
    observer.collective("all_gather", ([torch.zeros(2, 2)], result))
    assert len(observer._micro.gathers) == 1
    assert observer.record.collectives == 4


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, observer: Observer) -> torch.Tensor:  # noqa: ARG004
        observer.collective("all_to_all_single", (torch.zeros(2, 2), value))
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        return *gradients, None


def test_an_exchange_that_returns_gradients_is_no_gather(observer: Observer) -> None:
    layer = nn.Linear(3, 2)
    observer.before_module(layer)
    Exchange.apply(layer(torch.ones(2, 3)), observer)
    assert observer._micro.gathers == []
    assert observer._micro.exchanges[0].startswith("all_to_all_single at ")


@pytest.mark.parametrize(("size", "small"), [(1, {"DDP": 1}), (2, {})])
def test_a_wrapper_that_is_never_called_has_its_group(
    observer: Observer, monkeypatch: pytest.MonkeyPatch, size: int, small: dict[str, int]
) -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.process_group = nn.Linear(3, 2), SimpleNamespace(size=lambda: size)

    monkeypatch.setenv("WORLD_SIZE", "2")
    wrapper = DistributedDataParallel()
    trainer = Trainer(observer, wrapper.module)
    trainer.backward(wrapper.module)
    trainer.update(0)
    assert observer.record.names == ["weight", "bias"]
    assert "DDP" in observer.record.frameworks
    assert observer.record.small_groups == small


def test_a_fork_of_the_script_writes_no_record(observer: Observer, tmp_path: Path) -> None:
    trainer = Trainer(observer, nn.Linear(3, 2))
    trainer.backward(trainer.layers[0])
    trainer.update(0)
    observer._process += 1
    observer.write()
    assert not rank_file(str(tmp_path), 0).exists()
    observer._process -= 1
    observer.write()
    assert len(Record.load(rank_file(str(tmp_path), 0)).steps) == 1


def test_steps_before_os_exit_are_written(
    observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    hooks.watch_exit(observer)
    trainer = Trainer(observer, nn.Linear(3, 2))
    trainer.backward(trainer.layers[0])
    trainer.update(0)
    os._exit(3)
    assert codes == [3]
    assert len(Record.load(rank_file(str(tmp_path), 0)).steps) == 1


def test_tensors_of_large_models_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_tensors, "MOST_ELEMENTS", 10)
    assert [full_tensors.sampling_of(n) for n in (10, 11, 100, 10**9)] == [1, 5, 11, 51437]
    matrix = torch.arange(30.0).view(5, 6)
    assert full_tensors.sampled(matrix, 11).tolist() == [0, 11, 22]
    assert full_tensors.sampled(matrix, 1) is matrix


def trained(observer: Observer, model: nn.Module) -> None:
    """Take a step, with the calls of the hooks."""
    adam = torch.optim.Adam(model.parameters())
    observer.optimizers.append(weakref.ref(adam))
    observer.before_module(model)
    outputs = model(torch.ones(2, 4))
    observer.after_module(model, (torch.ones(2, 4),), outputs)
    observer.before_backward(outputs.sum())
    outputs.sum().backward()
    observer.after_backward()
    observer.before_step(adam)
    adam.step()
    observer.after_step(adam)
    observer.before_module(model)


def test_a_sampled_record_is_a_part_of_the_full_one(
    observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    full = Observer(Plan(directory=str(tmp_path), steps=9))
    atexit.unregister(full.write)
    trained(full, model)
    model = nn.Linear(4, 8)
    model.load_state_dict(dict(zip(("weight", "bias"), start, strict=True)))
    monkeypatch.setattr(full_tensors, "MOST_ELEMENTS", 10)
    trained(observer, model)
    assert (full.record.every, observer.record.every) == (1, 5)
    (every,), (some,) = full.record.steps, observer.record.steps
    pairs = [
        *zip(every.gradients, some.gradients, strict=True),
        *zip(every.after, some.after, strict=True),
        *zip(full.record.before, observer.record.before, strict=True),
        *((every.micros[0].gradients[n], some.micros[0].gradients[n]) for n in (0, 1)),
    ]
    for expected, value in pairs:
        assert torch.equal(present(expected).flatten()[::5], present(value))
    assert observer.record.start == full.record.start  # sums of all elements
    observer.write()
    stored = torch.load(rank_file(str(tmp_path), 0).with_suffix(START))
    assert all(torch.equal(a, b) for a, b in zip(stored, start, strict=True))


def test_records_without_room_are_refused_before_the_first_step(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    observer.before_module(nn.Linear(4, 8))
    assert "are free on the disk of" in observer.record.refusal
    assert "TMPDIR" in observer.record.refusal


@pytest.mark.parametrize(
    ("module", "asked"),
    [("__main__", True), ("data.loaders", True), ("accelerate.data_loader", False)],
)
def test_a_script_in_a_folder_named_like_a_library_asks_for_lengths_itself(
    observer: Observer, module: str, asked: bool
) -> None:
    def original() -> int:
        return observer.length_of(0, 4)

    def hook() -> int:
        return original()

    code = compile("steps = count()", "/home/me/accelerate/examples/train.py", "exec")
    exec(code, {"__name__": module, "count": hook})
    assert observer.record.asked_lengths == asked


class Flipped(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        pixels = torch.arange(4.0) + index
        return pixels.flip(0) if torch.rand(()) < 0.5 else pixels


def test_ranks_that_augment_by_other_random_numbers_begin_with_the_same_sample(
    observer: Observer,
) -> None:
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
        Flipped(), num_replicas=2, rank=0
    )
    loader = DataLoader(Flipped(), batch_size=2, sampler=sampler)
    for seed in range(8):
        torch.manual_seed(seed)
        list(observer.batches(loader, 0, lambda: iter(())))
    assert len({loader.first_sample for loader in observer.record.loaders}) == 1
    assert observer.record.loaders[0].first_sample is not None


class DistributedDataParallel(nn.Sequential):
    """Stands for DDP, which is known by its name."""


class Wrapper(nn.Module):
    """Calls a replica and keeps a buffer of its own, as a task around a model does."""

    mean: torch.Tensor

    def __init__(self, replica: nn.Module) -> None:
        super().__init__()
        self.model = replica
        self.register_buffer("mean", torch.ones(1))


def test_buffers_of_a_replica_in_a_wrapper_are_those_that_it_received(
    observer: Observer,
) -> None:
    norm = nn.BatchNorm1d(2)
    replica = DistributedDataParallel(norm)
    wrapper = Wrapper(replica)
    observer.before_module(wrapper)
    observer.before_module(replica)
    norm.running_mean = torch.full((2,), 5.0)  # rank 0's buffers arrive
    observer.before_module(norm)
    recorded = {name: value.tolist() for name, value in observer._step.buffers.items()}
    assert recorded["mean"] == [1.0]
    assert [5.0, 5.0] in recorded.values()
    assert [0.0, 0.0] not in recorded.values()


def test_a_recomputed_forward_pass_is_none_of_the_script(observer: Observer) -> None:
    """Activation checkpointing calls a part of the model again in the backward pass."""
    layer = nn.Linear(3, 2)
    outputs = layer(torch.ones(2, 3))
    observer.before_backward(outputs.sum())
    observer.before_module(layer)
    observer.after_module(layer, (torch.ones(2, 3),), outputs)
    observer.after_backward()
    assert observer.record.forwards == []
    observer.before_module(layer)
    observer.after_module(layer, (torch.ones(2, 3),), outputs)
    assert [forward.rows for forward in observer.record.forwards] == [2]


def read_order(observer: Observer, loader: DataLoader[Any]) -> tuple[list[Any], Loader]:
    """Take the first batch of an epoch, and read the order of all of it."""
    epoch = observer.batches(loader, 0, lambda: iter(loader))
    first: list[Any] = next(epoch).tolist()
    for order in observer._orders:
        order.read()
    return first, observer.record.loaders[0]


@pytest.fixture
def watching(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> Observer:
    original = _BaseDataLoaderIter._next_index
    monkeypatch.setattr(
        _BaseDataLoaderIter, "_next_index", lambda self: observer.next_index(original, self)
    )
    return observer


def test_indices_of_a_subset_are_those_of_its_data_set(watching: Observer) -> None:
    data = Subset(Subset(Augmented(), [7, 5, 3, 1]), [2, 0])
    _, loader = read_order(watching, DataLoader(data))
    assert (loader.indices, loader.available) == ([3, 7], [3, 7])


class Given(Sampler[Any]):
    """A sampler with these indices."""

    def __init__(self, indices: Iterable[Any]) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_of_an_epoch_is_known_after_its_first_batch(
    watching: Observer, workers: int
) -> None:
    data: Any = range(40)
    sampler = BatchSampler(RandomSampler(data), 4, drop_last=True)
    first, loader = read_order(
        watching, DataLoader(data, batch_sampler=sampler, num_workers=workers)
    )
    assert loader.indices is not None
    assert first == loader.indices[:4]
    assert sorted(loader.indices) == [*range(40)]
    assert (loader.sampler, loader.shuffles, loader.largest_batch) == ("RandomSampler", True, 4)


@pytest.mark.parametrize(
    ("sampler", "read"),
    [
        (Given(itertools.cycle(range(40))), 44),
        (Given(n // (20 - n) for n in range(40)), 0),
        (WeightedRandomSampler([1.0] * 40, 40), 0),
        (Given((n, 224) for n in range(40)), 0),
    ],
    ids=["endless", "failing", "weighted", "with sizes of images"],
)
def test_an_order_that_cannot_be_read_is_unknown(
    watching: Observer, sampler: Any, read: int
) -> None:
    loader: DataLoader[Any] = DataLoader(Anything(), batch_size=4, sampler=sampler)
    _, facts = read_order(watching, loader)
    assert len(facts.indices or []) == read


class Anything(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, _: Any) -> int:
        return 0


@pytest.mark.parametrize(("partitioned", "read"), [(True, 5.0), (False, 1.0)])
def test_partitioned_tensors_are_read_by_deepspeed(
    partitioned: bool, read: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    if partitioned:
        parameter.ds_id = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(
        full_tensors, "_deepspeed_function", lambda _: lambda p: torch.full_like(p, 5.0)
    )
    (gradient,) = full_tensors.gradients_of([parameter], deepspeed=True)
    (value,) = full_tensors.full_parameters([parameter], deepspeed=True)
    assert (present(gradient).tolist(), value.tolist()) == ([read] * 2, [read] * 2)
    (value,) = full_tensors.full_parameters([parameter], deepspeed=False)
    assert value.tolist() == [1.0] * 2


class DeepSpeedEngine(nn.Module):
    """The engine of DeepSpeed as the observer sees it, whose optimizer has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, dtype=torch.bfloat16)
        masters = [nn.Parameter(p.detach().clone()) for p in self.module.parameters()]
        self.optimizer = torch.optim.SGD(masters, lr=0.1)

    def gradient_clipping(self) -> float:
        return 0.0


def test_the_optimizer_inside_of_deepspeed_may_get_another_gradient(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_tensors, "_deepspeed_function", lambda _: lambda p: p)
    engine = DeepSpeedEngine()
    observer.loss_of_engine = torch.tensor(2.0)
    observer.before_backward(torch.tensor(8.0))
    observer.after_backward()
    masters = engine.optimizer.param_groups[0]["params"]
    for parameter, master in zip(engine.module.parameters(), masters, strict=True):
        parameter.grad, master.grad = torch.ones_like(parameter), torch.ones_like(master) / 4
    observer.before_step(engine)
    observer.before_step(engine.optimizer)
    observer.after_step(engine.optimizer)
    observer.after_step(engine)
    (step,) = observer.record.steps
    assert step.micros[0].scale == 4.0
    norms, elements = zip(*step.sizes, strict=True)
    assert norms == pytest.approx([6**0.5, 6**0.5 / 4])
    assert elements == (6, 6)


def test_gradients_that_a_fused_optimizer_divides_by_a_scale_are_recorded_without_it(
    observer: Observer,
) -> None:
    fused = optimizer()
    fused.param_groups[0]["params"][0].grad = torch.full((3,), 8.0)
    fused.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    observer.before_step(fused)
    observer.after_step(fused)
    (step,) = observer.record.steps
    assert present(step.gradients[0]).tolist() == [2.0] * 3
    assert step.local_norms == pytest.approx([12**0.5])
