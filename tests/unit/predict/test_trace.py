"""Profiles of small models that can be computed by hand, and against the allocator's own events."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection.roi_heads import RoIHeads

from shardmark.base.errors import InputError
from shardmark.base.layout import ActivationSharding
from shardmark.base.recipe import Weights
from shardmark.predict.memory import rank_memory
from shardmark.predict.models import Models
from shardmark.predict.profile import Profile
from shardmark.predict.trace.optimizers import with_optimizer
from shardmark.predict.trace.trace import at_their_limits, limited_heads
from shardmark.ranks.measure.memory.tensors import allocator_rise_bytes
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import Server
from shardmark.ranks.workloads.adapters import NF4_BYTES, add_adapter
from shardmark.ranks.workloads.base import TensorPlan
from shardmark.ranks.workloads.flops import grouped_product_flops
from shardmark.ranks.workloads.language.options import LanguageOptions
from shardmark.ranks.workloads.options import Adapter
from tests import present
from tests.unit.predict.made import trace
from tests.unit.ranks.train.toy import ALONE, ToyWorkload, recipe

WIDTH = 300


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.layers(inputs)
        return outputs


def convolutional() -> nn.Module:
    """A kernel of four axes beside matrices."""
    image = (nn.Linear(4, 64), nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 8, 3), nn.Flatten())
    return nn.Sequential(*image, nn.Linear(32, WIDTH), Block(), nn.Linear(WIDTH, 2))


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 2))


class LooksAtValues(nn.Module):
    """A model whose computation depends on values, which no fake tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = blocks()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs if float(outputs.detach().sum()) < 1e9 else outputs + 1


class Skips(LooksAtValues):
    """A block is skipped by chance."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers.children():
            skipped = isinstance(layer, Block) and self.draw() < 0.5
            inputs = inputs if skipped else layer(inputs)
        return inputs


class MultiHead(nn.Module):
    """torch's own module passes all arguments of its attention by position."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs[:, None].expand(-1, 3, -1)
        outputs: Tensor = self.attention(rows, rows, rows, need_weights=False)[0]
        return outputs[:, 0, :2]


class Looked(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=sparse)

    def forward(self, inputs: Tensor) -> Tensor:
        rows: Tensor = self.table(inputs.abs().long() % 50)
        return rows.sum(1)


def traced(model: Callable[[], nn.Module] = blocks, **changes: Any) -> Profile:
    """The profile of a toy's step with a model under a changed recipe."""
    return trace(ToyWorkload(model), recipe(**changes))


class Divisible(ToyWorkload):
    def tensor_plan(self, model: nn.Module) -> TensorPlan:  # noqa: ARG002
        styles = {"*.layers.0": "column", "*.layers.2": "row", "3": "gathered"}
        return TensorPlan(styles=styles)


def test_what_computes_nothing_is_no_operation() -> None:
    """Python asks fake tensors for their device, which is dispatched like an operation."""
    profiled = trace(ToyWorkload(lambda: nn.Linear(4, 2)), recipe(), device_type="cpu")
    calls = {
        each.kind: each.calls for unit in profiled.units for each in unit.forward if each.calls
    }
    assert calls["product"] == 1
    assert calls["other"] <= 8  # operators of the loss


def summed(profiled: Profile, kind: str, samples: float) -> float:
    operations = [each for unit in profiled.units for each in (*unit.forward, *unit.backward)]
    return sum(each.flops.at(samples) for each in operations if each.kind == kind)


def test_units_are_blocks_and_what_is_between() -> None:
    found = traced()
    named = {unit.name: unit for unit in found.units if unit.parameters}
    block = 2 * WIDTH * (WIDTH + 1)
    sizes = [(name, unit.block, unit.parameters) for name, unit in named.items()]
    assert sizes == [
        ("start", False, 5 * WIDTH),
        ("1", True, block),
        ("2", True, block),
        ("after 2", False, 2 * (WIDTH + 1)),
    ]
    assert found.size.units == 3  # what is between blocks is gathered together
    assert found.size.parameters == found.size.trained_parameters
    assert found.size.parameters == sum(p.numel() for p in blocks().parameters())
    # Inputs of two layers of products, tanh's outputs among them, and the sum that goes on.
    assert named["2"].saved_bytes.at(10) == 10 * 4 * WIDTH * 2


