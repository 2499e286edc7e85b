"""The documentation: the pages of this folder, the reference from the docstrings, the examples with their output.

pip install -e ".[docs]" && sphinx-build -W -b html docs docs/_build
"""

import fastnorm

project = html_title = "fastnorm"
release = version = fastnorm.__version__
html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_prev_next": False}

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates"]

# The pages are read on GitHub, too, where each heading is a target.
myst_heading_anchors = 3

# The doors' annotations repeat what their docstrings say better.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# The template of a class shows its methods in full; a table of them would lead to pages that there are not.
numpydoc_show_class_members = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "examples",
    # Shared by the examples, not one of them.
    "ignore_pattern": r"networks\.py",
    "abort_on_example_error": True,
    "write_computation_times": False,
}
