"""Layers, stages and sequences shared among ranks: numerics, memory, traffic, planted faults.

Each table names strategies by a short text; one process group of each size runs all that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from shardmark.core.recipe import Recipe
from shardmark.strategies.base import RankContext
from shardmark.trials.trial import Trial
from shardmark.workloads import check_data
from shardmark.workloads.base import TensorPlan, Workload
from shardmark.workloads.language.batch import TokenBatch
from shardmark.workloads.own.options import OwnOptions
from tests.distributed import layered
from tests.distributed.captures import Case, capture_all, recipe, refusals, trial
from tests.distributed.faults import Started
from tests.distributed.layered import (
    AGAIN,
    SGD,
    UNCLIPPED,
    UNTIED,
    VISION,
    WIDE,
    Probed,
    check_exact,
    check_traffic,
    started,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

Options = dict[str, Any]


def hugging_face(family: str, **fields: object) -> Options:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    return {"model": f"hf:{family}", "model_options": sizes | fields}


GROUPED = {"num_key_value_heads": 2, "intermediate_size": 64}
QWEN3 = hugging_face("qwen3", head_dim=8, **GROUPED)
TIED_QWEN3 = hugging_face("qwen3", head_dim=8, tie_word_embeddings=True, **GROUPED)
NEOX = hugging_face("gpt_neox", intermediate_size=64, hidden_dropout=0.1)
"""Its dropout is on activations that are not sharded."""
NEOX_WITHOUT_DROPOUT = hugging_face(
    "gpt_neox", intermediate_size=64, hidden_dropout=0, attention_dropout=0
)
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)
GPT2 = hugging_face("gpt2", num_hidden_layers=3, **NO_DROPOUT)
BERT = hugging_face(
    "bert", intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0
)
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
DEEP = {"layers": 4}
LEARNED = {"positions": "learned"}
UNEVEN = {"packed": False, "objective": "masked"}
PADDED = OwnOptions(task="tests.distributed.models:PaddedSequences")
SHARED = OwnOptions(task="tests.distributed.models:SharedSequences")
ZERO_BUBBLE, GPIPE, INTERLEAVED = (
    {"schedule": schedule} for schedule in ("zero-bubble", "gpipe", "interleaved")
)
BY_POSITION = {"sequence_parallel": True, "loss_parallel": True}
FSDP_TP: Options = {"name": "fsdp-tp", "mesh": {"shard": 2, "tensor": 2}}
TP_PP: Options = {"name": "fsdp-tp-pp", "mesh": {"tensor": 2, "pipeline": 2}}
DDP_TP: Options = {"name": "fsdp-tp-pp", "mesh": {"data": 2, "tensor": 2}}
ULYSSES, FSDP_ULYSSES = {"name": "ulysses"}, {"name": "fsdp-ulysses"}
DDP_ULYSSES: Options = ULYSSES | {"mesh": {"data": 2, "sequence": 2}}
SHARDED_ULYSSES: Options = FSDP_ULYSSES | {"mesh": {"shard": 2, "sequence": 2}}
TP, PP, DDP_PP, FSDP_PP = ({"name": name} for name in ("tp", "pp", "ddp-pp", "fsdp-pp"))

# Faults


def untied_layers(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """Tied weights as `parallelize_module` leaves them."""
    with patch("shardmark.strategies.layers.divided._tied", return_value=[]):
        return started("tp", workload, wanted, process)


def with_plan(change: Callable[[TensorPlan, int], TensorPlan]) -> Callable[..., Started]:
    def begin(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
        planned = workload.tensor_plan

        def changed(model: nn.Module) -> TensorPlan:
            plan = planned(model)
            assert isinstance(plan, TensorPlan)
            return change(plan, process.rank)

        workload.tensor_plan = changed  # type: ignore[method-assign]
        return started("tp", workload, wanted, process)

    return begin


def norms_not_summed(plan: TensorPlan, _: int) -> TensorPlan:
    """The plan of Qwen3 without `replicated_with_grad_allreduce`."""
    styles = {name: style for name, style in plan.styles.items() if style != "summed"}
    return TensorPlan(styles=styles, units=plan.units)


def order_of_a_set(plan: TensorPlan, rank: int) -> TensorPlan:
    """A plan in another order on each rank, as if it were made from a set of names."""
    order = sorted(plan.styles, reverse=rank == 1)
    return TensorPlan(styles={name: plan.styles[name] for name in order}, units=plan.units)


def untied_stages(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """Each stage keeps the gradient of its own copy of the tied weight."""
    begun = started("pp", workload, wanted, process)
    begun.worker._tied = {}
    return begun


def clipped_by_stage(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    begun = started("pp", workload, wanted, process)
    worker: Any = begun.worker
    worker._clip = lambda largest: nn.utils.clip_grad_norm_(worker._parameters, largest)
    return begun


def gradients_not_summed(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """Each rank updates with the gradients of its part of the sequences."""
    begun = started("ulysses", workload, wanted, process)
    begun.worker._model.require_backward_grad_sync = False
    return begun


def positions_from_zero(workload: Workload, wanted: Recipe, process: RankContext) -> Started:
    """Each part of a sequence begins at the first position."""
    begun = started("ulysses", workload, wanted, process)
    part = begun.worker._part

    def moved(batch: TokenBatch, index: int, count: int) -> TokenBatch:
        cut: TokenBatch = part(batch, index, count)
        assert cut.positions is not None
        return replace(cut, positions=cut.positions - cut.positions[:, :1])

    begun.worker._part = moved
    return begun


ONE_GRADIENT = "only the gradients of some parameters are wrong"

# Tables: (strategy with its options, changes of the recipe, model or task, fault, its cause)
Row = tuple[Any, ...]
ROWS: dict[int, dict[str, Row]] = {
    2: {
        "tp, tied": (TP, AGAIN),
        "tp, learned positions, uneven": (TP, SGD, LEARNED | UNEVEN),
        "tp, untied, sequence, loss": (TP | BY_POSITION, AGAIN, UNTIED),
        "tp, bf16": (TP, BF16),
        "tp, fp16": (TP, FP16),
        "tp, tied Qwen3": (TP, {}, TIED_QWEN3),
        "tp, GPT-NeoX": (TP, {}, NEOX),
        "tp, vision transformer": (TP, AGAIN, VISION),
        "tp, a plan from a set": (TP, {}, {}, with_plan(order_of_a_set)),
        "tp, untied by mistake": (
            *(TP, {}, {}, untied_layers),
            "tied weights are not tied any more: head.weight",
        ),
        "tp, norms not summed": (TP, {}, QWEN3, with_plan(norms_not_summed), ONE_GRADIENT),
        "pp, tied": (PP, {}),
        "pp, untied, gpipe": (PP | GPIPE, SGD, UNTIED),
        "pp, untied, interleaved": (PP | INTERLEAVED | {"micro_batches": 8}, {}, UNTIED | DEEP),
        "pp, zero bubble": (PP | ZERO_BUBBLE, {}, DEEP),
        "pp, again": (PP, AGAIN),
        "pp, bf16": (PP, BF16),
        "pp, learned positions, uneven": (PP, {}, LEARNED | UNEVEN),
        "pp, documents": (PP, {}, {"document_masks": True}),
        "pp, GPT-2": (PP, AGAIN, GPT2),
        "pp, untied Llama": (PP, {}, hugging_face("llama", num_hidden_layers=3, **GROUPED)),
        "pp, GPT-NeoX, documents": (PP, {}, NEOX_WITHOUT_DROPOUT | {"document_masks": True}),
        "pp, vision transformer": (PP, {}, VISION),
        "pp, tied weights not summed": (PP, {}, {}, untied_stages, ONE_GRADIENT),
        "pp, clipped by stage": (
            *(PP, SGD, UNTIED, clipped_by_stage),
            "gradients are clipped by the norms of parts of the model, not by the norm of all",
        ),
    },
    4: {
        "fsdp-tp, tied": (FSDP_TP, AGAIN),
        "fsdp-tp, untied, sequence, loss": (FSDP_TP | BY_POSITION, {}, UNTIED),
        "fsdp-tp, Qwen3": (FSDP_TP, {}, QWEN3),
        "ddp-pp, tied": (DDP_PP, AGAIN),
        "ddp-pp, weights of the loss": (DDP_PP, AGAIN, PADDED),
        "ddp-pp, interleaved": (DDP_PP | INTERLEAVED, SGD, UNTIED | DEEP),
        "fsdp-pp, tied": (FSDP_PP, AGAIN),
        "fsdp-pp, zero bubble": (FSDP_PP | ZERO_BUBBLE, {}, DEEP),
        "fsdp-pp, gpipe": (FSDP_PP | GPIPE, SGD, UNTIED),
        "fsdp-pp, vision transformer": (FSDP_PP, {}, VISION),
        "fsdp-pp, tied Qwen3": (FSDP_PP, {}, TIED_QWEN3),
        "tp-pp, tied": (TP_PP, AGAIN),
        "tp-pp, sequence, loss": (TP_PP | BY_POSITION, SGD, UNTIED),
        "tp-pp, zero bubble": (TP_PP | ZERO_BUBBLE, {}, DEEP),
        "tp-pp, vision transformer": (TP_PP, {}, VISION),
        "tp-pp, tied Qwen3": (TP_PP, AGAIN, TIED_QWEN3),
        "ddp-tp": (DDP_TP, {}),
        "ulysses, tied": (ULYSSES, AGAIN),
        "ulysses, untied, uneven": (DDP_ULYSSES, SGD, LEARNED | UNEVEN | UNTIED),
        "ulysses, documents": (DDP_ULYSSES, {}, LEARNED | {"document_masks": True}),
        "ulysses, bf16": (ULYSSES, BF16),
        "ulysses, Qwen3": (DDP_ULYSSES, AGAIN, QWEN3),
        "ulysses, BERT, uneven": (DDP_ULYSSES, {}, BERT | UNEVEN),
        "ulysses, own task": (ULYSSES, {}, SHARED),
        "ulysses, weights of the loss": (DDP_ULYSSES, AGAIN, PADDED),
        "fsdp-ulysses, fp16": (FSDP_ULYSSES, FP16),
        "fsdp-ulysses, tied": (SHARDED_ULYSSES, AGAIN),
        "fsdp-ulysses, bf16": (SHARDED_ULYSSES, BF16),
        "ulysses, gradients not summed": (
            *(ULYSSES, {}, {}, gradients_not_summed),
            "gradients are wrong although losses are right",
        ),
        "ulysses, positions from zero": (
            *(ULYSSES, {}, LEARNED, positions_from_zero),
            "the model computes something else from the same samples",
        ),
    },
    8: {"fsdp-tp-pp": ({"name": "fsdp-tp-pp"}, AGAIN)},
}
PROBES: dict[int, dict[str, Row]] = {
    2: {
        "ddp": ({"name": "ddp"}, {}, UNTIED),
        "tp, again": (TP, AGAIN),
        "tp, sequence": (TP | {"sequence_parallel": True}, AGAIN),
        "tp, bf16, loss": (TP | {"loss_parallel": True}, BF16),
        "pp, tied": (PP, {}),
        "pp, untied": (PP, AGAIN, UNTIED),
        "pp, zero bubble": (PP | ZERO_BUBBLE, {}, DEEP),
    },
    4: {
        "ddp": ({"name": "ddp"}, {}),
        "fsdp-tp": (FSDP_TP, AGAIN),
        "ddp-pp": (DDP_PP, AGAIN),
        "fsdp-pp": (FSDP_PP, AGAIN),
        "fsdp-tp-pp": (TP_PP, AGAIN),
        "ulysses": (ULYSSES, {}),
        "ulysses, again": (ULYSSES, AGAIN),
        "ulysses, bf16": (DDP_ULYSSES, BF16),
        "ulysses, Qwen3": (DDP_ULYSSES, BF16, QWEN3),
        "fsdp-ulysses": (SHARDED_ULYSSES, {}),
    },
}
HELD = {
    **{(2, f"tp, {name}"): 0.45 for name in ("again", "sequence", "bf16, loss")},
    **{(2, "pp, untied"): 0.51, (4, "fsdp-tp"): 0.26, (4, "fsdp-tp-pp"): 0.3},
    **{(4, "fsdp-ulysses"): 0.26, (4, "ulysses"): 1.0, (4, "ulysses, again"): 1.0},
}
"""Largest fraction of `ddp`'s parameters, gradients and optimizer state on any rank."""
REFUSED: dict[int, dict[str, tuple[Row, str]]] = {
    2: {
        "tp, heads": ((TP, {}, {"heads": 1}), "1 heads cannot be divided over 2 tensor ranks"),
        "tp, dropout": ((TP, {}, {"dropout": 0.1}), "set workload.dropout: 0"),
        "tp, positions": (
            (TP | {"sequence_parallel": True}, {}, LEARNED),
            "sequence_parallel: false",
        ),
        "tp, length": (
            (TP | {"sequence_parallel": True}, {}, {"sequence_length": 25}),
            "sequences of 25 cannot be divided",
        ),
        "tp, no plan": ((TP, {}, hugging_face("gpt2")), "fsdp"),
        "pp, dropout": ((PP, {}, {"dropout": 0.1}), "a dropout"),
        "pp, few layers": ((PP | INTERLEAVED, {}, {"layers": 1}), "do not make 4 stages"),
        "pp, dropouts of GPT-2": (
            (PP, {}, hugging_face("gpt2", embd_pdrop=0)),
            "set resid_pdrop, attn_pdrop",
        ),
    },
    4: {
        "ulysses, heads": (
            (ULYSSES, {}, {"heads": 2}),
            "2 heads cannot be divided over 4 ranks; use 2 ranks of sequence",
        ),
        "ulysses, length": (
            (ULYSSES, {}, {"sequence_length": 25}),
            "25 positions cannot be divided",
        ),
        "ulysses, dropout": (
            (ULYSSES, {}, {"dropout": 0.1}),
            "dropout, a dropout, would draw other masks",
        ),
        "ulysses, no plan": (
            (ULYSSES, {}, OwnOptions(task="tests.distributed.models:GroupedTokens")),
            "sequence_plan(model)",
        ),
    },
}


