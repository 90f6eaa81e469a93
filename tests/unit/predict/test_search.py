"""The search holds what single predictions hold, and leaves out nothing that is better."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from shardmark.base.recipe import Recipe
from shardmark.experiment.load import load_experiment, to_yaml
from shardmark.experiment.matrix import expand
from shardmark.predict.hardware.catalogue import load_node
from shardmark.predict.memory import rank_memory
from shardmark.predict.plan import make_plan
from shardmark.predict.profile import Profile
from shardmark.predict.request import PlanRequest
from shardmark.predict.search.search import GAIN, Candidate, Search, Searcher
from shardmark.predict.step import Factors, plan_step
from shardmark.predict.timing import Constants
from shardmark.ranks.strategies import STRATEGIES
from shardmark.ranks.strategies.base import Strategy
from tests.unit.predict.made import MadeModels, made_profile
from tests.unit.predict.test_plan import experiment, planned

GiB = 2**30
RANKS, NODES = 16, 2


def partly_whole(made: Profile) -> Profile:
    """A model with norms that tensor ranks do not divide, and activations between the layers."""
    units = (
        replace(
            unit,
            replicated_fraction=0.01,
            saved_bytes=replace(unit.saved_bytes, replicated_fraction=0.3),
            backward_moments=tuple(
                replace(at, bytes=replace(at.bytes, per_sample=at.bytes.per_sample / number))
                for at in unit.backward_moments
            ),
        )
        for number, unit in enumerate(made.units, start=1)
    )
    return replace(made, units=tuple(units))


def searcher(
    global_batch: int | None = 64,
    million_parameters: float = 2000.0,
    per_rank_batch: int | None = None,
) -> Searcher:
    profile, less = (
        replace(
            partly_whole(
                made_profile(million_parameters=million_parameters, sample_bytes=sample_bytes)
            ),
            native=made_profile(
                million_parameters=million_parameters, sample_bytes=0.4 * sample_bytes
            ),
        )
        for sample_bytes in (1e9, 2e8)
    )
    size = replace(
        profile.size,
        divided={"in": 10**6, "out": 10**6},
        divided_again={"in": 10**5, "out": 10**6},
        between_stages_bytes=10**6,
    )
    return Searcher(
        profiles={False: profile, True: less},
        sizes=dict.fromkeys(product((False, True), (1, 2, 4, 8), (1, 2, 4)), size),
        recipe=Recipe(
            global_batch=global_batch, per_rank_batch=per_rank_batch, steps=1, precision="bf16"
        ),
        node=load_node("dgx-h100"),
        ranks=RANKS,
        nodes=NODES,
        constants=Constants(),
        factors=Factors(compute=1.3, communication=2.0),
    )


def rebuilt(candidate: Candidate, of: Searcher) -> tuple[Recipe, Strategy]:
    """Recipe and strategy of a candidate, to predict it alone."""
    fields = ("activation_checkpointing", "cpu_offload", "gradient_accumulation")
    recipe = of.recipe.model_copy(update={name: getattr(candidate, name) for name in fields})
    return recipe, STRATEGIES[candidate.strategy](**candidate.options)


def test_all_at_once_takes_what_each_takes_alone() -> None:
    of = searcher()
    candidates = of.candidates()
    assert len(candidates) > 300
    for candidate in candidates:
        recipe, strategy = rebuilt(candidate, of)
        profile = replace(
            of.profiles[bool(recipe.activation_checkpointing)], size=of.sizes[False, 1, 1]
        )
        alone = plan_step(
            profile, strategy, recipe, RANKS, of.node, nodes=NODES, constants=of.constants
        )
        expected = alone.time(of.constants, of.factors).seconds
        assert candidate.step_seconds == pytest.approx(expected, rel=1e-9), candidate
        memory = rank_memory(profile, strategy, recipe, RANKS, nodes=NODES).device_bytes("cuda")
        assert candidate.device_bytes == pytest.approx(memory, rel=1e-9), candidate


@pytest.mark.parametrize("room_gib", [80, 12])
def test_no_layout_beats_the_front(room_gib: int) -> None:
    of = searcher()
    front = of.search(room_gib * GiB).front
    assert front
    needed = [each.device_bytes for each in front]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] <= room_gib * GiB
    assert [each.step_seconds for each in front] == sorted(each.step_seconds for each in front)
    for candidate in of.candidates():
        seconds, memory = candidate.step_seconds, candidate.device_bytes
        faster = [each.device_bytes for each in front if each.step_seconds <= seconds * (1 + 1e-9)]
        if memory <= room_gib * GiB:
            assert faster, f"{candidate} is faster than the front"
            assert memory >= GAIN * min(faster) * (1 - 1e-9), candidate


def test_layouts_that_train_fewer_samples_are_not_faster() -> None:
    """Tensor ranks and stages with a batch of each share train a part of what shards do."""
    of = searcher(global_batch=None, per_rank_batch=1)
    found = of.search(80 * GiB).front[0]
    candidates = of.candidates()
    rates = [
        rebuilt(candidate, of)[1].layout(RANKS, NODES).shares / candidate.step_seconds
        for candidate in candidates
    ]
    assert found.samples_per_second == pytest.approx(max(rates))
    assert found.samples == RANKS
    assert found.step_seconds > 1.5 * min(one.step_seconds for one in candidates), "less work"


def test_nothing_fits() -> None:
    assert searcher().search(2 * GiB).front == ()


def test_the_winner_is_an_experiment_to_run(tmp_path: Path) -> None:
    of = experiment(["ddp"], per_rank_batch=None, global_batch=128)
    plan = planned(of, nodes="1,2", search=True)
    assert plan.search is not None
    assert plan.winner is not None
    best = plan.search.front[0]
    assert (plan.search.ranks, plan.search.nodes) == (16, 2)
    file = tmp_path / "best.yaml"
    file.write_text(to_yaml(plan.winner))
    trial, *_ = expand(load_experiment(str(file)), "cuda").trials
    assert (trial.world_size, trial.nodes, trial.strategy.name) == (16, 2, best.strategy)
    assert trial.recipe.activation_checkpointing is best.activation_checkpointing
    layout = trial.layout
    found = (layout.data, layout.shard, layout.tensor, layout.pipeline)
    assert found == (best.mesh.data, best.mesh.shard, best.mesh.tensor, best.mesh.pipeline)
    nothing = planned(of, "t4x1", nodes="1", search=True)
    assert nothing.winner is None


def test_a_search_casts_parameters_as_the_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """On cards without bf16 the rows of a model alone are those of FSDP's casts to fp16."""
    made: list[Searcher] = []

    def search(of: Searcher, _: float) -> Search:
        made.append(of)
        return Search(ranks=8, nodes=1, searched=0, seconds=0.0, front=())

    monkeypatch.setattr(Searcher, "search", search)
    for on in ("8xv100-32", "8xh100"):
        request = PlanRequest(subject="hf:Qwen/Qwen3-8B", machines=(on,), search=True)
        make_plan(request, MadeModels())
    old, new = made
    assert (old.casting, new.casting) == ("native", None)
    fp16 = searcher().recipe.model_copy(update={"precision": "fp16"})
    cast, automatic = (
        {
            (one.strategy, str(one.options.get("mesh")), one.micro_batch): one
            for one in replace(searcher(), recipe=fp16, casting=casting).candidates()
            if not (one.activation_checkpointing or one.cpu_offload)
        }
        for casting in ("native", None)
    )
    assert cast.keys() == automatic.keys()
    for place, one in cast.items():
        is_sharded = one.strategy in {"fsdp", "fsdp-grad-op", "fsdp-hybrid"}
        assert one.options.get("mixed_precision") == ("native" if is_sharded else None)
        assert (one.device_bytes < automatic[place].device_bytes) == is_sharded