def test_a_model_that_draws_is_traced_with_the_same_draws() -> None:
    before = random.getstate()
    drawing = ToyWorkload(lambda: Skips(random.random))
    found = [trace(drawing, recipe(seed=seed)) for seed in (0, 0, 1, 2, 3)]
    assert random.getstate() == before
    assert found[0] == found[1]
    assert {each.unused for each in found} > {("layers.1",)}
    draws = iter([0.0, 1.0, 1.0, 0.0] * 9)  # no seed reaches it
    with pytest.raises(InputError, match="use different parts of it: layers"):
        traced(lambda: Skips(lambda: next(draws)))


def test_sparse_gradients_are_not_counted_as_dense_ones() -> None:
    sparse, dense = (
        trace(
            ToyWorkload(lambda: nn.Sequential(Looked(sparse=kind), nn.Linear(WIDTH, 2))),  # noqa: B023
            recipe(),
            device_type="cpu",
        )
        for kind in (True, False)
    )
    assert sparse.size == dense.size
    whole, few = (sum(unit.gradient_bytes for unit in each.units) for each in (dense, sparse))
    assert whole == 4 * dense.size.parameters
    assert few < whole - 4 * 34 * WIDTH, "at most 16 of 50 rows are looked up"


def test_frozen_parameters_have_no_part_in_an_optimizer() -> None:
    def frozen() -> nn.Module:
        model = blocks()
        model.get_submodule("1").requires_grad_(False)
        return model

    found = traced(frozen)
    for unit in found.units:
        assert sum(unit.sizes) == unit.trained_parameters, unit.name
    trained = [5 * WIDTH, 2 * WIDTH * (WIDTH + 1), 2 * (WIDTH + 1)]
    assert [sum(unit.sizes) for unit in found.units if unit.sizes] == trained


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("torch.optim:AdamW", 2),
        ("tests.unit.predict.test_trace:InOneByte", 0.25),
    ],
)
def test_optimizers_by_path_have_their_own_state(path: str, values: float) -> None:
    optimizer = {"name": "own", "path": path}
    assert traced(optimizer=optimizer).state_values == values


@pytest.mark.parametrize(
    ("path", "values"),
    [("torch.optim:AdamW", 1), ("tests.unit.predict.test_trace:InOneByte", 0.25)],
)
def test_optimizers_store_bf16_for_bf16_weights_unless_they_store_less(
    path: str, values: float
) -> None:
    asked = recipe(optimizer={"name": "own", "path": path}, weights="bf16")
    found = trace(ToyWorkload(blocks), asked)
    assert found.native is not None
    assert found.native.state_values == values
    of_fp32 = trace(ToyWorkload(blocks), asked.model_copy(update={"weights": "fp32"}))
    assert of_fp32.native is not None
    assert of_fp32.native.units == found.native.units
    accesses = found.native.update_accesses, of_fp32.native.update_accesses
    assert present(accesses[0]) <= present(accesses[1]) / 2


STATES: dict[str, dict[str, Any]] = {
    "adafactor": {"name": "adafactor"},
    "adafactor by path": {"name": "own", "path": "torch.optim:Adafactor"},
    "adamw": {"name": "adamw"},
    "lamb": {"name": "lamb"},
    "muon": {"name": "muon"},
}


@pytest.mark.parametrize("model", [blocks, convolutional])
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", STATES.values(), ids=STATES)
def test_state_of_each_shape_is_what_an_optimizer_allocates(
    optimizer: dict[str, Any], weights: Weights, model: Callable[[], nn.Module]
) -> None:
    workload, asked = ToyWorkload(model), recipe(optimizer=optimizer, weights=weights)
    worker = build_strategy("single", {}).start(workload, asked, ALONE)
    assert not isinstance(worker, Server)
    worker.step(workload.batch(range(8)), NoSpans())
    counters = worker.full_optimizer_state().values()
    held = sum(t.nbytes for t in worker.held_state().optimizer_state)
    held -= sum(4 for state in counters if "step" in state)
    found = trace(workload, asked)
    assert 4 * found.state_values * found.size.trained_parameters == pytest.approx(held)
    other = with_optimizer(trace(workload, recipe()), asked.optimizer, "cpu", weights)
    assert other.state_values == found.state_values