def case_of(folder: Path, row: Row, ranks: int) -> Case:
    filled: Row = (*row, None, None, None)
    options, changes, model, begin, cause = filled[:5]
    batch = 16 if "pp" in options["name"] else 8
    return layered.case(
        folder,
        changes,
        model=model,
        begin=begin,
        cause=cause,
        **{"ranks": ranks, "batch": batch} | options,
    )


def cases_of(folder: Path, ranks: int) -> dict[str, Case]:
    return {name: case_of(folder, row, ranks) for name, row in ROWS[ranks].items()}


def probed_trials(folder: Path, ranks: int) -> dict[str, Trial]:
    """Models wide enough that state and traffic are more than rounding."""
    made = {}
    for name, (options, changes, *model) in PROBES.get(ranks, {}).items():
        fields = model[0] if model else {}
        sizes = {"vocabulary": 512, "sequence_length": 64} if "model" in fields else WIDE
        row = (options, UNCLIPPED | changes, sizes | fields)
        made[name] = case_of(folder, row, ranks).trial
    return made


def refused_trials(folder: Path, ranks: int) -> dict[str, Trial]:
    rows = {name: row for name, (row, _) in REFUSED.get(ranks, {}).items()}
    made = {name: case_of(folder, row, ranks).trial for name, row in rows.items()}
    return made | ({"pp, batch norm": trial("pp", recipe())} if ranks == 2 else {})


