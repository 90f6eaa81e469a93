"""The time of compilations, and which of them fall into windows."""

from __future__ import annotations

from itertools import count

import pytest
from torch._dynamo.callback import CallbackTrigger, callback_handler

from shardmark.ranks.measure.step.compilation import Compilation

compiling = callback_handler.install_callbacks
DYNAMO, BACKWARD = CallbackTrigger.DYNAMO, CallbackTrigger.LAZY_BACKWARD


def test_nested_compilations_are_one_and_those_in_windows_are_counted() -> None:
    ticks = count()
    compilation = Compilation(clock=lambda: float(next(ticks)))
    with compilation:
        for measured in (False, True):
            if measured:
                compilation.window_started()
            with compiling(DYNAMO, "0"), compiling(BACKWARD, "1"):
                pass
            if measured:
                compilation.window_stopped()
        with pytest.raises(ZeroDivisionError), compiling(DYNAMO, "2"):
            raise ZeroDivisionError
    with compiling(DYNAMO, "3"):
        pass
    assert (compilation.seconds, compilation.in_windows) == (3.0, 1)
