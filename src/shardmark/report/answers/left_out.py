"""What stands beside a recommendation: who had no room, who does not compete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardmark.analysis.advise.candidates import Field, LeftOut
from shardmark.analysis.compare.rows import Row
from shardmark.report.answers.wording import listed, name, names, ranks


def fits_lines(fields: Sequence[Field], group_of: Callable[[Row], str]) -> list[str]:
    """Who has enough memory where others have not."""
    return [
        f"{_head(group_of(ran[0]))}On {ranks(count)} only {_labels(ran)}"
        f" {'fits' if len(ran) == 1 else 'fit'}: {_labels(full)} ran out of memory."
        for field in fields
        for count, (ran, full) in field.fits.items()
    ]


def left_out_lines(fields: Sequence[Field], group_of: Callable[[Row], str]) -> list[str]:
    """By cause; with the group, where the same rows of another group do compete."""
    groups: dict[tuple[str, str], list[str]] = {}
    for field in fields:
        causes: dict[str, list[Row]] = {}
        for one in field.left_out:
            causes.setdefault(_cause(one), []).append(one.row)
        for cause, rows in causes.items():
            groups.setdefault((names(rows), cause), []).append(group_of(rows[0]))
    parts = [
        f"{rows}{'' if len(found) == len(fields) else f' in {listed(found)}'} ({cause})"
        for (rows, cause), found in groups.items()
    ]
    return [f"Left out: {'; '.join(parts)}."] if parts else []


def _head(group: str) -> str:
    return f"{group}: " if group else ""


def _labels(rows: Sequence[Row]) -> str:
    return listed([name(row, with_ranks=False) for row in rows])


def _cause(one: LeftOut) -> str:
    if one.cause in ("not equivalent", "rank lost"):
        return f"{one.cause}: {one.reason}"
    return one.cause.replace("_", " ")


def basis_lines(fields: Sequence[Field]) -> list[str]:
    if not any(field.unverified for field in fields):
        return []
    return [
        "Nothing was verified: this rests on the unproven assumption that all of these train the"
        " same thing."
    ]