def work(process: RankContext, folder: Path) -> Any:
    ranks = process.world_size
    captured = capture_all(process, cases_of(folder, ranks))
    probes = {
        name: layered.probed(process, of) for name, of in probed_trials(folder, ranks).items()
    }
    return captured, probes, refusals(process, refused_trials(folder, ranks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = layered.written_texts(tmp_path_factory.mktemp("texts"))
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        trials = [case.trial for ranks in ROWS for case in cases_of(texts, ranks).values()]
        for ranks in PROBES:
            trials += [
                *probed_trials(texts, ranks).values(),
                *refused_trials(texts, ranks).values(),
            ]
        for of in trials:
            check_data(of.workload)
        yield texts


@pytest.fixture(scope="module")
def groups(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """What each rank of the group of that size returns; a group runs once, also if it fails."""
    pytest.importorskip("transformers")
    ended: dict[int, list[Any] | Exception] = {}

    def ranks_of(size: int) -> list[Any]:
        if size not in ended:
            directory = tmp_path_factory.mktemp(f"ranks-{size}")
            try:
                ended[size] = run_ranks(work, folder, world_size=size, directory=directory)
            except Exception as error:
                ended[size] = error
        outcome = ended[size]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return ranks_of


Groups = Callable[[int], list[Any]]


@pytest.mark.parametrize(
    ("ranks", "name"), [(n, name) for n, rows in ROWS.items() for name in rows]
)
def test_ranks_train_as_one_or_the_fault_is_named(
    groups: Groups, folder: Path, ranks: int, name: str
) -> None:
    check_exact(groups(ranks), name, case_of(folder, ROWS[ranks][name], ranks))


@pytest.mark.parametrize(("ranks", "name"), HELD)
def test_a_rank_holds_its_fraction_of_the_state(groups: Groups, ranks: int, name: str) -> None:
    probes = [probes for _, probes, _ in groups(ranks)]
    full = sum(probes[0]["ddp"].held.values())
    assert max(sum(of[name].held.values()) for of in probes) <= HELD[ranks, name] * full


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(n, name) for n, rows in PROBES.items() for name in rows if name != "ddp"],
)
def test_collectives_carry_the_bytes_of_the_cost_model(
    groups: Groups, ranks: int, name: str
) -> None:
    check_traffic(name, [probes for _, probes, _ in groups(ranks)])


def test_ulysses_saves_the_activations_of_its_part(groups: Groups) -> None:
    """A rank of `ddp` has as many tokens: a quarter of the samples."""
    probes: dict[str, Probed] = groups(4)[0][1]
    assert probes["ulysses"].saved_bytes < 1.1 * probes["ddp"].saved_bytes


def test_pipelines_draw_nothing_outside_their_schedule(groups: Groups) -> None:
    moved = {name for _, probes, _ in groups(2) for name, of in probes.items() if of.draws_moved}
    assert not [name for name in moved if name.startswith("pp")]


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n, of in REFUSED.items() for name in of])
def test_a_model_that_cannot_be_shared_is_refused(groups: Groups, ranks: int, name: str) -> None:
    assert REFUSED[ranks][name][1] in groups(ranks)[0][2][name]


def test_a_pipeline_refuses_batch_norm(groups: Groups) -> None:
    assert "batch norm" in groups(2)[0][2]["pp, batch norm"]
