"""Sphinx's settings: how the pages of this folder become a site."""

from __future__ import annotations

from shardmark import __version__

project = "Shardmark"
release = __version__
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # a link to a heading is checked, too
nitpicky = True

# Nothing on a page comes from the network: the theme uses the reader's own fonts.
html_theme = "furo"
html_title = f"Shardmark {__version__}"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