def test_8_bits_have_scales_of_blocks_and_small_tensors_have_32() -> None:
    found = traced(optimizer={"name": "adamw", "state_bits": 8})
    matrices = 4 * 2 * (WIDTH * WIDTH + 4 * 352)  # 351.6 blocks
    others = found.size.trained_parameters - 4 * WIDTH * WIDTH
    state = 4 * found.state_values * found.size.trained_parameters
    assert state == pytest.approx(matrices + 8 * others, rel=1e-12)
    assert found.update_values == 0


def test_muon_multiplies_in_its_update() -> None:
    model = Block()
    shapes = [p.shape for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(shape)) for shape in shapes])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()  # type: ignore[no-untyped-call]  # torch's
    found = traced(optimizer={"name": "muon"})
    assert found.update_products.flops.fixed == 2 * counted.get_total_flops()  # two blocks
    adam = recipe(optimizer={"name": "adam", "state_bits": 8})
    assert with_optimizer(found, adam.optimizer, "cuda") == trace(ToyWorkload(blocks), adam)


def test_muon_needs_matrices_in_blocks() -> None:
    muon = recipe(optimizer={"name": "muon"})
    with pytest.raises(InputError, match="no trained matrix in repeated blocks"):
        trace(ToyWorkload(), muon)
    with pytest.raises(InputError, match="no trained matrix in repeated blocks"):
        with_optimizer(trace(ToyWorkload(), recipe()), muon.optimizer, "cuda")


class InOneByte(torch.optim.Optimizer):
    """Stores an average in 8 bits."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = parameter.grad.to(torch.uint8)
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("optimizer", "accesses"),
    [
        ({"name": "sgd"}, 3),  # reads the gradient and the parameter, writes the parameter
        ({"name": "sgd", "momentum": 0.9}, 8),
        ({"name": "adamw", "weight_decay": 0.1}, 20),
    ],
)
def test_accesses_of_an_update_are_those_of_its_operators(
    optimizer: dict[str, Any], accesses: int
) -> None:
    assert traced(optimizer=optimizer).update_accesses == accesses


def test_real_steps_are_of_few_samples_unless_a_batch_norm_refuses_one() -> None:
    sizes: list[int] = []

    class Normalises(LooksAtValues):
        def forward(self, inputs: Tensor) -> Tensor:
            if type(inputs) is Tensor:
                sizes.append(len(inputs))
            return super().forward(functional.batch_norm(inputs, None, None, training=True))

    traced(LooksAtValues)
    traced(Normalises)
    assert sizes == [1, 4, 8]


def test_no_real_step_computes_in_fp16() -> None:
    """CPUs take minutes for one; bf16 has the same bytes."""
    types: set[torch.dtype] = set()

    class Records(LooksAtValues):
        def forward(self, inputs: Tensor) -> Tensor:
            types.add(torch.get_autocast_dtype("cpu"))
            return super().forward(inputs)

    traced(Records, precision="fp16")
    assert types == {torch.bfloat16}


def test_a_real_step_computes_no_large_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor takes minutes for the convolutions of a detector in 16 bits."""
    outputs: list[Tensor] = []

    class Convolves(LooksAtValues):
        def __init__(self) -> None:
            super().__init__()
            self.layers = convolutional()
            self.layers[2].register_forward_hook(lambda *values: outputs.append(values[-1]))

    computed = traced(Convolves)
    assert outputs[-1].abs().max() > 0.1
    monkeypatch.setattr("shardmark.predict.trace.step_trace.MOST_FLOPS", 0)
    invented = traced(Convolves)
    assert outputs[-1].abs().max() < 0.1
    assert invented == computed
    kinds = [operation.kind for unit in invented.units for operation in unit.forward]
    assert "convolution_3x3" in kinds
    Convolves.transform = None  # type: ignore[attr-defined]  # as detectors of torchvision have
    resized = [operation.kind for unit in traced(Convolves).units for operation in unit.forward]
    assert "convolution" in resized
    assert "convolution_3x3" not in resized, "the sizes of a detector's images vary"


