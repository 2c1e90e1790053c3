"""Settings of the site: ``python -m sphinx -W docs OUT`` builds it, with the extra ``docs``."""

import importlib.metadata
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "jaxrec"
author = "the jaxrec authors"
release = version = importlib.metadata.version("jaxrec")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "api_pages",
    "built_site",
    "formulas",
    "repository_pages",
    "search_words",
    "versions",
]
exclude_patterns = ["_ext", "pictures/*.py"]
suppress_warnings = [
    "mystnb.unknown_mime_type",
]

# Pages. Tests run their code and the notebooks, which hold the output of their last run.
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 4
nb_execution_mode = "off"

# The reference. A name in single backticks of a docstring is a link where a page describes it.
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
# Other projects' inventories would need the network.

# What it looks like.
html_theme = "pydata_sphinx_theme"
html_title = "jaxrec"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "_ext/search_scorer.js")
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "header_links_before_dropdown": 9,
    "navbar_align": "left",
    "navigation_with_keys": False,
    "search_bar_text": "Search",
    "show_toc_level": 2,
    "footer_start": [],
    "footer_end": [],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
