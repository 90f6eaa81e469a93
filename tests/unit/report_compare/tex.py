"""Reads LaTeX as strictly as TeX would, as far as a table needs it."""

from __future__ import annotations

import re

COMMANDS = frozenset(
    [
        *("begin", "end", "centering", "caption", "toprule", "midrule", "bottomrule", "item"),
        *("raggedright", "footnotesize", "subsection", "pm", "times", "geq", "leq", "approx"),
        *("to", "mu", "ldots", "textbackslash", "textasciitilde", "textasciicircum"),
        *("textless", "textgreater", "textbar", "textasciigrave", "textendash", "textemdash"),
    ]
)
IN_MATHS = frozenset(["pm", "times", "geq", "leq", "approx", "to", "mu"])
ENVIRONMENTS = frozenset(["table", "tabular", "itemize"])
SCALED = (
    ("  \\sbox0{\\begin{tabular}", "  \\begin{tabular}"),
    ("  \\end{tabular}}%\n", "  \\end{tabular}\n"),
    ("  \\ifdim\\wd0>\\linewidth\\resizebox{\\linewidth}{!}{\\usebox0}\\else\\usebox0\\fi\n", ""),
)
"""What scales a table down to the line, and what it stands around."""
_TOKEN = re.compile(r"\\begin\{(?P<begin>\w+)\}|\\end\{(?P<end>\w+)\}|\\(?P<name>[a-zA-Z]+)|\\.|.")


def check_tex(text: str) -> None:
    """Fail where TeX would, or where it would print something else than was meant."""
    open_environments: list[str] = []
    braces = 0
    maths = False
    for frame, inside in SCALED:
        text = text.replace(frame, inside)
    for line in text.splitlines():
        if line.startswith("%"):
            continue
        assert line.isprintable(), line
        for found in _TOKEN.finditer(line):
            token = found.group()
            if name := found.group("begin"):
                assert name in ENVIRONMENTS, line
                open_environments.append(name)
            elif name := found.group("end"):
                assert open_environments.pop() == name, line
            elif name := found.group("name"):
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