def test_a_real_step_computes_what_random_numbers_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse products, results that are written elsewhere, and factorisations."""
    monkeypatch.setattr("shardmark.predict.trace.step_trace.MOST_FLOPS", 0)

    class Factorises(LooksAtValues):
        def forward(self, inputs: Tensor) -> Tensor:
            with torch.no_grad():
                ones = torch.ones(4, 4)
                assert (torch.sparse.mm(torch.eye(4).to_sparse(), ones) == 1).all()
                written = torch.zeros(4, 4)
                assert (torch.mm(ones, ones, out=written) == 4).all()
                torch.linalg.cholesky(ones @ ones.T + torch.eye(4))
            return super().forward(inputs)

    assert traced(Factorises).size.parameters == traced(LooksAtValues).size.parameters


def test_large_models_take_no_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would fill the memory of the machine that plans."""
    monkeypatch.setattr("shardmark.predict.trace.trace.REAL_PARAMETERS", 0)
    workload = ToyWorkload(LooksAtValues)
    with pytest.raises(InputError) as raised:
        trace(workload, recipe(), model=workload.build_model())
    assert "cannot be traced without weights (DataDependentOutputException" in str(raised.value)
    assert "fewer layers, or measure it with run" in str(raised.value)


def test_products_are_counted_once_forward_and_twice_backward() -> None:
    found = traced()
    inner = 4 * WIDTH * WIDTH + 2 * WIDTH
    first = 4 * WIDTH  # whose inputs need no gradient
    assert summed(found, "product", 7) == pytest.approx(7 * 2 * (3 * inner + 2 * first))


@pytest.mark.parametrize(
    ("division", "start", "last", "logits"),
    [
        # The first layer's outputs are whole; so are, at the end, logits, loss and its targets.
        (ActivationSharding(), 1, 124, 1),
        # What enters a divided layer is gathered, and kept whole for its backward pass.
        (ActivationSharding(sequence_parallel=True), 1 / 2, 6000 + 56, 5 / 6),
        (ActivationSharding(loss_parallel=True), 1, 82, 1 / 2),
        (ActivationSharding(sequence_parallel=True, loss_parallel=True), 1 / 2, 6000 + 14, 1 / 2),
    ],
    ids=["plain", "sequence", "loss", "both"],
)
def test_tensor_ranks_hold_whole_what_is_between_divided_layers(
    division: ActivationSharding, start: float, last: float, logits: float
) -> None:
    """On one of two: a block's hidden activations are divided, what it adds them to is not."""
    found = trace(Divisible(blocks), recipe(), activations=division)
    units = {unit.name: unit for unit in found.units}
    one = 4 * WIDTH * 10
    assert units["start"].saved_bytes.at(10, 2) == start * one
    assert units["2"].saved_bytes.at(10) == 2 * one
    assert units["2"].saved_bytes.at(10, 2) == one + one / 2
    assert units["after 2"].saved_bytes.at(10, 2) == pytest.approx(last, abs=1)
    products, others = (
        [each.flops for each in units["after 2"].forward if (each.kind == "product") is is_product]
        for is_product in (True, False)
    )
    assert sum(f.at(5, 2) for f in products) == sum(f.at(5) for f in products) / 2
    on_one = sum(flops.at(1) for flops in others)
    assert sum(flops.at(1, 2) for flops in others) == pytest.approx(logits * on_one)
    assert units["start"].replicated_fraction == 1
    # Its second layer's bias is added to what was summed up.
    assert units["2"].replicated_fraction == pytest.approx(WIDTH / units["2"].parameters)


def adapted_blocks() -> nn.Module:
    model = blocks()
    add_adapter(model, Adapter(), None, seed=0)
    return model


