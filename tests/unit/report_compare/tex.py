"""Reads LaTeX as strictly as TeX would, as far as a table needs it."""

from __future__ import annotations

import re

IN_MATHS = frozenset(["pm", "times", "geq", "leq", "approx", "to", "mu"])
COMMANDS = IN_MATHS | {
    *("centering", "caption", "toprule", "midrule", "bottomrule", "item", "raggedright"),
    *("footnotesize", "textbackslash", "textasciitilde", "textasciicircum", "textless"),
    *("textgreater", "textbar", "textasciigrave", "linewidth"),
}
ENVIRONMENTS = frozenset(["table", "adjustbox", "tabular", "itemize"])
_TOKEN = re.compile(r"\\begin\{(?P<begin>\w+)\}|\\end\{(?P<end>\w+)\}|\\(?P<name>[a-zA-Z]+)|\\.|.")


def check_tex(text: str) -> None:
    """Fail where TeX would, or where it would print something else than was meant."""
    open_environments: list[str] = []
    braces = 0
    maths = False
    for line in text.splitlines():
        if line.startswith("%"):
            continue
        assert line.isprintable(), line
        for match in _TOKEN.finditer(line):
            token = match.group()
            if name := match.group("begin"):
                assert name in ENVIRONMENTS, line
                open_environments.append(name)
            elif name := match.group("end"):
                assert open_environments.pop() == name, line
            elif name := match.group("name"):
                assert name in COMMANDS, line
                assert (name in IN_MATHS) is maths, line
            elif token == "$":
                maths = not maths
            elif token in "{}":
                braces += 1 if token == "{" else -1
                assert braces >= 0, line
            elif token == "&":
                assert open_environments[-1] == "tabular", line
            else:
                assert token in {r"\\", r"\,"} or token[0] != "\\" or token[1] in "&%$#_{}", line
                assert token not in '%#_^~<>|`"', line
        assert not maths, line
        assert braces == 0, line
    assert not open_environments
