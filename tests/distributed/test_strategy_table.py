"""Every row of the table holds in real process groups."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shardmark.base.layout import Shard
from shardmark.predict.memory import rank_memory
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.measure.memory.tensors import live_tensor_bytes, storage_bytes
from shardmark.ranks.strategies import STRATEGIES, build_strategy
from shardmark.ranks.strategies.base import RankContext, Server
from shardmark.ranks.strategies.step import local_shard
from shardmark.ranks.train.probe import HeldSpans
from shardmark.ranks.workloads import build_workload, check_data
from shardmark.ranks.workloads.base import BatchPlan
from tests.distributed.captures import (
    REFERENCES,
    STEPS,
    Captures,
    capture_all,
    check_verdict,
    recipe,
    refusal,
    verdict_of,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.strategy_table import (
    CAST,
    HELD,
    IN_BF16_PARAMETERS,
    PROBES,
    REFUSED,
    ROWS,
    UNCOUNTED,
    VARIANTS,
    WIDE,
    WITH_BF16_WEIGHTS,
    Group,
    Probed,
    case_of,
    probed,
    processes_of,
    written_texts,
)
from tests.unit.predict.made import trace

JOIN_SECONDS = 600
DEFAULT_GROUPS = (1, 2, 4)
"""Groups of the default run, which have every strategy; the others have more of its options."""

Probes = list[dict[str, Probed]]
Groups = Callable[[Group], tuple[Captures, Probes, list[dict[str, str]]]]


def work(process: RankContext, folder: Path, group: Group) -> Any:
    probes = {
        name: probed(process, case_of(folder, row, group).trial)
        for name, row in PROBES.get(group, {}).items()
    }
    cases = {name: case_of(folder, row, group) for name, row in ROWS[group].items()}
    captures = capture_all(process, cases)
    refused = {
        name: refusal(process, case_of(folder, row, group).trial)
        for name, (row, _) in REFUSED.get(group, {}).items()
    }
    return captures, probes, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = written_texts(tmp_path_factory.mktemp("texts"))
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        for table in (ROWS, PROBES):
            for group, rows in table.items():
                for row in rows.values():
                    check_data(case_of(texts, row, group).trial.workload)
        for group, refused in REFUSED.items():
            for row, _ in refused.values():
                check_data(case_of(texts, row, group).trial.workload)
        yield texts


@pytest.fixture(scope="module")
def groups(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Groups:
    """Results of all ranks of a group; a group runs once, also if it fails."""
    pytest.importorskip("transformers")
    ended: dict[Group, Any] = {}

    def ranks_of(group: Group) -> Any:
        if group not in ended:
            directory = tmp_path_factory.mktemp(f"ranks-{group}")
            try:
                ranks = run_ranks(
                    *(work, folder, group),
                    world_size=processes_of(group),
                    directory=directory,
                    join_seconds=JOIN_SECONDS,
                )
                ended[group] = tuple(map(list, zip(*ranks, strict=True)))
            except Exception as error:
                ended[group] = error
        if isinstance(ended[group], Exception):
            raise ended[group]
        return ended[group]

    return ranks_of


def names_of(table: Any) -> pytest.MarkDecorator:
    names = [
        pytest.param(group, name, marks=[] if group in DEFAULT_GROUPS else [pytest.mark.slow])
        for group, rows in table.items()
        for name in rows
    ]
    return pytest.mark.parametrize(("group", "name"), names)


@names_of(ROWS)
def test_ranks_train_as_defined_or_the_verdict_names_the_fault(
    groups: Groups, folder: Path, group: Group, name: str
) -> None:
    """The losses in fp32, about 5, deviate by less than 1e-6 of them, the update by 5e-5."""
    captures, *_ = groups(group)
    row = ROWS[group][name]
    case = case_of(folder, row, group)
    verdict = check_verdict(captures, name, case)
    if "compress" in row.options:
        assert verdict.mathematics, "the table of verdicts names it"
    elif case.trial.recipe.optimizer.name == "muon":
        assert case.trial.recipe.precision == "fp32", "but it rounds its updates to bf16"
    elif case.trial.recipe.precision == "fp32" and row.cause is None:
        found = {check.name: check.found for check in verdict.checks}
        losses, parameters = found["losses"], found["parameters after the last step"]
        assert isinstance(losses, float)
        assert isinstance(parameters, float)
        assert losses < 5 * 1e-6
        assert parameters < 5e-5
        if isinstance(row.model, dict):
            in_one_piece = found["whole batch in one piece"]
            assert isinstance(in_one_piece, float), "compared"
            assert in_one_piece < 1e-5


GPT_IN_BF16 = [f"{name}, GPT, bf16" for name in (*IN_BF16_PARAMETERS, "ddp")]


def first_losses(captures: Captures, name: str) -> list[float | None]:
    return [rank.losses[0][0] for each in captures if (rank := each[name])]


@names_of({"recipes": CAST, 2: GPT_IN_BF16})
def test_first_forward_pass_in_bf16_equals_the_reference_to_the_last_bit(
    groups: Groups, folder: Path, group: Group, name: str
) -> None:
    trial = case_of(folder, ROWS[group][name], group).trial
    reference = REFERENCES.get(trial, STEPS).tolerances.reference
    captures, *_ = groups(group)
    assert first_losses(captures, name) == [losses[0] for losses in reference.losses]


def test_libraries_cast_parameters_in_bf16(groups: Groups) -> None:
    captures, *_ = groups(2)
    *casting, autocast = (first_losses(captures, name) for name in GPT_IN_BF16)
    assert autocast not in casting


@pytest.mark.slow
def test_all_ranks_skip_the_step_that_overflows_fp16(groups: Groups) -> None:
    captures, *_ = groups("recipes")
    skipped = {
        rank.skipped
        for of_rank in captures
        for name, rank in of_rank.items()
        if name.endswith("fp16") and rank is not None
    }
    assert skipped == {((0,),)}, "and no step after it"


@names_of({"detection": [n for n, row in ROWS["detection"].items() if row.cause is None]})
def test_proposals_of_a_detector_are_drawn_alike(
    groups: Groups, folder: Path, group: Group, name: str
) -> None:
    """3 steps of 8 pictures: each draws once for anchors and once for proposals."""
    captures, *_ = groups(group)
    verdict = verdict_of(captures, name, case_of(folder, ROWS[group][name], group))
    (draws,) = [check for check in verdict.checks if check.name == "random draws"]
    assert draws.found == "48 draws are equal"


@names_of(HELD)
def test_a_rank_holds_its_fraction_of_the_state(groups: Groups, group: Group, name: str) -> None:
    _, probes, _ = groups(group)
    full = "ddp" if PROBES[group][name].model == WIDE else "ddp, language"
    first = probes[0]
    largest = [max(of) for of in zip(*(rank[name].held for rank in probes), strict=True)]
    for held, of, fraction in zip(largest, first[full].held, HELD[group][name], strict=True):
        assert fraction is None or held / of == pytest.approx(fraction, rel=0.02)


@pytest.mark.parametrize("name", ["ddp", "zro", "fsdp", "fsdp1", "zero-1", "zero-2"])
@pytest.mark.parametrize(
    ("group", "weights"),
    [(2, ""), pytest.param(VARIANTS[2], ", bf16 weights", marks=pytest.mark.slow)],
)
def test_the_state_is_that_of_the_cost_model(
    groups: Groups, folder: Path, name: str, group: Group, weights: str
) -> None:
    """Parameters and optimizer state of the largest rank; DeepSpeed pads them."""
    _, probes, _ = groups(group)
    trial = case_of(folder, PROBES[group][name + weights], group).trial
    profile = trace(build_workload(WIDE, seed=3), trial.recipe, device_type="cpu")
    needed = rank_memory(profile, trial.built_strategy, trial.recipe, 2, device_type="cpu")
    held = [max(of) for of in zip(*(rank[name + weights].held for rank in probes), strict=True)]
    assert held[0] == pytest.approx(needed.parameters, rel=1e-4)
    assert held[2] == pytest.approx(needed.optimizer_state, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BF16_WEIGHTS)
def test_bf16_weights_halve_every_message(groups: Groups, name: str) -> None:
    """DeepSpeed's as well, which the cost model counts as they are on a GPU."""
    _, probes, _ = groups(VARIANTS[2])
    for rank in probes:
        sent, halved = (
            sum(record.payload_bytes for record in probe.collectives.values())
            for probe in (rank[name], rank[f"{name}, bf16 weights"])
        )
        assert halved / sent == pytest.approx(0.5, rel=1e-3)


