"""Sphinx's settings: how the pages of this folder become a site."""

from __future__ import annotations

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
