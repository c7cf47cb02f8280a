"""What Sphinx is told; `website.build` calls it."""

from __future__ import annotations

import re

import nhwc

project = "nhwc"
author = "the authors of nhwc"
version = release = nhwc.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "index"
language = "en"
# Docstrings name code in single backticks, as Markdown does.
default_role = "code"
highlight_language = "text"

myst_heading_anchors = 4
# A file of the repository that is shown as a page may begin with any heading.
suppress_warnings = ["myst.header"]
nb_execution_mode = "off"
# A page is read without a host: what widgets would fetch is left out.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
# No page has an equation, and none may fetch what draws them from a host.
mathjax_path = "no-equations.js"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": False}
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "nhwc"
html_static_path = ["_static"]
html_css_files = ["memory.css", "site.css"]
html_js_files = ["site.js"]
html_extra_path = ["_extra"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_permalinks_icon = "#"
html_favicon = None
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _in_markdown(app, what, name, obj, options, lines):
    """Dashes and backticks mean the same in a docstring and on a page; a blank line ends a list."""
    text = "\n".join(lines)
    lines[:] = re.sub(r"(?m)^(?=- )(?<!\n\n)", "", text).split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", _in_markdown)
