"""Random numbers of a script are seen wherever they are drawn, and replaced in a replay."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from shardmark.scripts.draws import Flow, WatchDraws
from shardmark.scripts.interventions.base import replace


def test_draws_of_scripts_and_of_dropout_are_seen() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(_place: str, value: Tensor, _own_seed: bool) -> None:
        seen.append(tuple(value.shape))

    with WatchDraws(watch, Flow()):
        nn.Linear(5, 5)
        torch.randint(10, (4,))
        nn.functional.dropout(torch.ones(2, 3), 0.5)
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5)(torch.ones(2, 3, 4))
    assert seen[:2] == [(4,), (2, 3)]
    assert len(seen) > 4


def test_a_replayed_draw_replaces_the_result() -> None:
    def watch(_place: str, value: Tensor, _own_seed: bool) -> Tensor:
        return torch.arange(2 * len(value))

    with WatchDraws(watch, Flow()):
        assert torch.randint(10, (2,)).tolist() == [0, 1, 2, 3]


def test_a_place_ends_at_the_script_whatever_starts_it(tmp_path: Path) -> None:
    places: list[str] = []

    def watch(place: str, _value: Tensor, _own_seed: bool) -> None:
        places.append(place)

    script = tmp_path / "train.py"
    script.write_text("import torch\n\n\ndef noise():\n    return torch.randn(3)\n\n\nnoise()\n")
    with WatchDraws(watch, Flow()):
        runpy.run_path(str(script), run_name="__main__")
    assert places == ["train.py:5 < train.py:8"]


def test_noise_with_a_seed_of_its_own_is_told_apart() -> None:
    """A seed that the initial weights have, too, is not one for the noise."""
    owns: list[bool] = []

    def watch(_place: str, _value: Tensor, own_seed: bool) -> None:
        owns.append(own_seed)

    draws, module = WatchDraws(watch, Flow()), SimpleNamespace(manual_seed=torch.random.manual_seed)
    replace(module, "manual_seed", draws.seeded)
    with draws:
        module.manual_seed(0)
        nn.Linear(5, 5)
        torch.randn(3)
        torch.randn(3, generator=torch.Generator().manual_seed(0))
        module.manual_seed(0)
        torch.randn(3)
    assert owns == [False, True, True]


def test_what_depends_on_a_buffer_is_followed_until_it_is_overwritten() -> None:
    flow, buffer = Flow(), torch.zeros(3)
    flow.add([buffer], {"Mixup"})
    with WatchDraws(lambda *_: None, flow):
        result, like = torch.ones(3) * buffer, torch.zeros_like(buffer)
        assert flow.origins([result]) == {"Mixup"}
        assert not flow.origins([like]), "no value was read"
        buffer[:1].fill_(0.5)
        assert flow.origins([buffer]), "a part of it alone is new"
        buffer.copy_(torch.rand(3))
        assert not flow.origins([buffer + 1]), "it is what was drawn"


def test_modules_of_one_class_are_told_apart() -> None:
    flow, modules = Flow(), [torch.nn.Identity(), torch.nn.ReLU(), torch.nn.Identity()]
    names = ["Identity", "ReLU", "Identity-2"]
    assert [flow.name_of(module) for module in [*modules, *modules]] == names * 2
