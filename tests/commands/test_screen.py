"""What is drawn on a real pseudo-terminal, and what reaches a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.terminal import Screen, into_pipe, on_terminal

DRAWING = str(Path(__file__).with_name("drawing.py"))
ENDED = [
    "2 trials; loading libraries",
    "[1/2] ddp on 2 ranks, repeat 1 of 2: ok in 21.5 s, 80.0 samples/s, about 40 s left",
    "[2/2] ddp on 2 ranks, repeat 2 of 2: failed after 21.5 s: rank 1: broken;"
    " mend it (trials/ddp-2-0)",
    "the table",
]


def shown(*arguments: str, columns: int, **variables: str) -> Screen:
    code, output = on_terminal(DRAWING, *arguments, columns=columns, **variables)
    assert code == 0, output
    screen = Screen(columns)
    screen.feed(output)
    assert screen.cursor_shown, "the cursor is given back"
    return screen


def test_trial_is_drawn_at_the_foot_and_gone_in_the_end() -> None:
    screen = shown(columns=150)
    assert [ENDED[0], "verifying [1/1] ddp"] in screen.frames
    (frame,) = [found for found in screen.frames if any("step 210 of" in line for line in found)]
    assert frame[:2] == [ENDED[0], "[1/2] ddp on 2 ranks, repeat 1 of 2"]
    assert len(frame[2]) == 60, "the bar"
    assert frame[3:] == [
        "step 210 of 400  80.0 samples/s  loss 1.79  memory 512 MiB  21 s gone  about 59 s left"
    ]
    assert screen.text.splitlines() == ENDED
    assert screen.wrapped == 0
    assert screen.colours


@pytest.mark.parametrize("columns", [60, 40, 25])
def test_narrow_terminal_gets_more_lines_and_wraps_none_of_them(columns: int) -> None:
    screen = shown(columns=columns)
    (frame,) = [found for found in screen.frames if any("step 210 of" in line for line in found)]
    text = " ".join(frame)
    for part in ("step 210 of 400", "80.0 samples/s", "loss 1.79", "512 MiB", "about 59 s left"):
        assert part in text
    assert max(map(len, frame)) <= columns
    assert screen.wrapped == sum((len(line) - 1) // columns for line in ENDED), "what stays does"


def test_resized_terminal_is_drawn_to_its_new_width() -> None:
    screen = shown("45", columns=100)
    after = [f for f in screen.frames if any("step 300 of" in line for line in f)]
    assert after
    assert all(len(line) <= 45 for frame in after for line in frame)
    assert screen.text.splitlines()[-1] == "the table"
    assert "step" not in screen.text


def test_no_color_is_kept() -> None:
    screen = shown(columns=100, NO_COLOR="1")
    assert screen.colours == set()
    assert any("step 210 of" in line for frame in screen.frames for line in frame)


def test_interrupt_gives_the_terminal_back() -> None:
    screen = shown("ctrl-c", columns=100)
    assert screen.text.splitlines() == [ENDED[0], "the table"]


def test_terminal_without_cursor_gets_lines() -> None:
    code, output = on_terminal(DRAWING, columns=200, TERM="dumb")
    assert code == 0
    assert "\x1b" not in output
    assert output.splitlines()[0] == ENDED[0]
    assert output.splitlines()[-3:] == ENDED[1:]


def test_quiet_draws_nothing() -> None:
    screen = shown("quiet", columns=200)
    assert screen.frames == []
    assert screen.text.splitlines() == [
        f"error: {ENDED[2]}",
        "the table",
    ]


def test_pipe_gets_lines_without_control_characters_even_with_colours_forced() -> None:
    code, output = into_pipe(DRAWING, FORCE_COLOR="1", TTY_COMPATIBLE="1")
    assert code == 0
    lines = output.splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line in ENDED] == ENDED
    assert [line for line in lines if line not in ENDED] == [
        "verifying [1/1] ddp",
        "[1/2] ddp on 2 ranks, repeat 1 of 2: step 300 of 400, 80.0 samples/s, loss 1.7,"
        " memory 512 MiB, 30 s gone, about 50 s left",
    ]
