"""A patch adds arguments to the calls that were seen, and to nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.bench.analysis.improvement import patch_of

if TYPE_CHECKING:
    import pytest

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
    patch = patch_of(
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
        "+gradient_as_bucket_view=True)",
        "+optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)",
    ]
    assert "make" not in "".join(added)
    assert Path("train.py").read_text() == SCRIPT