@pytest.mark.parametrize("model", [blocks, LooksAtValues, adapted_blocks])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "adafactor"])
def test_peak_is_that_of_a_real_step(model: type[nn.Module], optimizer: str) -> None:
    """The real peak is from the allocator's events, with gradients and the update's temporaries."""
    workload = ToyWorkload(model)
    chosen = recipe(optimizer={"name": optimizer, "lr": 0.1})
    worker = build_strategy("single", {}).start(workload, chosen, ALONE)
    assert not isinstance(worker, Server)
    with profile(profile_memory=True, use_kineto=True) as profiled:
        worker.step(workload.batch(range(8)), NoSpans())
        since = time.time_ns()
        worker.step(workload.batch(range(8)), NoSpans())
    rise = allocator_rise_bytes(profiled, since_nanoseconds=since)
    found = rank_memory(
        trace(workload, chosen, device_type="cpu"),
        build_strategy("single", {}),
        chosen,
        1,
        device_type="cpu",
    )
    parameters = [*model().parameters()]
    trained = 4 * sum(p.numel() for p in parameters if p.requires_grad)
    assert found.parameters == 4 * sum(p.numel() for p in parameters)
    values = {"sgd": 0, "adamw": 2, "lamb": 2}
    if optimizer in values:
        assert found.optimizer_state == values[optimizer] * trained
    still = found.parameters + found.optimizer_state
    assert found.peak_bytes - still == pytest.approx(rise, rel=0.01)


def test_frozen_weights_have_the_bytes_of_their_base() -> None:
    """The weights are 4 x 300, 300 x 2 and twice 300 x 300, with biases; matrices have rank 1."""

    def adapted(base: Any) -> nn.Module:
        model = blocks()
        add_adapter(model, Adapter(rank=1, base=base, targets=("0",)), None, seed=0)
        return model

    weights = sum(p.numel() for p in blocks().parameters())
    biases = sum(p.numel() for p in blocks().parameters() if p.dim() == 1)
    added = 4 + WIDTH + 2 * (WIDTH + WIDTH)
    chosen = recipe(precision="bf16")
    held = {
        base: rank_memory(
            trace(ToyWorkload(partial(adapted, base)), chosen),
            build_strategy("ddp", {}),
            chosen,
            2,
        ).parameters
        for base in ("fp32", "bf16", "nf4")
    }
    assert held["fp32"] == 4 * (weights + added)
    assert held["bf16"] == 2 * weights + 4 * added
    in_four_bits = NF4_BYTES * (weights - biases) + 2 * biases
    assert held["nf4"] == pytest.approx(in_four_bits + 4 * added, abs=1)


def test_checkpointing_keeps_less_and_computes_the_same_operations() -> None:
    usual = traced()
    again = traced(activation_checkpointing=True)
    kept = [sum(u.saved_bytes.per_sample for u in found.units) for found in (usual, again)]
    assert kept[1] < 0.7 * kept[0]
    assert summed(again, "product", 5) == summed(usual, "product", 5)


class Layer(nn.Module):
    """Three products, each with two pointwise operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(torch.sin(layer(inputs)))
        return inputs


def repeated_products(how: bool | str | int) -> tuple[float, float]:
    """Products that the backward pass repeats for each sample, and rows that are saved."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, WIDTH), *(Layer() for _ in range(4)), nn.Linear(WIDTH, 2))

    found = traced(model, activation_checkpointing=how)
    products = (o for u in found.units for o in u.repeated if o.kind == "product")
    saved = sum(u.saved_bytes.per_sample for u in found.units) / (4 * WIDTH)
    return sum(o.flops.per_sample for o in products) / (2 * WIDTH * WIDTH), saved


def test_selective_checkpointing_repeats_every_second_product() -> None:
    """Each of four layers has three products and repeats one; the last two blocks repeat four."""
    repeated, saved = repeated_products("selective")
    assert repeated == 4
    _, without = repeated_products(False)
    _, full = repeated_products(True)
    assert full < saved < without
    repeated, saved = repeated_products(2)
    assert repeated == 2 * 3
    assert full < saved < without


def test_what_is_traced_stays_on_the_line_of_other_batches() -> None:
    """A step of 24 samples is as predicted from those of 4 and 8."""
    found = traced()
    workload = ToyWorkload(blocks)
    model = workload.build_model()
    kept: set[int] = set()
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        address = tensor.untyped_storage().data_ptr()
        if address not in kept and not isinstance(tensor, nn.Parameter) and tensor.dim() == 2:
            saved += tensor.nbytes if tensor.shape[0] == 24 else 0
        kept.add(address)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = workload.loss(model, workload.batch(range(24)))
    predicted = sum(u.saved_bytes.at(24) for u in found.units) + found.batch_bytes.at(24)
    assert predicted == pytest.approx(saved, rel=0.02)
    del loss