@names_of(
    {group: [n for n in rows if not n.startswith(UNCOUNTED)] for group, rows in PROBES.items()}
)
def test_collectives_carry_the_bytes_of_the_cost_model(
    groups: Groups, group: Group, name: str
) -> None:
    """Counted over full rounds, and by the probe.  Besides, losses and norms are sent."""
    _, probes, _ = groups(group)
    of = [rank[name] for rank in probes]
    payloads: dict[str, float] = defaultdict(float)
    for part in of[0].needed.traffic:
        payloads[part.kind] += part.payload_bytes
    counted: dict[str, float] = defaultdict(float)
    by_probe: dict[str, float] = defaultdict(float)
    for probe in of:
        for kind, record in probe.collectives.items():
            counted[kind] += record.payload_bytes / probe.steps / len(of)
        for kind, record in (probe.record.collectives or {}).items():
            by_probe[kind] += record.payload_bytes / len(of)
    for found in (counted, by_probe):
        others = sum(found.pop(kind) for kind in found.keys() - payloads.keys())
        assert others < 0.01 * sum(payloads.values())
        assert found == pytest.approx(payloads, rel=0.05)


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("ddp", {("backward", "all_reduce")}),
        ("fsdp", {("forward", "all_gather"), ("backward", "all_gather"),
                  ("backward", "reduce_scatter")}),
        ("fsdp-grad-op", {("forward", "all_gather"), ("backward", "reduce_scatter")}),
        ("zero-1", {("backward", "all_reduce"), ("update", "all_gather")}),
        ("zro", {("backward", "all_reduce"), ("update", "broadcast")}),
    ],
)  # fmt: skip
def test_collectives_have_the_phase_that_the_definition_gives(
    groups: Groups, name: str, patterns: set[tuple[str, str]]
) -> None:
    """The test reads collectives of parameters and gradients; ZeRO-1 gathers in no forward pass."""
    _, probes, _ = groups(2)
    for rank in probes:
        record = rank[name].record
        assert record.collectives is not None
        by_phase = record.collectives_by_phase or {}
        for kind, total in record.collectives.items():
            parts = [kinds[kind] for kinds in by_phase.values() if kind in kinds]
            assert sum(part.calls for part in parts) == total.calls
            assert sum(part.payload_bytes for part in parts) == total.payload_bytes
        largest = max(record.payload_bytes for record in record.collectives.values())
        found = {
            (phase, kind)
            for phase, kinds in by_phase.items()
            for kind, counted in kinds.items()
            if counted.payload_bytes > 0.01 * largest
        }
        assert found == patterns


