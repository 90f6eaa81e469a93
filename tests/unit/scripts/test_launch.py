"""Records of a start are those of the ranks that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from shardmark.base.errors import InputError
from shardmark.scripts.launch import read_records
from shardmark.scripts.record import Record, Step
from shardmark.scripts.recording import Plan, rank_file
from shardmark.scripts.start import Started


class Ended:
    """A start that has ended without an error."""

    def wait(self, _: float) -> int:
        return 0

    def error(self) -> str:
        return ""


@pytest.mark.parametrize("joined", [True, False])
def test_a_script_that_starts_other_ranks_than_it_was_to_is_refused(
    tmp_path: Path, joined: bool
) -> None:
    """Without a process group, the number of ranks is not known."""
    for rank in range(2):
        record = Record(rank=rank, ranks=4, steps=[Step()], joined=joined)
        record.save(rank_file(str(tmp_path), rank))
    started, plan = cast("Started", Ended()), Plan(directory=str(tmp_path), steps=1)
    if not joined:
        assert len(read_records(started, plan, ranks=2, seconds=1)[0]) == 2
        return
    with pytest.raises(InputError, match=r"trains on 4 ranks, and was to on 2.*\{ranks\}"):
        read_records(started, plan, ranks=2, seconds=1)