def test_kernels_are_those_of_the_device() -> None:
    """A GPU's dropout keeps a byte for each value, a CPU's a factor of four; both keep the input's
    sum with it."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2))

    on_gpu, on_cpu = (
        sum(
            u.saved_bytes.per_sample
            for u in trace(ToyWorkload(model), recipe(), device_type=d).units
        )
        for d in ("cuda", "cpu")
    )
    assert on_cpu - on_gpu == pytest.approx(3 * WIDTH, abs=1)


def test_parameters_in_16_bits_are_traced_beside_autocast() -> None:
    """Autocast keeps casts of all weights for the backward pass; libraries that cast have none."""
    found = traced(precision="bf16")
    assert found.native is not None
    weights = 2 * found.size.parameters
    kept = [sum(u.saved_bytes.fixed for u in of.units) for of in (found, found.native)]
    assert kept[0] - kept[1] == pytest.approx(weights, rel=0.02)
    gradients = [sum(u.gradient_bytes for u in of.units) for of in (found, found.native)]
    assert gradients == [2 * weights, weights]
    assert traced().native is None
    sharded = build_strategy("fsdp", {})
    chosen = recipe(precision="bf16", optimizer={"name": "adam"})
    native = rank_memory(found, sharded, chosen, 4)
    assert native == rank_memory(found.native, sharded, chosen, 4)
    assert native.peak_bytes < rank_memory(found, build_strategy("ddp", {}), chosen, 4).peak_bytes


class Chained(nn.Module):
    """Two products with a chain of three operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(torch.sin(self.first(inputs)).mul(2.0)))
        return outputs


def moved(profiled: Profile, in_pass: str, kinds: set[str]) -> float:
    """Bytes that operations move for each sample, in rows of `WIDTH` fp32 values."""
    operations = (each for unit in profiled.units for each in getattr(unit, in_pass))
    total: float = sum(each.bytes.per_sample for each in operations if each.kind in kinds)
    return total / (4 * WIDTH)


def test_compiled_chains_read_and_write_once_and_are_computed_again() -> None:
    """Eager, three operations read and write a row each.  A chain reads the first product's output,
    and writes what the last product reads.  Only outputs of products are saved."""
    workload = ToyWorkload(Chained)
    eager, compiled = (trace(workload, recipe(compile=how)) for how in ("none", "model"))
    assert moved(eager, "forward", {"other"}) == pytest.approx(6, rel=0.05)
    chain, products = (moved(compiled, "forward", kinds) for kinds in ({"other"}, {"product"}))
    assert chain + products - moved(eager, "forward", {"product"}) == pytest.approx(2, rel=0.05)
    assert moved(compiled, "backward", {"other"}) < 0.6 * moved(eager, "backward", {"other"})
    saved = [sum(u.saved_bytes.per_sample for u in each.units) for each in (eager, compiled)]
    assert saved[0] / (4 * WIDTH) == pytest.approx(2, rel=0.05)  # the inputs of sin and the last
    assert saved[1] / (4 * WIDTH) == pytest.approx(1, rel=0.05)
    calls = [
        sum(o.calls for u in each.units for o in (*u.forward, *u.backward))
        for each in (eager, compiled)
    ]
    assert calls[1] < calls[0]
    assert summed(compiled, "product", 5) == summed(eager, "product", 5)


def test_a_loss_outside_of_a_compiled_model_is_not_fused() -> None:
    eager, compiled = (traced(compile=how) for how in ("none", "model"))
    ends = [each.units[-1] for each in (eager, compiled)]
    assert ends[0].name == "after 2"
    loss_calls = [sum(o.calls for o in unit.forward if o.kind == "other") for unit in ends]
    assert loss_calls[0] == loss_calls[1]