@pytest.mark.slow
def test_ulysses_saves_the_activations_of_its_part(groups: Groups) -> None:
    """A rank of `ddp` has as many tokens: a quarter of the samples."""
    _, (first, *_), _ = groups(VARIANTS[4])
    assert 0 < first["ulysses"].saved_bytes < 1.1 * first["ddp, language"].saved_bytes


@pytest.mark.parametrize("group", [2, pytest.param(VARIANTS[2], marks=pytest.mark.slow)])
def test_pipelines_draw_nothing_outside_their_schedule(groups: Groups, group: Group) -> None:
    _, probes, _ = groups(group)
    moved = {name for rank in probes for name, of in rank.items() if of.draws_moved}
    assert not [name for name in moved if name.startswith("pp")]


@names_of(REFUSED)
def test_a_model_that_cannot_be_shared_is_refused(groups: Groups, group: Group, name: str) -> None:
    *_, refused = groups(group)
    for message in refused:
        assert not [fact for fact in REFUSED[group][name][1] if fact not in message[name]]


@pytest.mark.parametrize(("name", "messages"), [("local-sgd", 1), ("diloco", 3)])
def test_a_round_sends_one_message_a_fragment(groups: Groups, name: str, messages: int) -> None:
    _, probes, _ = groups(2)
    for rank in probes:
        record = rank[name].record
        assert record.collectives is not None
        assert record.collectives["all_reduce"].calls == messages / 4
        assert record.exposed_communication_seconds is not None


