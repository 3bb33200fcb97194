"""The site: `make docs` writes docs/_build/html, which opens from disk and asks no other machine for anything."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

import polyhead  # noqa: E402

project = "polyhead"
author = "The polyhead authors"
copyright = "The polyhead authors, Apache 2.0"
version = release = polyhead.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "mathml", "plain_docstrings", "site_links", "percent"]
exclude_patterns = ["_build", "_ext", "conf.py", "figures", "make_*.py", "notebooks"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures: those of other projects and of our insides have no page

myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4
myst_url_schemes = {"https": None, "mailto": None, "site": "{{path}}"}
suppress_warnings = ["myst.header"]  # a passage of another page may begin below its heading

highlight_language = "text"  # of blocks that do not say
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True, "exclude-members": "extra_repr"}
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "polyhead"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False}
pygments_style = "friendly"
pygments_dark_style = "monokai"