class Attends(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.project, self.causal = nn.Linear(4, 4 * 16 * 16), causal

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.project(inputs).view(len(inputs), 4, 16, 16)
        mixed: Tensor = nn.functional.scaled_dot_product_attention(
            rows, rows, rows, is_causal=self.causal
        )
        return mixed.sum((1, 2))[:, :2]


def test_causal_attention_computes_half_of_the_scores() -> None:
    full, half = (
        summed(traced(partial(Attends, causal=causal)), "attention", 4) for causal in (False, True)
    )
    assert half > 0
    assert full == 2 * half


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "convolution"),
        ({"kernel_size": 3}, "convolution_3x3"),
        ({"kernel_size": 3, "stride": 2}, "convolution"),
        ({"kernel_size": 3, "dilation": 2}, "convolution"),
        ({"groups": 2}, "grouped"),
        ({"groups": 4}, "depthwise"),
    ],
)
def test_convolutions_are_of_unlike_kinds(options: dict[str, int], kind: str) -> None:
    class Convolves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 4 * 64)
            self.layer = nn.Conv2d(4, 4, **{"kernel_size": 1, **options})  # type: ignore[arg-type]

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.layer(self.project(inputs).view(-1, 4, 8, 8))
            return outputs.sum((2, 3))[:, :2]

    found = traced(Convolves)
    for in_pass in ("forward", "backward"):
        kinds = {o.kind for unit in found.units for o in getattr(unit, in_pass)}
        assert kinds == {"product", "other", kind}