def level(context: RankContext) -> tuple[int, int]:
    """Bytes that the probe of `ddp` counts between two steps, and those of the parameters."""
    workload = build_workload(WIDE, seed=3)
    before = live_tensor_bytes("cpu")
    worker = build_strategy("ddp", {}).start(workload, recipe(), context)
    assert not isinstance(worker, Server)
    shard = Shard(index=context.rank, count=context.world_size)
    batches = workload.batches(BatchPlan(global_batch=32, seed=3), shard)
    for _ in range(3):
        worker.step(next(batches), HeldSpans(worker, context.device))
    state = worker.held_state()
    held = live_tensor_bytes("cpu") + state.untracked_bytes - before
    return held, storage_bytes(state.parameters)


def test_buckets_are_counted_once(tmp_path: Path) -> None:
    """Parameters, momentum and buckets; statistics of batch norms are small."""
    for held, parameters in run_ranks(level, world_size=2, directory=tmp_path):
        assert held == pytest.approx(3 * parameters, rel=0.05)


ACCUMULATED = recipe(gradient_accumulation=2)


def bytes_of_gradients() -> int:
    """Bytes of the gradients of all parameters, those that libraries hide as well."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    trained = [one for one in tensors if one.is_leaf and one.requires_grad]
    return storage_bytes(local_shard(one.grad) for one in trained if one.grad is not None)


def between_passes(context: RankContext, name: str, each_pass: bool) -> int:
    """Bytes of gradients when the second micro-batch of a step begins."""
    workload = build_workload(WIDE, seed=3)
    strategy = build_strategy(name, {"reduce_each_pass": each_pass})
    worker = strategy.start(workload, ACCUMULATED, context)
    assert not isinstance(worker, Server)
    shard = Shard(index=context.rank, count=context.world_size)
    batches = workload.batches(BatchPlan(global_batch=32, seed=3), shard)
    held: list[int] = []

    class AtForward:
        @contextmanager
        def span(self, name: str) -> Iterator[None]:
            if name == "forward":
                held.append(bytes_of_gradients())
            yield

    worker.step(next(batches), AtForward())
    return held[1]


@pytest.mark.parametrize("name", ["fsdp", "fsdp1"])
@pytest.mark.parametrize("each_pass", [True, False])
def test_accumulated_gradients_are_those_of_the_cost_model(
    tmp_path: Path, name: str, each_pass: bool
) -> None:
    """Shards if each pass reduces them; otherwise all gradients."""
    strategy = build_strategy(name, {"reduce_each_pass": each_pass})
    profile = trace(build_workload(WIDE, seed=3), ACCUMULATED, device_type="cpu")
    cell = Cell(size=profile.size, units=profile.units, recipe=ACCUMULATED, world_size=2)
    expected = cost_model(strategy).step_state(cell).gradients
    for held in run_ranks(between_passes, name, each_pass, world_size=2, directory=tmp_path):
        assert held == pytest.approx(expected, rel=0.02)


def test_the_default_run_trains_every_strategy() -> None:
    """`dp` needs several devices; `ps-bounded` differs from `ps-async` by waiting workers."""
    rows = [row for group in DEFAULT_GROUPS for row in ROWS[group].values()]
    assert STRATEGIES.keys() - {row.options["name"] for row in rows} == {"dp", "ps-bounded"}
