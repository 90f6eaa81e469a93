"""A patch adds arguments to the calls that were seen, and to nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardmark.bench.analysis.compare.race import Race
from shardmark.bench.analysis.improvement import Improvement, patch_of
from shardmark.bench.report.answers.improvement import answer_of

SCRIPT = """\
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
loader = list(DataLoader(dict(a=1), 4))
model = DDP(
    net,  # é
    device_ids=[0],
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
other = make()
"""


def test_arguments_are_added_at_the_end_of_the_named_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    patch, missing = patch_of(
        {
            "train.py:3": {"DataLoader": {"num_workers": 2, "persistent_workers": True}},
            "train.py:4": {"DistributedDataParallel": {"gradient_as_bucket_view": True}},
            "train.py:8": {"AdamW": {"fused": True}},
            "train.py:9": {"DataLoader": {"num_workers": 2}},
        }
    )
    added = [line for line in patch.splitlines() if line.startswith("+") and line[1] != "+"]
    assert added == [
        "+loader = list(DataLoader(dict(a=1), 4, num_workers=2, persistent_workers=True))",
        "+    device_ids=[0], gradient_as_bucket_view=True,",
        "+optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)",
    ]
    assert missing == ("DataLoader is called at train.py:9: let it get num_workers=2",)
    assert "make" not in "".join(added)
    assert Path("train.py").read_text() == SCRIPT


def test_a_given_argument_is_changed_and_a_patch_applies_to_any_ends_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = b"DataLoader(data, num_workers=0)\r\nf(**DataLoader(data, **more))\r\nAdam((p))"
    Path("train.py").write_bytes(script)
    workers = {"DataLoader": {"num_workers": 2, "persistent_workers": True}}
    patch, missing = patch_of(
        {"train.py:1": workers, "train.py:2": workers, "train.py:3": {"Adam": {"fused": True}}}
    )
    assert [text.partition(":")[0] for text in missing] == ["DataLoader is called at train.py"]
    subprocess.run(["patch", "-p1", "--binary"], input=patch.encode(), check=True)
    assert Path("train.py").read_bytes() == (
        b"DataLoader(data, num_workers=2, persistent_workers=True)\r\n"
        b"f(**DataLoader(data, **more))\r\nAdam((p), fused=True)"
    )


def test_a_call_that_cannot_be_changed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls on a line may differ: the argument may be in one of them already."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("Adam(p for p in model.parameters())\na, b = Adam(a), Adam(b)\n")
    Path("train.yaml").write_text("lr: 1 e\n")
    for place in ("train.py:1", "train.py:2", "train.yaml:1", "elsewhere.py:1", ""):
        patch, missing = patch_of({place: {"Adam": {"fused": True}}})
        assert not patch
        where = f"at {place}" if place else "by a library"
        assert missing == (f"Adam is called {where}: let it get fused=True",)


@pytest.mark.parametrize(
    ("place", "calls", "sentence"),
    [
        (
            "train.py:9<transformers",
            {"DataLoader": {"num_workers": 4, "persistent_workers": True}},
            "DataLoader is called by transformers at train.py:9: give TrainingArguments "
            "dataloader_num_workers=4, dataloader_persistent_workers=True",
        ),
        (
            "train.py:9<lightning",
            {"DistributedDataParallel": {"gradient_as_bucket_view": True}},
            "DistributedDataParallel is called by lightning at train.py:9: give DDPStrategy "
            "gradient_as_bucket_view=True",
        ),
        (
            "<deepspeed",
            {"AdamW": {"fused": True}},
            "AdamW is called by deepspeed: let it get fused=True",
        ),
    ],
)
def test_a_library_gets_its_arguments_where_its_users_give_them(
    place: str, calls: dict[str, Any], sentence: str
) -> None:
    assert patch_of({place: calls}) == ("", (sentence,))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Adam(params, lr=(1))  # (one)", "Adam(params, lr=(1), fused=True)  # (one)"),
        ("Adam(params,)", "Adam(params, fused=True,)"),
        ("Adam(\n params  # (one)\n)", "Adam(\n params, fused=True  # (one)\n)"),
        ("Adam(((params) ) )", "Adam(((params) ), fused=True )"),
        ("Adam()", "Adam(fused=True)"),
    ],
)
def test_an_argument_is_added_behind_the_last_one(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(f"{before}\n")
    patch, _ = patch_of({"train.py:1": {"Adam": {"fused": True}}})
    subprocess.run(["patch", "-p1"], input=patch.encode(), check=True)
    assert Path("train.py").read_text() == f"{after}\n"


def test_a_change_that_was_asked_for_and_does_not_fit_is_named() -> None:
    race: Any = Race(reference=None, racers=(), margin=0.01)  # type: ignore[arg-type]
    facts: Any = {"interventions": (), "best": "", "patch": "", "snippets": ()}
    assert "fused" in answer_of(Improvement(race=race, unfit=("fused",), **facts))
    assert "Not tried" not in answer_of(Improvement(race=race, unfit=(), **facts))