class Mixes(nn.Module):
    """A product of activations and a buffer in fp32, which 16-bit parameters refuse."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.project(inputs)[:, None]
        outputs: Tensor = torch.bmm(rows, self.table.expand(len(rows), -1, -1))
        return outputs[:, 0]


def test_a_model_that_refuses_16_bit_parameters_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = traced(Mixes, precision="bf16")
    assert found.native is None
    assert capfd.readouterr() == ("", "")


def test_eager_attention_stores_its_scores() -> None:
    """A layer of 4 heads on 64 tokens: scores, their softmax, and its dropout."""
    kinds, saved = [], []
    for how in ({}, {"attn_implementation": "eager"}):
        sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "attn_pdrop": 0.0}
        options = LanguageOptions(
            model="hf:gpt2", sequence_length=64, model_options={**sizes, **how}
        )
        found = Models().profile(options, recipe())
        kinds.append({o.kind for unit in found.units for o in unit.forward})
        saved.append(sum(unit.saved_bytes.per_sample for unit in found.units))
    assert ["attention" in each for each in kinds] == [True, False]
    assert saved[1] - saved[0] > 0.7 * 4 * 64 * 64 * 4  # and the output is not saved again


@pytest.mark.parametrize("how", ["none", "blocks", "model"])
def test_checkpointed_blocks_save_their_inputs(how: str) -> None:
    """Also those that compiled code computes in a chain."""
    found = traced(activation_checkpointing=True, compile=how)
    live = {unit.name: unit.begun_bytes.per_sample for unit in found.units}
    assert live["2"] - live["1"] >= 4 * WIDTH


def test_attention_of_torch_is_one_kernel() -> None:
    found = traced(MultiHead)
    assert "attention" in {o.kind for unit in found.units for o in unit.forward}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("mistralai/Mistral-7B-v0.1", {"num_key_value_heads": 4, "sliding_window": 16}),
        (
            "google/gemma-2-2b",  # eager attention without FlashAttention, whose logits are capped
            {"head_dim": 8, "num_key_value_heads": 4, "sliding_window": 16},
        ),
    ],
)
def test_flash_attention_computes_a_window(model: str, sizes: dict[str, Any]) -> None:
    """64 tokens, each of which sees 16; kernels of torch compute all pairs under such a mask."""
    common = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4}
    found = {}
    for how in ("flash_attention_2", None):
        chosen = {**common, **heads, **sizes, "attn_implementation": how}
        options = LanguageOptions(model=f"hf:{model}", sequence_length=64, model_options=chosen)
        found[how] = Models().profile(options, recipe(precision="bf16"))
    pairs = 64 * 16 - 16**2 / 2
    assert summed(found["flash_attention_2"], "attention", 3) == 3 * 7 * 2 * pairs * 32
    everything = summed(found[None], "attention", 3)
    assert everything == (3 * 7 * 2 * 64 * 64 * 32 if "mistral" in model else 0)
    saved = [sum(unit.saved_bytes.per_sample for unit in one.units) for one in found.values()]
    assert saved[0] < saved[1], "no mask, and no scores"


def test_linear_attention_is_traced_as_products_of_chunks() -> None:
    """Transformers goes through 64 places and each chunk one by one: 600 calls."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    chosen = {**sizes, **heads, "linear_value_head_dim": 8, "layer_types": ["linear_attention"]}
    model = "hf:Qwen/Qwen3.5-0.8B"
    options = LanguageOptions(model=model, sequence_length=130, model_options=chosen)
    (layer,) = (unit for unit in Models().profile(options, recipe()).units if unit.block)
    assert sum(one.calls for one in layer.forward) < 150
    in_a_chunk = 2 * 64 * 64 * (3 * 16 + 2 * 8) + 3 * 2 * 64 * 16 * 8
    projected = 2 * 130 * 32 * (2 * 16 + 3 * 16 + 2 * 2) + 2 * 3 * 130 * 32 * 64
    found = sum(one.flops.per_sample for one in layer.forward)
    assert found == pytest.approx(2 * 3 * in_a_chunk + projected, rel=0.05)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_of_transformers_is_causal_as_in_a_real_step(family: str) -> None:
    """64 tokens in 4 heads of 8 channels: two products forward, five backward, half of each."""
    sizes: dict[str, dict[str, Any]] = {
        "llama": {
            **{"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64},
            **{"num_attention_heads": 4, "num_key_value_heads": 4},
        },
        "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 4, "attn_pdrop": 0.0},
    }
    options = LanguageOptions(model=f"hf:{family}", sequence_length=64, model_options=sizes[family])
    found = Models().profile(options, recipe())
    assert summed(found, "attention", 3) == 3 * 7 * 2 * 64 * 64 * 32 / 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((6, 4), (3, 4, 5)),  # rows of tokens, each multiplied by the matrix of its expert
        ((4, 6), (6, 5)),  # the gradient of these matrices: tokens are summed within groups
        ((3, 6, 4), (4, 5)),  # columns in groups
    ],
)
def test_products_of_groups_multiply_each_row_once(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """2 x 6 x 4 x 5, however many groups there are."""
    assert grouped_product_flops(first, second) == 240


PROPOSALS, MOST = 40, 5


def detector(*, masks: bool) -> nn.Module:
    other: dict[str, Any] = dict.fromkeys(("mask_roi_pool", "mask_head", "mask_predictor"))
    if masks:
        other = {name: nn.Identity() for name in other}
    heads = RoIHeads(
        *(nn.Identity(), nn.Identity(), nn.Identity()),
        *(0.5, 0.5, 20, MOST / 20, None, 0.05, 0.5, 100),
        **other,
    )
    return nn.ModuleDict({"roi_heads": heads})


def sampled(model: nn.Module, boxes: Tensor) -> Tensor:
    """Labels of the proposals that are sampled, which touch no box."""
    proposals = torch.tensor([[200.0, 200.0, 210.0, 210.0]]).repeat(PROPOSALS, 1)
    labels, masks = torch.full((len(boxes),), 3), torch.zeros(len(boxes), 50, 50)
    target = {"boxes": boxes, "labels": labels, "masks": masks}
    heads: Any = model["roi_heads"]  # type: ignore[index]
    found: Tensor = heads.select_training_samples([proposals], [target])[2][0]
    return found


ONE_BOX = torch.tensor([[0.0, 0.0, 50.0, 50.0]])


@pytest.mark.parametrize(
    ("masks", "boxes", "positive"),
    [(True, ONE_BOX, MOST), (False, ONE_BOX, 1), (True, torch.zeros(0, 4), 0)],
)
def test_only_heads_with_masks_are_filled(masks: bool, boxes: Tensor, positive: int) -> None:
    model = detector(masks=masks)
    assert list(limited_heads(model)) == (["roi_heads"] if masks else [])
    with at_their_limits(model):
        assert int((sampled(model, boxes) == 3).sum()) == positive
    assert int((sampled(model, boxes) == 3).sum()) == len(boxes)  # the box itself is a proposal
