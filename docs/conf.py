"""Sphinx's settings: how the pages of this folder become a site."""

from __future__ import annotations

from typing import Any

from shardmark import __version__

project = "Shardmark"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # a link to a heading is checked, too
default_role = "code"  # a name in backticks in docstrings
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries and of internal modules
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# Nothing on a page comes from the network: the theme uses the reader's own fonts.
html_theme = "furo"
html_title = f"Shardmark {__version__}"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]

# Pages below others in the menu, which is folded there: the first screen has what a newcomer needs.
BELOW = {
    "guides/install": ("guides/docker", "guides/first-gpu-run"),
    "guides/is-my-script-right": ("reference/causes", "guides/found-faults"),
    "guides/own-model": (
        "guides/own-task", "guides/own-data", "guides/language", "guides/detection",
        "guides/reinforcement-learning",
    ),
    "guides/strategies": ("guides/model-parallel", "guides/parameter-servers"),
    "guides/compare": ("guides/numbers", "guides/repeats", "guides/regression", "guides/trackers"),
    "guides/own-study": (
        "guides/against-a-paper", "studies/lamsal-2025", "studies/asu-fsdp-2024",
        "studies/ovi-2025", "studies/fsdp-vs-deepspeed-poster",
    ),
    "guides/several-machines": ("guides/slurm", "guides/ray", "guides/security"),
    "guides/add-a-strategy": ("guides/add-a-workload", "guides/plug-ins", "architecture"),
    "method/measurement": (
        "method/network", "method/statistics", "method/race", "method/recommendation",
        "method/detection-quickstart",
    ),
}  # fmt: skip


def add_menu(_app: object, page: str, source: list[str]) -> None:
    """Append the menu of the pages below a page, which other readers of the file do not see."""
    if page in BELOW:
        entries = "\n".join(f"/{entry}" for entry in BELOW[page])
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def setup(app: Any) -> None:
    app.connect("source-read", add_menu)
